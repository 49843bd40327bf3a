"""Open stream IDs, and the settled ID below them (docs/protocol/ids.md F1, F4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import filterfalse
from typing import TYPE_CHECKING

from replication.errors import SequenceRegressedError, StreamError

if TYPE_CHECKING:
    from collections.abc import Sequence


def regressed(ids: Sequence[int], floor: int) -> SequenceRegressedError:
    """Return the error for IDs of a sequence of which one was used before."""
    return SequenceRegressedError(
        f"the sequence returned {list(ids)}, but every ID up to {floor} was used before, and others are open:"
        " set it forward, past every ID that is stored",
        ids=ids,
        used_upto=floor,
    )


class PendingIds:
    """One writer's stream IDs, which complete in any order.

    IDs come from this object's counter (``reserve``), or from a shared sequence (``expect``, then ``open`` or
    ``abandon``; ``note`` for IDs of other processes).  ``highest`` is the largest ID that was opened or noted.  Every
    operation takes O(1) amortised time, for any number of open IDs and any order of completion.
    """

    __slots__ = ("_floors", "_open", "_order", "highest")

    def __init__(self, settled: int) -> None:
        """Begin with every ID up to ``settled`` complete."""
        self.highest = settled
        self._open: set[int] = set()
        self._order: deque[int] = deque()  # ascending; the first is open, later ones may be complete
        self._floors: list[int] = []  # ascending: ``highest`` when each request for IDs began

    @property
    def settled(self) -> int:
        """The largest ID up to which this writer has no open ID, and is allocating none; it never decreases."""
        reached = self._order[0] - 1 if self._order else self.highest
        return min(reached, self._floors[0]) if self._floors else reached

    def settled_with(self, ids: Sequence[int]) -> int:
        """Return what ``settled`` would be if these open IDs were complete too."""
        if len(ids) == len(self._open):  # no other ID is open: a million need no set
            reached = self.highest
        else:
            left = filterfalse(set(ids).__contains__, filter(self._open.__contains__, self._order))
            reached = next(left, self.highest + 1) - 1
        return min(reached, self._floors[0]) if self._floors else reached

    @property
    def open_count(self) -> int:
        """The number of open IDs, and of requests for IDs in progress."""
        return len(self._open) + len(self._floors)

    def oldest(self) -> int | None:
        """Return the smallest open ID: all larger ones wait for it; None if no ID is open."""
        return self._order[0] if self._order else None

    def reserve(self, count: int = 1) -> list[int]:
        """Open the next ``count`` IDs of the counter, and return them."""
        first = self.highest + 1
        if count == 1:  # the usual case, in half the time
            self.highest = first
            self._order.append(first)
            self._open.add(first)
            return [first]
        self.highest += count
        ids = [*range(first, self.highest + 1)]  # a million numbers are made once, and shared
        self._order.extend(ids)
        self._open.update(ids)
        return ids

    def expect(self) -> int:
        """Begin a request for IDs, and return its floor: no ID above it settles until the request ends.

        Otherwise an ID that is allocated and not open yet could settle (docs/protocol/traps.md 36).
        """
        self._floors.append(self.highest)
        return self.highest

    def open(self, floor: int, ids: Sequence[int]) -> None:
        """End the request with that floor, and open the IDs that it returned; requests may end in any order.

        SequenceRegressedError if an ID was used before; the request has not ended then.
        """
        arrived = sorted(set(ids))
        if len(arrived) < len(ids) or any(each <= floor or each in self._open for each in arrived):
            raise regressed(ids, floor)
        self.abandon(floor)
        if arrived:
            self.highest = max(self.highest, arrived[-1])
            self._open.update(arrived)
            while self._order and self._order[-1] > arrived[0]:
                arrived.append(self._order.pop())
            self._order.extend(sorted(arrived))

    def note(self, seen: int) -> None:
        """Note that another process has allocated ``seen``: without open IDs, this writer is settled up to it.

        A request in progress keeps its floor, because it may bring an ID below ``seen`` (docs/protocol/ids.md F4).
        """
        self.highest = max(self.highest, seen)

    def abandon(self, floor: int) -> None:
        """End the request with that floor without opening IDs."""
        place = bisect_left(self._floors, floor)
        if self._floors[place : place + 1] != [floor]:
            raise StreamError(f"no request for IDs has the floor {floor}")
        del self._floors[place]

    def complete(self, ids: Sequence[int]) -> None:
        """Complete open IDs, committed or rolled back; StreamError if one is not open."""
        open_ids, order = self._open, self._order
        left = len(open_ids) - len(ids)
        if len(ids) == 1:  # the usual case, in half the time
            open_ids.discard(ids[0])
        else:
            open_ids.difference_update(ids)
        if len(open_ids) != left:
            raise StreamError(f"IDs {list(ids)} are not all open: each is completed once")
        if not open_ids:
            order.clear()
        while order and order[0] not in open_ids:
            order.popleft()
