"""Finds a fact that a restore or a failover has lost, although it kept facts with larger IDs (following.md E7).

The histories alone do not show that.  So where the state of the tables has changed, the facts that a follower has
applied in the range in doubt are counted, and compared with those of the writer.  A copy has its facts.  A function
keeps none: there, the facts of the last seconds are counted as they are applied.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from replication.errors import CatchUpError, FactsGoneError
from replication.streams.cursor import Reset
from replication.streams.history import doubted_since
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime

    from replication.streams.cursor import Apply
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore, Page

SLOT: Final = 0.25  # seconds
SLOTS: Final = 40  # of one writer: ten seconds.  A writer stores its position once a second
PAGE_ROWS: Final = 10_000


class ICountsFacts(Protocol):
    """Counts the facts that a writer has."""

    def __call__(
        self, stream: StreamName, writer: InstanceName, history: History, *, after: Token, upto: Token
    ) -> Coroutine[Deferred[Any], Any, int | None]:
        """Return the number of facts in a source with ``history``; None if some are gone.  CatchUpError: no source."""
        ...


async def count_facts(page_of: Callable[..., Coroutine[Deferred[Any], Any, Page]], *, after: Token, upto: Token) -> int:
    """Return how many facts the pages of a range have; CatchUpError if the source does not have all of the range."""
    count, at = 0, after
    while at < upto:
        page = await page_of(after=at, upto=upto, limit=PAGE_ROWS)
        if page.upto <= at:
            raise CatchUpError(f"the source has nothing after {at}")
        count, at = count + len(page.facts), page.upto
    return count


@attrs.define
class _Slot:
    after: Token
    began: float
    count: int = 0


class RecentFacts:
    """Counts the facts of one writer that were applied lately."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._slots: deque[_Slot] = deque(maxlen=SLOTS)
        self._upto = Token(0)

    def note(self, step: Apply | Reset) -> None:
        """Count the facts of a step that was applied."""
        if isinstance(step, Reset) or step.after != self._upto:
            self._slots.clear()
        if isinstance(step, Reset):
            return
        now = self._clock.seconds()
        if not self._slots or now - self._slots[-1].began >= SLOT:
            self._slots.append(_Slot(step.after, now))
        self._slots[-1].count += len(step.facts)
        self._upto = step.upto

    def above(self, token: Token) -> tuple[Token, int] | None:
        """Return a place at or below ``token``, and the number of facts above it; None if that is not known."""
        count = 0
        for slot in reversed(self._slots):
            count += slot.count
            if slot.after <= token:
                return slot.after, count
        return None


@attrs.define(eq=False, repr=False, kw_only=True)
class Doubts:
    """Compares the facts of one stream with those of its writers after a start of the writer.

    Args:
        stream: its name.
        copies: the store with the copy of the facts; None for a function.
        clock: for the facts of the last seconds.
        count: counts the facts of a writer.

    """

    _stream: StreamName
    _copies: IStreamStore | None
    _clock: IReactorTime
    _count: ICountsFacts
    _recent: dict[InstanceName, RecentFacts] = attrs.field(init=False, factory=dict)

    def note(self, writer: InstanceName, step: Apply | Reset) -> None:
        """Note that a step was applied."""
        if self._copies is None:
            recent = self._recent.get(writer)
            if recent is None:
                recent = self._recent[writer] = RecentFacts(self._clock)
            recent.note(step)

    async def common(
        self, writer: InstanceName, ours: History, theirs: History, *, after: Token, upto: Token
    ) -> Token | None:
        """Return the token up to which facts are certainly the writer's; None if none are in doubt.

        Facts up to ``after`` are applied, and counted; those up to ``upto`` are received.
        """
        since = doubted_since(ours, theirs, upto)
        if since is None or since >= after:
            return since
        applied = await self._applied(writer, since, after)
        if applied is None:
            return after
        place, count = applied
        found = await self._count(self._stream, writer, theirs, after=place, upto=after)
        return after if found is None or found >= count else since

    async def _applied(self, writer: InstanceName, after: Token, upto: Token) -> tuple[Token, int] | None:
        if self._copies is None:
            recent = self._recent.get(writer)
            return None if recent is None else recent.above(after)
        try:
            return after, await count_facts(partial(self._copies.facts, self._stream, writer), after=after, upto=upto)
        except FactsGoneError:
            return None
