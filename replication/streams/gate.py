"""Which IDs of a shared sequence can no longer come, as looks at the database tell it.

A transaction draws an ID at once and commits the row later, or never.  So an ID that is missing now may come yet, and a
position may pass it only when every transaction that can have drawn it has ended (``protocol``, F1 and trap 36).

A look tells what was drawn, and then who is under way: all who can have drawn so much, and have not ended, are among
those.  Once they have ended, that much is complete; if there are none, it is at once.  There are two ways to tell:

- by number: after it has seen what was drawn, a look takes a ``number`` itself, so all who had drawn have smaller ones,
  and have ended when the ``oldest`` number under way, at this look or a later one, is not below it.  (A snapshot's own
  upper end would not do: it is only past the transactions that have ended.)  It costs next to nothing, but a
  transaction must have its number before it draws (``numbered``), and one that has nothing to do with the sequence is
  waited for as well.
- by name: who draws from a sequence holds a lock on it until the transaction ends.  That costs a look at all locks, so
  it is asked for only if numbers do not do: see ``wants_holders``.

By name, nobody is lost who is prepared (``PREPARE TRANSACTION``) while a mark waits, though the name may change then:

- All who can have drawn what a mark is about, and have not ended, are among those whom it saw first: they had the lock.
  Whoever was prepared by then keeps that name to the end.
- A session's transaction keeps its name, which none has again, so it is waited for until a look does not see it.  It
  has ended by then, or it is prepared, and that same look sees it so: a look misses nobody who holds the lock all the
  while, and a lock goes from a session to a prepared transaction in one step.  Which of the prepared ones it is, a look
  does not tell, so all of them are waited for from then on.
- That is as true if there were no looks for long: who was prepared and has ended meanwhile need not be waited for, and
  who is waited for instead costs time only.  A crash gives prepared ones other names, and ``start_over`` comes first.

A mark sees no new sessions, so it takes prepared ones at most as often as it saw sessions at first, and comes to an end
however many are prepared meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from replication.wire.grammar import Token

MARKS: Final = 32  # that wait, each for its own transactions; what comes then waits with the last one
NOBODY: Final[frozenset[Holder]] = frozenset()
PATIENCE: Final = 0.1  # seconds in which transactions that are waited for usually end


@attrs.frozen
class Holder:
    """A transaction that holds a sequence; a prepared one has no ``session``, and may have another name than before."""

    transaction: str
    session: int | None


@attrs.frozen
class Look:
    """What a database says of a sequence.

    ``drawn`` is the last ID that was drawn, and was read first.  Then the look took its ``number``; None if it took
    none, as when nothing was drawn since the last look.  Then it saw that no transaction under way has a number below
    ``oldest``, and whether those who draw are ``numbered``.
    """

    drawn: Token
    oldest: int
    numbered: bool
    number: int | None


@attrs.define
class _Mark:
    """IDs up to ``drawn``, and who must have ended before they are complete."""

    drawn: Token
    number: int | None  # all with smaller ones; None if that does not tell
    since: float
    holders: AbstractSet[Holder] | None = None  # who is left of these; None if nobody asked yet

    def blockers(self, holders: AbstractSet[Holder]) -> AbstractSet[Holder]:
        """Return who is still waited for of those who hold the sequence now."""
        if self.holders is None:
            left = holders
        else:
            left = self.holders & holders
            if any(each.session is not None for each in self.holders - holders):  # each may be prepared now
                left |= {each for each in holders if each.session is None}
        self.holders = left
        return left


class Gate:
    """How far the IDs of one sequence are complete, whoever draws them."""

    def __init__(self) -> None:
        """Begin without knowing anything: whatever was drawn before may be under way."""
        self.complete: Token | None = None  # everything up to it has ended; None until that is known of anything
        self.drawn: Token | None = None  # as the last look has it
        self.blockers: AbstractSet[Holder] = NOBODY  # who is waited for longest, as far as anybody asked
        self._numbered = False  # as the last look has it
        self._marks: deque[_Mark] = deque()

    @property
    def since(self) -> float | None:
        """When what is waited for longest was noted; None if nothing is."""
        return self._marks[0].since if self._marks else None

    def wants_holders(self, now: float) -> bool:
        """Whether it should be asked who holds the sequence, now that the last look was seen."""
        if self.since is None:
            return False
        return not self._numbered or now - self.since >= PATIENCE

    def see(self, look: Look, now: float) -> None:
        """Take the next look, at ``now`` seconds of any clock."""
        self.drawn, self._numbered = look.drawn, look.numbered
        number = look.number if look.numbered else None
        while self._marks and self._marks[-1].drawn > look.drawn:  # a crash took them back, and they come again
            self._marks.pop()
        known = self._marks[-1].drawn if self._marks else self.complete
        if known is None or look.drawn > known:
            if len(self._marks) == MARKS:
                mark = self._marks.pop()
                self._marks.append(_Mark(look.drawn, number, mark.since))
            else:
                self._marks.append(_Mark(look.drawn, number, now))
        self._pass([mark.number is not None and look.oldest >= mark.number for mark in self._marks])

    def see_holders(self, holders: AbstractSet[Holder]) -> None:
        """Learn who held the sequence after the last look."""
        waiting = [mark.blockers(holders) for mark in self._marks]
        self._pass([not blockers for blockers in waiting])
        self.blockers = waiting[-len(self._marks)] if self._marks else NOBODY

    def start_over(self) -> None:
        """Forget who is waited for: a server that crashed gives numbers and IDs again that it had not kept."""
        self._marks.clear()
        self.drawn, self.blockers = None, NOBODY

    def _pass(self, ended: Sequence[bool]) -> None:
        """Pass every mark up to the last one whose transactions have all ended: it has waited for more than others."""
        for _ in range(max((place for place, has in enumerate(ended, 1) if has), default=0)):
            self.complete, self.blockers = self._marks.popleft().drawn, NOBODY
