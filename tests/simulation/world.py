"""A world of masters and workers: the real product in one thread; network, clock and disks are the test's to control.

``trace`` says what was done and what was said on the wire.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Self
from unittest import mock

from twisted.internet.error import ConnectionLost
from twisted.logger import LogLevel, globalLogPublisher

import replication.follower
import replication.writer
from replication.streams.cursor import Cursor
from replication.streams.settling import Settling
from replication.wire.grammar import InstanceName
from tests.simulation.following import APPLY_ROWS, HELD_BYTES, WorkerNode
from tests.simulation.network import Network
from tests.simulation.node import LIMITS
from tests.simulation.witness import WireWatch
from tests.simulation.writing import MasterNode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twisted.logger import LogEvent
    from twisted.python.failure import Failure

    from tests.simulation.following import Question
    from tests.simulation.network import Connection
    from tests.simulation.node import Node

# Seconds.  A link that is dead in silence is noticed after 15 and abandoned after 15 more; a nap lasts up to 10.
HEALED_WITHIN = 45.0

MASTERS: Mapping[str, Sequence[str]] = {"master": ("a", "b")}
# The streams that a worker follows (None: all) and those that it has functions for.
WORKERS: Mapping[str, tuple[Sequence[str] | None, Sequence[str]]] = {
    "copy": (None, ()),
    "apply": (None, ("a", "caches")),
    "few": (("b",), ()),
}


class World:
    """Masters and workers; entered as a context they all start, and what they may keep in memory is little."""

    def __init__(
        self,
        masters: Mapping[str, Sequence[str]] = MASTERS,
        workers: Mapping[str, tuple[Sequence[str] | None, Sequence[str]]] = WORKERS,
    ) -> None:
        self.trace: list[str] = []
        self.failures: list[str] = []  # what the product logged as its own bug, and what was wrong in a callback
        self.graveyard: list[object] = []  # what dead processes have left
        self.questions: list[Question] = []
        self.network = Network(high_water=300, window=300)
        self.network.on_connected = self._watch
        self.masters = {InstanceName(name): MasterNode(self, name, streams) for name, streams in masters.items()}
        self.workers = {name: WorkerNode(self, name, *what) for name, what in workers.items()}
        self._watches: list[WireWatch] = []
        self._serial = count(1)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        little = partial(Cursor, max_held_bytes=HELD_BYTES, max_apply_rows=APPLY_ROWS)
        self._stack.enter_context(mock.patch.object(replication.follower, "Cursor", little))
        waiting = partial(Settling, max_bytes=HELD_BYTES)
        self._stack.enter_context(mock.patch.object(replication.writer, "Settling", waiting))
        globalLogPublisher.addObserver(self._logged)  # type: ignore[arg-type]
        self._stack.callback(globalLogPublisher.removeObserver, self._logged)  # type: ignore[arg-type]
        for node in self.nodes:
            node.start()
        self.turn()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.running:
                node.kill()
        self._stack.close()

    @property
    def nodes(self) -> list[Node]:
        """All machines, masters first."""
        return [*self.masters.values(), *self.workers.values()]

    # ---- what a test does

    def row(self, size: int = 0) -> list[object]:
        """Return a row that is like no other; from a ``size`` of 240 on no line can hold it."""
        return [next(self._serial), "x" * size]

    def rows(self, *counts: int, size: int = 0) -> list[list[list[object]]]:
        """Return facts of so many rows."""
        return [[self.row(size) for _ in range(each)] for each in counts]

    def turn(self) -> None:
        """Let happen what can happen at this moment, and look at the invariants."""
        self.network.turn()
        self.check()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        for _ in self.network.passing(seconds):
            self.check()

    def heal(self) -> None:
        """End every fault: processes run, links carry, disks and functions work, and who writes makes up his mind."""
        self.trace.append("---- heal")
        self.network.heal()
        for worker in self.workers.values():
            worker.pages_held = worker.pages_fail = False
        for node in self.nodes:
            node.store.release_all()
        for worker in self.workers.values():
            worker.release_functions()
        self.turn()
        for question in list(self.questions):
            question.pass_on()
        for master in self.masters.values():
            for job in [each for each in master.jobs if each.open]:
                job.wish.callback(None)
        for connection in self.network.connections:
            if connection.dead:
                self._give_up(connection)
        for node in self.nodes:
            if node.running and node.stopping:
                node.kill()  # it has had its time
            if not node.running:
                node.start()

    def converge(self, within: float = HEALED_WITHIN) -> float:
        """Let time pass until all followers have all; return how long that took, at most ``within`` seconds (I10)."""
        since = self.network.clock.seconds()
        for _ in self.network.passing(within):
            self.check()
            if not self.lags():
                break
        lags = self.lags()
        assert not lags, f"I10: after {within} s: {lags}"
        for worker in self.workers.values():
            worker.check_disk()
        return self.network.clock.seconds() - since

    def lags(self) -> list[str]:
        """Return what is not as it should be in the end."""
        lags = [each for worker in self.workers.values() for each in worker.lags()]
        for master in self.masters.values():
            for status in master.master.stream_statuses():
                (writer,) = status.writers
                if status.open_count or writer.announced != writer.position:
                    lags.append(f"{master} has {status} open")
        return lags + [f"connection {each.number} is dead" for each in self.network.connections if each.dead]

    def check_quiet(self, seconds: float = 30.0) -> None:
        """I11: when nothing is written, nothing is said but PING."""
        before = self._spoken()
        self.advance(seconds)
        assert self._spoken() == before, "I11: somebody talks about nothing"

    def check(self) -> None:
        """Look at what must be true at any time."""
        assert not self.failures, "\n".join(self.failures)
        for worker in self.workers.values():
            if worker.running:
                worker.check()
        for connection in self.network.connections:
            outbox = connection.server.protocol._outbox
            assert outbox.queued_bytes <= LIMITS.max_queued_bytes, "I9"
            assert outbox.queued_lines <= LIMITS.max_queued_lines, "I9"

    def broken(self, failure: Failure) -> None:
        """Keep what was found to be wrong where Twisted would not let it out."""
        self.failures.append(failure.getTraceback())

    # ---- inside

    def _watch(self, connection: Connection) -> None:
        client, server = connection.client.reactor.host, InstanceName(connection.server.reactor.host)
        watch = WireWatch(self.masters[server].ledgers, self.trace, f"{connection.number} {server} -> {client}:")
        self._watches.append(watch)
        connection.server.on_write = watch.read

    def _give_up(self, connection: Connection) -> None:
        """Do what a kernel does in the end, for whoever may wait for ever: he has heard no PING (protocol B2).

        A worker may only if it has heard SERVER.
        """
        for pipe, first in ((connection.up, b""), (connection.down, b"SERVER")):
            said = pipe.delivered[: pipe.delivered.rfind(b"\n") + 1]
            if said.startswith(first) and b"PING" not in said:
                pipe.target.lose(ConnectionLost())

    def _spoken(self) -> int:
        return sum(each.spoke for each in self._watches)

    def _logged(self, event: LogEvent) -> None:
        ours = event["log_namespace"].startswith("replication.")
        if ours and event["log_level"] is LogLevel.critical and "application's function" not in event["log_format"]:
            failure = event.get("log_failure")
            self.failures.append(event["log_format"] + ": " + (failure.getTraceback() if failure else ""))
