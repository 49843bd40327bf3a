"""Settled facts to 1, 10 and 100 connections; another process reads as fast as it can and counts rows.

The measurement begins after the commit: IDs are completed, facts settle, are encoded from their texts, joined for a
reactor turn, and written to every connection.  Storing is not included (see ``append``).  The master pauses while a
connection has more than a megabyte of unsent data.
"""

from __future__ import annotations

import selectors
import socket
import time
from typing import TYPE_CHECKING, Final

from twisted.internet.task import deferLater

from replication.bench.daemons import BenchMaster, MasterAddress, address_of, cpu_time, serve_master, short_row
from replication.bench.processes import BenchError, ChildProcess
from replication.bench.series import Sample, Stopwatch, rates
from replication.streams.facts import facts_of
from replication.wire.grammar import Token, encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.series import BenchOptions, Series

TURN: Final = 1_000  # facts that settle in one reactor turn
MAX_QUEUED: Final = 2**20  # bytes
READ: Final = 256 * 1024  # bytes
SIZES: Final = (1, 1_000_000), (10, 500_000), (100, 100_000)  # connections, and facts for each
ROW: Final = b"@"  # each row has one


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each number of connections."""
    for connections, facts in SIZES:
        count = options.size(facts, 2 * TURN)
        variant = f"{connections} connection{'s'[: connections - 1]}"
        yield from rates(variant, "deliveries", options, publish_once, connections, count)


def publish_once(connections: int, facts: int) -> Sample:
    """Publish facts to connections, and return the deliveries: their time, and the CPU time of the master."""
    with (
        ChildProcess(serve_master, "sqlite://") as master,
        ChildProcess(subscribe, master.call(address_of), connections) as readers,
    ):
        readers.call(len)  # all are connected
        readers.begin(count_rows, facts)
        start: Stopwatch = master.call(_publish, facts)
        ended: float = readers.result()
        return Sample(connections * facts, ended - start.wall, master.call(cpu_time) - start.cpu)


async def _publish(master: BenchMaster, facts: int) -> Stopwatch:
    """Publish facts, and return the clocks at the start."""
    texts = [(encode_row(short_row(number)),) for number in range(TURN)]
    watch = Stopwatch()
    for _ in range(facts // TURN):
        while max(peer.queued_bytes for peer in master.master.served.peer_statuses()) > MAX_QUEUED:
            await deferLater(master.reactor, 0.001)
        tokens = [Token(each) for each in master.writer.publisher.ids.pending.reserve(TURN)]
        master.writer.outgoing.complete(tokens, facts_of(tokens, texts))
        await deferLater(master.reactor, 0)
    return watch


def subscribe(_: object, address: MasterAddress, connections: int) -> list[socket.socket]:
    """Connect, and wait until the master publishes to all connections: after SERVER and PING."""
    peers = [socket.create_connection(("127.0.0.1", address.wire)) for _ in range(connections)]
    for peer in peers:
        greeting = b""
        while b"PING" not in greeting or greeting[-1:] != b"\n":
            greeting += peer.recv(1_000)
        peer.sendall(b"NAME bench\n")
    return peers


def count_rows(peers: list[socket.socket], facts: int) -> float:
    """Read until each connection has received as many rows as there are facts; return the time."""
    buffer = bytearray(READ)
    missing = dict.fromkeys(peers, facts)
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
        while missing:
            for key, _ in selector.select():
                peer = key.fileobj  # type: ignore[assignment]  # only sockets are registered
                length = peer.recv_into(buffer)
                if not length:
                    raise BenchError("a connection was closed")
                missing[peer] -= buffer.count(ROW, 0, length)
                if missing[peer] <= 0:
                    selector.unregister(peer)
                    del missing[peer]
    return time.monotonic()
