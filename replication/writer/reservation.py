"""Writing a fact: IDs are reserved, rows are written in one transaction, commit or rollback completes the IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from replication.caches import encode_key
from replication.deferreds import shield
from replication.errors import RowError, StoppingError, StoreError, StreamError
from replication.net import traces
from replication.streams.definitions import CACHES
from replication.streams.facts import Fact, check_size
from replication.streams.ids import Allocation
from replication.wire.grammar import Token
from replication.writer.interaction import AddedFact, Interaction, NewFact

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from twisted.internet.interfaces import IReactorTime

    from replication.streams.interfaces import ISqlExecutor, IStreamStore, ITransaction, Receipt
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.publisher import PublishedStream

T = TypeVar("T")
R = TypeVar("R")

COMPLETE: Final = "complete: write inside its 'async with' block"  # how a fact ended, for later calls


@attrs.define(eq=False, repr=False)
class Reservation:
    """A reserved stream ID, and the fact that is being written under it.

    ``token`` is the ID, ``texts`` are the rows so far as JSON texts.  ``caches_token`` is the ID of the invalidations
    in the stream ``caches``, from the commit on; 0 if there are none.
    ``async with stream.reserve() as fact`` makes one.
    """

    _stream: PublishedStream
    token: Token
    _transaction: FactTransaction[Any]
    texts: list[str] = attrs.field(init=False, factory=list)
    caches_token: Token = attrs.field(init=False, default=Token(0))

    @property
    def stream_id(self) -> int:
        """The ID as a table of this stream holds it: negative in a negative stream."""
        return -self.token if self._stream.definition.negative else self.token

    async def write(self, row: object) -> None:
        """Add ``row`` to the fact.

        RowError: it is not JSON, or lacks the declared fields.  StreamError: the block has been left.
        """
        self._transaction.check_open()
        self.texts.append(self._stream.definition.encode(row))

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one SQL statement of the application in this fact's transaction, and return its rows.

        ``parameters`` replace ``?`` on SQLite and ``%s`` on PostgreSQL.  StoreError: the database refuses.

        On SQLite the transaction holds the database's write lock from its first statement on: do not wait for the
        network between statements.
        """
        return await self._transaction.database_transaction().execute(sql, parameters)

    async def run(self, function: Callable[[ISqlExecutor], T]) -> T:
        """Call ``function`` in this fact's transaction, on the database's thread; return or raise what it does."""
        return await self._transaction.database_transaction().run(function)

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> Deferred[None]:
        """Add a fact on the caches stream to this transaction: every process drops an entry of ``cache``.

        ``keys`` are the arguments of the cached call; None drops all entries.  RowError: ``keys`` is a string.  The
        returned Deferred has fired already.
        """
        self._transaction.invalidate(cache, keys)
        return succeed(None)


@attrs.define(eq=False, repr=False)
class OpenTransactions:
    """The fact transactions in progress in this process.

    Args:
        store: makes the database's transactions.
        clock: seconds of any clock, for the age of open IDs.
        wall: seconds of the epoch, for cache invalidations.
        ready: returns once facts can be written; raises the error of a start that failed.
        caches: returns the caches stream.
        on_commit: is called with each stream's facts once they are durable, before they are published.

    """

    _instance_name: InstanceName
    store: IStreamStore
    clock: IReactorTime
    wall: Callable[[], float]
    ready: Callable[[], Awaitable[None]]
    caches: Callable[[], PublishedStream]
    on_commit: Callable[[StreamName, Sequence[Fact]], object]
    stopping: bool = attrs.field(init=False, default=False)
    trouble: Exception | None = attrs.field(init=False, default=None)  # why the last start failed
    _open: dict[FactTransaction[Any], None] = attrs.field(init=False, factory=dict)  # oldest first
    _idle: Deferred[None] | None = attrs.field(init=False, default=None)

    def begin(self, transaction: FactTransaction[Any]) -> None:
        """Note a transaction that reserves IDs; StoppingError if this process is stopping."""
        self.check_not_stopping()
        self._open[transaction] = None

    def check_not_stopping(self) -> None:
        """Raise StoppingError if this process is stopping."""
        if self.stopping:
            raise StoppingError(f"{self._instance_name!r} is stopping", instance=self._instance_name)

    def trace(self, transaction: FactTransaction[Any], stream: StreamName, facts: Sequence[Fact]) -> None:
        """Note for a trace that facts are durable."""
        if traces.tracer is not None:
            traces.tracer.wrote(stream, self._instance_name, facts, self.clock.seconds() - transaction.since)

    def end(self, transaction: FactTransaction[Any]) -> None:
        """Forget a transaction: all its IDs are complete."""
        del self._open[transaction]
        if self._idle is not None and not self._open and not self._idle.called:
            self._idle.callback(None)

    def encode_invalidation(self, cache: str, keys: Sequence[object] | None) -> str:
        """Return the row of an invalidation; RowError if ``keys`` is a string, NotAWriterError as ``check_writer``."""
        if isinstance(keys, (str, bytes)):
            raise RowError(f"keys are a list of arguments, not {keys!r}: write [{keys!r}]")
        caches = self.caches()
        caches.check_writer()
        encoded = None if keys is None else list(encode_key(keys))
        return caches.definition.encode([cache, encoded, int(self.wall() * 1000)])

    def oldest_first(self) -> Iterable[tuple[PublishedStream, Token, float]]:
        """Yield, for each transaction and stream, the first open ID and its age in seconds."""
        now = self.clock.seconds()
        for transaction in self._open:
            for stream, tokens in transaction.held.items():
                yield stream, tokens[0], now - transaction.since
            allocation = transaction.allocation
            if allocation is not None and allocation.token is not None and transaction.stream not in transaction.held:
                yield transaction.stream, allocation.token, now - transaction.since

    async def finish(self, patience: float) -> None:
        """Let the open transactions end for ``patience`` seconds, then roll back the rest."""
        if self._open:
            self._idle = Deferred()
            await self._idle.addTimeout(patience, self.clock, lambda _result, _seconds: None)
        for transaction in list(self._open):
            try:
                await transaction.abandon()
            except StoreError as error:
                FactTransaction.log.error("cannot roll back while stopping: {error}", error=str(error))


