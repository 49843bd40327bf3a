"""Test doubles: a network in memory, a transport with a slow peer, a store that waits or fails as a test wants."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionRefusedError  # noqa: A004 - Twisted's name
from twisted.internet.interfaces import IHostnameResolver, IReactorPluggableNameResolver
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.test.iosim import FakeTransport, IOPump
from zope.interface import implementer

from replication.deferreds import share
from replication.storage.memory import MemoryStore, MemoryTransaction
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence

    from twisted.internet.interfaces import IProtocolFactory
    from twisted.internet.protocol import Protocol

    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import ISequence, Page, Receipt, Sample

T = TypeVar("T")


# ---- waiting and logging


def begin(work: Coroutine[Any, Any, Any] | Deferred[Any]) -> list[Any]:
    """Start ``work``, and return a list to which its result, or its Failure, is appended."""
    outcome: list[Any] = []
    deferred = work if isinstance(work, Deferred) else Deferred.fromCoroutine(work)
    deferred.addBoth(outcome.append)
    return outcome


def now(work: Coroutine[Any, Any, T] | Deferred[T]) -> T:
    """Return the result of ``work``, or raise its error; ``work`` must not wait."""
    outcome = begin(work)
    assert outcome, f"{work} waits"
    if isinstance(outcome[0], Failure):
        outcome[0].raiseException()
    return cast("T", outcome[0])


def error_of(outcome: Sequence[object]) -> BaseException:
    """Return the error in a list that :func:`begin` returned."""
    assert outcome, "it waits"
    failure = outcome[0]
    assert isinstance(failure, Failure), failure
    assert failure.value is not None
    return failure.value


@contextmanager
def logged(least: LogLevel = LogLevel.warn) -> Iterator[list[str]]:
    """Collect the texts of log events of level ``least`` and above; the list is filled at the end of the block."""
    lines: list[str] = []
    with capturedLogs() as events:
        yield lines
    lines += [formatEvent(each) for each in events if each["log_level"] >= least]


# ---- transports


class Wire(StringTransport):
    """A transport whose peer reads when ``read`` is called; it pauses the producer beyond ``room`` bytes.

    ``lost`` is true after an abort, or when everything was read after a close.
    """

    def __init__(self, protocol: Any, room: int = 64 * 1024) -> None:
        super().__init__(peerAddress=IPv4Address("TCP", "127.0.0.1", 40_000))
        self.room = room
        self.aborted = self.lost = False
        self.no_delay = False
        self.protocol = protocol
        protocol.makeConnection(self)

    def setTcpNoDelay(self, enabled: bool) -> None:
        self.no_delay = enabled

    def write(self, data: bytes) -> None:
        assert not self.lost
        if self.disconnecting:
            return  # as a real transport does
        super().write(data)
        if self.producer is not None and len(self.value()) > self.room:
            self.producer.pauseProducing()

    def read(self, size: int | None = None) -> bytes:
        """Read as the peer: ``size`` bytes, or everything."""
        data: bytes = self.value()
        taken, rest = (data, b"") if size is None else (data[:size], data[size:])
        self.clear()
        self.io.write(rest)
        if self.producer is not None and len(rest) <= self.room:
            self.producer.resumeProducing()
        if self.disconnecting and not rest:
            self.lose()
        return taken

    def abortConnection(self) -> None:
        self.aborted = True
        super().abortConnection()
        self.lose()

    def lose(self) -> None:
        """Lose the connection."""
        if not self.lost:
            self.lost = True
            self.protocol.connectionLost(Failure(ConnectionDone()))


@implementer(IHostnameResolver)
class Literal:
    """A resolver that takes every name for an address."""

    def resolveHostName(
        self,
        resolutionReceiver: Any,
        hostName: str,
        portNumber: int = 0,
        addressTypes: Any = None,
        transportSemantics: str = "TCP",
    ) -> Any:
        resolutionReceiver.resolutionBegan(self)
        resolutionReceiver.addressResolved(IPv4Address("TCP", hostName, portNumber))
        resolutionReceiver.resolutionComplete()
        return self


@implementer(IReactorPluggableNameResolver)
class Net(MemoryReactorClock):
    """A reactor with TCP in memory: a connection reaches ``serving[port]`` or is refused; ``run`` moves the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.serving: dict[int, IProtocolFactory] = {}
        self.hanging = False  # whether attempts to connect get no answer
        self.nameResolver = Literal()
        self.attempted: list[int] = []  # the port of each attempt to connect
        self._pumps: list[IOPump] = []

    @property
    def attempts(self) -> int:
        """The number of attempts to connect."""
        return len(self.attempted)

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, and run every timer and move all bytes in between."""
        while True:
            self._settle()
            calls = [each.getTime() - self.seconds() for each in self.getDelayedCalls()]
            step = min([seconds, *[each for each in calls if each > 0]])
            if seconds <= 0:
                return
            self.advance(step)
            seconds -= step

    def cut(self) -> None:
        """Lose every connection."""
        for pump in self._pumps:
            for each in (pump.clientIO, pump.serverIO):
                if not each.disconnected:
                    each.disconnecting = each.disconnected = True
                    each.stream = []
                    each.protocol.connectionLost(Failure(ConnectionDone()))
        self._pumps.clear()
        self._settle()

    def _settle(self) -> None:
        for _ in range(1_000):
            self.advance(0)
            connected = self._connect()
            moved = [pump.pump(advanceClock=False) for pump in self._pumps]
            self._pumps = [p for p in self._pumps if not (p.clientIO.disconnected and p.serverIO.disconnected)]
            if not connected and not any(moved):
                return
        raise AssertionError("the connections never become idle")

    def _connect(self) -> bool:
        if self.hanging or not self.tcpClients:
            return False
        clients, self.tcpClients = self.tcpClients, []
        for _host, port, factory, _timeout, _bind in clients:
            self.attempted.append(port)
            if port not in self.serving:
                factory.clientConnectionFailed(cast("Any", None), Failure(ConnectionRefusedError()))
                continue
            here, there = IPv4Address("TCP", "127.0.0.1", 40_000), IPv4Address("TCP", "127.0.0.1", port)
            server, client = self.serving[port].buildProtocol(here), factory.buildProtocol(there)
            assert server is not None
            assert client is not None
            self._pumps.append(_pump(self, server, client, here, there))
        return True


def _pump(net: Net, server: Any, client: Any, here: IPv4Address, there: IPv4Address) -> IOPump:
    server_io = FakeTransport(server, isServer=True, hostAddress=there, peerAddress=here)
    client_io = FakeTransport(client, isServer=False, hostAddress=here, peerAddress=there)
    server.makeConnection(server_io)
    client.makeConnection(client_io)
    return IOPump(client, server, client_io, server_io, debug=False, clock=net)


# ---- stores


class FragileStore(MemoryStore):
    """A MemoryStore whose operations wait if they are named in ``gates``, and fail if they are in ``errors``.

    ``asked`` are the operations so far, ``executed`` the SQL statements, ``ends`` how each transaction ended, and
    ``synchronous`` whether each transaction waits for the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, Deferred[None]] = {}
        self.errors: dict[str, Exception] = {}
        self.asked: list[str] = []
        self.executed: list[str] = []
        self.ends: list[str] = []
        self.synchronous: list[bool] = []

    async def operation(self, name: str) -> None:
        self.asked.append(name)
        if name in self.gates:
            await share(self.gates[name])
        if name in self.errors:
            raise self.errors[name]

    def close_gate(self, name: str) -> None:
        self.gates[name] = Deferred()

    def open_gate(self, name: str) -> None:
        self.gates.pop(name).callback(None)

    async def open(self) -> None:
        await self.operation("open")
        await super().open()

    async def declare(self, *definitions: StreamDefinition) -> None:
        await self.operation("declare")
        await super().declare(*definitions)

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        await self.operation("positions")
        return await super().positions_of(streams)

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        await self.operation("positions")
        return await super().applied_positions(stream, follower)

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        await self.operation("stored")
        return await super().stored_positions()

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        await self.operation("rows")
        return await super().present(stream, writer, after=after, upto=upto)

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        await self.operation("facts")
        return await super().facts(stream, writer, after=after, upto=upto, limit=limit)

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        await self.operation("store histories")
        await super().store_histories(writer, histories, follower)

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        await self.operation("raise position")
        await super().raise_position(write, history, former)

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        await self.operation("recall")
        return await super().find_receipt(key)

    async def verify(self) -> None:
        await self.operation("verify")
        await super().verify()

    async def close(self) -> None:
        await self.operation("close")
        await super().close()

    async def sync(self) -> None:
        await self.operation("sync")
        await super().sync()

    def transaction(self, *, synchronous: bool = True) -> MemoryTransaction:
        self.synchronous.append(synchronous)
        return _FragileTransaction(self)


