"""A network in memory with the interfaces of Twisted's TCP; tests cut and delay connections.

A :class:`Transport` behaves as Twisted's own: it buffers, pauses its producer above a mark, closes once all is written.
Between two of them a :class:`Connection` carries bytes.  Each of its pipes can be held back, let go by the byte, or
lose everything.  Nothing happens by itself: :meth:`Network.turn` is one round of a reactor for all.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.error import (
    ConnectionAborted,
    ConnectionDone,
    ConnectionLost,
    ConnectionRefusedError,  # noqa: A004 - the one that Twisted means
)
from twisted.internet.error import TimeoutError as ConnectTimeoutError
from twisted.python.failure import Failure

from replication.bench.simulation.clock import SimulatedClock, Timer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from twisted.internet.interfaces import IDelayedCall
    from twisted.internet.protocol import ClientFactory, Factory

MAX_ROUNDS = 10_000  # of one turn; more is a loop that never ends


class Transport:
    """One end of a connection."""

    def __init__(self, reactor: SimulatedReactor, here: IPv4Address, there: IPv4Address) -> None:
        self.reactor = reactor
        self.protocol: Any = None
        self.connected = True
        self.disconnecting = False
        self.resting = False  # its protocol wants to read nothing for now
        self.outgoing = bytearray()  # written, and not taken by the kernel; it dies with its process
        self.on_write: Callable[[bytes], object] = lambda _: None
        self._here = here
        self._there = there
        self._producer: Any = None
        self._paused = False

    # ---- what a protocol calls

    def write(self, data: bytes) -> None:
        if not self.connected or not data:
            return
        self.on_write(data)
        self.outgoing += data
        if self._producer is not None and not self._paused and len(self.outgoing) > self.reactor.network.high_water:
            self._paused = True
            self._producer.pauseProducing()

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert self._producer is None and streaming
        self._producer = producer

    def unregisterProducer(self) -> None:
        self._producer = None

    def pauseProducing(self) -> None:
        """Stop reading."""
        self.resting = True

    def resumeProducing(self) -> None:
        """Resume reading."""
        self.resting = False

    def loseConnection(self) -> None:
        self.disconnecting = self.connected

    def abortConnection(self) -> None:
        if self.connected:
            self.outgoing.clear()
            self.reactor.callLater(0, self.lose, ConnectionAborted())

    def getPeer(self) -> IPv4Address:
        return self._there

    def getHost(self) -> IPv4Address:
        return self._here

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Do nothing: the network decides when bytes are delivered."""

    # ---- what the network does

    @property
    def open(self) -> bool:
        """Whether the connection is open, as far as this end knows."""
        return self.connected and not self.disconnecting

    def emptied(self) -> None:
        """Notify the protocol that everything was sent to the kernel."""
        if self._producer is not None and self._paused:
            self._paused = False
            self._producer.resumeProducing()
        elif self.disconnecting:
            self.lose(ConnectionDone())

    def lose(self, reason: Exception) -> None:
        """Notify the protocol that the connection is lost, once."""
        if self.connected:
            self.connected = self.disconnecting = False
            self.outgoing.clear()
            self.protocol.connectionLost(Failure(reason))

    def die(self) -> None:
        """Drop the end of a killed process."""
        self.connected = self.disconnecting = False
        self.outgoing.clear()
        self._producer = None


class Pipe:
    """One direction of a connection; ``carried`` are the bytes that the kernel has taken from ``source``."""

    def __init__(self, source: Transport, target: Transport) -> None:
        self.source = source
        self.target = target
        self.carried = bytearray()
        self.delivered = bytearray()
        self.held = False

    def take(self, window: int) -> bool:
        """Move bytes into the kernel while it has room; return whether any moved.

        The source has bytes, or closes.
        """
        source = self.source
        room = max(0, window - len(self.carried))
        taken = source.outgoing[:room]
        self.carried += taken
        del source.outgoing[:room]
        if source.connected and not source.outgoing and (taken or source.disconnecting):
            source.emptied()
            return True
        return bool(taken)

    def deliver(self, size: int) -> None:
        """Deliver the next ``size`` bytes in one read; they are dropped if the other end has closed."""
        data = bytes(self.carried[:size])
        del self.carried[:size]
        self.delivered += data
        if data and self.target.open:
            self.target.protocol.dataReceived(data)


