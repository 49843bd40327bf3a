"""Writing facts: an ID is reserved, rows go into a transaction, the ID completes, the fact settles and is announced.

``reserve()`` opens a :class:`Reservation`; leaving its block commits the rows, or rolls them back; either way the ID is
then complete.  When every smaller ID of the stream is complete too, the fact is settled: it is spelt and handed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import deferLater
from twisted.logger import Logger

from replication.caches import spell_key
from replication.errors import NotAWriterError, RowError, StoreError, StreamError
from replication.session.feed import spell_facts, spell_position
from replication.streams.facts import Fact
from replication.streams.pending import PendingIds
from replication.streams.seams import Receipt, Write
from replication.streams.settling import Settling
from replication.waiting import shield
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from twisted.internet.interfaces import IReactorTime

    from replication.session.feed import Chunk
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStreamStore, ITransaction

FIRST_SETTLED = Token(1)  # an empty stream: its first ID is 2, as everywhere in this protocol (protocol F5)
RETRY_AFTER = 1.0  # seconds, when the store fails between commit and announcement
PAGE_ROWS = 5_000


class IWritingProcess(Protocol):
    """What a stream's writer needs from the process that it is part of."""

    instance_name: InstanceName
    line_limit: int
    store: IStreamStore
    clock: IReactorTime
    wall: Callable[[], float]
    reservations: dict[Reservation, None]
    stopping: bool

    async def started(self) -> None:
        """Return once facts can be written."""

    def caches_writer(self) -> StreamWriter:
        """Return the writer of the caches stream."""
        ...

    def tell(self, stream: StreamName, chunk: Chunk) -> None:
        """Hand lines to every connection that wants the stream."""

    def reservation_ended(self, reservation: Reservation) -> None:
        """All IDs of a reservation are complete."""


class OpenFact:
    """A fact that is being written: its ID is reserved, its rows are not committed."""

    def __init__(self, writer: StreamWriter, token: Token, reservation: Reservation) -> None:
        self.token = token
        self.texts: list[str] = []
        self._writer = writer
        self._reservation = reservation

    @property
    def stream_id(self) -> int:
        """The ID as a table of this stream has it: below zero in a negative stream."""
        return -self.token if self._writer.definition.negative else self.token

    async def write(self, row: object) -> None:
        """Add a row; RowError if it is not JSON or does not have the stream's declared fields."""
        self._reservation.check_open()
        self.texts.append(self._writer.spell(row))

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run the application's own SQL in this fact's transaction and return the rows; StoreError if it fails.

        From the first statement on, the transaction holds the database's write lock: do not wait for the network here.
        """
        return await self._reservation.transaction().execute(sql, parameters)

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> Deferred[None]:
        """Add, to this transaction, a fact that empties ``cache`` at ``keys`` everywhere; all of it if None.

        It happens at once: the result may be awaited, but need not be.
        """
        self._reservation.invalidate(cache, keys)
        return succeed(None)


class Reservation:
    """Reserved IDs and one transaction, as an asynchronous context; leaving it completes the IDs, by whichever exit."""

    log = Logger()

    def __init__(self, process: IWritingProcess, writer: StreamWriter, count: int | None) -> None:
        self.writer = writer
        self.since = 0.0  # seconds of the process's clock
        self._process = process
        self._count = count
        self._transaction: ITransaction | None = None
        self._facts: dict[StreamWriter, list[OpenFact]] = {}
        self._ended = False

    async def __aenter__(self) -> Any:
        """Reserve; returns the open fact, or a list of them if a count was given."""
        await self._process.started()
        facts = self._open(self.writer, 1 if self._count is None else self._count)
        self.since = self._process.clock.seconds()
        self._process.reservations[self] = None
        return facts[0] if self._count is None else facts

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit or roll back; whatever becomes of the caller, that runs to its end before the IDs are complete."""
        if kind is None:
            await shield(self._commit())
            return
        rolled_back = shield(self._roll_back())
        if issubclass(kind, GeneratorExit):  # the coroutine was dropped: it may not wait for anything
            rolled_back.addErrback(lambda failure: self.log.failure("rollback of a dropped fact", failure=failure))
        else:
            await rolled_back

    @property
    def first(self) -> Token:
        """The first ID that this reservation holds of its stream."""
        return self._facts[self.writer][0].token

    @property
    def held(self) -> Iterable[StreamWriter]:
        """The streams of which this reservation holds IDs."""
        return self._facts

    def check_open(self) -> None:
        """Raise StreamError if the block has been left."""
        if self._ended:
            raise StreamError("this fact is complete: write inside its 'async with' block")

    def transaction(self) -> ITransaction:
        """Return the one transaction of all these facts."""
        self.check_open()
        if self._transaction is None:
            self._transaction = self._process.store.transaction()
        return self._transaction

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> None:
        """Add a row to this transaction's fact on the caches stream."""
        self.check_open()
        caches = self._process.caches_writer()
        fact = self._facts[caches][0] if caches in self._facts else self._open(caches, 1)[0]
        spelt = None if keys is None else list(spell_key(keys))
        fact.texts.append(caches.spell([cache, spelt, int(self._process.wall() * 1000)]))

    def _open(self, writer: StreamWriter, count: int) -> list[OpenFact]:
        facts = [OpenFact(writer, Token(token), self) for token in writer.pending.reserve(count)]
        self._facts[writer] = facts
        return facts

    async def _commit(self) -> None:
        whole = {
            writer: [Fact(each.token, tuple(each.texts)) for each in opened] for writer, opened in self._facts.items()
        }
        try:
            transaction = self.transaction()
            self._ended = True
            await transaction.commit([writer.write_of(facts) for writer, facts in whole.items()])
        except BaseException:
            self._complete({})
            raise
        self._complete(whole)

    async def _roll_back(self) -> None:
        self._ended = True
        try:
            if self._transaction is not None:
                await self._transaction.rollback()
        finally:
            self._complete({})

    def _complete(self, committed: Mapping[StreamWriter, Sequence[Fact]]) -> None:
        for writer, opened in self._facts.items():
            writer.complete([each.token for each in opened], committed.get(writer, ()))
        self._process.reservation_ended(self)


