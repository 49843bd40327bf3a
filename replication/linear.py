"""Following a stream of several writers as one: its facts come in the order of their tokens, whoever wrote them.

A writer that has settled less than the others holds them all up, until it says that it has got further: those who are
idle do.  So whoever is waited for must be heard of first, and the order begins when all are.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred

from replication.follower import ApplyTransaction, StreamFollower
from replication.streams.cursor import Apply, Reset
from replication.streams.linear import ApplyTogether, merge
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    from collections.abc import Hashable

    from replication.session.connection import Rows
    from replication.streams.facts import Fact
    from replication.streams.seams import ITransaction, WriterStatus
    from replication.wire.commands import Position
    from replication.wire.grammar import StreamName, Token

ALL = InstanceName("")  # in whose name the facts of all writers are handed over
PATIENCE = 5.0  # seconds for which we wait for a writer that was there before we began, once all links have spoken


class LinearTransaction(ApplyTransaction):
    """What the application's function gets beside facts of several writers; ``writer`` is empty."""

    def __init__(self, stream: StreamName, step: ApplyTogether, transaction: ITransaction) -> None:
        super().__init__(stream, ALL, transaction)
        self._parts = step.parts

    def writer_of(self, fact: Fact) -> InstanceName:
        """Return who wrote one of the facts."""
        return self._writers[fact.token]

    @cached_property
    def _writers(self) -> dict[Token, InstanceName]:
        return {token: writer for writer, part in self._parts.items() for token, _ in part.facts}


class LinearFollower(StreamFollower):
    """One stream, whose writers draw their IDs from one sequence, followed in that order.

    Each link has one writer of a stream, the one that it named last: if that has another name now, nobody waits for the
    old one.  What a new writer wrote before it was followed may come late, but it comes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._voices: dict[Hashable, InstanceName] = {}
        self._missed: set[InstanceName] = set()  # who was there before, and has not spoken yet
        self._patient = False  # somebody is waiting for those

    async def open(self) -> None:
        """Read the positions that were stored; their writers are waited for."""
        await super().open()
        self._missed = {*(self._positions or ())} - {ALL, *self._voices.values()}

    def position_heard(self, link: Hashable, command: Position) -> None:
        """Take in a POSITION, and whose word the link brings."""
        self._voices[link] = command.instance
        self._missed.discard(command.instance)
        super().position_heard(link, command)

    def rows_heard(self, link: Hashable, rows: Rows) -> bool:
        """Take in a run of RDATA; its link may only wait for us, never for another writer."""
        return super().rows_heard(link, rows) and ALL in self._driving and ALL not in self.errors

    def look_again(self) -> None:
        """Go on if there is anything to do, and do not wait for ever for writers that nobody speaks for any more."""
        super().look_again()
        if self._missed and not self._patient and self._process.all_heard():
            self._patient = True
            napping = Deferred.fromCoroutine(self._process.waits.nap(PATIENCE))
            napping.addCallback(lambda _: self._give_up_missed())

    def status(self, writer: InstanceName) -> WriterStatus:
        """Return how one writer of the stream stands here."""
        found, error = super().status(writer), self.errors.get(ALL)
        if error is not None and found.error is None:
            return attrs.evolve(found, state="stopped", error=error)
        if self.cursors[writer].reached > found.position and ALL not in self._driving:
            return attrs.evolve(found, state="waiting for others")
        return found

    # ---- what is done about it

    def _step(self, writer: InstanceName) -> Any:
        if writer == ALL:
            return self._merge()
        step = super()._step(writer)
        return None if isinstance(step, Apply) else step

    def _merge(self) -> ApplyTogether | None:
        if self._missed or not self._process.all_heard():
            return None
        voices = {*self._voices.values()}
        return merge(
            {
                writer: cursor
                for writer, cursor in self.cursors.items()
                if writer in voices or cursor.position < cursor.announced
            }
        )

    def _drive(self, writer: InstanceName) -> None:
        super()._drive(writer)
        super()._drive(ALL)

    def _rested(self, writer: InstanceName) -> None:
        if writer != ALL:
            super()._drive(ALL)
            return
        for each in list(self.cursors):
            super()._drive(each)

    async def _apply(self, writer: InstanceName, step: Any) -> None:  # noqa: ARG002 (it may be old)
        fresh = self._step(writer)  # another one of the stream may have had its turn before us
        if isinstance(fresh, ApplyTogether):
            await self._apply_together(fresh)
        elif isinstance(fresh, Reset):
            await super()._apply(writer, fresh)

    async def _apply_together(self, step: ApplyTogether) -> None:
        if self._first is not None:
            for part in step.parts.values():
                self._first(part)
        writes = [self._write(each, part) for each, part in step.parts.items()]
        await self._hand_over(step.facts, partial(LinearTransaction, self.name, step), writes)
        for each, part in step.parts.items():
            self.cursors[each].applied(part)
        self.applied_rows += sum([len(fact.texts) for fact in step.facts])
        for each in step.parts:
            self._process.moved(self.name, each, self.cursors[each].position)

    def _give_up_missed(self) -> None:
        if self._missed and not self._process.stopping:
            self.log.warn(
                "{stream} does not wait for {writers}: no writer that we are connected to has that name",
                stream=self.name,
                writers=", ".join(sorted(self._missed)),
            )
            self._missed.clear()
            self.look_again()
