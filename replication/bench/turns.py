"""A master whose reactor turns are measured: a fact waits for the turn in progress."""

from __future__ import annotations

import time
from typing import Any, Final

from replication.bench.daemons import BenchMaster, serve_master
from replication.net.admission import allow_open_files

LONG: Final = 0.004  # seconds of CPU time that make a turn long


class Turns:
    """Measures the turns of a reactor: the CPU time of the longest one, and of all that are longer than LONG."""

    def __init__(self, reactor: Any) -> None:
        """Measure every turn of ``reactor``."""
        self.begin()
        iterate = reactor.doIteration

        def turn(delay: float | None) -> None:
            iterate(delay)
            self._end_turn()

        reactor.doIteration = turn

    def begin(self) -> None:
        """Measure from now on."""
        self._ended, self.longest, self.in_long = time.thread_time(), 0.0, 0.0

    def _end_turn(self) -> None:
        before, self._ended = self._ended, time.thread_time()
        took = self._ended - before
        self.longest = max(self.longest, took)
        if took > LONG:
            self.in_long += took


class WatchedMaster(BenchMaster, frozen=True):
    """A started master, and its turns."""

    turns: Turns


async def serve_watched(reactor: object, database: str) -> WatchedMaster:
    """Return a started master that may have thousands of connections."""
    allow_open_files()
    made = await serve_master(reactor, database)
    return WatchedMaster(made.reactor, made.master, made.address, made.start, Turns(reactor))


def begin_turns(master: WatchedMaster) -> None:
    """Measure the turns from now on."""
    master.turns.begin()


def turns_of(master: WatchedMaster) -> tuple[float, float]:
    """Return the CPU time of the longest turn, and of all long turns, in seconds."""
    return master.turns.longest, master.turns.in_long
