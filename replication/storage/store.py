"""What the SQL stores do alike: each call of ``IStreamStore`` runs on the thread of one connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.threads import blockingCallFromThread
from twisted.logger import Logger

from replication.deferreds import Lock
from replication.errors import CommitsLostError, StoreError
from replication.storage.connection import SqlConnection
from replication.storage.contract import Batch, undeclared
from replication.storage.interactions import Interaction
from replication.storage.proof import WriteProof
from replication.storage.receipts import ReceiptClock
from replication.storage.table import POSITIONS_ONLY, StreamTable
from replication.storage.tables.histories import get_histories, put_histories, replace_history
from replication.storage.tables.kept_facts import delete_slices, get_gone, get_slices, put_gone, put_slice
from replication.storage.tables.known_followers import delete_follower, get_followers, put_follower
from replication.storage.tables.skipped_facts import count_skipped, get_skipped
from replication.storage.threads import ConnectionThread, ICloses
from replication.storage.transactions import CallGroup, Transaction, run_transaction
from replication.streams.interfaces import Write
from replication.wire.grammar import Token

if TYPE_CHECKING:
    import re
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.interfaces import (
        FactSlice,
        IAllocation,
        IReactorCalls,
        ISqlExecutor,
        KnownFollower,
        Page,
        Receipt,
    )
    from replication.streams.skips import SkippedFact, SkipState
    from replication.wire.grammar import InstanceName, StreamName

_T = TypeVar("_T")
_C = TypeVar("_C", bound=ICloses)
_Connection = TypeVar("_Connection", bound=SqlConnection[Any])


class ApplicationReader:
    """Reads the IDs in tables of an application; ``SqlStore`` has the rest."""

    _table: Callable[[StreamName], StreamTable[Any]]
    _read: Callable[..., Awaitable[Any]]

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto`` in tables of the application."""
        table = self._table(stream)
        found: set[Token] = await self._read(lambda connection: table.present(connection.session, writer, after, upto))
        return found

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> Mapping[InstanceName, Token]:
        """Return the writers with rows in a range, as ``IStreamStore.writers`` does."""
        table = self._table(stream)
        found: Mapping[InstanceName, Token] = await self._read(
            lambda connection: table.writers(connection.session, after, upto)
        )
        return found

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Note that these writers have ended."""
        self._table(stream).former = frozenset(writers)

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token in tables of the application, of all writers; 0 if there are none."""
        table = self._table(stream)
        found: Token | None = await self._read(lambda connection: table.last_id(connection.session))
        return found or Token(0)


class HistoryStore:
    """Stores the histories of writers, and reads what followers count; ``SqlStore`` has the rest."""

    read: Callable[..., Awaitable[Any]]
    _read: Callable[..., Awaitable[Any]]
    transaction: Callable[[], Transaction]

    async def history(self, stream: StreamName, writer: InstanceName, follower: str = "") -> History:
        """Return the stored history of a writer; empty if there is none."""
        found: History = await self._read(lambda connection: connection.history(stream, writer, follower))
        return found

    async def histories(self, writer: InstanceName) -> Mapping[StreamName, History]:
        """Return the stored history of a writer in every stream that has one."""
        found: Mapping[StreamName, History] = await self.read(lambda database: get_histories(database, writer))
        return found

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        """Store the history of a writer in each of these streams."""
        await run_transaction(self, lambda database: put_histories(database, writer, histories, follower))

    async def applied_counts(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, str]:
        """Return, per writer, the text that ``Write.counts`` has stored for ``follower``."""
        found: Mapping[InstanceName, str] = await self._read(lambda each: each.applied_counts(stream, follower))
        return found

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        """Store a position and a history; PositionMovedError if what is stored is not ``expected`` and ``former``."""
        await run_transaction(self, lambda database: replace_history(database, write, history, former), [write])


