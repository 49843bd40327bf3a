"""A follower's position in one writer's facts, and what to do next (docs/protocol/following.md E1 to E4).

::

          applied        ready            gap                     held
    ...───────────┼───────────────┼─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┼───────────────────┤
               position         tail                 gap_upto           published

Facts that are received on the connection raise ``published``, which is *known* on that page.  Without a gap they are
ready to be applied at once.  A POSITION that begins above ``published`` opens a gap, and so does a lack of memory.
Facts that are received after that are held until pages have filled the gap.  A *link* below is any hashable object that
stands for one connection to the writer.

The module has more than 500 lines because all that moves a position is one algorithm.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, Final, cast

import attrs
import msgspec

from replication.errors import CatchUpError, StreamError
from replication.streams.facts import Fact, count_rows, fact_bytes, facts_of_rows, is_ascending, row_bytes, tokens_of
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from replication.streams.interfaces import Page

_MAX_TOKEN: Final = Token(2**63 - 1)


@attrs.frozen
class Apply:
    """Apply ``facts``, which may be empty, and move the position from ``after`` to ``upto``, in one transaction.

    ``resets`` is the number of resets of the writer before this step; only the cursor uses it.  So is ``late_upto``,
    the last token of facts that came late, below the position.
    """

    facts: Sequence[Fact]
    after: Token
    upto: Token
    resets: int = 0
    late_upto: Token = attrs.field(default=Token(0), eq=False)

    def first(self, count: int) -> Apply:
        """Return the step that applies only the first ``count`` facts, at least one."""
        if count >= len(self.facts):
            return self
        facts = self.facts[:count]
        last = facts[-1].token
        if self.upto == self.after:
            return attrs.evolve(self, facts=facts, late_upto=last)
        return attrs.evolve(self, facts=facts, upto=last)


class CatchUp(msgspec.Struct, frozen=True):
    """Fetch a page of the facts with ``after < token <= upto``.

    If ``fresh``, a page that was read earlier must not be used: the writer sends facts out of order, so it may lack
    some.
    """

    after: Token
    upto: Token
    resets: int = 0
    fresh: bool = False


class Reset(msgspec.Struct, frozen=True):
    """Undo what was applied above ``to``, and lower the position to it: the writer was restored or reset."""

    after: Token
    to: Token
    resets: int = 0


class Check(msgspec.Struct, frozen=True):
    """Compare the writer's history with the one that was followed: what was received up to ``upto`` may be lost.

    ``link`` is the number of links before; only the cursor uses it.
    """

    after: Token
    upto: Token
    link: int


class Cursor:
    """What is applied, what can be applied next, and what is missing.

    The caller passes on everything that is received.  It calls ``step``, does one step at a time, and reports it with
    ``applied`` or ``fetched``.  A step that failed is not reported: ``step`` returns it again.

    One link is followed at a time, from its POSITION on; rows of other links are dropped.  After that link is lost, a
    second link to the same writer is followed from its next POSITION on.
    """

    ORDERED_AGAIN: ClassVar = 100  # after so many facts in order, they are taken as they arrive again

    def __init__(
        self,
        position: Token,
        *,
        max_held_bytes: int = 8 * 2**20,
        max_apply_rows: int = 10_000,
        checks_history: bool = False,
    ) -> None:
        """Begin at ``position``, the stored one; 0 if there is none.

        Received facts take at most ``max_held_bytes`` bytes of memory; a fetched page is not counted.  An Apply has at
        most ``max_apply_rows`` rows, except for a single fact with more.  With ``checks_history``, a Check is the first
        step on each link, and the step after a Reset.
        """
        self.position = position  # the applied position
        self.published = position  # the writer's published position, as far as it was received
        self.duplicates = 0  # rows that were received before
        self.dropped = 0  # rows that were received and not kept
        self.held_bytes = 0  # the approximate memory of all rows here: ready, held or of an incomplete fact
        self._max_held_bytes = max_held_bytes
        self._max_apply_rows = max_apply_rows
        self._ready: list[Fact] = []  # all facts in (position, tail]
        self._tail = position
        self._gap_upto = position  # (tail, gap_upto] is to be fetched; equal if there is no gap
        self._held: list[Fact] = []  # all facts in (gap_upto, published]
        self._link: Hashable = None
        self._partial: list[str] = []  # the rows of an incomplete fact on that link
        self._skipping: set[Hashable] = set()  # links in the middle of a fact whose first rows were dropped
        self._jumped_from = position  # no fact was received between this and published
        self._unordered = False  # facts were received out of order, so only pages have them all
        self._ordered = 0  # facts that were received in order since then
        self._late_gap: tuple[Token, Token] | None = None  # a range below the position from which facts may be missing
        self._late: list[Fact] = []  # facts that were fetched from that range and are to be applied
        self._resets = 0
        self._checks_history = checks_history
        self._links = 0
        self._unchecked: Token | None = None  # facts up to here were received on earlier links
        self._reset_to = _MAX_TOKEN  # facts that were applied above this are from before a reset

    @property
    def link(self) -> Hashable:
        """The link that is followed; None if there is none."""
        return self._link

    @property
    def linked(self) -> bool:
        """Whether a link is followed."""
        return self._link is not None

    @property
    def reached(self) -> Token:
        """The token up to which all facts are here, applied or not, and are known to be the writer's."""
        return self._tail if self._unchecked is None else min(self.position, self._tail)

    @property
    def confirmed(self) -> bool:
        """Whether all that is applied is known to be the writer's: there is nothing to compare, nothing to undo."""
        return self._unchecked is None and self.position <= self._reset_to

    @property
    def live(self) -> bool:
        """Whether a link is followed and all published facts are applied."""
        late = bool(self._late) or self._late_gap is not None
        return self.linked and self.position == self.published and self.confirmed and not late

    @property
    def crowded(self) -> bool:
        """Whether reading should pause: facts that are ready take more than half of ``max_held_bytes``.

        It should not during a Check: that waits for an answer behind the facts that are not read yet.
        """
        can_apply = self._unchecked is None and self._tail == self._gap_upto
        return can_apply and 2 * self.held_bytes > self._max_held_bytes

    def position_received(self, link: Hashable, prev: Token, new: Token) -> None:
        """Process a POSITION: IDs up to ``new`` are settled, and there is no fact with ``prev < token <= new``.

        If it is above ``published`` in the middle of a fact, the last row of the fact was too long, and is lost with
        the fact's token (docs/protocol/traps.md 5).
        """
        if new < self.published and self.linked:
            return  # out of date: the link that is followed has sent more
        if link != self._link:
            self._links += 1
            if self._checks_history:
                self._unchecked = max(self.published, self.position, self._unchecked or Token(0))
                if self._reset_to < _MAX_TOKEN:  # the history of this link decides anew
                    self._drop_partial()
                    self._reset_to = _MAX_TOKEN
                    self._rewind(self.position)
                    self._reset_to = _MAX_TOKEN
        if new < self.published:
            self._rewind(new)
        if link != self._link or new > self.published:
            self._drop_partial()
        self._link = link
        if prev > self.published:
            self._open_gap(new)
        elif self._tail < self._gap_upto:
            self.published = new
        else:
            self._tail = self._gap_upto = self.published = new
        self._jumped_from = new

    def rows_received(self, link: Hashable, places: Sequence[Token | None], texts: Sequence[str]) -> None:
        """Process consecutive rows; a place of None means that the next row is of the same fact.

        A fact above ``published`` needs no fetch, whatever IDs lie between: a link is in order, so those have no facts.
        Once a link was out of order, as Synapse's ``backfill`` is (docs/protocol/traps.md 12), its facts are fetched,
        until ORDERED_AGAIN facts were in order.
        """
        if link != self._link:
            self.dropped += len(texts)
            self._skipping.discard(link)
            if places[-1] is None:
                self._skipping.add(link)
        elif self._partial or None in places or link in self._skipping:
            self._add(self._complete(places, texts))
        else:
            self._add(facts_of_rows(cast("Sequence[Token]", places), texts))

    def facts_announced(self, link: Hashable, places: Sequence[Token | None]) -> None:
        """Have facts fetched of which rows were received: others may be lost.  ``places`` as in ``rows_received``."""
        if link == self._link:
            self.settled(max((place for place in places if place is not None), default=Token(0)))

    def row_lost(self, link: Hashable) -> None:
        """Process a row that cannot be read: its fact is missing, and is fetched with the next fact of the link."""
        if link == self._link:
            self._drop_partial()
        self._skipping.add(link)

    def link_lost(self, link: Hashable) -> None:
        """Drop the incomplete fact of a lost link; complete facts are kept."""
        if link == self._link:
            self._drop_partial()
            self._link = None
        self._skipping.discard(link)

    def found_late(self, facts: Sequence[Fact]) -> bool:
        """Take facts up to the position that were never received; they ascend, and none was applied.

        Return whether they will be applied; they are not while earlier ones wait, or a Reset: offer them again.
        """
        busy = self._late or self._late_gap is not None or not self.confirmed
        if busy or not facts or facts[-1].token > self.position:
            return False
        self._late = [*facts]
        return True

    def settled(self, upto: Token) -> bool:
        """Note that IDs up to ``upto`` are settled, as the writer's database has it; return whether that is news.

        Facts that were not received are fetched.  Without a link nothing is noted: the next one begins with a POSITION.
        """
        if not self.linked or upto <= self.published:
            return False
        self.position_received(self._link, upto, upto)
        return True

    def step(self) -> Apply | CatchUp | Check | Reset | None:
        """Return what to do next, or None.

        The step stays the same until it is reported or something is received; an Apply may get more facts.
        """
        if self._unchecked is not None:
            return Check(self.position, self._unchecked, self._links) if self.linked else None
        if self.position > self._reset_to:
            return Reset(self.position, self._reset_to, self._resets)
        if self._late:
            return Apply(self._late, self.position, self.position, self._resets, self._late[-1].token)
        if self._late_gap is not None and self._late_gap[1] <= self.position:
            return CatchUp(*self._late_gap, self._resets, fresh=True)
        if self.position < self._tail:
            rows = [*accumulate(map(len, map(itemgetter(1), self._ready[: self._max_apply_rows])))]
            facts = self._ready[: bisect_right(rows, self._max_apply_rows) or 1]
            upto = self._tail if len(facts) == len(self._ready) else facts[-1].token
            return Apply(facts, self.position, upto, self._resets)
        if self._tail < self._gap_upto:
            return CatchUp(self._tail, self._gap_upto, self._resets, self._unordered)
        return None

    def compare_again(self) -> None:
        """Let the next step be a Check, as on a new link: the history has changed on this one."""
        if self._checks_history and self.linked:
            self._links += 1  # a Check that is being made has the former history
            self._unchecked = max(self.published, self.position, self._unchecked or Token(0))

    def compared(self, step: Check, common: Token, *, both_known: bool) -> bool:
        """Drop everything above ``common``; returns whether nothing is above it, applied or received.

        Then ``checked`` ends the check, once the writer's history is stored.  Else the next step is a Reset if facts
        above ``common`` are applied, and another Check.  If both ends have a history, a lower POSITION undoes nothing.
        """
        if step.link != self._links or not self.linked:
            return False
        if both_known and min(self.published, self._reset_to) < min(common, self.position):
            self._reset_to = _MAX_TOKEN
            self.published = max(self.published, self.position)
            self._jumped_from = max(self._jumped_from, self.position)
            self._advance_tail(max(self._tail, self.position))
        if common < min(step.upto, self._reset_to):
            self.go_back(common)
        elif self.position <= self._reset_to:
            return True
        self._unchecked = None if self.position > self._reset_to else self.position
        return False

    def checked(self, step: Check) -> None:
        """Note that the history is the writer's, up to what is received on this link."""
        if step.link == self._links:
            self._unchecked = None

    def applied(self, step: Apply | Reset) -> None:
        """Note that ``step`` is stored; StreamError if it does not start at the position.

        A committed step from before a reset counts too: its facts are not applied again, unless a later Reset undoes
        them.
        """
        if step.after != self.position:
            raise StreamError(f"a step was applied from {step.after}, but the position is {self.position}")
        if isinstance(step, Apply) and step.upto == step.after:
            self._late = [fact for fact in self._late if fact.token > step.late_upto]
        self.position = step.to if isinstance(step, Reset) else step.upto
        if isinstance(step, Reset) and self._checks_history:
            self._unchecked = self.position
            if step.resets != self._resets:  # it was forgotten while it was applied
                self.go_back(step.to)
        if step.resets == self._resets:
            self._reset_to = _MAX_TOKEN  # no older step can be committed any more
        if self.position <= self._reset_to:
            self._advance_tail(max(self._tail, self.position))

    def fetched(self, step: CatchUp, page: Page) -> None:
        """Take the page of ``step``, unless the writer was reset since; CatchUpError if it is wrong or has nothing."""
        if step.resets != self._resets:
            return
        tokens = tokens_of(page.facts)
        if not is_ascending(tokens):
            raise CatchUpError(f"the facts of a page that should follow {step.after} do not ascend")
        if page.upto <= step.after:
            raise CatchUpError(f"facts after {step.after} are missing, but the source reaches only {page.upto}")
        if self._late_gap is not None and step.upto == self._late_gap[1] and step.after == self._late_gap[0]:
            self._late = [fact for fact in page.facts if step.after < fact.token < step.upto]
            self._late_gap = None if page.upto >= step.upto else (page.upto, step.upto)
            return
        upto = min(page.upto, self._gap_upto)
        facts = page.facts[bisect_right(tokens, self._tail) : bisect_right(tokens, upto)]
        self._ready += facts
        self.held_bytes += fact_bytes(facts)
        self._advance_tail(max(self._tail, upto))

    def _complete(self, places: Sequence[Token | None], texts: Sequence[str]) -> list[Fact]:
        """Return the facts that these rows complete, and keep the rows of a fact that they begin."""
        facts = []
        start = 0
        for end, place in enumerate(places, 1):
            if place is not None:
                facts.append(Fact(place, tuple(texts[start:end])))
                start = end
        if facts and self._link in self._skipping:
            self._skipping.remove(self._link)
            token, rest = facts.pop(0)
            self.dropped += len(rest)
            if token > self.published:
                self._open_gap(token)
        elif facts and self._partial:
            facts[0] = Fact(facts[0].token, (*self._partial, *facts[0].texts))
            self.held_bytes -= row_bytes(self._partial)
            self._partial = []
        if start < len(texts):
            self._partial += texts[start:]
            self.held_bytes += row_bytes(texts[start:])
            if self._link in self._skipping or self.held_bytes > self._max_held_bytes:
                self._drop_partial()
        return facts

    def _add(self, facts: list[Fact]) -> None:
        """Take complete facts from the link that is followed."""
        if not facts:
            return  # all rows are of a fact that is incomplete
        tokens = tokens_of(facts)
        missing = self._late_gap is not None or self._tail < self._gap_upto
        if self._ordered >= self.ORDERED_AGAIN and not missing:
            self._unordered, self._ordered = False, 0  # pages have filled all that was out of order
            self._jumped_from = self.published
        if self._unordered or not is_ascending([self.published, *tokens]):
            if self._unordered or self._is_out_of_order(tokens):
                self._fetch_instead(facts)
                return
            facts = self._only_new(facts)
        if not facts:
            return
        self._jumped_from = facts[-2].token if len(facts) > 1 else self.published
        size = fact_bytes(facts)
        if self.held_bytes + size > self._max_held_bytes:
            self.dropped += count_rows(facts)
            self._open_gap(facts[-1].token)
            return
        self.held_bytes += size
        self.published = facts[-1].token
        if self._tail < self._gap_upto:
            self._held += facts
        else:
            self._ready += facts
            self._tail = self._gap_upto = self.published

    def _only_new(self, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts that were not received before."""
        new = []
        newest = self.published
        for fact in facts:
            if fact.token > newest:
                newest = fact.token
                new.append(fact)
            else:
                self.duplicates += len(fact.texts)
        return new

    def _is_out_of_order(self, tokens: Sequence[Token]) -> bool:
        """Return whether one of these tokens is lower than an earlier one and was not received before."""
        newest, received = self.published, set[Token]()
        for token in tokens:
            late = self.published < token < newest or self._jumped_from < token < self.published
            if late and token not in received:
                return True
            received.add(token)
            newest = max(newest, token)
        return False

    def _fetch_instead(self, facts: Sequence[Fact]) -> None:
        """Drop these facts, and have them fetched with all that may be missing below them."""
        tokens = tokens_of(facts)
        self.dropped += count_rows(facts)
        if not self._unordered and any(self._jumped_from < token < self.published for token in tokens):
            # The newest fact is being applied, or is applied: facts below it are applied after it.
            self._late_gap = self._jumped_from, self.published
        self._ordered = self._ordered + len(facts) if is_ascending([self.published, *tokens]) else 0
        self._unordered = True
        newest = max(tokens)
        if newest > self.published:
            self._open_gap(newest)

    def _open_gap(self, upto: Token) -> None:
        """Have all facts above the tail fetched, up to ``upto``, and drop the held facts, which are among them."""
        self.dropped += count_rows(self._held)
        self.held_bytes -= fact_bytes(self._held)
        self._held = []
        self._gap_upto = self.published = upto

    def _advance_tail(self, tail: Token) -> None:
        """Move the tail; if that closes the gap, the held facts are ready.  Drop what is ready up to the position."""
        self._tail = tail
        if tail >= self._gap_upto:
            self._ready += self._held
            self._held = []
            self._tail = self._gap_upto = self.published
        done = bisect_right(self._ready, self.position, key=itemgetter(0))
        if done == len(self._ready):
            self.held_bytes = fact_bytes(self._held) + row_bytes(self._partial)  # usually of nothing
            self._ready = []
        else:
            self.held_bytes -= fact_bytes(self._ready[:done])
            del self._ready[:done]

    def _rewind(self, new: Token) -> None:
        """Start over at ``new``: the writer was restored or reset to ``new``, so facts above it may be gone.

        Facts that are not applied are dropped, and fetched again.  The next step undoes those above ``new`` that are
        applied, or are being applied now.
        """
        self.dropped += count_rows(self._ready) + count_rows(self._held)
        self.held_bytes = 0
        self._ready = []
        self._held = []
        self._late = []
        self._late_gap = None
        self._resets += 1
        self._reset_to = min(self._reset_to, new)
        self._tail = self._gap_upto = self.published = self._jumped_from = min(self.position, self._reset_to)

    def go_back(self, to: Token) -> Reset:
        """Start over at ``to``, have everything that was published above it fetched, and return the step to there."""
        published = self.published
        self._drop_partial()
        self._rewind(to)
        if published > self.published:
            self._open_gap(published)
        return Reset(self.position, to, self._resets)

    def _drop_partial(self) -> None:
        """Drop the incomplete fact of the link that is followed, and the rest of it when it comes."""
        if self._partial:
            self.dropped += len(self._partial)
            self.held_bytes -= row_bytes(self._partial)
            self._partial = []
            self._skipping.add(self._link)
