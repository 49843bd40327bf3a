"""What bad peers do to a good follower: the latency of the scenario ``latency``, while others attack the wire.

The peers that attack are one process of the lowest priority, which stands for other hosts: it takes only the processor
time that is left.  ``quiet`` is the same without an attack.

A fact waits for the reactor turn in progress.  So the CPU time of the master's turns is measured too: unlike the
latency, it depends little on what else the machine does.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import msgspec

from replication.bench.daemons import address_of, cpu_time, database_in, make_worker
from replication.bench.latency import PACE, delays_between, quantiles, write_facts
from replication.bench.processes import ChildProcess
from replication.bench.series import Series, Stopwatch
from replication.bench.turns import begin_turns, serve_watched, turns_of
from replication.net.admission import allow_open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from replication.bench.daemons import MasterAddress
    from replication.bench.series import BenchOptions

PEERS: Final = 1_000
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99))
GARBAGE: Final = bytes(range(128, 256)) * 4 + b"\n"
BLOCK: Final = 65_536


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure the follower during each attack."""
    facts, peers = options.size(2_000, 20), options.size(PEERS, 20)
    attacks: dict[str, Callable[[int, int, float], None] | None] = {
        "quiet": None,
        f"{peers:,} garbage connections at once": _send_garbage,
        f"{peers:,} half-open connections": _send_nothing,
        "a peer that never reads": _never_read,
        "a peer that reconnects at once": _reconnect,
    }
    rounds = [{name: _round(attack, peers, facts) for name, attack in attacks.items()} for _ in range(options.rounds)]
    for name in attacks:
        yield from quantiles(name, [each[name].delays for each in rounds], QUANTILES)
        yield Series(name, "CPU of the master", "cores", [each[name].cores for each in rounds])
        yield Series(name, "CPU of the longest turn", "s", [each[name].longest for each in rounds])
        yield Series(name, "CPU of turns over 4 ms", "s", [each[name].in_long for each in rounds])


class _Round(msgspec.Struct, frozen=True):
    """The seconds from each commit until a worker has applied the fact, and what the master did meanwhile.

    ``cores``: its CPU time, by the clock.  ``longest``: the CPU time of its longest turn, in seconds.  ``in_long``: of
    all turns over 4 ms.
    """

    delays: list[float]
    cores: float
    longest: float
    in_long: float


def _round(attack: Callable[[int, int, float], None] | None, peers: int, facts: int) -> _Round:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="replication-bench-"))
        master = stack.enter_context(ChildProcess(serve_watched, database_in(folder, "master")))
        address: MasterAddress = master.call(address_of)
        worker = stack.enter_context(ChildProcess(make_worker, address, database_in(folder, "worker")))
        settled = 1 + PACE // 4  # facts before the attack: both processes have done everything once
        delays_between(master, write_facts, worker, 1, settled - 1)
        if attack is not None:
            others = stack.enter_context(ChildProcess(_be_others))
            others.begin(_attack, attack, address.wire, peers, time.monotonic() + facts / PACE)
        master.call(begin_turns)
        watch, before = Stopwatch(), master.call(cpu_time)
        delays = delays_between(master, write_facts, worker, settled, facts)
        cores = (master.call(cpu_time) - before) / watch.sample(1).wall
        return _Round(delays, cores, *master.call(turns_of))


# ---- the other processes


def _be_others(_: object) -> None:
    allow_open_files()
    os.nice(19)


def _attack(_: object, attack: Callable[[int, int, float], None], wire: int, peers: int, end: float) -> None:
    attack(wire, peers, end)


def _connect(wire: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", wire))


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _send_garbage(wire: int, peers: int, end: float) -> None:
    """Open all connections, send garbage on each, and read until each is closed."""
    with selectors.DefaultSelector() as selector:
        for _ in range(peers):
            peer = _connect(wire)
            selector.register(peer, selectors.EVENT_READ)
            peer.sendall(GARBAGE)
        while selector.get_map() and _left(end):
            for key, _events in selector.select(_left(end)):
                peer = key.fileobj  # type: ignore[assignment]
                with suppress(ConnectionError):
                    if peer.recv(BLOCK):
                        continue
                selector.unregister(peer)
                peer.close()


def _send_nothing(wire: int, peers: int, end: float) -> None:
    opened = [_connect(wire) for _ in range(peers)]
    time.sleep(_left(end))
    for each in opened:
        each.close()


def _never_read(wire: int, _: int, end: float) -> None:
    """Request positions for ever, and read none; connect again once that has ended."""
    while _left(end):
        with _connect(wire) as peer, suppress(ConnectionError, TimeoutError):
            while _left(end):
                peer.settimeout(_left(end) or None)
                peer.sendall(b"REPLICATE\n")


def _reconnect(wire: int, _: int, end: float) -> None:
    while _left(end):
        with _connect(wire) as peer, suppress(ConnectionError):
            peer.sendall(b"NAME again\nREPLICATE\n")
            peer.recv(BLOCK)
