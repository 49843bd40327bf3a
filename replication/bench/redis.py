"""The cost of following a Synapse over Redis, at 10,000 RDATA per second.

A process sends what a Redis with a busy channel sends: four writers of two streams in turns of five rows.  The worker
is complete.  It only follows positions, so that no application and no database counts; or it follows neither stream; or
a function of the application counts the rows, and positions are stored in SQLite.
"""

from __future__ import annotations

from itertools import islice
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.endpoints import serverFromString
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import LoopingCall, deferLater

from replication.bench.daemons import database_in, short_row
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Series, Stopwatch
from replication.follower.worker import Worker
from replication.net.redis_connection import encode, make_parser
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.series import BenchOptions
    from replication.streams.facts import Fact

RATE: Final = 10_000  # RDATA per second
_TICK: Final = 0.01  # seconds
_TURN: Final = 5  # rows that one writer publishes in a row
_CHANNEL: Final = b"localhost"
_WRITERS: Final = [(stream, writer) for stream in ("events", "receipts") for writer in ("persister1", "persister2")]
_KINDS: Final = {"followed": None, "not followed": ("another",), "applied by a function": None}


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each kind of worker."""
    seconds = options.size(10, 1)
    for kind in _KINDS:
        shares = [_follow_once(kind, seconds) for _ in range(options.rounds)]
        yield Series(f"{RATE:,} RDATA/s, {kind}", "CPU", "cores", shares)


def _follow_once(kind: str, seconds: int) -> float:
    with (
        TemporaryDirectory(prefix="replication-bench-") as folder,
        ChildProcess(_serve) as server,
        ChildProcess(_make_worker, server.call(_Server.port_of), kind, database_in(folder, "worker")) as worker,
    ):
        worker.call(_Follower.start)
        server.begin(_Server.send, seconds)
        share: float
        share, messages = worker.call(_Follower.follow, seconds)
        server.result()
    if messages < seconds * RATE / 2:
        raise BenchError(f"in {seconds} s the worker received {messages} messages: this machine is too busy")
    return share


class _Redis(Protocol):
    """A connection to the server: SUBSCRIBE and PUBLISH are answered; REPLICATE, with positions."""

    transport: Any

    def connectionMade(self) -> None:
        self._parser = make_parser()

    def dataReceived(self, data: bytes) -> None:
        self._parser.feed(data)
        while (command := self._parser.gets()) is not False:
            if command[0] == b"SUBSCRIBE":
                self.factory.subscriber = self
                self.transport.write(b"*3\r\n$9\r\nsubscribe\r\n$9\r\nlocalhost\r\n:1\r\n")
            elif command[0] == b"PUBLISH":
                self.transport.write(b":1\r\n")
                positions = [f"POSITION {stream} {writer} 1 1" for stream, writer in _WRITERS]
                self.factory.subscriber.transport.write(b"".join(map(_message, positions)))


@attrs.define(eq=False)
class _Server:
    reactor: Any
    factory: Any
    port: int

    def port_of(self) -> int:
        return self.port

    async def send(self, seconds: int) -> None:
        """Send for so many seconds, and one more."""
        messages = _rows()

        def tick(ticks: int) -> None:
            due = int(ticks * RATE * _TICK)
            self.factory.subscriber.transport.write(b"".join(islice(messages, due)))

        sending = LoopingCall.withCount(tick)
        sending.clock = self.reactor
        ended = sending.start(_TICK)
        await deferLater(self.reactor, seconds + 1)
        sending.stop()
        await ended


async def _serve(reactor: Any) -> _Server:
    factory = Factory.forProtocol(_Redis)
    port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(factory)
    return _Server(reactor, factory, port.getHost().port)


def _rows() -> Iterator[bytes]:
    """Yield RDATA for ever."""
    token = 1
    while True:
        for stream, writer in _WRITERS:
            for _ in range(_TURN):
                token += 1
                yield _message(f"RDATA {stream} {writer} {token} {encode_row(short_row(token))}")


def _message(text: str) -> bytes:
    return encode(b"message", _CHANNEL, text.encode())


@attrs.define(eq=False)
class _Follower:
    reactor: Any
    worker: Worker

    async def start(self) -> None:
        """Start, and wait until the first positions are here; where none is followed, for the subscription."""
        starting = self.worker.start()
        (client,) = self.worker._clients  # noqa: SLF001 (what status pages show of it)
        for _ in range(int(PATIENCE)):
            if client.state == "following":
                break
            await deferLater(self.reactor, 1.0)
        starting.addErrback(lambda _: None)

    async def follow(self, seconds: int) -> tuple[float, int]:
        """Return the share of a core that following takes, and how many messages were received."""
        watch = Stopwatch()
        await deferLater(self.reactor, seconds)
        sample = watch.sample(1)
        (client,) = self.worker._clients  # noqa: SLF001 (as above)
        return sample.cpu / sample.wall, client.reader.messages  # type: ignore[attr-defined]


def _make_worker(reactor: Any, port: int, kind: str, database: str) -> _Follower:
    streams = _KINDS[kind]
    url = f"redis://127.0.0.1:{port}"
    worker = Worker(connect=[url], database=database, streams=streams, copy=False, reactor=reactor)
    if kind == "applied by a function":
        counted = []
        for stream in ("events", "receipts"):

            @worker.on(stream)
            def apply(facts: Sequence[Fact], txn: object) -> None:  # noqa: ARG001 (only the position is stored)
                counted.append(len(facts))

    return _Follower(reactor, worker)
