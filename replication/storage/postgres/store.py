"""The PostgreSQL store: which session runs what, and when.

Every session lives on a thread of its own.  One reads.  One claims names and allocates IDs, apart from those that the
transaction of an interaction allocates itself.  One watches the sequences of mapped tables.  One commits without
statements: such commits wait as a group, and share one transaction and one fsync.  A transaction with statements has a
session to itself, from the first of them to its end.  As many of these run side by side as there are ``connections``;
further ones wait.

In the application's SQL a parameter is ``%s``; with parameters, ``%`` is written ``%%``.
"""

from __future__ import annotations

import re
from itertools import islice
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from twisted.internet.defer import Deferred

from replication.deferreds import Lock, Semaphore
from replication.errors import StoreError
from replication.storage.contract import ClaimedError
from replication.storage.postgres.address import Address
from replication.storage.postgres.checks import refuse_shared
from replication.storage.postgres.connection import PAGING, STEPS, PostgresConnection
from replication.storage.postgres.generic import GenericTable
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.ids import IDS_SETTINGS, TAKE_OVER_SETTINGS, Allocations, PostgresIds
from replication.storage.postgres.joined import table_of
from replication.storage.postgres.session import PostgresSession, SessionLostError
from replication.storage.postgres.truncations import Truncations
from replication.storage.postgres.watch import WATCH_SETTINGS, PostgresWatch
from replication.storage.store import SqlStore
from replication.storage.threads import ConnectionThread
from replication.storage.transactions import CallGroup
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads
    from twisted.python.failure import Failure

    from replication.storage.interactions import Interaction
    from replication.storage.receipts import ReceiptClock
    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import IAllocation, IWatch, SequenceState
    from replication.urls import Url
    from replication.wire.grammar import StreamName, Token

# With a timeout, a locked table delays only the callers that read it.
PAGES: Final[Mapping[str, str]] = {**dict.fromkeys(PAGING, "off"), "jit": "off", "lock_timeout": "2s"}
READ_ONLY: Final[Mapping[str, str]] = {
    "default_transaction_read_only": "on",
    "extra_float_digits": "1",  # the server may be configured to round numbers
    # To plan the queries for one event of a Synapse takes longer than to run them.
    "plan_cache_mode": "force_generic_plan",
    **PAGES,
}

PATIENCE: Final = 5.0  # seconds for which ``close`` waits until the server answers a statement
INTERVAL: Final = 0.5  # seconds between two looks for such statements after that
HELD_FOR: Final = 1.0  # seconds for which names count as held after they were
_OF_SESSION: Final = frozenset(("LISTEN", "UNLISTEN", "DISCARD", "DEALLOCATE"))
_OF_TRANSACTION: Final = frozenset(("LOCAL", "TRANSACTION", "CONSTRAINTS"))  # a SET that ends with the transaction


