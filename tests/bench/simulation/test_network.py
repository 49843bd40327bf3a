"""The simulated network."""

from __future__ import annotations

from twisted.internet.protocol import ClientFactory, Factory, Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.bench.simulation.network import Connection, Network, SimulatedReactor


class Recorder(Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.lost: type[BaseException] | None = None

    def dataReceived(self, data: bytes) -> None:
        self.received += data

    def connectionLost(self, reason: Failure = Failure(Exception())) -> None:  # noqa: B008
        self.lost = reason.type


class Client(ClientFactory):
    protocol = Recorder
    failed: type[BaseException] | None = None

    def clientConnectionFailed(self, _: object, reason: Failure) -> None:
        self.failed = reason.type


class NetworkTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.network = Network()
        self.server, self.client = (SimulatedReactor(self.network, name) for name in ("server", "client"))
        self.server.listen(9, Factory.forProtocol(Recorder))

    def connect(self) -> Connection:
        self.client.connectTCP("server", 9, Client())
        self.network.turn()
        return self.network.connections[-1]

    def test_bytes_arrive_in_order_also_if_they_are_held_back(self) -> None:
        wire = self.connect()
        wire.down.held = True
        wire.server.write(b"one two")
        self.network.turn()
        wire.down.deliver(3)
        self.assertEqual(wire.client.protocol.received, b"one")
        self.network.heal()
        wire.server.writeSequence([b" ", b"three"])
        wire.server.loseConnection()
        self.network.turn()
        self.assertEqual(wire.client.protocol.received, b"one two three")
        self.assertEqual(wire.client.protocol.lost.__name__, "ConnectionDone")
        self.assertEqual(self.network.connections, [])

    def test_a_port_without_a_listener_refuses_connections(self) -> None:
        factory = Client()
        self.client.connectTCP("server", 8, factory)
        self.network.turn()
        self.assertEqual(factory.failed and factory.failed.__name__, "ConnectionRefusedError")

    def test_an_unplugged_host_is_not_reached(self) -> None:
        wire = self.connect()
        self.network.unplug("server")
        factory = Client()
        self.client.connectTCP("server", 9, factory, timeout=5)
        wire.server.write(b"lost")
        self.network.advance(5)
        self.assertEqual(factory.failed and factory.failed.__name__, "TimeoutError")
        self.assertEqual(wire.client.protocol.received, b"")

    def test_the_timers_of_a_killed_process_end(self) -> None:
        called: list[str] = []
        timer = self.client.callLater(1, called.append, "before")
        self.client.kill()
        self.client.callLater(1, called.append, "after")
        self.network.advance(2)
        self.assertEqual((called, timer.active(), self.client.getDelayedCalls()), ([], False, []))

    def test_a_turn_that_never_ends_is_an_error(self) -> None:
        self.network._move = lambda: True  # type: ignore[method-assign]
        self.assertRaises(AssertionError, self.network.turn)
