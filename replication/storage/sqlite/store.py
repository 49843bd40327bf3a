"""The SQLite store: which connection runs what, and when.

There are two connections, each on a thread of its own: one writes and one reads.  With WAL, reads do not wait for
writes. A database in memory has one connection for both.  There, a read waits for the open transaction, so a
transaction that awaits a read of the same store waits for ever.

One transaction writes at a time.  A transaction with statements holds the writing connection from the first of them to
its end.  Commits without statements wait as a group, and share one transaction of the database and one fsync.  So do
interactions, each behind a savepoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from replication.errors import StoreError
from replication.storage.contract import UsedByOneProcess
from replication.storage.sqlite.connection import STEPS, SqliteConnection
from replication.storage.sqlite.joined import table_of
from replication.storage.sqlite.mapped import MappedTable
from replication.storage.sqlite.session import MEMORY
from replication.storage.sqlite.watch import SqliteWatch
from replication.storage.store import SqlStore
from replication.storage.threads import ConnectionThread
from replication.storage.transactions import CallGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorFromThreads

    from replication.storage.interactions import Interaction
    from replication.storage.receipts import ReceiptClock
    from replication.streams.history import History
    from replication.streams.interfaces import IAllocation, IWatch, Write
    from replication.wire.grammar import InstanceName, StreamName, Token

_T = TypeVar("_T")


class SqliteStore(UsedByOneProcess, SqlStore[SqliteConnection]):
    """Facts and positions in an SQLite database.

    ``path`` is a file, or ``:memory:``.  ``open`` claims the file: no other process may write it until ``close``, and
    StoreError names the process that does.  ``reactor`` needs ``callFromThread`` only.  With ``read_only`` the store
    reads what another process writes, and creates no table; ``foreign`` is that of ``open_store``.
    ``busy_timeout`` is how long a statement waits, in seconds, for a lock of another process.  ``clock`` is for
    receipts.  ``warnings`` are about mapped tables.
    """

    SCHEMA = len(STEPS)
    ALL_USED = "another transaction of this process, which holds the write lock"
    FIRST_WORDS = re.compile(r"(?:[\s\ufeff;]|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*(\w*)\s*(\w*)", re.DOTALL)
    RESERVED = frozenset(
        ("BEGIN", "COMMIT", "END", "ROLLBACK", "SAVEPOINT", "RELEASE", "PRAGMA", "ATTACH", "DETACH", "VACUUM")
    )

    def __init__(
        self,
        path: str,
        reactor: IReactorFromThreads,
        *,
        read_only: bool = False,
        foreign: bool = False,
        busy_timeout: float = 5.0,
        clock: ReceiptClock | None = None,
    ) -> None:
        super().__init__(path, reactor, table_of, read_only=read_only, clock=clock)
        self._interactions: CallGroup[Interaction, None] = CallGroup(self._writer_lock, self._interact_together)
        self._busy_timeout = busy_timeout
        self._foreign = foreign
        self._name: InstanceName | None = None  # of the Master or Worker that uses this store

    async def claim(self, instance: InstanceName) -> None:
        """Raise StoreError for a second name; ``open`` has claimed the file for this process."""
        if self._name not in (None, instance):  # as a Worker that was given the store of a Master
            raise StoreError(
                f"database {self.name!r} holds the positions of {self._name!r}: give {instance!r} a database of its own"
            )
        await self.verify()
        self._name = instance

    async def verify(self) -> None:
        """Raise CommitsLostError if a backup was restored into the file; a transaction in progress does this itself."""
        writer = self._checked(self._writer)
        if not self._writer_lock.locked:
            async with self._writer_lock:
                await writer.run(lambda connection: connection.verify())

    def sequence(self, stream: StreamName) -> None:
        """Return None: the one process that writes a file counts by itself."""
        self._table(stream)

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the position of the process that uses this file, under any name.

        StoreError if the process has kept a copy of the stream: its function has not applied these facts.
        """
        return await self._read(lambda connection: connection.applied_positions(stream, follower))

    async def claim_tables(self, streams: Sequence[StreamName], instance: InstanceName, *, copy: bool) -> None:
        """Claim the mapped tables for their one writer; StoreError if another instance has written one."""
        found = [self._table(stream).definition for stream in streams]
        mapped = [each for each in found if not copy and each.maps("sqlite") and each.has_one_writer(instance)]
        if mapped:
            await self._write(lambda connection: connection.claim_tables(mapped, instance))

    async def store_histories(
        self, writer: InstanceName, histories: Mapping[StreamName, History], follower: str = ""
    ) -> None:
        """Store the history of a writer in each of these streams."""
        await self._write(lambda connection: connection.forget_histories(writer, histories, follower))
        await super().store_histories(writer, histories, follower)
        await self._write(lambda connection: connection.known.note_histories(writer, histories, follower))

    async def raise_position(self, write: Write, history: History, former: History) -> None:
        """Store a position and a history; PositionMovedError if what is stored is not ``expected`` and ``former``."""
        histories = {write.stream: history}
        await self._write(lambda connection: connection.forget_histories(write.writer, histories, ""))
        await super().raise_position(write, history, former)
        await self._write(lambda connection: connection.known.note_histories(write.writer, histories, ""))

    async def sync(self, *, foreign: bool = False) -> None:
        """Return once every commit is on the disk; with ``foreign``, also those of other processes."""
        writer = self._checked(self._writer).connection
        await self._read(lambda _: writer.sync(foreign=foreign))  # on another thread than a long transaction

    async def find_receipt(self, key: str) -> Sequence[Token] | None:
        """Return the tokens of a receipt; StoreError if a file of the database was exchanged or deleted."""
        try:
            tokens = await super().find_receipt(key)
        except StoreError:
            await self.check()  # a writer finds that a file was truncated, where a reader finds a disk that fails
            raise
        if tokens is not None and self._writer is not None:
            writer = self._writer.connection
            await self._read(lambda _: writer.check_places())
        return tokens

    def watch(self) -> IWatch | None:
        """Return the watch of the mapped streams declared so far; None in memory, or without such streams."""
        tables = [each for each in self._tables.values() if each.definition.is_mapped("sqlite")]
        if not tables or self.name == MEMORY:
            return None
        names = [each.definition.name for each in tables]

        async def poll(known: int | None) -> tuple[int, dict[StreamName, Token | StoreError]]:
            version, last = await self._read(lambda connection: connection.poll(tables, known))
            if last and self._writer is not None:  # it is published next, so a power loss must not undo it
                await self.sync(foreign=True)
                for each in tables:
                    found = last.get(each.definition.name)
                    if isinstance(each, MappedTable) and isinstance(found, int):
                        await self._move_forward(each, found)
            return version, last

        return SqliteWatch(names, poll)

    async def close(self) -> None:
        """Finish what runs, with open transactions, and close the database."""
        async with self._opening:
            if self._closed:
                return
            self._closed = True
        await self._writer_lock.acquire()
        if self._reader is not None and self._reader is not self._writer:
            await self._reader.close()
        if self._writer is not None:
            await self._writer.close()

    # ---- for transactions

    async def acquire(self) -> ConnectionThread[SqliteConnection]:
        """Wait for the writing connection."""
        writer = self._checked(self._writer)
        await self._writer_lock.acquire()
        return writer

    def release_connection(self, connection: ConnectionThread[SqliteConnection]) -> None:  # noqa: ARG002 (there is one)
        """Give the writing connection back."""
        self._writer_lock.release()

    # ---- inside

    async def _move_forward(self, table: MappedTable, last: Token) -> None:
        """Let no ID be given again if another program has emptied a table, and set back the IDs of AUTOINCREMENT."""
        if await self._read(lambda connection: table.is_reset(connection.session, last)):
            self.warnings += await self._write(lambda connection: connection.move_forward(table))
        self.warnings += table.warn_of_deleted(last)

    def _interact(self, interaction: Interaction, allocation: IAllocation | None) -> Deferred[None]:  # noqa: ARG002 (there is no sequence)
        return self._interactions.add(interaction)

    def _interact_together(self, interactions: Sequence[Interaction]) -> Deferred[Sequence[BaseException | None]]:
        interacting = self._checked(self._writer).run(lambda connection: connection.interact_together(interactions))
        return interacting.addCallback(self.proof.noted, [each.batch for each in interactions])

    async def _prove(self) -> None:
        """Return if the file is in its place and can be written, after all earlier writes; else raise StoreError."""
        use = self._read if self._read_only else self._write
        await use(lambda connection: connection.check())

    async def _open(self) -> None:
        writer = None if self._read_only else await self._open_thread(read_only=False)
        reader = writer
        if reader is None or self.name != MEMORY:
            try:
                reader = await self._open_thread(read_only=True)
            except BaseException:
                if writer is not None:
                    await writer.close()
                raise
        self._writer, self._reader = writer, reader

    async def _open_thread(self, *, read_only: bool) -> ConnectionThread[SqliteConnection]:
        connection = SqliteConnection(
            self.name,
            read_only=read_only,
            busy_timeout=self._busy_timeout,
            foreign=self._foreign,
            on_lost=self._report_loss,
        )
        thread = ConnectionThread(self._reactor, connection, self.name)
        try:
            await thread.run(lambda connection: connection.open())
        except BaseException:
            await thread.close()
            raise
        return thread

    def _log_name(self) -> str:
        return self.name if self.name == MEMORY else str(Path(self.name).resolve())

    async def _read(self, work: Callable[[SqliteConnection], _T]) -> _T:
        if self._reader is self._writer is not None:  # in memory
            return await self._write(work)
        return await super()._read(work)
