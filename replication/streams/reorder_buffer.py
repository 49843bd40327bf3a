"""The reorder buffer: committed facts that wait until all smaller IDs are complete (docs/protocol/ids.md F1)."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

import msgspec

from replication.errors import StreamError
from replication.streams.facts import fact_bytes, is_ascending, tokens_of
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.facts import Fact

MAX_BYTES: Final = 16 * 2**20


class Batch(msgspec.Struct, frozen=True):
    """The facts with ``after < token <= upto``, ascending.

    If ``spilled``, the buffer dropped some of them: ``facts`` is empty, and all are in the store.
    """

    facts: Sequence[Fact]
    after: Token
    upto: Token
    spilled: bool = False


class ReorderBuffer:
    """One writer's committed facts above ``published``, the largest token that was released.

    Facts that wait, because a smaller ID stays open, take at most ``max_bytes`` bytes.  Beyond that all are dropped,
    and the batches that would have them are ``spilled``.  Without ``spills`` none is dropped: ask ``has_room`` first.
    Facts that are added in order and released at once take little time.
    """

    __slots__ = ("_bytes", "_fresh", "_max_bytes", "_spilled_upto", "_spills", "_waiting", "published")

    def __init__(self, published: Token, max_bytes: int = MAX_BYTES, *, spills: bool = True) -> None:
        """Begin with all facts up to ``published`` released."""
        self.published = published
        self._max_bytes = max_bytes
        self._spills = spills
        self._fresh: list[Fact] = []  # added since the last release, in any order
        self._waiting: list[Fact] = []  # a heap
        self._bytes = 0  # the approximate memory of the heap
        self._spilled_upto = published

    def has_room(self, facts: Sequence[Fact], beside: int = 0) -> bool:
        """Return whether ``facts`` may wait, too, and ``beside`` bytes of others."""
        return self._bytes + beside + fact_bytes(facts) <= self._max_bytes

    def add(self, facts: Sequence[Fact]) -> None:
        """Add committed facts, in any order, before their IDs are completed; a ``release`` must follow.

        StreamError if one is not above ``published``: it would never be published.
        """
        if not facts:
            return
        smallest = facts[0].token if len(facts) == 1 else min(tokens_of(facts))
        if smallest <= self.published:
            raise StreamError(f"fact {smallest} comes late: {self.published} is published already")
        self._fresh.extend(facts)

    def spill(self, upto: Token) -> None:
        """Note that facts up to ``upto`` are in the store only, and too many to be added."""
        self._spilled_upto = max(self._spilled_upto, upto)

    def release(self, settled: Token) -> Batch | None:
        """Return the facts above ``published`` up to ``settled``, and move ``published``; None if it does not move."""
        after, fresh = self.published, self._fresh
        spilled = after < self._spilled_upto
        self._fresh = []
        self.published = max(after, settled)
        one = len(fresh) == 1 and after < fresh[0].token <= settled  # the usual case
        if self._waiting or not (one or is_ascending([after, *tokens_of(fresh), Token(settled + 1)])):
            fresh = self._sift(fresh)
        if settled <= after:
            return None
        return Batch((), after, settled, spilled=True) if spilled else Batch(fresh, after, settled)

    def _sift(self, fresh: Sequence[Fact]) -> list[Fact]:
        """Add ``fresh`` to the heap; remove and return, in order, the facts up to ``published``."""
        waiting, settled = self._waiting, self.published
        for fact in fresh:
            heappush(waiting, fact)
        released = []
        while waiting and waiting[0].token <= settled:
            released.append(heappop(waiting))
        self._bytes += fact_bytes(fresh) - fact_bytes(released)
        if self._spills and self._bytes > self._max_bytes:
            self._spilled_upto = max(self._spilled_upto, *tokens_of(waiting))
            waiting.clear()
            self._bytes = 0
        return released