class SkippedFactsReader:
    """Reads the table ``skipped_facts``; ``SqlStore`` has the rest."""

    read: Callable[..., Awaitable[Any]]

    async def skipped_facts(
        self,
        follower: InstanceName,
        stream: StreamName | None = None,
        key: tuple[InstanceName, Token] | None = None,
        *,
        states: Collection[SkipState] = (),
        limit: int,
    ) -> Sequence[SkippedFact]:
        """Return the facts that a follower leaves out, the latest first."""
        found: list[SkippedFact] = await self.read(
            lambda database: get_skipped(database, follower, stream, key, states=states, limit=limit)
        )
        return found

    async def skipped_counts(self, follower: InstanceName, stream: StreamName) -> Mapping[InstanceName, int]:
        """Return how many facts of each writer a follower leaves out."""
        found: dict[InstanceName, int] = await self.read(lambda database: count_skipped(database, follower, stream))
        return found


class KeptFactsStore:
    """Deletes facts, and notes what is gone; ``SqlStore`` has the rest."""

    SCHEMA: ClassVar[int]  # the version with the table ``gone_facts``
    read: Callable[..., Awaitable[Any]]
    transaction: Callable[[], Transaction]
    _table: Callable[[StreamName], StreamTable[Any]]
    _read: Callable[..., Awaitable[Any]]

    async def gone(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, up to where facts may be gone."""
        found: Mapping[InstanceName, Token] = await self.read(lambda database: get_gone(database, stream))
        return found

    async def forget_facts(self, stream: StreamName, writer: InstanceName, upto: Token, *, delete: bool = True) -> None:
        """Note that facts up to ``upto`` are gone and, with ``delete``, delete them."""
        table = self._table(stream)

        def forget(session: Any) -> None:
            put_gone(session, stream, writer, upto, self.SCHEMA)
            if delete:
                table.delete_upto(session, writer, upto)
                delete_slices(session, stream, writer, upto)

        await run_transaction(self, forget, [Write(stream, writer, upto)] if delete else [])

    async def mark_truncated(
        self,
        writer: InstanceName,  # noqa: ARG002
        published: Mapping[StreamName, Token],  # noqa: ARG002
    ) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Do nothing: only PostgreSQL has TRUNCATE."""
        return {}

    async def measure(
        self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int
    ) -> FactSlice:
        """Return the first facts of a range as a slice of about ``limit`` rows."""
        table = self._table(stream)
        found: FactSlice = await self._read(
            lambda connection: table.measure(connection.session, writer, after=after, upto=upto, limit=limit)
        )
        return found

    async def slices(self, stream: StreamName, writer: InstanceName) -> Sequence[FactSlice]:
        """Return the stored slices, ascending."""
        found: Sequence[FactSlice] = await self.read(lambda database: get_slices(database, stream, writer))
        return found

    async def store_slice(self, stream: StreamName, writer: InstanceName, new: FactSlice) -> None:
        """Store a slice, or replace that with the same end."""
        await run_transaction(self, lambda database: put_slice(database, stream, writer, new))

    async def known_followers(self) -> Sequence[KnownFollower]:
        """Return what followers have reported, by name."""
        found: Sequence[KnownFollower] = await self.read(get_followers)
        return found

    async def store_follower(self, follower: KnownFollower) -> None:
        """Store the report of a follower."""
        await run_transaction(self, lambda database: put_follower(database, follower))

    async def forget_follower(self, name: InstanceName) -> None:
        """Delete the report of a follower."""
        await run_transaction(self, lambda database: delete_follower(database, name))


class Interacts:
    """Runs functions of the application; ``SqlStore`` has the rest."""

    _reactor: IReactorFromThreads
    _writer: Any
    _checked: Callable[[Any], Any]
    _table: Callable[[StreamName], StreamTable[Any]]
    check_statement: Callable[[str], None]

    def interact(
        self,
        function: Callable[[ISqlExecutor, IReactorCalls], Sequence[Write]],
        allocation: IAllocation | None = None,
    ) -> Awaitable[None]:
        """Call ``function`` in a transaction, and commit with what it returns; see ``IStreamStore``."""
        self._checked(self._writer)

        def run(database: ISqlExecutor) -> Batch:
            writes = function(database, self._call_reactor)
            return Batch([(self._table(write.stream), write) for write in writes], None, 0.0, 0.0)  # without a receipt

        return self._interact(Interaction(run, self.check_statement), allocation)

    def _interact(self, interaction: Interaction, allocation: IAllocation | None) -> Awaitable[None]:
        """Run an interaction, and return once it is durable."""
        raise NotImplementedError

    def _call_reactor(self, function: Callable[[], Coroutine[Deferred[Any], Any, _T]]) -> _T:
        begin: Callable[[], Any] = lambda: Deferred.fromCoroutine(function())  # noqa: E731 (to give it a type)
        found: _T = blockingCallFromThread(self._reactor, begin)
        return found


class SqlStore(ApplicationReader, HistoryStore, Interacts, KeptFactsStore, SkippedFactsReader, Generic[_Connection]):
    """The base of the stores; ``name`` is the database for messages, without a password.

    ``table_of`` returns where the database has the facts of a stream.
    ``reactor`` needs ``callFromThread`` only.  A ``read_only`` store creates no table.  ``clock`` is for
    receipts.  ``collect`` is that of CallGroup.
    """

    log = Logger()
    FIRST_WORDS: ClassVar[re.Pattern[str]]  # two groups: the first two words of a statement, after comments
    RESERVED: ClassVar[frozenset[str]]  # statements that would end the transaction, or do not work inside one
    ALL_USED: ClassVar[str]  # what ``acquire`` waits for

    def __init__(
        self,
        name: str,
        reactor: IReactorFromThreads,
        table_of: Callable[[StreamDefinition], StreamTable[Any]],
        *,
        read_only: bool,
        clock: ReceiptClock | None = None,
        collect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self.warnings: list[str] = []
        self.commits_lost: Deferred[CommitsLostError] = Deferred()
        self._reactor = reactor
        self._table_of = table_of
        self._read_only = read_only
        self._clock = clock or ReceiptClock()
        self._tables: dict[StreamName, StreamTable[Any]] = {}
        self._reader: ConnectionThread[_Connection] | None = None
        self._writer: ConnectionThread[_Connection] | None = None
        self._writer_lock = Lock()
        # Commits without statements share one transaction and one fsync.
        self._group: CallGroup[Batch, None] = CallGroup(self._writer_lock, self._commit_together, collect)
        self._opening = Lock()
        self._closed = False
        self._lost: CommitsLostError | None = None
        self.proof = WriteProof(self._prove)

    @property
    def commits(self) -> int:
        """The number of commits that callers asked for."""
        return sum(each.connection.commits for each in self._writing())

    @property
    def transactions(self) -> int:
        """The number of transactions of the database that stored them; each has an fsync if it is synchronous."""
        return sum(each.connection.transactions for each in self._writing())

    async def open(self) -> None:
        """Connect and upgrade the tables; after a failure the caller may try again."""
        async with self._opening:
            if self._closed:
                raise StoreError(f"database {self.name!r} is closed")
            if self._reader is None:
                await self._open()
                how = " for reading" if self._read_only else ""
                self.log.info("database {name} is open{how}", name=self._log_name(), how=how)

    async def declare(self, *definitions: StreamDefinition) -> None:
        """Create or check the streams' tables and sequences; SchemaError names what does not fit."""
        tables = [self._table_of(each) for each in definitions]
        use = self._read if self._read_only else self._write
        beside = [each.definition for each in self._tables.values()]
        self.warnings.extend(await use(lambda connection: connection.declare(tables, beside)))
        self._tables.update({each.definition.name: each for each in tables})

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was committed or stored as a position."""
        return (await self.positions_of([stream]))[stream]

    async def positions_of(self, streams: Sequence[StreamName]) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return what ``positions`` returns, of several streams at once."""
        tables = [self._table(each) for each in streams]
        return await self._read(lambda connection: connection.positions_of(tables))

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the stored positions."""
        return await self._read(lambda connection: connection.stored_positions())

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        table = self._table(stream)
        return await self._read(lambda connection: connection.page(table, writer, after=after, upto=upto, limit=limit))

    async def check(self) -> None:
        """Return if the database can be written, else raise StoreError; see ``IStreamStore``."""
        self._checked(self._reader)
        await self.proof.check()

    def transaction(self, *, synchronous: bool = True) -> Transaction:
        """Return a transaction that has not begun."""
        return Transaction(self, synchronous=synchronous)

    def commit(
        self, writes: Sequence[Write], receipt: Receipt | None = None, *, synchronous: bool = True
    ) -> Deferred[None]:
        """Commit together with all commits that wait.  To cancel the Deferred ends the waiting, not the commit."""
        batch = self.batch(writes, receipt, synchronous=synchronous)
        self._checked(self._writer)
        return self._group.add(batch)

    async def read(self, function: Callable[[ISqlExecutor], _T]) -> _T:
        """Run ``function``, which only reads, on one snapshot."""
        return await self._read(lambda connection: connection.read(function))

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key``; None if there is none."""
        _, expired = self._clock.read()
        return await self._read(lambda connection: connection.find_receipt(key, expired))

    # ---- for transactions

    def batch(self, writes: Sequence[Write], receipt: Receipt | None, *, synchronous: bool = True) -> Batch:
        """Return what a commit stores; UnknownStreamError if a stream was not declared."""
        tables = [POSITIONS_ONLY if write.follower is not None else self._table(write.stream) for write in writes]
        return Batch(list(zip(tables, writes, strict=True)), receipt, *self._clock.read(), synchronous)

    def check_statement(self, sql: str) -> None:
        """Raise StoreError if the application may not run this statement in a transaction."""
        match = self.FIRST_WORDS.match(sql)
        word, second = (match[1].upper(), match[2].upper()) if match else ("", "")
        if word in self.RESERVED:
            what = "commits by itself when its block or function ends, and rolls back if that raises an exception"
            raise StoreError(f"{word} cannot run here: this transaction {what}")
        self._check_words(word, second)

    def _check_words(self, word: str, second: str) -> None:
        """Raise StoreError if the application may not run a statement that begins with these words."""

    async def acquire(self) -> ConnectionThread[_Connection]:
        """Wait for a connection that no other transaction uses until ``release_connection``."""
        raise NotImplementedError

    def release_connection(self, connection: ConnectionThread[_Connection]) -> None:
        """Give a connection back."""
        raise NotImplementedError

    async def blockers(self, connection: ConnectionThread[_Connection] | None) -> Sequence[str]:  # noqa: ARG002
        """Return what a statement waits for, None for a commit without statements; empty if that is not known."""
        return ()

    # ---- inside

    def _report_loss(self, error: CommitsLostError) -> None:
        """Fire ``commits_lost`` on the reactor's thread, before the call fails that noticed it."""
        self._lost = error
        self.log.critical("{why}", why=str(error))
        self._reactor.callFromThread(self.commits_lost.callback, error)

    async def _open(self) -> None:
        """Open the reading connection and, unless the store is read-only, the writing one."""
        raise NotImplementedError

    async def _prove(self) -> None:
        """Return once a small transaction is committed, or the database was read if it is only read."""
        raise NotImplementedError

    def _log_name(self) -> str:
        return self.name

    def _writing(self) -> list[ConnectionThread[_Connection]]:
        return [] if self._writer is None else [self._writer]

    def _table(self, stream: StreamName) -> StreamTable[Any]:
        if stream not in self._tables:
            raise undeclared(stream)
        return self._tables[stream]

    def _checked(self, connection: ConnectionThread[_C] | None) -> ConnectionThread[_C]:
        """Return the connection; StoreError if there is none, CommitsLostError if commits were lost."""
        if self._closed or self._reader is None:
            raise StoreError(f"database {self.name!r} is {'closed' if self._closed else 'not open'}")
        if self._lost is not None:
            raise self._lost
        if connection is None:
            raise StoreError(f"database {self.name!r} was opened for reading only")
        return connection

    async def _read(self, work: Callable[[_Connection], _T]) -> _T:
        return await self._checked(self._reader).run(work)

    async def _write(self, work: Callable[[_Connection], _T]) -> _T:
        writer = self._checked(self._writer)
        async with self._writer_lock:
            return await writer.run(work)

    def _commit_together(self, batches: Sequence[Batch]) -> Deferred[Sequence[BaseException | None]]:
        assert self._writer is not None  # noqa: S101 - commit has checked it
        committing = self._writer.run(lambda connection: connection.commit_together(batches))
        return committing.addCallback(self.proof.noted, batches)
