"""Following one stream: what its writers say becomes facts applied, in order, each once.

A :class:`Cursor` per writer decides what comes next; this file does it: fetch what was missed, hand facts to the
application's function, and move the position in the same transaction.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from twisted.internet.defer import CancelledError, Deferred, DeferredLock, maybeDeferred
from twisted.logger import Logger

from replication.errors import CatchUpError, ReplicationError, StoreError
from replication.streams.cursor import Apply, CatchUp, Cursor, Reset
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Write, WriterStatus
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from replication.session.connection import Rows
    from replication.streams.facts import Fact
    from replication.streams.seams import IStreamStore, ITransaction, Page
    from replication.waiting import Waits
    from replication.wire.commands import Position
    from replication.wire.grammar import InstanceName, StreamName

FIRST_ID = 2  # nobody's facts begin below it (protocol F5)
PAGE_ROWS = 10_000  # as many as one transaction applies
FIRST_RETRY = 0.25  # seconds; doubled at each failure in a row
LAST_RETRY = 10.0


class Keeping(Enum):
    """What a follower keeps of a stream."""

    APPLIED = "applied"  # its facts go to a function, its position into the database, in one transaction
    COPIED = "copied"  # its facts and its position go into the database
    WATCHED = "watched"  # nothing: it only has to know the position while it runs


class ApplyTransaction:
    """What an application's function gets beside the facts: SQL in the transaction that also moves the position.

    From the first statement on it holds the database's write lock.  ``stream`` and ``writer`` say whose facts they are.
    """

    def __init__(self, stream: StreamName, writer: InstanceName, transaction: ITransaction) -> None:
        self.stream = stream
        self.writer = writer
        self._transaction = transaction

    async def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement and return its rows; StoreError names what the database said."""
        return await self._transaction.execute(sql, parameters)

    async def executemany(self, sql: str, parameters: Sequence[Sequence[object]]) -> None:
        """Run one statement once per item of ``parameters``."""
        await self._transaction.executemany(sql, parameters)


class IFollowingProcess(Protocol):
    """What following needs from the process that it is part of."""

    instance_name: InstanceName
    store: IStreamStore
    waits: Waits
    stopping: bool

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        """Return missed facts from the first source that has them; CatchUpError if none has."""
        ...

    def moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        """A position was applied, or set back."""

    def all_heard(self) -> bool:
        """Whether every writer that there should be has said where its streams stand."""
        ...


