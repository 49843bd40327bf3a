"""A follower's place in the facts of one writer of one stream: the rules of the protocol's receiving side (E1 to E4).

::

          applied        ready          to be fetched             held
    ...───────────┼───────────────┼─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┼───────────────────┤
               position         tail                 gap_upto           announced

What is heard on the link extends ``announced``.  Without a gap it is ready to be applied at once.  A POSITION that does
not join on, or want of memory, opens a gap; what is heard after that is held until pages have filled the gap.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Final, cast

import attrs

from replication.errors import CatchUpError, StreamError
from replication.streams.facts import Fact, fact_bytes, facts_of_rows, is_ascending, row_bytes, texts_of, tokens_of
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from replication.streams.seams import Page

_NEVER: Final = Token(2**63 - 1)  # the largest token that there can be


@attrs.frozen
class Apply:
    """Hand ``facts`` over, which may be none, and move the position from ``after`` to ``upto``, in one transaction.

    ``epoch`` counts how often the writer had begun anew when the step was asked for; it is the cursor's business.
    """

    facts: Sequence[Fact]
    after: Token
    upto: Token
    epoch: int = 0


@attrs.frozen
class CatchUp:
    """Fetch a page of the facts with ``after < token <= upto``.

    A ``fresh`` one is read now: facts that were told in no order may be there since that were not a moment ago.
    """

    after: Token
    upto: Token
    epoch: int = 0
    fresh: bool = False


@attrs.frozen
class Reset:
    """The writer was restored or reset: undo what was applied above ``to``, and lower the position to it."""

    after: Token
    to: Token
    epoch: int = 0


class Cursor:
    """What has been applied, what may be applied next, and what is missing.

    The caller tells it all that is heard, asks ``step`` what to do, does one thing at a time, and reports it.  A step
    that failed is not reported: it is simply asked for again.

    One link is followed at a time, from a POSITION on, and no other may contradict it.  A caller that loses it and has
    another link to the same writer asks there with REPLICATE.
    """

    __slots__ = (
        "_begun",
        "_epoch",
        "_gap_upto",
        "_held",
        "_late",
        "_late_gap",
        "_leapt_from",
        "_link",
        "_max_apply_rows",
        "_max_held_bytes",
        "_ready",
        "_reset_to",
        "_tail",
        "_torn",
        "_unordered",
        "announced",
        "dropped",
        "duplicates",
        "held_bytes",
        "position",
    )

    def __init__(self, position: Token, *, max_held_bytes: int = 8 * 2**20, max_apply_rows: int = 10_000) -> None:
        """Go on from ``position``, as it was stored; 0 if nothing is known.

        What is heard waits in at most ``max_held_bytes`` of memory; a fetched page comes on top of that.  An Apply has
        at most ``max_apply_rows`` rows, unless it is a single fact.
        """
        self.position = position  # what has been applied
        self.announced = position  # the largest token that the writer is known to have settled
        self.duplicates = 0  # rows that were heard before
        self.dropped = 0  # rows that were heard and not kept
        self.held_bytes = 0  # about what all rows take that wait here
        self._max_held_bytes = max_held_bytes
        self._max_apply_rows = max_apply_rows
        self._ready: list[Fact] = []  # all facts in (position, tail]
        self._tail = position
        self._gap_upto = position  # (tail, gap_upto] is to be fetched; they are equal if there is no gap
        self._held: list[Fact] = []  # all facts in (gap_upto, announced]
        self._link: Hashable = None
        self._begun: list[str] = []  # rows on that link of a fact that is not complete
        self._torn: set[Hashable] = set()  # links in the middle of a fact whose first rows were not kept
        self._leapt_from = position  # nothing was heard between this and announced
        self._unordered = False  # facts were told in no order, so only pages have them all
        self._late_gap: tuple[Token, Token] | None = None  # what may be missing between a fact and the one before it
        self._late: list[Fact] = []  # was fetched from there, and is to be applied below the position
        self._epoch = 0
        self._reset_to = _NEVER  # what is applied above this is from an earlier epoch

    @property
    def linked(self) -> bool:
        """Whether a link is followed."""
        return self._link is not None

    @property
    def reached(self) -> Token:
        """The token up to which all facts are here, be they applied or not."""
        return self._tail

    @property
    def live(self) -> bool:
        """Whether a link is followed and all that was announced has been applied."""
        late = bool(self._late) or self._late_gap is not None
        return self.linked and self.position == self.announced and self.position <= self._reset_to and not late

    @property
    def crowded(self) -> bool:
        """Whether it is time to hear no more for a moment: what is ready takes half of the memory that it may."""
        return self._tail == self._gap_upto and 2 * self.held_bytes > self._max_held_bytes

    def position_heard(self, link: Hashable, prev: Token, new: Token) -> None:
        """Hear that the writer has settled all IDs up to ``new``, and that none in ``(prev, new]`` has a fact.

        In the middle of a fact, one that moves on says that the end of that was lost: a Synapse does not send a row
        that is too long, and its token goes with it (trap 5).
        """
        if new < self.announced:
            if self.linked:
                return  # stale: what we follow has told us more
            self._rewind(new)
        if link != self._link or new > self.announced:
            self._tear()
        self._link = link
        if prev > self.announced:
            self._miss(new)
        elif self._tail < self._gap_upto:
            self.announced = new
        else:
            self._tail = self._gap_upto = self.announced = new
        self._leapt_from = new

    def rows_heard(self, link: Hashable, places: Sequence[Token | None], texts: Sequence[str]) -> None:
        """Hear a run of one row or more; at a place of None, the fact has more rows to come.

        A fact above everything known joins on, whatever IDs lie between: the link is in order, so they have no facts.
        A link that turns out not to be, as a Synapse's in backfill (trap 12), is believed no more: what it tells is
        fetched.
        """
        if link != self._link:
            self.dropped += len(texts)
            self._torn.discard(link)
            if places[-1] is None:
                self._torn.add(link)
        elif self._begun or None in places or link in self._torn:
            self._extend(self._gather(places, texts))
        else:
            self._extend(facts_of_rows(cast("Sequence[Token]", places), texts))

    def link_lost(self, link: Hashable) -> None:
        """Forget the link and the fact that it was in the middle of; whole facts stay true."""
        if link == self._link:
            self._tear()
            self._link = None
        self._torn.discard(link)

    def step(self) -> Apply | CatchUp | Reset | None:
        """Return what to do next: the same until something is reported or heard, but for an Apply that grows."""
        if self.position > self._reset_to:
            return Reset(self.position, self._reset_to, self._epoch)
        if self._late:
            return Apply(self._late, self.position, self.position, self._epoch)
        if self._late_gap is not None and self._late_gap[1] <= self.position:
            return CatchUp(*self._late_gap, self._epoch, fresh=True)
        if self.position < self._tail:
            rows = [*accumulate(map(len, map(itemgetter(1), self._ready[: self._max_apply_rows])))]
            facts = self._ready[: bisect_right(rows, self._max_apply_rows) or 1]
            upto = self._tail if len(facts) == len(self._ready) else facts[-1].token
            return Apply(facts, self.position, upto, self._epoch)
        if self._tail < self._gap_upto:
            return CatchUp(self._tail, self._gap_upto, self._epoch, self._unordered)
        return None

    def applied(self, step: Apply | Reset) -> None:
        """Hear that ``step`` is durable; StreamError if it does not start at the position.

        A step of an earlier epoch counts too if it came through.  Its facts are not applied again, or a Reset undoes
        them.
        """
        if step.after != self.position:
            raise StreamError(f"a step was applied from {step.after}, but the position is {self.position}")
        if isinstance(step, Apply) and step.upto == step.after and step.facts and step.epoch == self._epoch:
            self._late = []
        self.position = step.to if isinstance(step, Reset) else step.upto
        if step.epoch == self._epoch:
            self._reset_to = _NEVER  # one that is older can no longer come through
        if self.position <= self._reset_to:
            done = bisect_right(self._ready, self.position, key=itemgetter(0))
            self.held_bytes -= fact_bytes(self._ready[:done])
            del self._ready[:done]
            self._reach(max(self._tail, self.position))

    def fetched(self, step: CatchUp, page: Page) -> None:
        """Take what is missing from a page that answers ``step``; nothing, if the writer has begun anew meanwhile.

        CatchUpError if the page is out of order or does not reach beyond ``step.after``.
        """
        if step.epoch != self._epoch:
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
        self._reach(max(self._tail, upto))

    def _gather(self, places: Sequence[Token | None], texts: Sequence[str]) -> list[Fact]:
        """Return the facts that these rows of our link complete, and keep the rows of one that they begin."""
        facts = []
        start = 0
        for end, place in enumerate(places, 1):
            if place is not None:
                facts.append(Fact(place, tuple(texts[start:end])))
                start = end
        if facts and self._link in self._torn:
            self._torn.remove(self._link)
            token, rest = facts.pop(0)
            self.dropped += len(rest)
            if token > self.announced:
                self._miss(token)
        elif facts and self._begun:
            facts[0] = Fact(facts[0].token, (*self._begun, *facts[0].texts))
            self.held_bytes -= row_bytes(self._begun)
            self._begun = []
        if start < len(texts):
            self._begun += texts[start:]
            self.held_bytes += row_bytes(texts[start:])
            if self._link in self._torn or self.held_bytes > self._max_held_bytes:
                self._tear()
        return facts

    def _extend(self, facts: list[Fact]) -> None:
        """Take whole facts that our link told us."""
        tokens = tokens_of(facts)
        if self._unordered or not is_ascending([self.announced, *tokens]):
            if self._unordered or self._is_out_of_order(tokens):
                self._distrust(facts)
                return
            facts = self._only_new(facts)
        if not facts:
            return
        self._leapt_from = facts[-2].token if len(facts) > 1 else self.announced
        size = fact_bytes(facts)
        if self.held_bytes + size > self._max_held_bytes:
            self.dropped += len(texts_of(facts))
            self._miss(facts[-1].token)
            return
        self.held_bytes += size
        self.announced = facts[-1].token
        if self._tail < self._gap_upto:
            self._held += facts
        else:
            self._ready += facts
            self._tail = self._gap_upto = self.announced

    def _only_new(self, facts: Sequence[Fact]) -> list[Fact]:
        """Return the facts that were not heard before."""
        new = []
        newest = self.announced
        for fact in facts:
            if fact.token > newest:
                newest = fact.token
                new.append(fact)
            else:
                self.duplicates += len(fact.texts)
        return new

    def _is_out_of_order(self, tokens: Sequence[Token]) -> bool:
        """Whether a token among these comes late: it is lower than one before it, and was never heard."""
        newest, heard = self.announced, set[Token]()
        for token in tokens:
            late = self.announced < token < newest or self._leapt_from < token < self.announced
            if late and token not in heard:
                return True
            heard.add(token)
            newest = max(newest, token)
        return False

    def _distrust(self, facts: Sequence[Fact]) -> None:
        """Leave these facts, and all that may be missing among those before them, to be fetched."""
        tokens = tokens_of(facts)
        self.dropped += len(texts_of(facts))
        if not self._unordered and any(self._leapt_from < token < self.announced for token in tokens):
            # The newest fact is on its way already, or applied: what is missing before it comes after it.
            self._late_gap = self._leapt_from, self.announced
        self._unordered = True
        newest = max(tokens)
        if newest > self.announced:
            self._miss(newest)

    def _miss(self, upto: Token) -> None:
        """Leave all facts above the tail, up to ``upto``, to be fetched; those that were held are among them."""
        self.dropped += len(texts_of(self._held))
        self.held_bytes -= fact_bytes(self._held)
        self._held = []
        self._gap_upto = self.announced = upto

    def _reach(self, tail: Token) -> None:
        """Have everything up to ``tail``; if that closes the gap, what was held behind it is ready."""
        self._tail = tail
        if tail >= self._gap_upto:
            self._ready += self._held
            self._held = []
            self._tail = self._gap_upto = self.announced

    def _rewind(self, new: Token) -> None:
        """Begin anew: the writer was restored or reset, and nobody knows what it was that we heard above ``new``.

        Nothing up to ``new`` is in doubt.  What is already applied above it is undone first, and that may be more than
        we know: a step that is under way.
        """
        self.dropped += len(texts_of(self._ready)) + len(texts_of(self._held))
        self.held_bytes = 0
        self._ready = []
        self._held = []
        self._late = []
        self._late_gap = None
        self._epoch += 1
        self._reset_to = min(self._reset_to, new)
        self._tail = self._gap_upto = self.announced = self._leapt_from = min(self.position, self._reset_to)

    def _tear(self) -> None:
        """Give up the fact that our link is in the middle of: the rest of it cannot be whole."""
        if self._begun:
            self.dropped += len(self._begun)
            self.held_bytes -= row_bytes(self._begun)
            self._begun = []
            self._torn.add(self._link)
