"""Which IDs of a shared sequence can no longer come, as looks at the database tell it.

A transaction draws an ID at once and commits the row later, or never.  So an ID that is missing now may come yet, and a
position may pass it only when every transaction that can have drawn it has ended (``protocol``, F1 and trap 36).

A look tells what was drawn; the look after it, which began later, tells who was under way then: all who had drawn so
much are among those.  Once they have ended, that much is complete.  There are two ways to tell that they have:

- by number: that look takes a ``number`` itself, so all who began before it have smaller ones, and have ended when the
  ``oldest`` number that a later look sees is not below it.  (A snapshot's own upper end would not do: it is only past
  the transactions that have ended.)  It costs next to nothing, but a transaction must have its number before it draws
  (``numbered``), and one that has nothing to do with the sequence is waited for as well.
- by name: who draws from a sequence holds a lock on it until the transaction ends.  That costs a look at all locks, so
  ``holders`` are asked for only if numbers do not do: see ``wants_holders``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

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
    """What a database says of a sequence; it was all read after the look before it had ended.

    ``drawn`` is the last ID that was drawn.  No transaction that is under way has a number below ``oldest``, which was
    read before ``drawn`` and ``holders``.  ``number`` is that of the look; it and ``holders`` are None if nobody asked.
    """

    drawn: Token
    oldest: int
    numbered: bool
    number: int | None = None
    holders: AbstractSet[Holder] | None = None


class _Mark:
    """IDs up to ``drawn``, and who must have ended before they are complete."""

    def __init__(self, drawn: Token, look: Look, now: float) -> None:
        self.since = now
        self.move(drawn, look)

    def move(self, drawn: Token, look: Look) -> None:
        """Wait for what is under way at this look."""
        self.drawn = drawn
        self._number = look.number if look.numbered else None
        self._holders: AbstractSet[Holder] | None = None

    def blockers(self, look: Look) -> AbstractSet[Holder] | None:
        """Return who is still waited for; None if this look cannot tell, but somebody may be."""
        if self._number is not None and look.oldest >= self._number:
            return NOBODY
        if look.holders is None:
            return None
        if self._holders is None:
            self._holders = look.holders
        return frozenset(each for each in look.holders if each in self._holders or each.session is None)


class Gate:
    """How far the IDs of one sequence are complete, whoever draws them."""

    def __init__(self) -> None:
        """Begin without knowing anything: whatever was drawn before may be under way."""
        self.complete: Token | None = None  # everything up to it has ended; None until that is known of anything
        self.drawn = Token(0)  # as the last look has it
        self.numbered = False  # likewise
        self.blockers: AbstractSet[Holder] = NOBODY  # who is waited for longest, as far as anybody asked
        self._marks: deque[_Mark] = deque()
        self._undated: Token | None = None  # what the last look saw: the next one says who was under way then

    @property
    def since(self) -> float | None:
        """When what is waited for longest was noted; None if nothing is."""
        return self._marks[0].since if self._marks else None

    @property
    def moves(self) -> bool:
        """Whether the next look may bring more, even if nobody draws."""
        if self._marks or self._undated is None:
            return bool(self._marks)
        return self.complete is None or self._undated > self.complete

    @property
    def wants_number(self) -> bool:
        """Whether the next look should take a number: it costs one of the server's, so only if somebody has drawn."""
        known = self._marks[-1].drawn if self._marks else self.complete
        return self.numbered and self._undated is not None and (known is None or self._undated > known)

    def wants_holders(self, now: float) -> bool:
        """Whether the next look should ask who holds the sequence."""
        if not self.numbered:
            return self.moves
        return self.since is not None and now - self.since >= PATIENCE

    def see(self, look: Look, now: float) -> None:
        """Take the next look, at ``now`` seconds of any clock."""
        drawn, self._undated = self._undated, look.drawn
        self.drawn, self.numbered = look.drawn, look.numbered
        known = self._marks[-1].drawn if self._marks else self.complete
        if drawn is not None and (known is None or drawn > known):
            if len(self._marks) < MARKS:
                self._marks.append(_Mark(drawn, look, now))
            else:
                self._marks[-1].move(drawn, look)
        passed = None
        for mark in reversed(self._marks):
            blockers = mark.blockers(look)
            if blockers is not None and not blockers:
                passed = mark
                break
            self.blockers = blockers or NOBODY
        while passed is not None and self._marks and self._marks[0].drawn <= passed.drawn:
            self.complete = self._marks.popleft().drawn
        if not self._marks:
            self.blockers = NOBODY