class StreamFollower:
    """One stream, as a follower holds it, over all its writers.

    ``function`` is the application's: it is called with facts in ascending order and an :class:`ApplyTransaction`;
    ``first`` is called with each step before that, inside the process only (cache invalidation: trap 30).
    """

    log = Logger()

    def __init__(
        self,
        process: IFollowingProcess,
        name: StreamName,
        keeping: Keeping,
        function: Callable[..., object] | None = None,
        first: Callable[[Apply | Reset], None] | None = None,
    ) -> None:
        self.name = name
        self.keeping = keeping
        self.cursors: dict[InstanceName, Cursor] = {}
        self.errors: dict[InstanceName, str] = {}  # why a writer's facts stand still
        self.error: str | None = None  # why the stream cannot be opened
        self.catch_ups = self.resets = self.failures = 0
        self.applied_rows = 0
        self._process = process
        self._function = function
        self._first = first
        self._turn = DeferredLock()  # one transaction of this stream at a time, whoever wrote the facts
        self._driving: dict[InstanceName, Deferred[None] | None] = {}  # None: just begun
        self._positions: dict[InstanceName, Token] | None = None  # None until read from the store
        self._early: list[Callable[[], object]] | None = None  # what is heard while they are being read

    # ---- what is heard

    async def open(self) -> None:
        """Read the positions that were stored, then take in what was heard meanwhile.

        If that fails, what was heard is let go: when it is tried again, the writers have to be asked again, too.
        """
        self._early = []
        try:
            stored = await self._read_positions()
        except ReplicationError as error:
            self._early = None
            self.error = str(error)
            self.failures += 1
            raise
        early, self._early, self._positions, self.error = self._early, None, stored, None
        for writer, position in stored.items():
            self._process.moved(self.name, writer, position)
        for hear in early:
            hear()

    async def _read_positions(self) -> dict[InstanceName, Token]:
        if self.keeping is Keeping.WATCHED:
            return {}
        store, me = self._process.store, self._process.instance_name
        if self.keeping is Keeping.APPLIED:
            return dict(await store.applied(self.name, me))
        await store.declare(StreamDefinition(self.name))
        await store.fill(self.name, me, copy=True)
        return dict(await store.positions(self.name))

    def position_heard(self, link: Hashable, command: Position) -> None:
        """Take in a POSITION."""
        if self._positions is None:
            self._hear_later(lambda: self.position_heard(link, command))
            return
        cursor = self.cursors.get(command.instance)
        if cursor is None:
            unknown = command.prev if self.keeping is Keeping.WATCHED else Token(0)
            cursor = self.cursors[command.instance] = Cursor(self._positions.get(command.instance, unknown))
            self._process.moved(self.name, command.instance, cursor.position)
        prev = command.prev if command.prev >= FIRST_ID else min(command.prev, Token(0))
        cursor.position_heard(link, prev, command.new)
        self._drive(command.instance)

    def rows_heard(self, link: Hashable, rows: Rows) -> bool:
        """Take in a run of RDATA; returns whether more of that writer had better wait until this is applied."""
        if self._positions is None:
            self._hear_later(lambda: self.rows_heard(link, rows))
            return False
        cursor = self.cursors.get(rows.instance)
        if cursor is None:  # nothing is known of that writer before its POSITION (trap 25)
            return False
        cursor.rows_heard(link, rows.places, rows.texts)
        self._drive(rows.instance)
        return cursor.crowded and rows.instance not in self.errors

    def link_lost(self, link: Hashable) -> None:
        """A connection is gone: what it said in part is forgotten."""
        self._hear_later(lambda: self.link_lost(link))
        for cursor in self.cursors.values():
            cursor.link_lost(link)

    def _hear_later(self, hear: Callable[[], object]) -> None:
        if self._early is not None:
            self._early.append(hear)

    def look_again(self) -> None:
        """Go on if there is anything to do."""
        for writer in list(self.cursors):
            self._drive(writer)

    def under_way(self) -> list[Deferred[None]]:
        """Return what has to fire before nothing of this stream is under way; cancelling one gives it up."""
        return [each for each in self._driving.values() if each is not None]

    def position(self, writer: InstanceName) -> Token:
        """Return how far a writer's facts are applied here, heard of or not; -1 if nothing is known."""
        cursor = self.cursors.get(writer)
        return (self._positions or {}).get(writer, Token(-1)) if cursor is None else cursor.position

    def positions(self) -> dict[InstanceName, Token]:
        """Return how far each writer's facts are applied here, of those who were heard of."""
        return {writer: cursor.position for writer, cursor in self.cursors.items()}

    def status(self, writer: InstanceName) -> WriterStatus:
        """Return how one writer of the stream stands here."""
        cursor = self.cursors[writer]
        error = self.errors.get(writer)
        state = "stopped" if error else "live" if cursor.live else "catching up" if cursor.linked else "not connected"
        return WriterStatus(writer, cursor.position, cursor.announced, state, error)

    # ---- what is done about it

    def _step(self, writer: InstanceName) -> Any:
        """Return what is to be done next of a writer's, or None."""
        return self.cursors[writer].step()

    def _drive(self, writer: InstanceName) -> None:
        if writer in self._driving or self._process.stopping or self._step(writer) is None:
            return
        self._driving[writer] = None  # before it begins: whom it wakes may come back here
        driving = self._driving[writer] = Deferred.fromCoroutine(self._drive_on(writer))
        driving.addErrback(lambda failure: self.log.failure("following {name}", failure, name=self.name))

        def done(_: None) -> None:
            del self._driving[writer]
            self._rested(writer)

        driving.addCallback(done)

    def _rested(self, writer: InstanceName) -> None:
        """There is nothing to do of a writer's for now."""

    async def _drive_on(self, writer: InstanceName) -> None:
        delay = FIRST_RETRY
        while not self._process.stopping and (step := self._step(writer)) is not None:
            try:
                if isinstance(step, CatchUp):
                    await self._catch_up(writer, step)
                else:
                    await self._turn.run(self._take, writer, step)
            except Exception as error:  # noqa: BLE001 (whatever an application raises stops its stream, and only that)
                if self._process.stopping and isinstance(error, CancelledError):
                    return
                self._stopped(writer, step, error, delay)
                await self._process.waits.nap(delay)
                delay = min(delay * 2, LAST_RETRY)
            else:
                delay = FIRST_RETRY
                self.errors.pop(writer, None)

    def _stopped(self, writer: InstanceName, step: Any, error: Exception, delay: float) -> None:
        what = "fetching" if isinstance(step, CatchUp) else "applying"
        text = f"{what} {self.name} of {writer or 'all writers'} after {step.after}: {type(error).__name__}: {error}"
        self.failures += 1
        if self.errors.get(writer) != text:
            self.errors[writer] = text
            self.log.error("{text}; trying again in {delay:.2f} s and on", text=text, delay=delay)
            if not isinstance(error, ReplicationError):
                self.log.failure("the application's function for {stream} raised", stream=self.name)

    async def _catch_up(self, writer: InstanceName, step: CatchUp) -> None:
        self.catch_ups += 1
        fetching = Deferred.fromCoroutine(self._process.fetch(self.name, writer, step, PAGE_ROWS))
        page = await self._process.waits.add(fetching)
        if page.upto <= step.after:
            raise CatchUpError(f"asked for ({step.after}, {step.upto}], got nothing beyond {page.upto}")
        self.cursors[writer].fetched(step, page)

    def _take(self, writer: InstanceName, step: Any) -> Deferred[None]:
        return Deferred.fromCoroutine(self._apply(writer, step))

    async def _apply(self, writer: InstanceName, step: Apply | Reset) -> None:
        if self._first is not None:
            self._first(step)
        if self.keeping is not Keeping.WATCHED:
            await self._store(writer, step)
        cursor = self.cursors[writer]
        cursor.applied(step)
        if isinstance(step, Reset):
            self.resets += 1
            self.log.error(
                "{writer} went back from {after} to {to} on {stream}: was its database restored? Following from there",
                writer=writer,
                after=step.after,
                to=step.to,
                stream=self.name,
            )
        else:
            self.applied_rows += sum([len(fact.texts) for fact in step.facts])
        self._process.moved(self.name, writer, cursor.position)

    async def _store(self, writer: InstanceName, step: Apply | Reset) -> None:
        if isinstance(step, Reset):
            await self._process.store.transaction().commit([self._write(writer, step)])
        else:
            await self._hand_over(step.facts, partial(ApplyTransaction, self.name, writer), [self._write(writer, step)])

    def _write(self, writer: InstanceName, step: Apply | Reset) -> Write:
        """Return what a step stores beside what the application does with its facts."""
        copying = self.keeping is Keeping.COPIED
        me = None if copying else self._process.instance_name
        if isinstance(step, Reset):
            return Write(self.name, writer, step.to, reset=True, follower=me)
        return Write(self.name, writer, step.upto, step.facts if copying else (), expected=step.after, follower=me)

    async def _hand_over(
        self, facts: Sequence[Fact], given: Callable[[ITransaction], ApplyTransaction], writes: Sequence[Write]
    ) -> None:
        """Call the function with facts and what it is ``given`` of the transaction that stores ``writes``, too."""
        transaction = self._process.store.transaction()
        try:
            if self._function is not None and facts:
                await maybeDeferred(self._function, facts, given(transaction))
            await transaction.commit(writes)
        except BaseException:
            try:
                await transaction.rollback()
            except StoreError as error:
                self.log.error("rolling back {stream}: {error}", stream=self.name, error=str(error))
            raise