class StreamWriter:
    """One stream, as its writer holds it."""

    log = Logger()

    def __init__(self, process: IWritingProcess, definition: StreamDefinition) -> None:
        self.definition = definition
        self._process = process
        self._busy = False  # the store is being asked before more can be announced
        self.begin(FIRST_SETTLED)

    def begin(self, start: Token) -> None:
        """Take up where the store says that the stream stands."""
        self.pending = PendingIds(start)
        self.announced = start  # how far every connection has been told
        self._settling = Settling(start)
        self._durable = start  # nothing above it may be announced: a crash would take it back

    def reserve(self, count: int | None = None) -> Reservation:
        """Return the context in which one fact, or a list of ``count`` facts in one transaction, is written.

        NotAWriterError if this instance may not write here.
        """
        self._check_writer()
        return Reservation(self._process, self, count)

    async def append(self, facts: Sequence[Sequence[object]], key: str | None = None) -> Sequence[Token]:
        """Append facts, each a list of rows, in one transaction; returns their IDs once all are durable.

        ``key`` names this append for a day: another one under the same key appends nothing and gets the same answer.
        RowError says which fact (counted from 1) is bad; then nothing is appended.
        """
        self._check_writer()
        texts = [self._spell_all(number, rows) for number, rows in enumerate(facts, 1)]
        await self._process.started()
        if key is not None and (known := await self._process.store.recall(key)) is not None:
            return known
        return await shield(self._append(texts, key)) if texts else []

    def spell(self, row: object) -> str:
        """Return the text of a row if it has the declared fields, else RowError."""
        fields = self.definition.row
        if fields is not None and not (isinstance(row, (list, tuple)) and len(row) == len(fields)):
            got = f"an array of {len(row)}" if isinstance(row, (list, tuple)) else f"a {type(row).__name__}"
            raise RowError(f"a row of {self.definition.name!r} is [{', '.join(fields)}], not {got}")
        return grammar.spell_row(row)

    def write_of(self, facts: Sequence[Fact]) -> Write:
        """Return this stream's part of a transaction that commits ``facts``."""
        return Write(self.definition.name, self._process.instance_name, facts[-1].token, facts)

    def complete(self, tokens: Sequence[Token], facts: Sequence[Fact]) -> None:
        """Note that IDs are complete and what they committed (nothing: rolled back), and announce what settled."""
        self.pending.complete(tokens)
        if facts:
            self._durable = max(self._durable, facts[-1].token)
            self._settling.add([fact for fact in facts if fact.texts])
        self.announce()

    def announce(self) -> None:
        """Tell all connections what has settled since the last time."""
        if self._busy:
            return
        settled = Token(self.pending.settled)
        batch = self._settling.release(min(settled, self._durable))
        if batch is not None and batch.spilled:
            self._ask_store(self._announce_from_store(batch.after, batch.upto))
            return
        if batch is not None:
            self._tell(batch.facts, batch.after, batch.upto)
        if settled > self._durable:  # the last IDs were rolled back: store the position before saying it
            self._ask_store(self._store_position(settled))

    def position(self) -> Chunk:
        """Return the line that answers REPLICATE."""
        return spell_position(self.definition.name, self._process.instance_name, self.announced, self.announced)

    def _tell(self, facts: Sequence[Fact], after: Token, upto: Token) -> None:
        name, me = self.definition.name, self._process.instance_name
        for chunk in spell_facts(name, me, facts, after=after, upto=upto, line_limit=self._process.line_limit):
            self._process.tell(name, chunk)
        self.announced = upto

    async def _append(self, texts: Sequence[tuple[str, ...]], key: str | None) -> Sequence[Token]:
        tokens = [Token(each) for each in self.pending.reserve(len(texts))]
        facts = list(map(Fact, tokens, texts))
        receipt = None if key is None else Receipt(key, tokens)
        try:
            await self._process.store.transaction().commit([self.write_of(facts)], receipt)
        except BaseException:
            self.complete(tokens, ())
            if key is not None and (known := await self._process.store.recall(key)) is not None:
                return known  # the same append came twice at once, and the other one was first
            raise
        self.complete(tokens, facts)
        return tokens

    def _spell_all(self, number: int, rows: Sequence[object]) -> tuple[str, ...]:
        try:
            return tuple([self.spell(row) for row in rows])
        except RowError as error:
            bad = RowError(f"fact {number}: {error}")
            bad.fact = number - 1
            raise bad from error

    def _ask_store(self, work: Any) -> None:
        """Run ``work`` while nothing else is announced, then look again."""
        self._busy = True

        def done(_: object) -> None:
            self._busy = False
            self.announce()

        asked = Deferred.fromCoroutine(work)
        asked.addErrback(lambda failure: self.log.failure("announcing {name}", failure, name=self.definition.name))
        asked.addCallback(done)

    async def _store_position(self, settled: Token) -> None:
        write = Write(self.definition.name, self._process.instance_name, settled)
        await self._until_it_works(lambda: self._process.store.transaction().commit([write]))
        self._durable = max(self._durable, settled)

    async def _announce_from_store(self, after: Token, upto: Token) -> None:
        name, me, store = self.definition.name, self._process.instance_name, self._process.store
        while after < upto:
            page = await self._until_it_works(
                lambda after=after: store.facts(name, me, after=after, upto=upto, limit=PAGE_ROWS)
            )
            self._tell(page.facts, after, page.upto)
            after = page.upto

    async def _until_it_works(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask the store until it answers: what is committed has to be announced, however long that takes."""
        while True:
            try:
                return await ask()
            except StoreError as error:
                if self._process.stopping:
                    raise
                self.log.error("{name} waits: {error}", name=self.definition.name, error=str(error))
                await deferLater(self._process.clock, RETRY_AFTER)

    def _check_writer(self) -> None:
        if not self.definition.written_by(self._process.instance_name):
            raise NotAWriterError(
                f"{self._process.instance_name!r} may not write to {self.definition.name!r}; "
                f"its writers: {', '.join(self.definition.writers)}"
            )
