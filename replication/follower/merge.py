"""Following several writers of one stream in one order: that of their tokens, which come from one sequence.

A fact is held back until every writer has settled its token.  The idle writers publish positions for that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
from msgspec.structs import replace
from twisted.internet.defer import Deferred

from replication.deferreds import start_alone
from replication.follower.stream import StreamFollower
from replication.streams.cursor import Apply, Reset
from replication.streams.merge import ApplyMerged, merge
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from replication.session.connection import Rows
    from replication.streams.interfaces import WriterStatus
    from replication.wire.commands import Position

ALL: Final = InstanceName("")  # stands for all writers together
PATIENCE: Final = 5.0  # seconds to wait for a known writer, once its connection has sent positions of others
LOSS_PATIENCE: Final = 15.0  # seconds to wait for the other writers, once one has gone back


@attrs.define(eq=False, repr=False, kw_only=True)
class MergingFollower(StreamFollower):
    """Follows all writers of one stream, in the order of their tokens.

    The writers of a connection are those in its POSITIONs.  While the connection is lost they are waited for.  Once it
    is followed again, those that have sent no POSITION again are waited for PATIENCE: the first positions may come in
    several reads.  After that they count as renamed or removed, and this is logged.  Facts that such a writer, or a new
    one, wrote before this process followed it may be applied after larger tokens.

    A writer that goes back has lost commits, and so may the others: they have one database.  Positions from before do
    not count.  Nothing is applied until each other writer sends one again; a connected one has LOSS_PATIENCE for that.

    ``all_positions_received`` returns whether every connection has sent its positions; the rest is StreamFollower's.
    """

    _all_positions_received: Callable[[], bool]
    _writers: dict[Hashable, set[InstanceName]] = attrs.field(init=False, factory=dict)  # by connection
    # Those of a connection that was lost; until PATIENCE ends, if they send no position again.
    _former: dict[Hashable, set[InstanceName]] = attrs.field(init=False, factory=dict)
    # Known writers that have sent no position, though connections have; with the wait for each, once it has begun.
    _missing: dict[InstanceName, Deferred[None] | None] = attrs.field(init=False, factory=dict)
    # Writers that have gone back or sent a position since the first one went back; None if there is no such wait.
    _confirmed: set[InstanceName] | None = attrs.field(init=False, default=None)
    _went_back_to: Token = attrs.field(init=False, default=Token(0))

    async def open(self) -> None:
        """Read the stored positions; their writers are waited for."""
        await super().open()
        self._missing = dict.fromkeys({*(self._positions or ())} - {ALL, *self._present()})

    def position_received(
        self, link: Hashable, command: Position, *, can_go_back: bool = True, begins_again: bool = False
    ) -> None:
        """Process a POSITION, which also names a writer that the connection brings."""
        self._writers.setdefault(link, set()).add(command.instance)
        self._missing.pop(command.instance, None)
        if self._confirmed is not None:
            self._confirmed.add(command.instance)
        super().position_received(link, command, can_go_back=can_go_back, begins_again=begins_again)

    def connection_lost(self, link: Hashable) -> None:
        """Drop the incomplete facts of a connection; its writers have to send positions again."""
        former = self._former.setdefault(link, set())
        former.update(self._writers.pop(link, ()))
        for writer in former:
            self._missing.pop(writer, None)
        super().connection_lost(link)

    def following(self, link: Hashable) -> None:
        """Process the first positions of a connection: its other former writers are missing."""
        former = self._former.get(link, set()).difference(*self._writers.values())
        self._missing.update(dict.fromkeys(former))

    def rows_received(self, link: Hashable, rows: Rows) -> bool:
        """Process consecutive RDATA; a connection pauses for this process, never for another writer."""
        return super().rows_received(link, rows) and ALL in self._driving and ALL not in self.errors.texts

    def resume(self) -> None:
        """Do what is to be done; give up waiting for missing writers after PATIENCE."""
        super().resume()
        new = [writer for writer, wait in self._missing.items() if wait is None]
        if new and self._all_positions_received():
            wait = Deferred.fromCoroutine(self._lifetime.sleep(PATIENCE))
            self._missing.update(dict.fromkeys(new, wait))
            wait.addCallback(lambda _: self._give_up_missing(wait))

    def status(self, writer: InstanceName) -> WriterStatus:
        """Return the status of one writer."""
        found, error = super().status(writer), self.errors.texts.get(ALL)
        if error is not None and found.error is None:
            return replace(found, state="stopped", error=error)
        if self.cursors[writer].reached > found.position and ALL not in self._driving:
            return replace(found, state="waiting for others")
        return found

    # ---- inside

    def _step(self, writer: InstanceName) -> Any:
        if writer == ALL:
            return self._merge()
        step = super()._step(writer)
        return None if isinstance(step, Apply) else step

    def _present(self) -> set[InstanceName]:
        return set().union(*self._writers.values(), *self._former.values())

    def _merge(self) -> ApplyMerged | None:
        if self._missing or not self._all_positions_received():
            return None
        present = self._present()
        cursors = {
            writer: cursor
            for writer, cursor in self.cursors.items()
            if writer in present or cursor.position < cursor.published
        }
        return merge(cursors) if all(self._is_confirmed(writer, present) for writer in cursors) else None

    def _is_confirmed(self, writer: InstanceName, present: set[InstanceName]) -> bool:
        """Return whether a writer cannot go back any more below where it is, or is not waited for."""
        cursor = self.cursors[writer]
        if not cursor.linked:
            return writer not in present
        sent_before = self._confirmed is not None and writer not in self._confirmed
        return cursor.confirmed and not (sent_before and cursor.reached > self._went_back_to)

    def _drive(self, writer: InstanceName) -> None:
        super()._drive(writer)
        super()._drive(ALL)

    def _rested(self, writer: InstanceName) -> None:
        if writer != ALL:
            super()._drive(ALL)
            return
        for each in list(self.cursors):
            super()._drive(each)

    async def _apply(self, writer: InstanceName, step: Any) -> None:  # noqa: ARG002 (it may be out of date)
        fresh = self._step(writer)  # another step of the stream may have been applied meanwhile
        if isinstance(fresh, ApplyMerged):
            await self._apply_merged(fresh)
        elif isinstance(fresh, Reset):
            self._wait_for_positions(writer, fresh.to)
            others = await self._take_others_back(writer, fresh.to)
            await super()._apply(writer, fresh)
            for each in others:
                super()._drive(each)

    async def _take_others_back(self, writer: InstanceName, to: Token) -> list[InstanceName]:
        """Undo the facts of all other writers above ``to``, too: those of ``writer`` that come again have smaller IDs.

        The others are first.  If the process is killed before ``writer`` is taken back, it still has to be.  A writer
        that is not waited for stays where it is: no process sends what would be undone.
        """
        present = [] if self._undo is None else sorted(self.cursors.keys() & self._present() - {writer})
        others = [each for each in present if self.cursors[each].position > to]
        for each in others:
            await super()._apply(each, self.cursors[each].go_back(to))
        return others

    async def _apply_merged(self, step: ApplyMerged) -> None:
        step.check()  # a transaction that ends between the two facts would lose the second one
        step = self.application.cut(ALL, step)
        if self._first is not None:
            for each, part in step.parts.items():
                self._first(each, part)
        parts = {each: attrs.evolve(part, facts=await self._new_facts(each, part)) for each, part in step.parts.items()}
        facts = next(iter(parts.values())).facts if len(parts) == 1 else self._hide(step.facts)
        step = ApplyMerged(parts, facts)
        await self.application.apply(ALL, step, parts, self._write, partial(self._note_parts, parts))
        for each, part in step.parts.items():
            self.cursors[each].applied(part)
            if self.histories is not None:
                self.histories.applied(each, part)
            if part.upto == part.after:
                self.late[each] += len(part.facts)
        self.applied_rows += sum([len(fact.texts) for fact in step.facts])
        for each in step.parts:
            self._moved(self.name, each, self.cursors[each].position)

    def _wait_for_positions(self, writer: InstanceName, to: Token) -> None:
        """Wait until the writers other than ``writer``, which goes back, have sent a position again."""
        if self._confirmed is not None:
            self._confirmed.add(writer)
            return
        self._confirmed, self._went_back_to = {writer}, to
        start_alone(self._end_wait_for_positions())

    async def _end_wait_for_positions(self) -> None:
        all_linked = False
        while not (all_linked or self._lifetime.ended):
            await self._lifetime.sleep(LOSS_PATIENCE)
            all_linked = all(self.cursors[writer].linked for writer in self._present())
        self._confirmed = None
        if not self._lifetime.ended:
            self.resume()

    def _give_up_missing(self, wait: Deferred[None]) -> None:
        missing = {writer for writer, waited in self._missing.items() if waited is wait}
        if missing and not self._lifetime.ended:
            self.log.warn(
                "{stream} does not wait for {writers}: no connected writer has that name",
                stream=self.name,
                writers=", ".join(sorted(missing)),
            )
            for writer in missing:
                del self._missing[writer]
            for former in self._former.values():
                former.difference_update(missing)
            self.resume()
