"""The SQLite store: who uses which connection, and when.  The SQL is in ``connection.py`` and beside it.

Two connections, each on a thread of its own: one writes, one reads (WAL lets it, whatever the other does).  A memory
database has one connection for both, so a read waits for its turn, and an open transaction that awaits a read of this
store would wait for ever.

Writing stands in line.  A transaction that executes statements takes its place with the first, and holds the connection
until it ends.  Those that only commit wait as a group and then share one transaction of the database, and one fsync.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredLock

from replication.errors import StoreError, UnknownStreamError
from replication.storage.connection import MEMORY, Batch, SqliteConnection
from replication.storage.mapped import MappedTable
from replication.storage.memory import ended, undeclared
from replication.storage.tables import GenericTable
from replication.storage.threads import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.storage.tables import Table
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, Page, Receipt, Write
    from replication.wire.grammar import InstanceName, StreamName, Token

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FIRST_WORD: Final = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*(\w*)", re.DOTALL)
_UNDONE: Final = "rolled back"
_OURS: Final = frozenset(
    ("BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA", "ATTACH", "DETACH", "VACUUM")
)


class _Desk:
    """A connection and the thread that it lives on."""

    def __init__(self, reactor: IReactorFromThreads, connection: SqliteConnection) -> None:
        self.connection = connection
        self._lane = Lane(reactor, f"replication {connection.path}")

    def run(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Deferred[_T]:
        return self._lane.run(method, self.connection, *args, **kwargs)

    async def open(self) -> None:
        try:
            await self.run(SqliteConnection.open)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self.run(SqliteConnection.close)
        await self._lane.stop()


class SqliteStore:
    """Facts and positions in an SQLite database.

    ``path`` is a file, or ``:memory:``.  ``reactor`` needs ``callFromThread`` only.  ``read_only`` reads what another
    process writes, and makes no table.  ``busy_timeout`` is how long, in seconds, we wait for a lock that another
    process holds; ``now`` tells the time in seconds, for receipts.

    ``warnings`` are what is to be said about mapped tables.
    """

    def __init__(
        self,
        path: str,
        reactor: IReactorFromThreads,
        *,
        read_only: bool = False,
        busy_timeout: float = 5.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._reactor = reactor
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._now = now
        self._tables: dict[StreamName, Table] = {}
        self._writer: _Desk | None = None
        self._reader: _Desk | None = None
        self._line = DeferredLock()  # who may use the writing connection
        self._group: list[tuple[Batch, Deferred[None]]] = []  # commits that wait for their turn in the line
        self._opening = DeferredLock()
        self._claim: IO[str] | None = None
        self._closed = False

    @property
    def commits(self) -> int:
        """How many commits that were asked for became durable."""
        return 0 if self._writer is None else self._writer.connection.commits

    @property
    def transactions(self) -> int:
        """How many transactions of the database, and so fsyncs, they took."""
        return 0 if self._writer is None else self._writer.connection.transactions

    async def open(self) -> None:
        """Connect and bring the tables up to date; after a failure it may be tried again."""
        async with self._opening:
            if self._closed:
                raise StoreError(f"database {self.path!r} is closed")
            if self._reader is None:
                await self._open()

    async def declare(self, definition: StreamDefinition) -> None:
        """Make sure that the stream's table is there; SchemaError says what is wrong with it."""
        table: Table = GenericTable(definition) if definition.table is None else MappedTable(definition)
        use = self._read if self._read_only else self._write
        self.warnings.extend(await use(SqliteConnection.declare, table))
        self._tables[definition.name] = table

    async def claim(self, instance: InstanceName) -> None:  # noqa: ARG002 (whatever its name: one process writes a file)
        """Make this process the only one that writes, for as long as it runs; StoreError says which one does.

        The claim is a lock on a file beside the database, and goes with the process, whatever ends that.
        """
        self._desk(self._writer)
        if self.path == MEMORY or self._claim is not None:
            return
        try:
            claim = Path(f"{self.path}-claim").open("a+")  # noqa: ASYNC230, SIM115 (short; open while the claim holds)
        except OSError as error:
            raise StoreError(f"database {self.path!r} cannot be claimed: {error}") from error
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            claim.seek(0)
            holder = claim.read().strip() or "unknown"
            claim.close()
            raise StoreError(
                f"database {self.path!r} is written by process {holder} already: stop that, or name another database"
            ) from error
        claim.truncate(0)
        claim.write(f"{os.getpid()}\n")
        claim.flush()
        self._claim = claim

    def sequence(self, stream: StreamName) -> None:
        """Return None: the one process that writes a file counts by itself."""
        self._table(stream)

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was ever committed or stored as a position."""
        return await self._read(SqliteConnection.positions, self._table(stream))

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        table = self._table(stream)
        return await self._read(SqliteConnection.page, table, writer, after=after, upto=upto, limit=limit)

    def transaction(self) -> SqliteTransaction:
        """Return a transaction that has not begun."""
        return SqliteTransaction(self)

    async def read(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function``, which only reads, on one snapshot."""
        return await self._read(SqliteConnection.read, function)

    async def recall(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of the receipt that was committed under ``key`` in the last day."""
        return await self._read(SqliteConnection.recall, key, self._now())

    async def check(self) -> None:
        """Return if the database is where it was and can be written, once it is our turn; else StoreError."""
        use = self._read if self._read_only else self._write
        await use(SqliteConnection.check)

    async def close(self) -> None:
        """Finish what runs, open transactions too, and let go of the database."""
        async with self._opening:
            if self._closed:
                return
            self._closed = True
        await self._line.acquire()
        if self._reader is not None and self._reader is not self._writer:
            await self._reader.close()
        if self._writer is not None:
            await self._writer.close()
        if self._claim is not None:
            self._claim.close()

    # ---- for transactions

    async def take_turn(self) -> None:
        """Wait in line for the writing connection."""
        self._desk(self._writer)
        await self._line.acquire()

    def run(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Deferred[_T]:
        """Do something on the writing connection; only for whoever has the turn."""
        assert self._writer is not None  # noqa: S101 - take_turn has seen it
        return self._writer.run(method, *args, **kwargs)

    def end_turn(self) -> None:
        """Let the next in line have the connection.

        What was given to the thread is done before anything of the next one, so this is right even if the caller was
        cancelled and no longer waits for it.
        """
        self._line.release()

    def batch(self, writes: Sequence[Write], receipt: Receipt | None) -> Batch:
        """Return what a commit stores; UnknownStreamError if a stream was not declared."""
        return Batch([(self._table(write.stream), write) for write in writes], receipt, self._now())

    def commit_in_group(self, batch: Batch) -> Deferred[None]:
        """Commit together with all that wait; cancelling the Deferred stops the waiting, not the commit."""
        self._desk(self._writer)
        done: Deferred[None] = Deferred()
        self._group.append((batch, done))
        if len(self._group) == 1:
            Deferred.fromCoroutine(self._commit_group())
        return done

    # ---- inside

    async def _open(self) -> None:
        writer = None
        if not self._read_only:
            writer = self._new_desk(read_only=False)
            await writer.open()
        reader = writer
        if reader is None or self.path != MEMORY:
            reader = self._new_desk(read_only=True)
            try:
                await reader.open()
            except BaseException:
                if writer is not None:
                    await writer.close()
                raise
        self._writer, self._reader = writer, reader

    def _new_desk(self, *, read_only: bool) -> _Desk:
        connection = SqliteConnection(self.path, read_only=read_only, busy_timeout=self._busy_timeout)
        return _Desk(self._reactor, connection)

    def _table(self, stream: StreamName) -> Table:
        if stream not in self._tables:
            raise undeclared(stream)
        return self._tables[stream]

    def _desk(self, desk: _Desk | None) -> _Desk:
        if self._closed or self._reader is None:
            raise StoreError(f"database {self.path!r} is {'closed' if self._closed else 'not open'}")
        if desk is None:
            raise StoreError(f"database {self.path!r} was opened for reading only")
        return desk

    async def _read(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        reader = self._desk(self._reader)
        if reader is self._writer:
            return await self._write(method, *args, **kwargs)
        return await reader.run(method, *args, **kwargs)

    async def _write(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        await self.take_turn()
        try:
            return await self.run(method, *args, **kwargs)
        finally:
            self.end_turn()

    async def _commit_group(self) -> None:
        await self._line.acquire()
        group, self._group = self._group, []
        try:
            outcomes = await self.run(SqliteConnection.commit_together, [batch for batch, _ in group])
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait are told
            outcomes = [error] * len(group)
        self.end_turn()
        for (_, done), outcome in zip(group, outcomes, strict=True):
            if outcome is None:
                done.callback(None)
            else:
                done.errback(outcome)


class SqliteTransaction:
    """A transaction: statements, if any, then one commit or rollback.

    A commit whose caller is cancelled goes on all the same: shield it if the outcome matters.
    """

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._turn = DeferredLock()  # one statement after the other, whoever awaits what
        self._holds = False  # the writing connection
        self._end: str | None = None

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError names what the database said."""
        return await self._statement(SqliteConnection.execute, sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item; if one is refused, those before it have been done."""
        await self._statement(SqliteConnection.executemany, sql, parameters)

    async def run(self, function: Callable[[IStatements], _T]) -> _T:
        """Run ``function`` inside the transaction, on the database's thread."""
        return await self._job(SqliteConnection.run, function)

    async def commit(self, writes: Sequence[Write], receipt: Receipt | None = None) -> None:
        """Store ``writes`` with what was executed; after an error none of it is stored, and nothing is left to undo."""
        async with self._turn:
            self._check_open()
            self._end = "handed over for its commit"
            try:
                await self._commit(writes, receipt)
            except CancelledError:
                raise  # it goes on without its caller
            except BaseException:
                self._end = _UNDONE
                raise
            self._end = "committed"

    async def rollback(self) -> None:
        """Undo what was executed; harmless if a commit has failed, StoreError if it has not."""
        async with self._turn:
            if self._end == _UNDONE:
                return
            self._check_open()
            self._end = _UNDONE
            if self._holds:
                await self._last(SqliteConnection.rollback)

    async def _statement(
        self, method: Callable[[SqliteConnection, str, Sequence[Any]], _T], sql: str, parameters: Sequence[Any]
    ) -> _T:
        word = _first_word(sql)
        if word in _OURS:
            raise StoreError(f"{word} is not for the application: commit() and rollback() end its transaction")
        return await self._job(method, sql, parameters)

    async def _job(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        async with self._turn:
            self._check_open()
            if not self._holds:
                await self._store.take_turn()
                self._holds = True
            return await self._store.run(method, *args, **kwargs)

    async def _commit(self, writes: Sequence[Write], receipt: Receipt | None) -> None:
        try:
            batch = self._store.batch(writes, receipt)
        except UnknownStreamError:
            if self._holds:
                await self._last(SqliteConnection.rollback)
            raise
        if self._holds:
            await self._last(SqliteConnection.commit, batch)
        else:
            await self._store.commit_in_group(batch)

    async def _last(
        self, method: Callable[Concatenate[SqliteConnection, _P], None], *args: _P.args, **kwargs: _P.kwargs
    ) -> None:
        try:
            await self._store.run(method, *args, **kwargs)
        finally:
            self._store.end_turn()

    def _check_open(self) -> None:
        if self._end is not None:
            raise ended(self._end)


def _first_word(sql: str) -> str:
    match = _FIRST_WORD.match(sql)
    return "" if match is None else match[1].upper()