class SharedStore(FragileStore):
    """A FragileStore with several writers: stream IDs come from sequences, whose operation is ``draw``."""

    def __init__(self) -> None:
        super().__init__()
        self.last_value: dict[StreamName, int] = {}  # the last allocated ID
        self.claims: list[InstanceName] = []
        self.there: set[InstanceName] = set()  # the other instances that are connected now
        self.claimed: set[InstanceName] = set()  # those that were, apart from the names that were taken over
        self.followers: dict[tuple[StreamName, InstanceName], dict[InstanceName, Token]] = {}

    def sequence(self, stream: StreamName) -> ISequence | None:  # type: ignore[override]
        super().sequence(stream)
        return _Sequence(self, stream)

    async def claim(self, instance: InstanceName) -> None:
        self.claims.append(instance)

    async def claimed_elsewhere(self, names: Collection[InstanceName]) -> Mapping[InstanceName, bool]:
        await self.operation("present")
        self.claimed |= self.there
        return {each: each in self.there for each in names if each in self.claimed}

    async def take_over(self, name: InstanceName) -> bool:
        await self.operation(f"take over {name}")
        ended = name in self.claimed - self.there
        self.claimed -= {name} - self.there
        return ended

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        return dict(self.followers.get((stream, follower), {}))

    def land(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        super().land([each for each in writes if each.follower is None], receipt)
        for each in writes:
            if each.follower is not None:
                self.followers.setdefault((each.stream, each.follower), {})[each.writer] = each.upto

    def others_write(self, stream: str, writer: str, upto: int) -> None:
        """Let another process allocate IDs and store its position."""
        name = StreamName(stream)
        self.last_value[name] = max(self.last_value.get(name, 1), upto)
        self.land([Write(name, InstanceName(writer), Token(upto))], None)


class _Sequence:
    def __init__(self, store: SharedStore, stream: StreamName) -> None:
        self._store = store
        self._stream = stream

    async def allocate(self, count: int) -> Sequence[int]:
        first = self._store.last_value.get(self._stream, 1) + 1
        self._store.last_value[self._stream] = first + count - 1
        await self._store.operation("draw")
        return range(first, first + count)


class _FragileTransaction(MemoryTransaction):
    def __init__(self, store: FragileStore) -> None:
        super().__init__(store)
        self._fragile = store

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        await self._fragile.operation("execute")
        self._fragile.executed.append(sql)
        return []

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        await self.execute(sql)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        await self._fragile.operation("commit")
        await super().commit(writes, receipt)
        self._fragile.ends.append("committed")

    async def rollback(self) -> None:
        await self._fragile.operation("rollback")
        await super().rollback()
        self._fragile.ends.append("rolled back")


def lines_of(data: bytes) -> list[str]:
    """Return whole lines as text."""
    assert not data or data.endswith(b"\n"), data
    return data.decode().splitlines()


def shown_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the value of each metric, by its name and labels."""
    shown = [(" ".join([each.name, *map("=".join, each.labels.items())]), each.value) for each in samples]
    assert len({name for name, _ in shown}) == len(shown), "a metric is there twice"
    return dict(shown)


def words_of(data: bytes) -> list[str]:
    """Return the first word of each line."""
    return [line.split(" ", 1)[0] for line in lines_of(data)]


def connect(factory: IProtocolFactory, room: int = 64 * 1024) -> Wire:
    """Connect to a factory, and return the transport."""
    protocol: Protocol | None = cast("Protocol | None", factory.buildProtocol(IPv4Address("TCP", "127.0.0.1", 40_000)))
    assert protocol is not None
    return Wire(protocol, room)