class Connection:
    """Two ends and two pipes; once ``dead``, it delivers nothing, and only notified ends know it."""

    def __init__(self, number: int, client: Transport, server: Transport) -> None:
        self.number = number
        self.client = client
        self.server = server
        self.up = Pipe(client, server)
        self.down = Pipe(server, client)
        self.pipes = self.up, self.down
        self.dead = False

    def cut(self, noticed_by: Iterable[Transport]) -> None:
        """Drop all bytes in flight and all later ones; notify some ends."""
        self.dead = True
        for end in noticed_by:
            end.lose(ConnectionLost())


class Connector:
    """An attempt to connect."""

    def __init__(self, reactor: SimulatedReactor, host: str, port: int, factory: ClientFactory, timeout: float) -> None:
        self.reactor = reactor
        self.host = host
        self.port = port
        self.factory = factory
        self._timeout = reactor.callLater(timeout, self.fail, ConnectTimeoutError())
        factory.doStart()
        factory.startedConnecting(self)  # type: ignore[arg-type]

    def getDestination(self) -> IPv4Address:
        return IPv4Address("TCP", self.host, self.port)

    def stopConnecting(self) -> None:
        self.fail(ConnectionAborted())

    def fail(self, reason: Exception) -> None:
        self.forget()
        self.factory.clientConnectionFailed(self, Failure(reason))  # type: ignore[arg-type]
        self.factory.doStop()

    def forget(self) -> None:
        self.reactor.network.attempts.remove(self)
        if self._timeout.active():
            self._timeout.cancel()


class SimulatedReactor:
    """The reactor of one process: time and TCP; both end when the process is killed."""

    def __init__(self, network: Network, host: str) -> None:
        self.network = network
        self.host = host
        self.killed = False
        self._clock = network.clock

    def seconds(self) -> float:
        return self._clock.now

    def callLater(self, delay: float, callable: Callable[..., object], *args: Any, **kwargs: Any) -> IDelayedCall:  # noqa: A002
        timer = Timer(self._clock, self._clock.now + delay, callable, args, kwargs, self)
        if self.killed:
            timer.cancel()
        return timer

    def getDelayedCalls(self) -> list[IDelayedCall]:
        return cast("list[IDelayedCall]", self.network.clock.timers_of(self))

    def listen(self, port: int, factory: Factory) -> None:
        self.network.listeners[self.host, port] = (self, factory)

    def connectTCP(
        self, host: str, port: int, factory: ClientFactory, timeout: float = 30, bindAddress: object = None
    ) -> Connector:
        connector = Connector(self, host, port, factory, timeout)
        self.network.attempts.append(connector)
        return connector

    def kill(self, *, power: bool = False) -> None:
        """Kill the process; bytes in its kernel are still delivered, unless ``power`` is lost."""
        self.killed = True
        for call in self.getDelayedCalls():
            call.cancel()
        network = self.network
        network.listeners = {at: each for at, each in network.listeners.items() if each[0] is not self}
        network.attempts = [each for each in network.attempts if each.reactor is not self]
        for connection in network.connections:
            for end in (connection.client, connection.server):
                if end.reactor is self:
                    end.die()
                    connection.dead |= power


