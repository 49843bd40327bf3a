"""Settled facts to 1, 10 and 100 connections that read as fast as they can, in another process that counts lines.

The master begins where a commit has just returned: IDs complete, facts settle, are spelt from the texts that they have,
joined a reactor turn, and written to every connection.  Storing them is not included (see ``append``).  It pauses while
a megabyte waits for some connection, as an application would that does not want to lose its slowest follower.
"""

from __future__ import annotations

import selectors
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.task import deferLater

from replication.bench.children import Child, hear
from replication.bench.daemons import serve_master
from replication.bench.rows import STREAM, short_row
from replication.bench.series import Lap, Stopwatch, rates
from replication.streams.facts import facts_of
from replication.wire.grammar import Token, spell_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from replication.bench.series import Effort, Series

TURN: Final = 1_000  # facts that settle in one reactor turn
WAITING: Final = 2**20  # bytes
READ: Final = 256 * 1024  # bytes


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each number of connections."""
    for connections, facts in ((1, 1_000_000), (10, 500_000), (100, 100_000)):
        count = effort.size(facts, 2 * TURN)
        laps = [_announce_once(connections, count) for _ in range(effort.rounds)]
        yield from rates(f"{connections} connection{'s'[: connections - 1]}", "deliveries", laps)


def _announce_once(connections: int, facts: int) -> Lap:
    with Child(_announce, facts) as master, Child(_count_lines, master.hear(), connections, facts) as readers:
        readers.hear()  # all are connected
        started: float = master.ask("go")
        ended: float = readers.hear()
        cpu: float = master.ask("done")
    return Lap(connections * facts, ended - started, cpu)


async def _announce(reactor: Any, pipe: Connection[Any, Any], facts: int) -> None:
    master, address = await serve_master(reactor, "sqlite://")
    writer = master.stream(STREAM)
    texts = [(spell_row(short_row(number)),) for number in range(TURN)]
    pipe.send(address.wire)
    await hear(reactor, pipe)
    watch = Stopwatch.start()
    pipe.send(watch.wall)
    for _ in range(facts // TURN):
        while max(peer.queued_bytes for peer in master.peer_statuses()) > WAITING:
            await deferLater(reactor, 0.001)
        tokens = [Token(each) for each in writer.pending.reserve(TURN)]
        writer.complete(tokens, facts_of(tokens, texts))
        await deferLater(reactor, 0)
    await hear(reactor, pipe)
    pipe.send(watch.lap(facts).cpu)
    await master.stop()


def _count_lines(pipe: Connection[Any, Any], port: int, connections: int, facts: int) -> None:
    """Read on all connections until each has had as many RDATA lines as there are facts."""
    buffer = bytearray(READ)
    with selectors.DefaultSelector() as selector:
        missing = {}
        for _ in range(connections):
            peer = socket.create_connection(("127.0.0.1", port))
            said = b""
            while b"PING" not in said or said[-1:] != b"\n":  # SERVER, PING: from then on it is told everything
                said += peer.recv(1_000)
            selector.register(peer, selectors.EVENT_READ)
            missing[peer] = facts
        pipe.send("connected")
        while missing:
            for key, _ in selector.select():
                peer = key.fileobj  # type: ignore[assignment]  # we registered nothing but sockets
                missing[peer] -= buffer.count(b"\n", 0, peer.recv_into(buffer))
                if missing[peer] <= 0:
                    selector.unregister(peer)
                    del missing[peer]
    pipe.send(time.monotonic())
    pipe.recv()  # our end of the connections stays open until we are ended