class PostgresStore(SqlStore[PostgresConnection]):
    """Facts and positions in the PostgreSQL database at ``url``.

    ``reactor`` needs ``callFromThread`` only.  With ``read_only`` the store reads what other processes write, and
    creates no table; ``foreign`` is that of ``open_store``.
    ``connections`` is the number of transactions with statements that run side by side; the store
    has three or four further sessions.  ``clock`` is for receipts.  Raises ConfigError if the URL is not one of
    PostgreSQL.  A pooler with transaction pooling (PgBouncer) must not stand between the store and the server, because
    sessions hold the claims of names.
    """

    SCHEMA = len(STEPS)
    ALL_USED = "other transactions of this process, which use all its connections"
    # A line ends at CR, too.  Comments may be nested: one that has another one, or no end, stands for the first word.
    FIRST_WORDS = re.compile(r"(?:[\s\ufeff;]|--[^\r\n]*|/\*(?:(?!/\*|\*/).)*\*/)*(/\*|\w*)\s*(\w*)", re.DOTALL)
    RESERVED = frozenset(("BEGIN", "START", "COMMIT", "END", "ABORT", "ROLLBACK", "SAVEPOINT", "RELEASE", "PREPARE"))

    def __init__(
        self,
        url: str | Url,
        reactor: IReactorFromThreads,
        *,
        read_only: bool = False,
        foreign: bool = False,
        connections: int = 8,
        clock: ReceiptClock | None = None,
    ) -> None:
        self.address = Address.parse(url, read_only=read_only)
        super().__init__(
            self.address.name, reactor, table_of, read_only=read_only, clock=clock, collect=self.end_of_turn
        )
        self._foreign = foreign
        self._connections = connections
        self._ending = Event()
        self._sessions: WeakSet[PostgresSession] = WeakSet()
        self._holder = Holder(self._report_loss)
        self._sequences: dict[StreamName, PostgresSequence] = {}
        self._ids: ConnectionThread[PostgresIds] | None = None
        self._watches: list[ConnectionThread[PostgresWatch]] = []
        self._truncations = Truncations()
        self._allocations = Allocations(self.warnings.append)
        self._held_until = 0.0  # of ``monotonic``
        self._slots = Semaphore(connections)  # of transactions with statements
        self._pool: list[ConnectionThread[PostgresConnection]] = []  # their connections
        self._free: list[ConnectionThread[PostgresConnection]] = []  # those that no transaction uses

    async def claim(self, instance: InstanceName) -> None:
        """Make this process the only one that writes as ``instance``; StoreError names the process that does."""
        await self._checked(self._ids).run(lambda ids: ids.claim(instance))

    async def claimed_elsewhere(self, names: Collection[InstanceName]) -> Mapping[InstanceName, bool]:
        """Return which of these names are claimed, each with whether its process has a session now."""
        return await self._read(lambda connection: connection.claims(names))

    async def take_over(self, name: InstanceName) -> bool:
        """End the claim of ``name`` if its process has no session; return whether a claim was ended.

        This runs in a separate session, so that neither IDs nor commits wait for it.
        """
        self._checked(self._ids)
        session = PostgresIds(self._new_session(TAKE_OVER_SETTINGS), self._allocations)
        thread = ConnectionThread(self._reactor, session, self.name)
        try:
            return await thread.run(lambda ids: ids.take_over(name))
        finally:
            await thread.close()

    async def declare(self, *definitions: StreamDefinition) -> None:
        """Create or check the streams' tables and sequences; SchemaError names what does not fit."""
        await super().declare(*definitions)
        for each in definitions:
            self._sequences[each.name] = PostgresSequence(self, self._table(each.name).sequence)

    def sequence(self, stream: StreamName) -> PostgresSequence | None:
        """Return where the stream's IDs come from; None if the store is read-only."""
        self._table(stream)
        return None if self._read_only else self._sequences[stream]

    async def applied_positions(self, stream: StreamName, follower: InstanceName) -> Mapping[InstanceName, Token]:
        """Return, per writer, the position of ``follower``."""
        return await self._read(lambda connection: connection.applied_positions(stream, follower))

    async def claim_tables(self, streams: Sequence[StreamName], instance: InstanceName, *, copy: bool) -> None:
        """Claim the tables of streams for their writers, or for one copy; StoreError if another process fills one."""
        definitions = [self._table(each).definition for each in streams]
        await self._write(lambda connection: connection.claim_tables(definitions, instance, copy=copy))
        for each in definitions:
            if each.in_memory and each.written_by(instance) and not copy:
                await self._claim_in_memory(each.name)

    async def _claim_in_memory(self, stream: StreamName) -> None:
        """Make this process the only writer of a stream in memory: each counts the IDs of such a stream by itself."""
        try:
            await self.claim(InstanceName(f"{stream} (in memory)"))  # the name of no process: it has a space
        except ClaimedError as error:
            raise StoreError(
                f"database {self.name!r}: stream {stream!r} is in memory, so one process writes it, and {error.holder} "
                "does already: name the process that writes it as writers of the stream in each configuration"
            ) from error

    async def verify(self) -> None:
        """Raise CommitsLostError if the database has lost commits of this process."""
        await self._read(lambda connection: connection.verify())

    async def mark_truncated(
        self, writer: InstanceName, published: Mapping[StreamName, Token]
    ) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Note that facts are gone of streams whose table was truncated; return up to where they are, per writer."""
        tables = {self._table(stream): position for stream, position in published.items()}
        generic = {table: position for table, position in tables.items() if isinstance(table, GenericTable)}
        if not generic:
            return {}
        found = await self._read(lambda connection: self._truncations.find(connection.session, writer, generic))
        for table, lost in found.items():
            for each, upto in lost.items():
                await self.forget_facts(table.definition.name, each, upto, delete=False)
            self._truncations.forget(table)
        return {table.definition.name: lost for table, lost in found.items() if lost}

    def watch(self) -> IWatch | None:
        """Return the watch of the mapped streams declared so far; None if there are none.

        SchemaError names a stream that external writers can write and no watch can follow.
        """
        self._checked(self._ids)
        for table in self._tables.values():
            refuse_shared(table, [each.definition for each in self._tables.values()])
        tables = [each for each in self._tables.values() if each.definition.is_mapped("postgresql")]
        if not tables:
            return None
        watch = PostgresWatch(self._new_session(WATCH_SETTINGS), tables, self.warnings)
        self._watches.append(ConnectionThread(self._reactor, watch, self.name))
        return ThreadedWatch(self._watches[-1])

    async def sync(self) -> None:
        """Return: every commit has waited for the disk."""

    async def close(self) -> None:
        """Finish what runs, with open transactions, and close all sessions.

        A commit whose outcome the server cannot answer now is not waited for.  A statement that the server has not
        answered after PATIENCE seconds fails.
        """
        async with self._opening:
            if self._closed:
                return
            self._closed = True
        self._ending.set()
        closed = Event()
        Thread(target=self._interrupt, args=(closed,), name=f"replication end of {self.name}", daemon=True).start()
        try:
            await self._writer_lock.acquire()
            for _ in range(self._connections):
                await self._slots.acquire()
            for connection in (*self._writing(), self._reader, self._ids, *self._watches):
                if connection is not None:
                    await connection.close()
        finally:
            closed.set()

    # ---- for transactions and sequences

    def _check_words(self, word: str, second: str) -> None:
        if word == "/*":
            raise StoreError("a statement begins with a comment inside a comment, or with one that does not end")
        if word == "COPY":
            raise StoreError("COPY needs a connection of its own: use INSERT, with unnest() for many rows")
        if word in _OF_SESSION or (word in ("SET", "RESET") and second not in _OF_TRANSACTION):
            raise StoreError(f"{word} would outlast the transaction: use SET LOCAL, or a connection of your own")

    async def acquire(self) -> ConnectionThread[PostgresConnection]:
        """Wait for a connection that no other transaction uses."""
        self._checked(self._writer)
        await self._slots.acquire()
        if not self._free:
            self._free.append(self._new_thread({}))
            self._pool.append(self._free[-1])
        return self._free.pop()

    def release_connection(self, connection: ConnectionThread[PostgresConnection]) -> None:
        """Give the connection back."""
        self._free.append(connection)
        self._slots.release()

    async def blockers(self, connection: ConnectionThread[PostgresConnection] | None) -> Sequence[str]:
        """Return the sessions that hold the locks which a statement waits for."""
        waiting = (connection or self._checked(self._writer)).connection.session
        return await self._read(lambda reader: reader.blockers_of(waiting))

    def allocate(self, sequence: str, count: int) -> Deferred[list[int]]:
        """Allocate IDs from a sequence; without them, no fact can be stored."""
        allocating = self._checked(self._ids).run(lambda ids: ids.allocate(sequence, count))
        return allocating.addErrback(self._note_no_ids)

    def end_of_turn(self) -> Deferred[None]:
        """Return what fires at the end of the reactor's present iteration: until then, more callers may join."""
        done: Deferred[None] = Deferred()
        self._reactor.callFromThread(done.callback, None)
        return done

    # ---- inside

    async def _interact(self, interaction: Interaction, allocation: IAllocation | None) -> None:
        connection = await self.acquire()
        sequence = None
        try:
            if allocation is not None:
                sequence = self._table(allocation.stream).sequence
                self._hold_names()
                allocation.expect()
            interacting = connection.run(lambda session: session.interact(interaction, sequence, allocation))
            await interacting.addErrback(self._report_outage)
            self.proof.end_trouble()
        finally:
            self.release_connection(connection)

    def _note_no_ids(self, failure: Failure) -> Failure:
        if isinstance(failure.value, StoreError):
            self.proof.note_failed(failure.value)
        return failure

    def _report_outage(self, failure: Failure) -> Failure:
        if isinstance(failure.value, SessionLostError):
            self.proof.report(failure.value)
        return failure

    def _hold_names(self) -> None:
        """Let the session of the claims, once a second, hold them again if it was lost."""
        now = monotonic()
        if now >= self._held_until:
            self._held_until = now + HELD_FOR
            holding = self._checked(self._ids).run(PostgresIds.hold_names)
            holding.addErrback(lambda failure: failure.trap(StoreError))  # writers receive it from their own sessions

    async def _prove(self) -> None:
        """Return if the database answers and can be written, even while transactions wait; else raise StoreError."""
        await self._read(lambda connection: connection.check())

    async def _open(self) -> None:
        first = self._new_thread(READ_ONLY if self._read_only else {}, read_only=self._read_only)
        try:
            self.warnings.extend(await first.run(lambda connection: connection.open()))
        except BaseException:
            await first.close()
            raise
        if self._read_only:
            self._reader = first
            return
        self._writer, self._reader = first, self._new_thread(PAGES)
        ids = PostgresIds(self._new_session(IDS_SETTINGS), self._allocations)
        self._ids = ConnectionThread(self._reactor, ids, self.name)

    def _interrupt(self, closed: Event) -> None:
        """Let statements that the server does not answer fail, until the store is closed."""
        patience = PATIENCE
        while not closed.wait(patience):
            patience = INTERVAL
            for session in list(self._sessions):
                session.interrupt()

    def _new_session(self, settings: Mapping[str, str]) -> PostgresSession:
        session = PostgresSession(self.address, self._ending, self._holder, settings)
        self._sessions.add(session)
        return session

    def _new_thread(
        self, settings: Mapping[str, str], *, read_only: bool = False
    ) -> ConnectionThread[PostgresConnection]:
        connection = PostgresConnection(
            self._new_session(settings), read_only=read_only, foreign=self._foreign, allocations=self._allocations
        )
        return ConnectionThread(self._reactor, connection, self.name)

    def _writing(self) -> list[ConnectionThread[PostgresConnection]]:
        return [*self._pool, *super()._writing()]


class ThreadedWatch:
    """An IWatch that polls on a thread of its own."""

    def __init__(self, watch: ConnectionThread[PostgresWatch]) -> None:
        self.streams = watch.connection.streams
        self._watch = watch

    async def poll(self) -> Mapping[StreamName, SequenceState]:
        """Return the state of each mapped stream's sequence."""
        return await self._watch.run(PostgresWatch.poll)


class PostgresSequence:
    """An ISequence of one stream; calls that arrive during a round trip to the server share the next one."""

    def __init__(self, store: PostgresStore, sequence: str) -> None:
        self._store = store
        self._sequence = sequence
        self._group: CallGroup[int, Sequence[int]] = CallGroup(Lock(), self._allocate, store.end_of_turn)

    async def allocate(self, count: int) -> Sequence[int]:
        """Return ``count`` IDs, ascending, which no other caller receives; StoreError if the server returns none."""
        return await self._group.add(count)

    async def _allocate(self, counts: Sequence[int]) -> list[Sequence[int]]:
        ids = iter(await self._store.allocate(self._sequence, sum(counts)))
        return [[*islice(ids, count)] for count in counts]
