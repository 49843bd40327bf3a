"""Committed facts that wait until every smaller ID has completed."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import attrs

from replication.errors import StreamError
from replication.streams.facts import fact_bytes, is_ascending, tokens_of
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.facts import Fact


@attrs.frozen
class Batch:
    """The facts with ``after < token <= upto``, ascending.

    If it is ``spilled``, some of them had to be forgotten: ``facts`` is empty then, and the store has them all.
    """

    facts: Sequence[Fact]
    after: Token
    upto: Token
    spilled: bool = False


class Settling:
    """One writer's committed facts above ``announced``, the largest token that was released.

    Facts that still wait after a ``release`` because an old ID stays open, and take more than ``max_bytes``, are
    forgotten; the batches that cover them say so.  What is added in order and released at once costs next to nothing.
    """

    __slots__ = ("_bytes", "_fresh", "_max_bytes", "_spilled_upto", "_waiting", "announced")

    def __init__(self, announced: Token, max_bytes: int = 16 * 2**20) -> None:
        """Begin with everything up to ``announced`` released."""
        self.announced = announced
        self._max_bytes = max_bytes
        self._fresh: list[Fact] = []  # added since the last release, in any order
        self._waiting: list[Fact] = []  # a heap
        self._bytes = 0  # that those who wait take
        self._spilled_upto = announced

    def add(self, facts: Sequence[Fact]) -> None:
        """Take durable facts, in any order, before their IDs are completed; a ``release`` must follow.

        StreamError if one is not above ``announced``: its followers would never learn of it.
        """
        if facts and min(tokens_of(facts)) <= self.announced:
            raise StreamError(f"fact {min(tokens_of(facts))} comes late: {self.announced} is announced already")
        self._fresh.extend(facts)

    def release(self, settled: Token) -> Batch | None:
        """Return what lies between ``announced`` and ``settled``, and move ``announced``; None if they are equal."""
        after, fresh = self.announced, self._fresh
        spilled = after < self._spilled_upto
        self._fresh = []
        self.announced = max(after, settled)
        if self._waiting or not is_ascending([after, *tokens_of(fresh), Token(settled + 1)]):
            fresh = self._sift(fresh)
        if settled <= after:
            return None
        return Batch((), after, settled, spilled=True) if spilled else Batch(fresh, after, settled)

    def _sift(self, fresh: Sequence[Fact]) -> list[Fact]:
        """Let ``fresh`` wait with the others, and return in order those that need not wait any longer."""
        waiting, settled = self._waiting, self.announced
        for fact in fresh:
            heappush(waiting, fact)
        released = []
        while waiting and waiting[0].token <= settled:
            released.append(heappop(waiting))
        self._bytes += fact_bytes(fresh) - fact_bytes(released)
        if self._bytes > self._max_bytes:
            self._spilled_upto = max(self._spilled_upto, *tokens_of(waiting))
            waiting.clear()
            self._bytes = 0
        return released
