"""What the tests of writers share: a process in memory, and the writers of its streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.deferreds import Lifetime
from replication.net.protocol import Limits
from replication.streams.definitions import CACHES, StreamDefinition
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.publisher import Publisher
from replication.writer.reservation import FactTransaction, OpenTransactions
from replication.writer.stream import StreamWriter
from tests.doubles import FragileStore, begin, lines_of, now

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from twisted.python.failure import Failure

    from replication.session.encoder import EncodedLines
    from replication.streams.facts import Fact
    from replication.streams.interfaces import IStreamStore


ORDERS = StreamName("orders")


ME = InstanceName("master")


class Process:
    """What the writers of one process share; ``lines`` are the lines that all streams published."""

    def __init__(self, store: IStreamStore, *, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.store = store
        self.clock: Any = Clock()
        self.lifetime = Lifetime(self.clock)
        self.lines: list[str] = []
        self.committed_facts: list[tuple[StreamName, Fact]] = []
        self.ready: Deferred[None] = Deferred()
        self.ready.callback(None)
        self.writers: dict[StreamName, StreamWriter] = {}
        self.transactions = OpenTransactions(
            ME,
            store,
            clock=self.clock,
            wall=lambda: 1700.5,
            ready=self.started,
            caches=lambda: self.caches_writer().outgoing,
            on_commit=self.committed,
        )

    @property
    def open(self) -> list[FactTransaction[Any]]:
        """The transactions in progress."""
        return [*self.transactions._open]

    def stop(self) -> None:
        """Refuse new transactions, and end every retry."""
        self.transactions.stopping = True
        self.lifetime.end()

    async def started(self) -> None:
        if not self.ready.called:
            await self.ready

    def make_writer(self, definition: StreamDefinition) -> StreamWriter:
        if definition.shares is not None:
            publisher = self.writers[definition.shares].publisher
        else:
            publisher = Publisher(
                ME, self.store, cast("Any", self), limits=self.limits, lifetime=self.lifetime, clock=self.clock
            )
        writer = self.writers[definition.name] = StreamWriter(definition, publisher, self.transactions)
        return writer

    async def declare(self, *definitions: StreamDefinition) -> None:
        await self.store.open()
        for definition in definitions:
            await self.store.declare(definition)
            writer = self.make_writer(definition)
            start = max([Token(1), *(await self.store.positions(definition.name)).values()])
            writer.publisher.begin(start, self.store.sequence(definition.name))

    def caches_writer(self) -> StreamWriter:
        return self.writers[CACHES]

    def publish(self, stream: StreamName, chunk: EncodedLines) -> None:
        """Note lines in place of the broadcast to all subscribers."""
        lines = lines_of(chunk.data)
        assert chunk.lines == len(lines)
        assert all(line.split(" ")[1] == stream for line in lines)
        self.lines += lines

    def committed(self, stream: StreamName, facts: Sequence[Fact]) -> None:
        self.committed_facts += [(stream, fact) for fact in facts]

    def new_lines(self) -> list[str]:
        """Return what was published since the last call."""
        lines, self.lines = self.lines, []
        return lines


DEFINITIONS = (
    StreamDefinition("orders", row=("order_id", "state")),
    StreamDefinition("notes"),
    StreamDefinition("debts", negative=True),
    StreamDefinition("foreign", writers=("other",)),
    StreamDefinition(CACHES, row=("cache_func", "keys", "invalidation_ts")),
)


class WriterCase(SynchronousTestCase):
    limits = Limits()

    def make_store(self) -> FragileStore:
        return FragileStore()

    def setUp(self) -> None:
        self.store = self.make_store()
        self.process = Process(self.store, limits=self.limits)
        now(self.process.declare(*DEFINITIONS))
        self.store.asked.clear()
        self.orders, self.notes = self.process.writers[ORDERS], self.process.writers[StreamName("notes")]

    def tearDown(self) -> None:
        self.assertEqual(self.process.open, [])
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def hold(self, writer: StreamWriter | None = None, count: int | None = None) -> Any:
        """Enter a reserve() block; return the block and what it gives."""
        writer = writer or self.notes
        reservation: Any = writer.reserve() if count is None else writer.reserve(count)
        return reservation, now(reservation.__aenter__())

    def leave(
        self, reservation: AbstractAsyncContextManager[Any], error: BaseException | None = None
    ) -> list[Failure | None]:
        """Leave the block, with or without an error."""
        kind = None if error is None else type(error)
        return begin(reservation.__aexit__(kind, error, None))

    def stored(self, name: str = "notes", after: int = 0) -> dict[int, tuple[str, ...]]:
        page = now(self.store.facts(StreamName(name), ME, after=Token(after), upto=Token(10**6), limit=10**6))
        return {fact.token: fact.texts for fact in page.facts}

    def position(self, name: str = "notes") -> int:
        return now(self.store.positions(StreamName(name))).get(ME, Token(0))