@attrs.define(eq=False, repr=False)
class FactTransaction(Generic[T]):
    """Reserved IDs and one transaction of the database, as an asynchronous context manager.

    Leaving the block commits, or rolls back after an exception.  Either way the IDs are complete then.  ``give`` is
    called with the reservations, and returns what ``async with`` binds.
    """

    log = Logger()

    _all: OpenTransactions
    stream: PublishedStream
    _count: int
    _give: Callable[[list[Reservation]], T]
    since: float = attrs.field(init=False, default=0.0)  # seconds of ``clock``
    held: dict[PublishedStream, Sequence[Token]] = attrs.field(init=False, factory=dict)  # the reserved IDs
    allocation: Allocation | None = attrs.field(init=False, default=None)  # of an interaction
    _transaction: ITransaction | None = attrs.field(init=False, default=None)
    _reservations: list[Reservation] = attrs.field(init=False, factory=list)
    _invalidations: list[str] = attrs.field(init=False, factory=list)  # rows of one fact on the caches stream
    _begun: bool = attrs.field(init=False, default=False)
    _ended: str | None = attrs.field(init=False, default=None)  # how, for later calls
    _complete: bool = attrs.field(init=False, default=False)

    async def __aenter__(self) -> T:
        """Reserve the IDs.  StoppingError: this process is stopping.  StoreError: the database gives no IDs."""
        await self._all.ready()
        self._reservations = [Reservation(self.stream, token, self) for token in await self.begin()]
        return self._give(self._reservations)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit or roll back.  If the caller is cancelled meanwhile, that still runs to its end.

        RowError: a fact is too large.  The block is then rolled back.
        """
        if kind is None:
            try:
                self._check_sizes()
            except RowError:
                self.stream.refused += 1
                await shield(self._roll_back())
                raise
            await shield(self.commit([Fact(each.token, tuple(each.texts)) for each in self._reservations]))
            return
        rolled_back = shield(self._roll_back())
        if issubclass(kind, GeneratorExit):  # the coroutine was closed: it cannot await anything
            rolled_back.addErrback(lambda failure: self.log.failure("cannot roll back a closed block", failure=failure))
        else:
            await rolled_back

    async def begin(self) -> Sequence[Token]:
        """Reserve the IDs and return them, once; StoppingError or StoreError as ``__aenter__``."""
        self._start()
        try:
            return await self._hold(self.stream, self._count)
        except BaseException:
            self._complete_all({})
            raise

    async def commit(self, facts: Sequence[Fact], receipt: Receipt | None = None) -> None:
        """Store a fact for each ID, and the cache invalidations; complete the IDs, also if that fails."""
        try:
            if self._ended is not None:
                raise self._ended_error()  # noqa: TRY301 (its IDs are completed, too)
            await self._check_room(facts)
            alone = self._transaction is not None  # without statements, a commit is shared with others that wait
            self._ended = COMPLETE
            committed = {self.stream: facts}
            if self._invalidations:
                committed |= await self._reserve_invalidation()
            writes = [write for stream, some in committed.items() for write in stream.writes(some, alone=alone)]
            if writes or receipt is not None or alone:  # else everything lives in memory
                await (self._transaction or self._all.store).commit(writes, receipt)
        except BaseException as error:
            self._complete_all({}, unknown=isinstance(error, MemoryError))
            raise
        self._complete_all(committed)
        for stream, some in committed.items():
            if stream.definition.name == CACHES:
                for each in self._reservations:
                    each.caches_token = some[-1].token

    async def interact(self, function: Callable[[ISqlExecutor, NewFact], R]) -> R:
        """Call ``function`` in a transaction on the database's thread, and commit with its fact.

        The ID is reserved before, or allocated in the transaction.  It is complete then, also if that fails.
        """
        ids = self.stream.ids
        if not ids.allocated_in_transactions:
            (token,) = await self.begin()
            self._ended = COMPLETE
            settled = self.stream.position_with([token], alone=True)
            return await self._interact(function, lambda: (token, settled))
        self._start()
        self._ended = COMPLETE
        self.allocation = Allocation(ids.pending, self.stream.definition.name)
        return await self._interact(function, self.allocation.place)

    async def abandon(self) -> None:
        """Roll back a block that did not end in time when this process stops."""
        if self._ended is None:
            await self._roll_back("rolled back: this process is stopping")

    def check_open(self) -> None:
        """Raise StreamError if the block has been left, StoppingError if this process stopped before that."""
        if self._ended is not None:
            raise self._ended_error()

    def database_transaction(self) -> ITransaction:
        """Return the transaction of the database that all these facts share."""
        self.check_open()
        if self._transaction is None:
            self._transaction = self._all.store.transaction()
        return self._transaction

    def invalidate(self, cache: str, keys: Sequence[object] | None) -> None:
        """Add a row to this transaction's fact on the caches stream."""
        self.check_open()
        text = self._all.encode_invalidation(cache, keys)
        (self._reservations[0].texts if self._all.caches() is self.stream else self._invalidations).append(text)

    def _start(self) -> None:
        if self._begun:
            raise StreamError("a reservation is used once: call reserve() again")
        self._begun = True
        self._all.begin(self)
        self.since = self._all.clock.seconds()

    async def _interact(
        self, function: Callable[[ISqlExecutor, NewFact], R], place: Callable[[], tuple[Token, Token]]
    ) -> R:
        interaction = Interaction(self.stream, function, place, self._all.encode_invalidation, self._add_invalidations)
        try:
            try:
                await self._all.store.interact(interaction.run, self.allocation)
            finally:
                self._hold_allocated()
        except BaseException as error:
            if isinstance(error, RowError):
                self.stream.refused += 1
            self._complete_all({}, unknown=isinstance(error, MemoryError))
            raise
        self._complete_all(interaction.committed)
        return interaction.result

    def _hold_allocated(self) -> None:
        """Hold the ID that the transaction has allocated, if it has one."""
        if self.allocation is None:
            return
        tokens = self.allocation.end()
        if tokens:
            self.held = {self.stream: tokens, **self.held}
        else:
            self.stream.publish()

    def _check_sizes(self) -> None:
        for each in self._reservations:
            check_size(each.texts)
        check_size(self._invalidations)

    async def _check_room(self, facts: Sequence[Fact]) -> None:
        """Roll back, and raise StoreError, if the facts of an in-memory stream cannot wait for smaller IDs."""
        try:
            self.stream.check_room(facts)
        except StoreError:
            await self._roll_back()
            raise

    def _ended_error(self) -> StreamError:
        return (StoppingError if self._all.stopping else StreamError)(f"this fact is {self._ended}")

    async def _hold(self, stream: PublishedStream, count: int) -> Sequence[Token]:
        tokens = await stream.reserve(count)
        if self._complete:  # abandoned meanwhile
            stream.complete(tokens, ())
            raise self._ended_error()
        self.held[stream] = tokens
        return tokens

    async def _reserve_invalidation(self) -> dict[PublishedStream, Sequence[Fact]]:
        """Return the fact of the caches stream.  Its ID is reserved last: the stream waits for the commit only."""
        caches = self._all.caches()
        try:
            (token,) = await self._hold(caches, 1)
        except BaseException:
            if self._transaction is not None:
                await self._transaction.rollback()
            raise
        return {caches: [Fact(token, tuple(self._invalidations))]}

    async def _add_invalidations(self, fact: Fact, invalidations: Sequence[str]) -> AddedFact | None:
        """Return the fact of the caches stream for an interaction; StoreError if its own fact cannot wait in memory."""
        self.stream.check_room([fact])
        if not invalidations:
            return None
        caches = self._all.caches()
        if caches not in self.held:  # otherwise the function runs again
            await self._hold(caches, 1)
        (token,) = self.held[caches]
        settled = caches.position_with([token], alone=True)
        return AddedFact(caches, Fact(token, tuple(invalidations)), settled)

    async def _roll_back(self, how: str = "rolled back") -> None:
        self._ended = how
        try:
            if self._transaction is not None:
                await self._transaction.rollback()
        finally:
            self._complete_all({})

    def _complete_all(self, committed: Mapping[PublishedStream, Sequence[Fact]], *, unknown: bool = False) -> None:
        """Complete all IDs.  After a MemoryError, which may come after COMMIT, the outcome is read from the store."""
        if self._complete:
            return
        self._complete = True
        try:
            for stream, tokens in self.held.items():
                facts = committed.get(stream, ())
                if facts:
                    self._all.on_commit(stream.definition.name, facts)
                    self._all.trace(self, stream.definition.name, facts)
                stream.complete(tokens, facts, unknown=unknown)
        finally:
            self._all.end(self)
