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
from typing import IO, TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

from twisted.internet.defer import DeferredLock
from twisted.logger import Logger

from replication.errors import StoreError
from replication.storage.connection import MEMORY, SqliteConnection
from replication.storage.gathered import table_of
from replication.storage.memory import undeclared
from replication.storage.notable import FOLLOWED
from replication.storage.sqlite_watch import SqliteWatch
from replication.storage.tables import Batch
from replication.storage.threads import Desk
from replication.storage.transactions import CommitGroup, Transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorFromThreads

    from replication.storage.tables import Table
    from replication.streams.registry import StreamDefinition
    from replication.streams.seams import IStatements, IWatch, Page, Receipt, Write
    from replication.wire.grammar import InstanceName, StreamName, Token

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FIRST_WORD: Final = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*(\w*)", re.DOTALL)
_OURS: Final = frozenset(
    ("BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA", "ATTACH", "DETACH", "VACUUM")
)


class SqliteStore:
    """Facts and positions in an SQLite database.

    ``path`` is a file, or ``:memory:``.  ``reactor`` needs ``callFromThread`` only.  ``read_only`` reads what another
    process writes, and makes no table.  ``busy_timeout`` is how long, in seconds, we wait for a lock that another
    process holds; ``now`` tells the time in seconds, for receipts.

    ``warnings`` are what is to be said about mapped tables.
    """

    log = Logger()

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
        self._writer: Desk[SqliteConnection] | None = None
        self._reader: Desk[SqliteConnection] | None = None
        self._line = DeferredLock()  # who may use the writing connection
        self._group = CommitGroup(self._line, self._commit_together)
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
                how = " for reading" if self._read_only else ""
                self.log.info("database {name} is open{how}", name=self._whole_path(), how=how)

    async def declare(self, definition: StreamDefinition) -> None:
        """Make sure that the stream's table is there; SchemaError says what is wrong with it."""
        table = table_of(definition)
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

    async def present(self, names: Collection[InstanceName]) -> Collection[InstanceName]:  # noqa: ARG002
        """Return none: one process writes a file."""
        return ()

    def sequence(self, stream: StreamName) -> None:
        """Return None: the one process that writes a file counts by itself."""
        self._table(stream)

    async def positions(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the largest token that was ever committed or stored as a position."""
        return await self._read(SqliteConnection.positions, self._table(stream))

    async def applied(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:  # noqa: ARG002 (the only one)
        """Return, per writer, the position of the process that uses this file, whatever its name is."""
        return await self._read(SqliteConnection.applied, stream)

    async def fill(self, stream: StreamName, instance: InstanceName, *, copy: bool) -> None:
        """Return: one process writes a file, so nobody else fills its tables; StoreError if its name was another."""
        definition = self._table(stream).definition
        if not copy and definition.maps("sqlite") and definition.has_one_writer(instance):
            await self._write(SqliteConnection.begin_as, definition, instance)

    async def stored(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return, per stream and writer, the positions that were stored."""
        return await self._read(SqliteConnection.stored)

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts of ``writer`` with ``after < token <= upto``, about ``limit`` rows of them."""
        table = self._table(stream)
        return await self._read(SqliteConnection.page, table, writer, after=after, upto=upto, limit=limit)

    def watch(self) -> IWatch | None:
        """Return what sees others write into the mapped streams declared up to now; None in memory."""
        tables = [each for each in self._tables.values() if each.definition.is_mapped("sqlite")]
        if not tables or self.path == MEMORY:
            return None
        names = [each.definition.name for each in tables]
        return SqliteWatch(names, lambda known: self._read(SqliteConnection.look, tables, known))

    def transaction(self) -> Transaction[Batch[Table]]:
        """Return a transaction that has not begun."""
        return Transaction(self)

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

    def check_statement(self, sql: str) -> None:
        """Raise StoreError if the application may not say this in a transaction."""
        match = _FIRST_WORD.match(sql)
        word = "" if match is None else match[1].upper()
        if word in _OURS:
            raise StoreError(f"{word} is not for the application: commit() and rollback() end its transaction")

    async def take_seat(self) -> Desk[SqliteConnection]:
        """Wait in line for the writing connection."""
        writer = self._desk(self._writer)
        await self._line.acquire()
        return writer

    def leave_seat(self, desk: Desk[SqliteConnection]) -> None:  # noqa: ARG002 (there is but one)
        """Let the next in line have the connection."""
        self._line.release()

    def batch(self, writes: Sequence[Write], receipt: Receipt | None) -> Batch[Table]:
        """Return what a commit stores; UnknownStreamError if a stream was not declared."""
        tables = [FOLLOWED if write.follower is not None else self._table(write.stream) for write in writes]
        return Batch(list(zip(tables, writes, strict=True)), receipt, self._now())

    def commit_in_group(self, batch: Batch[Table]) -> Deferred[None]:
        """Commit together with all that wait; cancelling the Deferred stops the waiting, not the commit."""
        self._desk(self._writer)
        return self._group.add(batch)

    # ---- inside

    async def _open(self) -> None:
        writer = None if self._read_only else await self._open_desk(read_only=False)
        reader = writer
        if reader is None or self.path != MEMORY:
            try:
                reader = await self._open_desk(read_only=True)
            except BaseException:
                if writer is not None:
                    await writer.close()
                raise
        self._writer, self._reader = writer, reader

    async def _open_desk(self, *, read_only: bool) -> Desk[SqliteConnection]:
        connection = SqliteConnection(self.path, read_only=read_only, busy_timeout=self._busy_timeout)
        desk = Desk(self._reactor, connection, self.path)
        try:
            await desk.run(connection.open)
        except BaseException:
            await desk.close()
            raise
        return desk

    def _whole_path(self) -> str:
        return self.path if self.path == MEMORY else str(Path(self.path).resolve())

    def _table(self, stream: StreamName) -> Table:
        if stream not in self._tables:
            raise undeclared(stream)
        return self._tables[stream]

    def _desk(self, desk: Desk[SqliteConnection] | None) -> Desk[SqliteConnection]:
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
        return await reader.run(method, reader.connection, *args, **kwargs)

    async def _write(
        self, method: Callable[Concatenate[SqliteConnection, _P], _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        desk = await self.take_seat()
        try:
            return await desk.run(method, desk.connection, *args, **kwargs)
        finally:
            self.leave_seat(desk)

    def _commit_together(self, batches: Sequence[Batch[Table]]) -> Deferred[list[Exception | None]]:
        assert self._writer is not None  # noqa: S101 - commit_in_group has seen it
        return self._writer.run(self._writer.connection.commit_together, batches)
