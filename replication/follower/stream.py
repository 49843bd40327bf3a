"""Following one stream: missed facts are fetched, and all facts are applied in order, each once.

A ``Cursor`` for each writer decides the next step; this module does it.  The effects of a fact and the new position are
stored in one transaction.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.logger import Logger

from replication.deferreds import Lock
from replication.errors import CatchUpError, ReplicationError, StreamError
from replication.follower.application import Application, FailedFactFunction
from replication.follower.database_waits import DatabaseWaits
from replication.follower.failures import Again, FailingFacts
from replication.follower.left_out import LeftOutRanges
from replication.follower.one_writer import not_applied
from replication.follower.relay import Relay, make_cursor
from replication.follower.step_errors import FIRST_RETRY, LAST_RETRY, StepErrors
from replication.follower.transaction_size import TransactionSize
from replication.session.backoff import Backoff
from replication.session.encoder import FIRST_GAP
from replication.streams.access_tokens import hide_access_tokens
from replication.streams.cursor import Apply, CatchUp, Check, Cursor, Reset
from replication.streams.definitions import FEDERATION, StreamDefinition
from replication.streams.facts import count_rows
from replication.streams.interfaces import IStreamStore, ITransaction, Page, Write, WriterStatus
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.history import FollowedHistories
    from replication.follower.known_tokens import CopiedTokens
    from replication.session.connection import Rows
    from replication.streams.facts import Fact
    from replication.wire.commands import Position

PAGE_ROWS: Final = 10_000  # that one transaction applies at most
WENT_BACK: Final = (
    "{writer} went back from {after} to {to} on {stream}: was its database restored? Following from there"
)


def begin_without_gap(command: Position) -> Token:
    """Return the position from which nothing has to be fetched, given the first POSITION of a writer."""
    return min(command.prev, command.new)


class FollowMode(Enum):
    """What a follower stores of a stream."""

    APPLIED = "applied"  # a function applies the facts; the position is stored in the same transaction
    COPIED = "copied"  # facts and position are stored
    POSITION_ONLY = "position only"  # nothing is stored; the position is known while the process runs


@attrs.define(eq=False, repr=False, kw_only=True)
class StreamFollower:
    """Follows all writers of one stream.

    Args:
        name: of the stream.
        mode: what is stored.
        instance_name: under which positions are stored.
        store: holds the positions, and copies.
        lifetime: of the process; it bounds every retry.
        fetch: returns a page of missed facts; CatchUpError if no source has any.
        moved: is called with each position that was applied or reset.
        function: the application's: ``function(facts, transaction)``, facts ascending.
        histories: of the writers; None if nothing is stored.
        known: the tokens that were applied; None if they are not needed.
        known_by_token: whether any writer may send the facts of another one.
        one_writer: whether one process writes at a time, and the sources do not name it (``one_writer``).
        audited: whether the tokens are compared with those in the writers' database, or at a relay.
        fetches_whole: whether received rows only announce their facts, which are then fetched: Redis may lose some rows
            of a fact.
        confirm_audit: is awaited with this follower and a writer before facts of a new connection are applied; it may
            begin or end the audit.  None if no connection can be to a relay.
        undo: the application's: ``undo(writer, to, transaction)`` undoes what was applied above ``to``.
        on_failed: the application's, for a fact that ``function`` cannot take.
        is_open: fires with whether the connection that is its argument is still open.
        first: is called with a writer and a step before the step is applied, outside its transaction
            (docs/protocol/traps.md 30).
        begin: returns where a new writer is followed from with ``POSITION_ONLY``, given its first POSITION.
        in_memory: whether the stream is in the memory of its writers, which begin again at 0.
        access_tokens: whether functions, copies and the followers of a relay receive the access tokens in facts of the
            caches stream; ``first`` always does.
        relay: publishes what is applied; None if nothing is relayed.

    """

    log = Logger()

    name: StreamName
    mode: FollowMode
    _instance_name: InstanceName
    _store: IStreamStore
    _lifetime: Lifetime
    _fetch: Callable[[StreamName, InstanceName, CatchUp, int], Coroutine[Deferred[Page], Any, Page]]
    _moved: Callable[[StreamName, InstanceName, Token], object]
    histories: FollowedHistories | None = None
    known: CopiedTokens | None = None
    known_by_token: bool = False
    one_writer: bool = False
    audited: bool = False
    _fetches_whole: bool = False
    _confirm_audit: Callable[[StreamFollower, InstanceName], Coroutine[Any, Any, None]] | None = None
    _function: Callable[..., object] | None = None
    _undo: Callable[..., object] | None = None
    _on_failed: FailedFactFunction | None = None
    _is_open: Callable[[Any], Deferred[bool]] = lambda _: succeed(True)
    _first: Callable[[InstanceName, Apply | Reset], None] | None = None
    _begin: Callable[[Position], Token] = begin_without_gap
    _in_memory: bool = False
    _access_tokens: bool = False
    _relay: Relay | None = None
    cursors: dict[InstanceName, Cursor] = attrs.field(init=False, factory=dict)
    errors: StepErrors = attrs.field(init=False)
    error: str | None = attrs.field(init=False, default=None)  # why the stream cannot be opened
    catch_ups: int = attrs.field(init=False, default=0)
    resets: int = attrs.field(init=False, default=0)
    applied_rows: int = attrs.field(init=False, default=0)
    lost_and_found: Counter[InstanceName] = attrs.field(init=False, factory=Counter)  # facts, by writer
    late: Counter[InstanceName] = attrs.field(init=False, factory=Counter)  # facts applied below the position
    checked: dict[InstanceName, Token] = attrs.field(init=False, factory=dict)  # up to where facts were compared
    # Whether it is known that facts are compared, or that they are not: behind a relay, once that has answered.
    audit_known: bool = attrs.field(init=False, default=False)
    application: Application = attrs.field(init=False)
    lock: Lock = attrs.field(init=False, factory=Lock)  # one transaction of this stream at a time
    _left_out: LeftOutRanges = attrs.field(init=False, factory=LeftOutRanges)
    _driving: dict[InstanceName, Deferred[None] | None] = attrs.field(init=False, factory=dict)  # None: it begins
    _positions: dict[InstanceName, Token] | None = attrs.field(init=False, default=None)  # None until they are read
    _early: list[Callable[[], object]] | None = attrs.field(init=False, default=None)  # what arrives meanwhile

    def __attrs_post_init__(self) -> None:
        """Make what calls the application's functions."""
        self.application = Application(
            stream=self.name,
            store=self._store,
            failing=FailingFacts(self.name, self._lifetime),
            waits=DatabaseWaits(self.name, "copy" if self._function is None else "function", self._lifetime),
            size=TransactionSize(self._lifetime.clock),
            # Copies and relays serve others.  The writer of federation forgets what FEDERATION_ACK acknowledges.
            synchronous=self.mode is FollowMode.COPIED or self._relay is not None or self.name == FEDERATION,
            function=self._function,
            undo=self._undo,
            on_failed=self._on_failed,
        )
        self.errors = StepErrors(self.name, self.application, self.log)

    # ---- what arrives

    async def open(self) -> None:
        """Read the stored positions, then process what arrived meanwhile.

        After a ReplicationError what arrived is dropped: send REPLICATE again before the next attempt.
        """
        self._early = []
        try:
            stored = await self._read_positions()
            if self.known is not None:
                resumes = self._confirm_audit is not None
                begun = await self.known.open_audit(stored, audited=self.audited, resumes=resumes)
                self.checked, self.audited = begun or {}, begun is not None
        except ReplicationError as error:
            self._early, self.error = None, str(error)
            self.errors.count += 1
            raise
        early, self._early, self._positions, self.error = self._early, None, stored, None
        for writer, position in stored.items():
            self._moved(self.name, writer, position)
        for process in early:
            process()

    def position_received(
        self, link: Hashable, command: Position, *, can_go_back: bool = True, begins_again: bool = False
    ) -> None:
        """Process a POSITION; one below the known position is ignored unless it ``can_go_back``.

        If the stream ``begins_again`` at 0 then, the writer's facts up to the new position are fetched.
        """
        if self._positions is None:
            again = partial(self.position_received, can_go_back=can_go_back, begins_again=begins_again)
            self._process_later(lambda: again(link, command))
            return
        cursor = self.cursors.get(command.instance)
        if cursor is None:
            stored = self._positions.get(command.instance, Token(0))
            if self.mode is FollowMode.POSITION_ONLY:
                stored = self._begin(command)
                self.checked[command.instance] = stored
            checks = self.histories is not None
            cursor = make_cursor(self._relay, self.name, command.instance, stored, checks_history=checks)
            self.cursors[command.instance] = cursor
            self._moved(self.name, command.instance, cursor.position)
        has_facts = command.prev >= FIRST_GAP or begins_again  # in memory the first fact of a Synapse has ID 1
        prev, new = command.prev if has_facts else min(command.prev, Token(0)), command.new
        if new < cursor.published and not cursor.linked and not can_go_back:
            message = "{stream}: {writer} sends position {new}, but is known to be at {known}, which is kept"
            self.log.info(message, stream=self.name, writer=command.instance, new=new, known=cursor.published)
            prev = new = cursor.published
        if new < cursor.published and begins_again:
            cursor.link_lost(link)  # it stays open, but its facts are those of another run of the writer
            cursor.position_received(link, Token(0), Token(0))
        cursor.position_received(link, prev, new)
        self._drive(command.instance)

    def rows_received(self, link: Hashable, rows: Rows) -> bool:
        """Process consecutive RDATA; returns whether the connection should pause until they are applied."""
        if self._positions is None:
            self._process_later(lambda: self.rows_received(link, rows))
            return False
        cursor = self.cursors.get(rows.instance)
        if cursor is None:  # rows before the writer's POSITION are not trusted (docs/protocol/traps.md 25)
            return False
        if self._fetches_whole:
            cursor.facts_announced(link, rows.places)
        else:
            cursor.rows_received(link, rows.places, rows.texts)
        self._drive(rows.instance)
        return cursor.crowded and rows.instance not in self.errors.texts

    def is_linked(self, writer: InstanceName) -> bool:
        """Return whether an open connection has sent a POSITION of a writer, and it is processed."""
        return self._positions is None or (writer in self.cursors and self.cursors[writer].linked)

    def row_lost(self, link: Hashable, writer: InstanceName) -> None:
        """Process a row of a writer that cannot be read."""
        self._process_later(lambda: self.row_lost(link, writer))
        if writer in self.cursors:
            self.cursors[writer].row_lost(link)

    def following(self, link: Hashable) -> None:
        """Process the end of the first positions of a connection."""

    def connection_lost(self, link: Hashable) -> None:
        """Drop the incomplete facts of a connection."""
        self._process_later(lambda: self.connection_lost(link))
        for cursor in self.cursors.values():
            cursor.link_lost(link)

    def withdrawn(self, link: Hashable, writer: InstanceName) -> None:
        """Follow a writer on a connection no more: that process does not send its position any more."""
        self._process_later(lambda: self.withdrawn(link, writer))
        if writer in self.cursors:
            self.cursors[writer].link_lost(link)
            if self._relay is not None:
                self._relay.withdrawn(link, (self.name, writer))

    def resume(self) -> None:
        """Do what is to be done for each writer."""
        for writer in list(self.cursors):
            self._drive(writer)

    # ---- positions and statuses

    async def compare_all_again(self) -> None:
        """Let the audit of a copy compare all facts again, also after a restart."""
        assert self.known is not None  # noqa: S101 - a copy has it
        async with self.lock:
            nothing = dict.fromkeys(self.all_positions(), Token(0))
            await self.known.advance_audit(nothing, of_writers={}, floor=Token(0))
            self.checked.update(nothing)

    def in_progress(self) -> list[Deferred[None]]:
        """Return a Deferred for each fetch or transaction in progress; to cancel it ends that work."""
        return [each for each in self._driving.values() if each is not None]

    def position(self, writer: InstanceName) -> Token:
        """Return the applied position of a writer; -1 if none is known."""
        cursor = self.cursors.get(writer)
        return (self._positions or {}).get(writer, Token(-1)) if cursor is None else cursor.position

    def positions(self) -> dict[InstanceName, Token]:
        """Return the applied position of each writer from which a POSITION was received."""
        return {writer: cursor.position for writer, cursor in self.cursors.items()}

    def all_positions(self) -> dict[InstanceName, Token]:
        """Return the position of each writer, stored or applied."""
        return {**(self._positions or {}), **self.positions()}

    def status(self, writer: InstanceName) -> WriterStatus:
        """Return the status of one writer."""
        cursor = self.cursors[writer]
        error = self.errors.texts.get(writer)
        state = "stopped" if error else "live" if cursor.live else "catching up" if cursor.linked else "not connected"
        failing, lost = self.application.failing, self.lost_and_found[writer]
        failed, skipped = failing.failing(writer), failing.counts[writer]
        decided = self.audit_known or self._confirm_audit is None
        audited = self.checked.get(writer, Token(0)) if self.audited or not decided else None
        known = lost, failed, skipped, audited, self.late[writer]
        return WriterStatus(writer, cursor.position, cursor.published, state, error, *known)

    # ---- inside

    async def _read_positions(self) -> dict[InstanceName, Token]:
        if self.mode is FollowMode.POSITION_ONLY:
            return {}
        if self.mode is FollowMode.APPLIED:
            positions = dict(await self._store.applied_positions(self.name, self._instance_name))
            await self.application.failing.load(self._store, self._instance_name, positions)
            if positions and self.histories is not None:
                counts = await self._store.applied_counts(self.name, self._instance_name)
                await self.histories.resume(counts, positions)
            return positions
        await self._store.declare(StreamDefinition(self.name))
        for warning in self._store.warnings:
            # A copy takes no ID from its sequence on PostgreSQL, which is therefore behind at each start.
            if warning.startswith(f"stream {self.name!r}: ") and not warning.endswith(": moved forward"):
                self.log.error("the copy of {warning}", warning=warning)
        await self._store.claim_tables([self.name], self._instance_name, copy=True)
        return dict(await self._store.positions(self.name))

    def _process_later(self, process: Callable[[], object]) -> None:
        if self._early is not None:
            self._early.append(process)

    def _step(self, writer: InstanceName) -> Any:
        """Return the next step for a writer, or None."""
        return self.application.failing.retry_of(writer) or self.cursors[writer].step()

    def _drive(self, writer: InstanceName) -> None:
        """Start to take the steps of a writer, if there are any and none is being taken."""
        if writer in self._driving or self._lifetime.ended:
            return
        if (step := self._step(writer)) is None:
            self.application.drop_unmatched(self.cursors, self._write, self.lock)
            return
        self._driving[writer] = None  # before it begins: a woken waiter may call this method again
        driving = self._driving[writer] = Deferred.fromCoroutine(self._take_steps(writer, step))
        driving.addErrback(lambda failure: self.log.failure("following {name}", failure, name=self.name))

        def done(_: None) -> None:
            del self._driving[writer]
            self.application.drop_unmatched(self.cursors, self._write, self.lock)
            self._rested(writer)

        driving.addCallback(done)

    def _rested(self, writer: InstanceName) -> None:
        """Note that there is no step for a writer now."""

    async def _take_steps(self, writer: InstanceName, step: Any) -> None:
        """Take ``step`` and all after it, until none is left; repeat one that fails, after a growing delay."""
        backoff = Backoff(FIRST_RETRY, LAST_RETRY)
        while step is not None:
            try:
                if isinstance(step, CatchUp):
                    await self._catch_up(writer, step)
                elif isinstance(step, Check):
                    await self._check(writer, step)
                else:
                    async with self.lock:
                        if isinstance(step, Again):
                            await self.application.apply_again(step, self.cursors[writer].position, self._write)
                        else:
                            await self._apply(writer, step)
            except Exception as error:  # noqa: BLE001 (an application's function may raise anything)
                if self._lifetime.ended and isinstance(error, CancelledError):
                    return
                failing = self.application.failing
                delay = FIRST_RETRY if failing.is_narrowing(writer) else backoff.next()
                self.errors.failed(writer, step, error, delay)
                await failing.pause(writer, delay)
            else:
                backoff.reset()
                self.errors.succeeded(writer, step)
            step = None if self._lifetime.ended else self._step(writer)
        if not self._lifetime.ended:
            self.errors.rested(writer, live=writer in self.cursors and self.cursors[writer].live)

    async def _catch_up(self, writer: InstanceName, step: CatchUp) -> None:
        """Fetch a page of missed facts, and pass it to the cursor; CatchUpError if no source has one."""
        self.catch_ups += 1
        fetching = Deferred.fromCoroutine(self._fetch(self.name, writer, step, PAGE_ROWS))
        page = await self._lifetime.add(fetching)
        if page.upto <= step.after:
            raise CatchUpError(f"the page for ({step.after}, {step.upto}] ends at {page.upto}")
        self.cursors[writer].fetched(step, page)
        if page.left_out and self.mode is FollowMode.COPIED:
            self._left_out.add(writer, step, page.upto)

    async def _check(self, writer: InstanceName, step: Check) -> None:
        """Compare the histories; if nothing must be undone, store that of the writer.

        In linear order a transaction may move the position during the comparison: then the cursor requests another one.
        """
        assert self.histories is not None  # noqa: S101 - else the cursor returns no Check
        if self._confirm_audit is not None:
            await self._confirm_audit(self, writer)
        cursor = self.cursors[writer]
        if not cursor.linked:
            raise CatchUpError("the connection was lost", behind=True)
        is_open = partial(self._is_open, cursor.link)
        try:
            common, history = await self.histories.compare(writer, step.after, step.upto, is_open)
        except StreamError:  # no epoch is in common
            await self._store.verify()
            raise
        if not await is_open():
            why = "the connection was lost, so this history may be of a later start of the writer"
            raise CatchUpError(why, behind=True)
        both_known = bool(history and await self.histories.followed(writer))
        async with self.lock:
            if cursor.position == step.after and cursor.compared(step, common, both_known=both_known):
                await self.histories.store(writer, history)
                cursor.checked(step)
                self._moved(self.name, writer, cursor.position)  # it is confirmed

    async def _apply(self, writer: InstanceName, step: Apply | Reset) -> None:
        """Apply a step and store the position, in one transaction; then fire the waiters."""
        if isinstance(step, Reset) and self.mode is not FollowMode.POSITION_ONLY:
            await self._store.verify()  # CommitsLostError: our position went back with the writer's, in one database
            if self.histories is not None and self._function is not None and self._undo is None:
                await self.histories.check_reset(writer, step.after, step.to)
        if isinstance(step, Apply):
            step = self.application.cut(writer, step)
        if self._first is not None:
            self._first(writer, step)
        if isinstance(step, Apply) and (facts := await self._new_facts(writer, step)) is not step.facts:
            step = attrs.evolve(step, facts=facts)
        if self.mode is FollowMode.POSITION_ONLY:
            await self._note(writer, step, None)
        else:
            parts = {writer: step}
            await self.application.apply(writer, step, parts, self._write, partial(self._note_parts, parts))
        self.cursors[writer].applied(step)
        self._left_out.applied(writer, step, self.cursors[writer].position)
        if self.histories is not None:
            self.histories.applied(writer, step)
        if isinstance(step, Reset):
            self.resets += 1
            await self.application.count_skipped(self._instance_name)
            if not self._in_memory:  # there it means that the writer was started again
                self.log.error(WENT_BACK, writer=writer, after=step.after, to=step.to, stream=self.name)
        else:
            self.applied_rows += count_rows(step.facts)
            if step.upto == step.after:
                self.late[writer] += len(step.facts)
        self._moved(self.name, writer, self.cursors[writer].position)

    async def _new_facts(self, writer: InstanceName, step: Apply) -> Sequence[Fact]:
        """Return the facts of a step that were not applied: those below the position, or of other writers, may be."""
        facts, late = self._hide(step.facts), step.upto == step.after
        if self.one_writer and not late:
            facts = not_applied(self, writer, step, facts)
        if self.known is None or not (self.known_by_token or (late and self.audited)):
            return facts
        return await self.known.new_facts(facts)

    async def _note_parts(self, parts: Mapping[InstanceName, Apply | Reset], transaction: ITransaction) -> None:
        for each, part in parts.items():
            await self._note(each, part, transaction)

    async def _note(self, writer: InstanceName, step: Apply | Reset, transaction: ITransaction | None) -> None:
        """Note the tokens of a step, if they decide what is applied; an audit forgets them."""
        if self.known is None or not (self.known_by_token or self.audited):
            return
        if isinstance(step, Reset):
            await self.known.undo(transaction, writer, step.to)
            self.checked[writer] = min(step.to, self.checked.get(writer, Token(0)))
        elif step.facts:
            floor = Token(0) if self.audited else min({**self.all_positions(), writer: step.upto}.values())
            await self.known.note(transaction, writer, step.facts, floor)

    def _hide(self, facts: Sequence[Fact]) -> Sequence[Fact]:
        return facts if self._access_tokens else hide_access_tokens(self.name, facts)

    def _write(self, writer: InstanceName, step: Apply | Reset) -> Write:
        """Return what a step stores beside what the application's function does."""
        copying = self.mode is FollowMode.COPIED
        follower = None if copying else self._instance_name
        counts = None if self.histories is None else self.histories.counts_after(writer, step)
        if isinstance(step, Reset):
            return Write(self.name, writer, step.to, reset=True, follower=follower, counts=counts)
        facts, gone = step.facts if copying else (), self._left_out.mark(writer, step)
        return Write(
            self.name, writer, step.upto, facts, expected=step.after, follower=follower, gone=gone, counts=counts
        )
