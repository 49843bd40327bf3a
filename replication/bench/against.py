"""The scenarios ``fanout`` and ``latency`` beside a broker on this machine, in turns in every round.

The rows are the same on both sides, each in the frame of its protocol.  So is the receiver: another process, which
reads as fast as it can, and counts the one ``@`` of each row.  A broker's publisher is a third process.  For
``fanout`` it encodes its texts before, and waits only while more than WINDOW batches have no answer.

A ratio compares two values of one round.  Above 1, this package is ahead.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from twisted.internet.task import deferLater

from replication.bench.brokers import KINDS, Broker, BrokerKind, connect
from replication.bench.daemons import BenchMaster, address_of, cpu_time, database_in, serve_master, short_row
from replication.bench.fanout import READ, ROW, SIZES, TURN, count_rows, publish_once, subscribe
from replication.bench.latency import PACE, QUANTILES, quantiles
from replication.bench.processes import BenchError, ChildProcess
from replication.bench.series import Sample, Series, Stopwatch
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

    from replication.bench.series import BenchOptions

WINDOW: Final = 16  # batches


def compare_fanout(name: str, options: BenchOptions) -> Iterator[Series]:
    """Measure each number of connections."""
    for connections, facts in SIZES[1:2] if options.quick else SIZES:
        count = options.size(facts, 2 * TURN)
        rounds = [
            {"ours": publish_once(connections, count), name: _publish_once(name, connections, count)}
            for _ in range(options.rounds)
        ]
        what = f"{connections} connection{'s'[: connections - 1]}"
        for side in rounds[0]:
            samples = [found[side] for found in rounds]
            rate = [each.count / each.wall for each in samples]
            yield Series(f"{what}, {side}", "deliveries", "deliveries/s", rate)
            rate = [each.count / each.cpu for each in samples]
            yield Series(f"{what}, {side}", "deliveries per CPU second", "deliveries/s", rate)
        ratios = [found[name].wall / found["ours"].wall for found in rounds]
        yield Series(f"{what}, ours", f"ratio to {name}", "x", ratios)
        ratios = [found[name].cpu / found["ours"].cpu for found in rounds]
        yield Series(f"{what}, ours", f"ratio to {name}, CPU", "x", ratios)


def compare_latency(name: str, options: BenchOptions) -> Iterator[Series]:
    """Measure one receiver of one publisher: ours since ``append`` was called, and since it returned."""
    facts = options.size(2_000, 20)
    rounds = [{**_append_once(facts), "publish": _send_once(name, facts)} for _ in range(options.rounds)]
    shares = QUANTILES[:2]
    theirs = [*quantiles(f"{PACE} facts/s, {name}, since publish", [found["publish"] for found in rounds], shares)]
    yield from theirs
    for start in ("append", "commit"):
        variant = f"{PACE} facts/s, ours, since {start}"
        for ours, other in zip(quantiles(variant, [found[start] for found in rounds], shares), theirs, strict=True):
            yield ours
            ratios = [b / a for a, b in zip(ours.values, other.values, strict=True)]
            yield Series(variant, f"ratio to {name}, {ours.metric}", "x", ratios)


# ---- ours


def _append_once(facts: int) -> Mapping[str, Sequence[float]]:
    """Return the seconds until each fact was received: since ``append`` was called, and since it returned."""
    with (
        TemporaryDirectory(prefix="replication-bench-") as folder,
        ChildProcess(serve_master, database_in(folder, "master")) as master,
        ChildProcess(subscribe, master.call(address_of), 1) as reader,
    ):
        reader.call(len)  # it is connected
        reader.begin(_receive, facts)
        called, returned = master.call(_append, facts)
        received = reader.result()
        return {"append": _since(called, received), "commit": _since(returned, received)}


def _since(sent: Sequence[float], received: Sequence[float]) -> Sequence[float]:
    return [there - here for here, there in zip(sent, received, strict=True)]


async def _append(master: BenchMaster, facts: int) -> tuple[list[float], list[float]]:
    """Append facts at PACE; return when each call began, and when it returned."""
    called, returned = [], []
    start = time.monotonic()
    for number in range(facts):
        await deferLater(master.reactor, max(0.0, start + number / PACE - time.monotonic()))
        called.append(time.monotonic())
        await master.writer.append([[short_row(number)]])
        returned.append(time.monotonic())
    return called, returned


# ---- the broker's


def _publish_once(name: str, connections: int, facts: int) -> Sample:
    with (
        Broker(name) as broker,
        ChildProcess(_connect_all, name, broker.port, connections) as readers,
        ChildProcess(_Publisher, name, broker.port) as publisher,
    ):
        readers.call(len)  # all are subscribed
        readers.begin(count_rows, facts)
        before = broker.cpu_time()
        start: Stopwatch = publisher.call(_Publisher.publish, facts)
        ended: float = readers.result()
        cpu: float = publisher.call(cpu_time) - start.cpu + broker.cpu_time() - before
        return Sample(connections * facts, ended - start.wall, cpu)


def _send_once(name: str, facts: int) -> Sequence[float]:
    """Return the seconds from the call that sends each text until it was received."""
    with (
        Broker(name) as broker,
        ChildProcess(_connect_all, name, broker.port, 1) as reader,
        ChildProcess(_Publisher, name, broker.port) as publisher,
    ):
        reader.call(len)
        reader.begin(_receive, facts)
        sent = publisher.call(_Publisher.send, facts)
        return _since(sent, reader.result())


class _Publisher:
    """A client that publishes."""

    def __init__(self, _: object, name: str, port: int) -> None:
        self._kind = KINDS[name]
        self._socket = connect(self._kind, port)

    def publish(self, facts: int) -> Stopwatch:
        """Publish texts as fast as the broker takes them, and return the clocks at the start."""
        batch = b"".join([_message(self._kind, number) for number in range(TURN)]) + b"PING\r\n"
        answers = TURN * self._kind.answers + 1
        watch = Stopwatch()
        due = 0
        for _ in range(facts // TURN):
            self._socket.sendall(batch)
            due += answers
            while due > WINDOW * answers:
                due -= self._socket.recv(READ).count(b"\n")
        return watch

    def send(self, facts: int) -> list[float]:
        """Publish texts at PACE; return when each was sent.  The answers stay unread."""
        sent = []
        start = time.monotonic()
        for number in range(facts):
            time.sleep(max(0.0, start + number / PACE - time.monotonic()))
            sent.append(time.monotonic())
            self._socket.sendall(_message(self._kind, number))
        return sent


def _message(kind: BrokerKind, number: int) -> bytes:
    text = encode_row(short_row(number)).encode()
    return kind.publish % (len(text), text)


def _connect_all(_: object, name: str, port: int, connections: int) -> list[socket.socket]:
    kind = KINDS[name]
    return [connect(kind, port, kind.subscribe) for _ in range(connections)]


# ---- the receiver of both


def _receive(peers: Sequence[socket.socket], facts: int) -> list[float]:
    """Return when each row was received."""
    received: list[float] = []
    while len(received) < facts:
        data = peers[0].recv(READ)
        if not data:
            raise BenchError("a connection was closed")
        received += [time.monotonic()] * data.count(ROW)
    return received