class Network:
    """All connections, the clock that all processes share, and faults.

    ``high_water`` is the size in bytes at which a transport pauses its producer, ``window`` what a kernel takes without
    the peer reading, ``read_size`` what one read brings at most.
    """

    def __init__(self, *, high_water: int = 65_536, window: int = 65_536) -> None:
        self.clock = SimulatedClock()
        self.high_water = high_water
        self.window = window
        self.read_size = 1 << 20
        self.connections: list[Connection] = []
        self.listeners: dict[tuple[str, int], tuple[SimulatedReactor, Factory]] = {}
        self.new_held = False, False  # which pipes of a new connection are held: up to the server, down from there
        self.attempts: list[Connector] = []
        self.unplugged: set[str] = set()  # hosts without any connection to others
        self.on_connected: Callable[[Connection], object] = lambda _: None
        self._numbers = count(1)

    # ---- time

    def turn(self) -> None:
        """Do all reads, writes and timers that are due."""
        for _ in range(MAX_ROUNDS):
            connected = bool(self.attempts) and self._connect()
            if not (self._move() | self.clock.run_due() | connected):
                return
        raise AssertionError("a turn of the reactor does not end")

    def advance(self, seconds: float) -> None:
        """Let time pass, from one timer to the next."""
        for _ in self.passing(seconds):
            pass

    def passing(self, seconds: float) -> Iterator[float]:
        """Let time pass, and yield the time after each step."""
        clock = self.clock
        until = clock.now + seconds
        self.turn()
        yield clock.now
        while clock.now < until:
            due = clock.next_time()
            clock.now = until if due is None else max(clock.now, min(until, due))
            self.turn()
            yield clock.now

    # ---- connections

    def between(self, client: str, server: str) -> list[Connection]:
        """Return the connections of two hosts, oldest first."""
        return [
            each
            for each in self.connections
            if each.client.reactor.host == client and each.server.reactor.host == server
        ]

    def unplug(self, host: str) -> None:
        """Drop everything from and to ``host``, without notice."""
        self.unplugged.add(host)
        for each in self.connections:
            if host in (each.client.reactor.host, each.server.reactor.host):
                each.dead = True

    def heal(self) -> None:
        """Deliver everything again; dead connections stay dead."""
        self.unplugged.clear()
        self.new_held = False, False
        for connection in self.connections:
            for pipe in connection.pipes:
                pipe.held = False

    def _connect(self) -> bool:
        moved = False
        for connector in list(self.attempts):
            if connector not in self.attempts or {connector.reactor.host, connector.host} & self.unplugged:
                continue
            moved = True
            listener = self.listeners.get((connector.host, connector.port))
            if listener is None:
                connector.fail(ConnectionRefusedError())
            else:
                connector.forget()
                self._establish(connector, *listener)
        return moved

    def _establish(self, connector: Connector, listening: SimulatedReactor, factory: Factory) -> None:
        number = next(self._numbers)
        there = connector.getDestination()
        here = IPv4Address("TCP", connector.reactor.host, 40_000 + number)
        connection = Connection(number, Transport(connector.reactor, here, there), Transport(listening, there, here))
        connection.up.held, connection.down.held = self.new_held
        self.connections.append(connection)
        self.on_connected(connection)
        for end, address, maker in ((connection.server, here, factory), (connection.client, there, connector.factory)):
            protocol = maker.buildProtocol(address)
            assert protocol is not None
            end.protocol = protocol
            protocol.makeConnection(end)  # type: ignore[arg-type]

    def _move(self) -> bool:
        moved = False
        for connection in list(self.connections):
            for pipe in connection.pipes:
                source, target = pipe.source, pipe.target
                if source.outgoing or source.disconnecting:
                    moved |= pipe.take(self.window)
                elif source.connected and not pipe.carried:
                    continue
                if pipe.held or connection.dead or (target.resting and target.open):
                    continue
                if pipe.carried:
                    pipe.deliver(self.read_size)
                    moved = True
                elif target.connected and not source.connected:
                    target.lose(ConnectionDone())
                    moved = True
            if not (connection.client.connected or connection.server.connected):
                self.connections.remove(connection)
        return moved
