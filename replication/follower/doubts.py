"""Finds a fact that a restore or a failover has lost, although it kept facts with larger IDs (following.md E7).

The histories alone do not show that.  So where the state of the tables has changed, the facts that a follower has
applied in the range in doubt are counted, and compared with those of the writer.  New rows may be as many as were lost:
so checksums of the IDs are compared, too, and of the rows.  Without a function of ``on_reset``, the stream would stop
because an application has changed its rows: there, rows are not compared.  A copy has its facts.  A function keeps
none: there, the facts of the last seconds are counted as they are applied.  The numbers are stored with the position,
so they outlive the process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from zlib import crc32

import attrs
import msgspec

from replication.errors import CatchUpError, FactsGoneError
from replication.streams.access_tokens import hide_access_tokens
from replication.streams.cursor import Reset
from replication.streams.history import doubted_since
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IReactorTime

    from replication.streams.cursor import Apply
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore, Page

SLOT: Final = 1.5  # seconds
SLOTS: Final = 8  # of one writer: ten seconds, without the newest.  A writer stores its position once a second
PAGE_ROWS: Final = 10_000


class FactCount(NamedTuple):
    """The number of facts in a range, and the checksums of their IDs and rows; None: not known.

    Facts have one checksum in any order, and however they are divided.
    """

    facts: int = 0
    ids: int | None = 0
    rows: int | None = 0

    def plus(self, other: FactCount) -> FactCount:
        """Return the count of two ranges without a common fact."""
        return FactCount(self.facts + other.facts, _sum(self.ids, other.ids), _sum(self.rows, other.rows))

    def matches(self, other: FactCount) -> bool:
        """Return whether both may be of the same facts: all that both know is equal."""
        return all(None in pair or pair[0] == pair[1] for pair in zip(self, other, strict=True))


def count_ids(facts: Sequence[Fact]) -> FactCount:
    """Return the count of facts, without their rows."""
    return FactCount(len(facts), _checksum(crc32(b"%d" % token) for token, _ in facts), None)


def count_with_rows(stream: StreamName, facts: Sequence[Fact]) -> FactCount:
    """Return the count of facts with their rows; a row in which an access token is hidden has the same checksum."""
    shown = hide_access_tokens(stream, facts)
    return count_ids(facts)._replace(rows=_checksum(crc32("\n".join(rows).encode(), at % 2**32) for at, rows in shown))


def _checksum(crcs: Iterable[int]) -> int:
    # A CRC is linear.  Without the squares, the sum could stay the same if two rows exchange their IDs.
    return sum([crc * crc for crc in crcs]) % 2**32


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else (one + other) % 2**32


class ICountsFacts(Protocol):
    """Counts the facts that a writer has."""

    def __call__(
        self, stream: StreamName, writer: InstanceName, history: History, *, after: Token, upto: Token
    ) -> Coroutine[Deferred[Any], Any, FactCount | None]:
        """Return the count of facts in a source with ``history``; None if some are gone.  CatchUpError: no source."""
        ...


async def count_facts(
    page_of: Callable[..., Coroutine[Deferred[Any], Any, Page]],
    stream: StreamName,
    writer: InstanceName,
    *,
    after: Token,
    upto: Token,
) -> FactCount:
    """Return the count of the pages of a range; CatchUpError if the source does not have all of the range."""
    count, at = FactCount(), after
    while at < upto:
        page = await page_of(stream, writer, after=at, upto=upto, limit=PAGE_ROWS)
        if page.upto <= at:
            raise CatchUpError(f"the source has nothing after {at}")
        count, at = count.plus(count_with_rows(stream, page.facts)), page.upto
    return count


class Slot(NamedTuple):
    """The count of facts above ``after`` that were applied, up to the next slot; an older text has no checksum."""

    after: Token
    facts: int
    ids: int | None = None
    rows: int | None = None

    @property
    def counted(self) -> FactCount:
        """The count alone."""
        return FactCount(self.facts, self.ids, self.rows)


class RecentFacts(NamedTuple):
    """How many facts of one writer were applied lately, up to the position ``upto``; the last slot is the newest.

    ``began`` is when the last slot began, in seconds.
    """

    upto: Token
    slots: tuple[Slot, ...] = ()
    began: float = 0.0

    def with_step(
        self, step: Apply | Reset, now: float, count_of: Callable[[Sequence[Fact]], FactCount] = count_ids
    ) -> RecentFacts:
        """Return what is known once a step is applied; facts below the position, which came late, do not count.

        A step without facts begins no slot: the position of a former writer is raised for ever, and the slots stay.
        """
        if isinstance(step, Reset):
            return RecentFacts(step.to, (), now)
        if step.upto == step.after:
            return self
        count, slots = count_of(step.facts), self.slots if step.after == self.upto else ()
        if not slots or (count.facts and now - self.began >= SLOT):
            return RecentFacts(step.upto, (*slots, Slot(step.after, *count))[-SLOTS:], now)
        last = Slot(slots[-1].after, *slots[-1].counted.plus(count))
        return RecentFacts(step.upto, (*slots[:-1], last), self.began)

    def above(self, token: Token) -> tuple[Token, FactCount] | None:
        """Return a place at or below ``token``, and the count of facts above it; None if that is not known."""
        count = FactCount()
        for slot in reversed(self.slots):
            count = count.plus(slot.counted)
            if slot.after <= token:
                return slot.after, count
        return None

    def encode(self) -> str:
        """Return the position and the slots as JSON, ``[upto,[[after,facts,ids,rows],…]]``."""
        return msgspec.json.encode((self.upto, self.slots)).decode()

    @classmethod
    def decode(cls, text: str, now: float) -> RecentFacts | None:
        """Return what ``encode`` has encoded, as if the last slot began now; None if the text has another form."""
        try:
            return cls(*msgspec.json.decode(text, type=tuple[Token, tuple[Slot, ...]]), now)
        except msgspec.MsgspecError:
            return None


_NONE: Final = RecentFacts(Token(0))


@attrs.define(eq=False, repr=False, kw_only=True)
class Doubts:
    """Compares the facts of one stream with those of its writers after a start of the writer.

    Args:
        stream: its name.
        copies: the store with the copy of the facts; None for a function.
        clock: for the facts of the last seconds.
        count: counts the facts of a writer.
        undone: whether a function of ``on_reset`` undoes facts; then the rows that a function has applied are compared,
            and facts that cannot be counted are applied again.

    """

    _stream: StreamName
    _copies: IStreamStore | None
    _clock: IReactorTime
    _count: ICountsFacts
    _undone: bool = False
    _recent: dict[InstanceName, RecentFacts] = attrs.field(init=False, factory=dict)
    # What is noted once the transaction of the step has ended.
    _stored: dict[InstanceName, tuple[Apply | Reset, RecentFacts]] = attrs.field(init=False, factory=dict)

    def resume(
        self, stored: Mapping[InstanceName, str], positions: Mapping[InstanceName, Token]
    ) -> Sequence[InstanceName]:
        """Go on from stored texts; one that belongs to another position is ignored.

        Return the writers whose position is not that of their text: an older program has moved it.
        """
        moved = []
        for writer, text in stored.items():
            recent = RecentFacts.decode(text, self._clock.seconds())
            if recent is not None and recent.upto == positions.get(writer):
                self._recent[writer] = recent
            elif recent is not None and writer in positions:
                moved.append(writer)
        return moved

    def after(self, writer: InstanceName, step: Apply | Reset) -> str | None:
        """Return the text that is stored with a step; None for a copy, or if the position stays."""
        if self._copies is not None or (not isinstance(step, Reset) and step.upto == step.after):
            return None
        recent = self._with_step(writer, step)
        self._stored[writer] = step, recent
        return recent.encode()

    def note(self, writer: InstanceName, step: Apply | Reset) -> None:
        """Note that a step was applied."""
        if self._copies is None:
            stored, recent = self._stored.pop(writer, (None, None))
            self._recent[writer] = recent if recent is not None and stored is step else self._with_step(writer, step)

    async def common(
        self, writer: InstanceName, ours: History, theirs: History, *, after: Token, upto: Token
    ) -> Token | None:
        """Return the token up to which facts are certainly the writer's; None if none are in doubt.

        Facts up to ``after`` are applied, and counted; those up to ``upto`` are received.
        """
        # The state of an application's table does not show that new rows have replaced lost ones.  So facts are counted
        # at each start.  A function without on_reset would stop then whenever the application has deleted rows.
        can_go_back = self._copies is not None or self._undone
        since = doubted_since(ours, theirs, upto, at_each_start=can_go_back)
        if since is None or since >= after:
            return since
        applied = await self._applied(writer, since, after)
        if applied is None and not self._undone:
            return after
        place, count = applied or (since, None)
        found = await self._count(self._stream, writer, theirs, after=place, upto=after)
        return after if found is None or (count is not None and found.matches(count)) else since

    async def _applied(self, writer: InstanceName, after: Token, upto: Token) -> tuple[Token, FactCount] | None:
        if self._copies is None:
            recent = self._recent.get(writer)
            return None if recent is None else recent.above(after)
        try:
            return after, await count_facts(self._copies.facts, self._stream, writer, after=after, upto=upto)
        except FactsGoneError:
            return None

    def _with_step(self, writer: InstanceName, step: Apply | Reset) -> RecentFacts:
        count_of = partial(count_with_rows, self._stream) if self._undone else count_ids
        return self._recent.get(writer, _NONE).with_step(step, self._clock.seconds(), count_of)
