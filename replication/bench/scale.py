"""How the cost grows with streams, connections, open IDs, stored facts, the length of rows, and writers of one stream.

Streams: a master's first start, a later start with a fact in each stream, its memory, and the answer to REPLICATE.
Connections: all connect at once, until each has received SERVER; then 200 facts a second, one at a time, until the last
connection has received each.  Open IDs: pairs of ``reserve`` and ``complete`` while others are open.
``scale_stored`` and ``scale_following`` have the rest.
"""

from __future__ import annotations

import selectors
import socket
import time
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final

import msgspec
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from replication.bench import scale_following, scale_stored
from replication.bench.cluster import POSTGRES, database_kinds
from replication.bench.daemons import WRITER, BenchMaster, address_of, serve_master, start_of, stop
from replication.bench.idle import resident
from replication.bench.ids import reserve_and_complete
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Series, Size, Stopwatch, rates
from replication.net.admission import allow_open_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions

RATE: Final = 200  # facts a second
AT_ONCE: Final = 100  # appends


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each size of each."""
    with database_kinds() as kinds:
        for kind in kinds:
            most = 1_000 if kind.name == POSTGRES else 10_000  # PostgreSQL takes 2 ms to create one table
            for streams in (20,) if options.quick else (1, 10, 100, most * options.times):
                yield from _streams(kind, streams, options)
            yield from scale_stored.measure(kind, options)
            yield from scale_following.measure(kind, options)
    for connections in (20,) if options.quick else (10, 100, 1_000):
        yield from _connections(connections, options)
    for ids in (1, 1_000, 100_000):
        pairs = options.size(500_000, 500)
        yield from rates(Size(ids, "open IDs"), "pairs", options, reserve_and_complete, ids, pairs)


# ---- streams


def _streams(kind: DatabaseKind, streams: int, options: BenchOptions) -> Iterator[Series]:
    variant = Size(streams, "streams", kind.name)
    fresh, again, memory, answers = [], [], [], []
    for _ in range(options.rounds):
        url = kind.make()
        with ChildProcess(serve_master, url, WRITER, _names(streams)) as master:
            fresh.append(master.call(start_of))
            master.call(_append_everywhere, streams)
            master.call(stop)
        with ChildProcess(serve_master, url, WRITER, _names(streams)) as master:
            again.append(master.call(start_of))
            memory.append(float(resident(master, "VmRSS")))
            answers.append(_replicate(master.call(address_of).wire, streams))
    for metric, samples in (("first start", fresh), ("start with a fact in each", again)):
        yield Series(variant, metric, "s", [each.wall for each in samples])
        yield Series(variant, f"{metric}, CPU", "s", [each.cpu for each in samples])
    yield Series(variant, "memory", "bytes", memory)
    yield Series(variant, "REPLICATE to last POSITION", "s", answers)


def _names(streams: int) -> Sequence[str]:
    return [f"s{number}" for number in range(streams)]


async def _append_everywhere(bench: BenchMaster, streams: int) -> None:
    names = _names(streams)
    for at in range(0, streams, AT_ONCE):
        appends = [bench.master.stream(each).append([[["o1", "placed"]]]) for each in names[at : at + AT_ONCE]]
        await gatherResults([Deferred.fromCoroutine(each) for each in appends])


def _replicate(wire: int, streams: int) -> float:
    """Return the seconds from REPLICATE to the last POSITION, of each stream and ``caches``."""
    with socket.create_connection(("127.0.0.1", wire)) as peer, peer.makefile("rb") as lines:
        peer.settimeout(PATIENCE)
        watch = Stopwatch()
        peer.sendall(b"REPLICATE\n")
        left = streams + 1
        while left:
            left -= lines.readline().startswith(b"POSITION")
        return watch.sample(1).wall


# ---- connections


def _connections(connections: int, options: BenchOptions) -> Iterator[Series]:
    variant = Size(connections, "connections")
    facts = options.size(2 * RATE, 20)
    greeted, costs, delays = [], [], []
    for _ in range(options.rounds):
        with (
            ChildProcess(_serve, "sqlite://") as master,
            ChildProcess(_connect, master.call(address_of).wire, connections) as peers,
        ):
            greeted.append(peers.call(_seconds))
            peers.begin(_receive, facts)
            cost, sent = master.call(_append, facts)
            received = peers.result()
            costs.append(cost)
            late = [there - here for here, there in zip(sent, received, strict=True)]
            delays.append(quantiles(late, n=100))
    yield Series(variant, "all greeted", "s", greeted)
    yield Series(variant, f"{RATE} facts/s, CPU of each", "s", costs)
    yield Series(variant, f"{RATE} facts/s, p50", "s", [each[49] for each in delays])
    yield Series(variant, f"{RATE} facts/s, p99", "s", [each[98] for each in delays])


async def _serve(reactor: Any, url: str) -> BenchMaster:
    allow_open_files()
    return await serve_master(reactor, url)


class Greeted(msgspec.Struct, frozen=True):
    """Connections in the order in which they were made; ``seconds`` passed until all were greeted."""

    peers: Sequence[socket.socket]
    seconds: float


def _connect(_: object, wire: int, connections: int) -> Greeted:
    allow_open_files()
    peers = [socket.socket() for _ in range(connections)]
    with selectors.DefaultSelector() as selector:
        watch = Stopwatch()
        for peer in peers:
            peer.setblocking(False)
            peer.connect_ex(("127.0.0.1", wire))
            selector.register(peer, selectors.EVENT_READ)
        while selector.get_map():
            for key, _events in selector.select():
                assert b"SERVER" in key.fileobj.recv(1_000)  # type: ignore[union-attr]  # noqa: S101
                key.fileobj.send(b"NAME bench\n")  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
        return Greeted(peers, watch.sample(1).wall)


def _seconds(greeted: Greeted) -> float:
    return greeted.seconds


async def _append(bench: BenchMaster, facts: int) -> tuple[float, list[float]]:
    """Append facts at RATE; return the CPU time of one, and when each was published."""
    sent, watch = [], Stopwatch()
    for number in range(facts):
        await deferLater(bench.reactor, max(0.0, watch.wall + number / RATE - time.monotonic()))
        await bench.writer.append([[["o1", "placed"]]])
        sent.append(time.monotonic())
    return watch.sample(facts).cpu / facts, sent


def _receive(greeted: Greeted, facts: int) -> list[float]:
    """Return when the last connection received each fact; read the others too."""
    received: list[float] = []
    with selectors.DefaultSelector() as selector:
        for peer in greeted.peers:
            selector.register(peer, selectors.EVENT_READ)
        while len(received) < facts:
            for key, _events in selector.select():
                data = key.fileobj.recv(100_000)  # type: ignore[union-attr]
                if not data:
                    raise BenchError("the master has closed a connection")
                if key.fileobj is greeted.peers[-1]:
                    received += [time.monotonic()] * data.count(b"RDATA ")
    return received[:facts]
