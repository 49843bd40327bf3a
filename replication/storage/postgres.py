"""The PostgreSQL store: who uses which session, and when.  The SQL is in ``postgres_connection.py`` and beside it.

Every session lives on a thread of its own.  One reads, one holds the names of this process and draws its IDs, one
looks how far others have come in mapped tables, one is for commits without statements: they wait as a group and then
share one transaction, and one fsync.  A transaction that executes statements has, from the first of them until its end,
a session to itself, so such transactions run side by side, as many as there are ``connections``; further ones wait in
line.

In the application's SQL a parameter is ``%s``, and a ``%`` is doubled if there are parameters.
"""

from __future__ import annotations

import re
import time
from collections import deque
from threading import Event
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock, DeferredSemaphore
from twisted.logger import Logger

from replication.errors import StoreError
from replication.storage.memory import undeclared
from replication.storage.notable import FOLLOWED
from replication.storage.postgres_checks import refuse_shared
from replication.storage.postgres_connection import PAGING, PostgresConnection
from replication.storage.postgres_gathered import table_of
from replication.storage.postgres_ids import IDS_SETTINGS, PostgresIds
from replication.storage.postgres_session import Address, Holder, PostgresSession
from replication.storage.postgres_watch import WATCH_SETTINGS, PostgresWatch
from replication.storage.tables import Batch
from replication.storage.threads import Desk, Watch
from replication.storage.transactions import CommitGroup, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.storage.postgres_tables import Table
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, IWatch, Page, Receipt, Write
    from replication.wire.grammar import InstanceName, StreamName, Token

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Connection = TypeVar("_Connection", PostgresConnection, PostgresIds)

# Nobody but those who ask for what is locked waits for it.
PAGES: Final[Mapping[str, str]] = {**dict.fromkeys(PAGING, "off"), "jit": "off", "lock_timeout": "2s"}
READ_ONLY: Final[Mapping[str, str]] = {"default_transaction_read_only": "on", **PAGES}

_FIRST_WORDS: Final = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*(\w*)\s*(\w*)", re.DOTALL)
_OURS: Final = frozenset(("BEGIN", "START", "COMMIT", "END", "ABORT", "ROLLBACK", "SAVEPOINT", "RELEASE", "PREPARE"))
_OUTLASTING: Final = frozenset(("LISTEN", "UNLISTEN", "DISCARD", "DEALLOCATE"))
_IN_TRANSACTION: Final = frozenset(("LOCAL", "TRANSACTION", "CONSTRAINTS"))  # a SET that ends with it


