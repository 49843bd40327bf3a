"""What the tests of followers share: a follower alone, and a worker with writers in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.errors import (
    CatchUpError,
)
from replication.follower.application import ApplyTransaction
from replication.follower.stream import FollowMode, StreamFollower
from replication.follower.worker import Worker
from replication.session.connection import Rows
from replication.streams.facts import Fact
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import FragileStore, Net, begin, now
from tests.net.test_client import FakeWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import Apply, CatchUp, Reset

    First = Callable[[InstanceName, Apply | Reset], None]
    from replication.streams.interfaces import Page


WIRE, HTTP = 9092, 9093


ORDERS, MASTER = StreamName("orders"), InstanceName("master")


HELLO = b"SERVER example.com\n"


def position(prev: int, new: int, stream: str = "orders", writer: str = "master") -> bytes:
    return f"POSITION {stream} {writer} {prev} {new}\n".encode()


def rdata(token: int, row: str = "[]", stream: str = "orders", writer: str = "master") -> bytes:
    return f"RDATA {stream} {writer} {token} {row}\n".encode()


def contents(store: FragileStore) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return every fact in a store, by stream and token."""
    return {name: {token: texts for token, (_, texts) in shelf.facts.items()} for name, shelf in store._streams.items()}


class WorkerCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.net, self.store = Net(), FragileStore()
        self.worker = self.make_worker()
        self.seen: list[list[int]] = []

    def tearDown(self) -> None:
        self.store.gates.clear()
        self.store.errors.clear()
        stopped = begin(self.worker.stop())
        self.net.run()
        self.assertEqual(stopped, [None])
        self.assertEqual(self.net.getDelayedCalls(), [])

    def make_worker(self, **options: Any) -> Worker:
        # Without an audit nothing waits for the answer of an HTTP that most of these tests have not.
        given: dict[str, Any] = {"server_name": "example.com", "database": self.store, "audit_interval": 0, **options}
        return Worker(reactor=self.net, **given)

    def serve(self, *scripts: bytes, port: int = WIRE, hangs_up: bool = False) -> FakeWriter:
        writer = self.net.serving[port] = FakeWriter(*scripts, hangs_up=hangs_up)
        return writer

    def send(self, writer: FakeWriter, *lines: bytes) -> None:
        """Send lines as the writer, on its latest connection."""
        writer.connections[-1].transport.write(b"".join(lines))
        self.net.run()

    def start(self) -> None:
        started = begin(self.worker.start())
        self.net.run()
        self.assertEqual(started, [None])

    def apply(self, stream: str = "orders") -> None:
        """Register a function that notes the tokens that it receives."""

        @self.worker.on(stream)
        def note(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.seen.append([fact.token for fact in facts])

    def at(self, stream: str = "orders", writer: str = "master") -> int:
        return self.worker._followed.position(StreamName(stream), InstanceName(writer))

    def stored(self, stream: str = "orders") -> int:
        return now(self.store.positions(StreamName(stream))).get(MASTER, 0)


ORDERS = StreamName("orders")


MASTER, OTHER = InstanceName("master"), InstanceName("other")


def fact(token: int, *rows: str) -> Fact:
    return Fact(Token(token), rows or (f"[{token}]",))


class Process:
    """What a follower uses; ``fetch`` returns ``pages`` in order, ``notes`` are the calls in order."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lifetime = Lifetime(self.clock)
        self.store: Any = FragileStore()
        self.all_received = True
        self.asked: list[tuple[int, int]] = []
        self.pages: list[Page | Exception | Deferred[Page]] = []
        self.notes: list[object] = []

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a StreamFollower."""
        return {
            "instance_name": InstanceName("worker1"),
            "store": self.store,
            "lifetime": self.lifetime,
            "fetch": self.fetch,
            "moved": self.moved,
        }

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        self.asked.append((step.after, step.upto))
        page = self.pages.pop(0) if self.pages else CatchUpError("no source has it")
        if isinstance(page, Exception):
            raise page
        return await page if isinstance(page, Deferred) else page

    def moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        self.notes.append(("moved", writer, position))


class FollowerCase(SynchronousTestCase):
    mode = FollowMode.COPIED

    def setUp(self) -> None:
        self.process = Process()
        self.store: FragileStore = self.process.store
        now(self.store.open())
        self.follower = self.make_follower()
        now(self.follower.open())

    def tearDown(self) -> None:
        self.process.lifetime.end()
        for each in self.follower.in_progress():
            each.cancel()
        self.assertEqual(self.follower.in_progress(), [])
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        return StreamFollower(name=ORDERS, mode=self.mode, function=function, first=first, **self.process.arguments)

    def at(self, prev: int, new: int, writer: InstanceName = MASTER, link: str = "link") -> None:
        self.follower.position_received(link, Position(ORDERS, writer, Token(prev), Token(new)))

    def rows(self, *facts: Fact, writer: InstanceName = MASTER, link: str = "link") -> None:
        places: list[Token | None] = []
        texts: list[str] = []
        for token, some in facts:
            places += [*[None] * (len(some) - 1), token]
            texts += some
        self.follower.rows_received(link, Rows(ORDERS, writer, places, texts))

    def stored(self, writer: InstanceName = MASTER) -> tuple[list[Fact], int]:
        page = now(self.store.facts(ORDERS, writer, after=Token(0), upto=Token(1_000), limit=1_000))
        return [*page.facts], now(self.store.positions(ORDERS)).get(writer, Token(0))

    def position(self, writer: InstanceName = MASTER) -> int:
        return self.follower.cursors[writer].position

    def state(self, writer: InstanceName = MASTER) -> str:
        return self.follower.status(writer).state