class PostgresStore:
    """Facts and positions in the PostgreSQL database at ``url``.

    ``reactor`` needs ``callFromThread`` only.  ``read_only`` reads what other processes write, and makes no table.
    ``connections`` is how many transactions with statements run side by side, beside three sessions of our own; ``now``
    tells the time in seconds, for receipts.  ConfigError if the URL is none.  Between us and the server there may be no
    pooler that gives each transaction another session (PgBouncer's transaction mode): names are held by sessions.
    """

    log = Logger()

    def __init__(
        self,
        url: str,
        reactor: IReactorFromThreads,
        *,
        read_only: bool = False,
        connections: int = 8,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.address = Address.parse(url, read_only=read_only)
        self.warnings: list[str] = []
        self._reactor = reactor
        self._read_only = read_only
        self._connections = connections
        self._now = now
        self._ending = Event()
        self._holder = Holder()
        self._tables: dict[StreamName, Table] = {}
        self._sequences: dict[StreamName, PostgresSequence] = {}
        self._reader: Desk[PostgresConnection] | None = None
        self._writer: Desk[PostgresConnection] | None = None
        self._ids: Desk[PostgresIds] | None = None
        self._watches: list[Desk[PostgresWatch]] = []
        self._line = DeferredLock()  # who may use the writing connection
        self._group = CommitGroup(self._line, self._commit_together, gather=self.end_of_turn)
        self._seats = DeferredSemaphore(connections)  # of transactions with statements
        self._desks: list[Desk[PostgresConnection]] = []  # made for them, all
        self._free: list[Desk[PostgresConnection]] = []  # and those without one
        self._opening = DeferredLock()
        self._closed = False

    @property
    def commits(self) -> int:
        """How many commits that were asked for became durable."""
        return sum(each.connection.commits for each in self._writing())

    @property
    def transactions(self) -> int:
        """How many transactions of the database, and so fsyncs, they took."""
        return sum(each.connection.transactions for each in self._writing())

    async def open(self) -> None:
        """Connect and bring the tables up to date; after a failure it may be tried again."""
        async with self._opening:
            if self._closed:
                raise StoreError(f"database {self.address.name!r} is closed")
            if self._reader is None:
                await self._open()
                how = " for reading" if self._read_only else ""
                self.log.info("database {name} is open{how}", name=self.address.name, how=how)

    async def claim(self, instance: InstanceName) -> None:
        """Make this process the only one that writes as ``instance``; StoreError says which one does."""
        ids = self._desk(self._ids)
        await ids.run(ids.connection.claim, instance)

    async def present(self, names: Collection[InstanceName]) -> Collection[InstanceName]:
        """Return which of these names processes have claimed that have a session now, and so may be amid a COMMIT."""
        return await self._read(PostgresConnection.present, names)

    async def declare(self, definition: StreamDefinition) -> None:
        """Make sure that the stream's table and sequence are there; SchemaError says what is wrong with them."""
        table = table_of(definition)
        use = self._read if self._read_only else self._write
        self.warnings.extend(await use(PostgresConnection.declare, table))
        self._tables[definition.name] = table
        self._sequences[definition.name] = PostgresSequence(self, table.sequence)

    def sequence(self, stream: StreamName) -> PostgresSequence | None:
        """Return where the stream's IDs come from; None if we only read."""
        self._table(stream)
        return None if self._read_only else self._sequences[stream]

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was ever committed or stored as a position."""
        return await self._read(PostgresConnection.positions, self._table(stream))

    async def applied(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the position of ``follower``."""
        return await self._read(PostgresConnection.applied, stream, follower)

    async def fill(self, stream: StreamName, instance: InstanceName, *, copy: bool) -> None:
        """Say who fills the table of a stream; StoreError if it is somebody else."""
        definition = self._table(stream).definition
        await self._write(PostgresConnection.fill, definition, instance, copy=copy)

    async def stored(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the positions that were stored."""
        return await self._read(PostgresConnection.stored)

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        table = self._table(stream)
        return await self._read(PostgresConnection.page, table, writer, after=after, upto=upto, limit=limit)

    def watch(self) -> IWatch | None:
        """Return what sees others write into the mapped streams declared up to now; None if there are none.

        SchemaError names one that others can write, and nobody can watch.
        """
        self._desk(self._ids)
        for table in self._tables.values():
            refuse_shared(table, [each.definition for each in self._tables.values()])
        tables = [each for each in self._tables.values() if each.definition.is_mapped("postgresql")]
        if not tables:
            return None
        watch = PostgresWatch(self._new_session(WATCH_SETTINGS), tables, self.warnings.append)
        self._watches.append(Desk(self._reactor, watch, self.address.name))
        return Watch(self._watches[-1])

    def transaction(self) -> Transaction[Batch[Table]]:
        """Return a transaction that has not begun."""
        return Transaction(self)

    async def read(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function``, which only reads, on one snapshot."""
        return await self._read(PostgresConnection.read, function)

    async def recall(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key`` in the last day."""
        return await self._read(PostgresConnection.recall, key, self._now())

    async def check(self) -> None:
        """Return if the database answers and can be written, else StoreError; whatever the others wait for."""
        await self._read(PostgresConnection.check)

    async def close(self) -> None:
        """Finish what runs, open transactions too, and let go of the database.

        A commit whose outcome the server cannot tell now is not waited for.
        """
        async with self._opening:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        await self._line.acquire()
        for _ in range(self._connections):
            await self._seats.acquire()
        for desk in (*self._writing(), self._reader, self._ids, *self._watches):
            if desk is not None:
                await desk.close()

    # ---- for transactions and sequences

    def check_statement(self, sql: str) -> None:
        """Raise StoreError if the application may not say this in a transaction."""
        match = _FIRST_WORDS.match(sql)
        word, second = (match[1].upper(), match[2].upper()) if match else ("", "")
        if word in _OURS:
            raise StoreError(f"{word} is not for the application: commit() and rollback() end its transaction")
        if word == "COPY":
            raise StoreError("COPY needs a connection of its own: use INSERT, with unnest() for many rows")
        if word in _OUTLASTING or (word in ("SET", "RESET") and second not in _IN_TRANSACTION):
            raise StoreError(f"{word} would outlast the transaction: say SET LOCAL, or use a connection of your own")

    async def take_seat(self) -> Desk[PostgresConnection]:
        """Wait in line for a connection of one's own."""
        self._desk(self._writer)
        await self._seats.acquire()
        if not self._free:
            self._free.append(self._new_desk({}))
            self._desks.append(self._free[-1])
        return self._free.pop()

    def leave_seat(self, desk: Desk[PostgresConnection]) -> None:
        """Let the next in line have the connection."""
        self._free.append(desk)
        self._seats.release()

    def batch(self, writes: Sequence[Write], receipt: Receipt | None) -> Batch[Table]:
        """Return what a commit stores; UnknownStreamError if a stream was not declared."""
        tables = [FOLLOWED if write.follower is not None else self._table(write.stream) for write in writes]
        return Batch(list(zip(tables, writes, strict=True)), receipt, self._now())

    def commit_in_group(self, batch: Batch[Table]) -> Deferred[None]:
        """Commit together with all that wait; cancelling the Deferred stops the waiting, not the commit."""
        self._desk(self._writer)
        return self._group.add(batch)

    def draw(self, sequence: str, count: int) -> Deferred[list[int]]:
        """Draw IDs."""
        ids = self._desk(self._ids)
        return ids.run(ids.connection.draw, sequence, count)

    def end_of_turn(self) -> Deferred[None]:
        """Return what fires once the reactor has done all that it does now: who asks until then is in the group."""
        done: Deferred[None] = Deferred()
        self._reactor.callFromThread(done.callback, None)
        return done

    # ---- inside

    async def _open(self) -> None:
        first = self._new_desk(READ_ONLY if self._read_only else {}, read_only=self._read_only)
        try:
            self.warnings.extend(await first.run(first.connection.open))
        except BaseException:
            await first.close()
            raise
        if self._read_only:
            self._reader = first
            return
        self._writer, self._reader = first, self._new_desk(PAGES)
        ids = PostgresIds(self._new_session(IDS_SETTINGS), self.warnings.append)
        self._ids = Desk(self._reactor, ids, self.address.name)

    def _new_session(self, settings: Mapping[str, str]) -> PostgresSession:
        return PostgresSession(self.address, self._ending, self._holder, settings)

    def _new_desk(self, settings: Mapping[str, str], *, read_only: bool = False) -> Desk[PostgresConnection]:
        connection = PostgresConnection(self._new_session(settings), read_only=read_only)
        return Desk(self._reactor, connection, self.address.name)

    def _writing(self) -> list[Desk[PostgresConnection]]:
        return [*self._desks, *([self._writer] if self._writer is not None else [])]

    def _table(self, stream: StreamName) -> Table:
        if stream not in self._tables:
            raise undeclared(stream)
        return self._tables[stream]

    def _desk(self, desk: Desk[_Connection] | None) -> Desk[_Connection]:
        if self._closed or self._reader is None:
            raise StoreError(f"database {self.address.name!r} is {'closed' if self._closed else 'not open'}")
        if desk is None:
            raise StoreError(f"database {self.address.name!r} was opened for reading only")
        return desk

    async def _read(
        self, method: Callable[Concatenate[PostgresConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        reader = self._desk(self._reader)
        return await reader.run(method, reader.connection, *args, **kwargs)

    async def _write(
        self, method: Callable[Concatenate[PostgresConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        writer = self._desk(self._writer)
        async with self._line:
            return await writer.run(method, writer.connection, *args, **kwargs)

    def _commit_together(self, batches: Sequence[Batch[Table]]) -> Deferred[list[Exception | None]]:
        assert self._writer is not None  # noqa: S101 - commit_in_group has seen it
        return self._writer.run(self._writer.connection.commit_together, batches)


class PostgresSequence:
    """The IDs of one stream; those who ask while others are being drawn share the next trip to the server."""

    def __init__(self, store: PostgresStore, sequence: str) -> None:
        self._store = store
        self._sequence = sequence
        self._asked: deque[tuple[int, Deferred[Sequence[int]]]] = deque()
        self._drawing = False

    async def draw(self, count: int) -> Sequence[int]:
        """Return ``count`` IDs, ascending, which nobody else gets; StoreError if there is no getting them now."""
        done: Deferred[Sequence[int]] = Deferred()
        self._asked.append((count, done))
        if not self._drawing:
            Deferred.fromCoroutine(self._draw())
        return await done

    async def _draw(self) -> None:
        self._drawing = True
        while self._asked:
            await self._store.end_of_turn()
            asked, self._asked = self._asked, deque()
            try:
                ids = await self._store.draw(self._sequence, sum(count for count, _ in asked))
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
                for _, done in asked:
                    done.errback(error)
                continue
            for count, done in asked:
                done.callback(ids[:count])
                del ids[:count]
        self._drawing = False
