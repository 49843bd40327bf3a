"""Which IDs are open, and how far everything before them is settled."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

from replication.errors import SequenceRegressedError, StreamError

if TYPE_CHECKING:
    from collections.abc import Sequence


class PendingIds:
    """One writer's IDs, finishing in any order (``protocol``, F1 and F4).

    IDs come from a counter of our own (``reserve``) or from a sequence that others draw from too (``expect``, then
    ``open`` or ``abandon``; ``note`` says how far others have got).  ``highest`` is the largest ID that was opened or
    noted.  Everything costs O(1), amortised, however many IDs are open and in whichever order they complete.
    """

    __slots__ = ("_floors", "_order", "_unfinished", "highest")

    def __init__(self, settled: int) -> None:
        """Begin with every ID up to ``settled`` completed."""
        self.highest = settled
        self._unfinished: set[int] = set()
        self._order: deque[int] = deque()  # ascending; the first is unfinished, later ones need not be
        self._floors: list[int] = []  # ascending: ``highest`` as each request under way began

    @property
    def settled(self) -> int:
        """The largest ID with nothing of ours unfinished, or being asked for, at or below it; it never goes back."""
        reached = self._order[0] - 1 if self._order else self.highest
        return min(reached, self._floors[0]) if self._floors else reached

    def settled_with(self, ids: Sequence[int]) -> int:
        """Return what ``settled`` would be if these open IDs were complete, too.

        It walks over those only that are dropped once they are.
        """
        done = set(ids)
        reached = next(
            (each - 1 for each in self._order if each in self._unfinished and each not in done), self.highest
        )
        return min(reached, self._floors[0]) if self._floors else reached

    @property
    def open_count(self) -> int:
        """How many IDs are open."""
        return len(self._unfinished)

    def oldest(self) -> int | None:
        """Return the smallest open ID: the one that everything above it waits for."""
        return self._order[0] if self._order else None

    def reserve(self, count: int = 1) -> range:
        """Open the next ``count`` IDs of our own counter."""
        first = self.highest + 1
        self.highest += count
        ids = range(first, self.highest + 1)
        self._order.extend(ids)
        self._unfinished.update(ids)
        return ids

    def expect(self) -> int:
        """Hold a place for IDs that are being asked for; nothing above the floor that is returned settles meanwhile.

        Without it, an ID that the sequence has handed out could be passed before we know of it (trap 36).
        """
        self._floors.append(self.highest)
        return self.highest

    def open(self, floor: int, ids: Sequence[int]) -> None:
        """Swap a held place for the IDs that it was kept for, which other requests may have overtaken.

        SequenceRegressedError if an ID was there before; the place is still held then.
        """
        arrived = sorted(set(ids))
        if len(arrived) < len(ids) or any(each <= floor or each in self._unfinished for each in arrived):
            raise SequenceRegressedError(
                f"the sequence handed out {list(ids)}, but every ID up to {floor} was used before, and others are open:"
                " set it forward, past every ID that is stored"
            )
        self.abandon(floor)
        if arrived:
            self.highest = max(self.highest, arrived[-1])
            self._unfinished.update(arrived)
            while self._order and self._order[-1] > arrived[0]:
                arrived.append(self._order.pop())
            self._order.extend(sorted(arrived))

    def note(self, seen: int) -> None:
        """Learn that the sequence has handed out ``seen`` to somebody else: who has nothing open is as far (F4).

        What is being asked for holds its place: it may be less than ``seen``, if that was drawn meanwhile.
        """
        self.highest = max(self.highest, seen)

    def abandon(self, floor: int) -> None:
        """Give a held place back: the request failed, or its IDs have come."""
        place = bisect_left(self._floors, floor)
        if self._floors[place : place + 1] != [floor]:
            raise StreamError(f"no request for IDs is under way from {floor}")
        del self._floors[place]

    def complete(self, ids: Sequence[int]) -> None:
        """Finish open IDs, committed or rolled back alike; StreamError at the first that is not open."""
        unfinished, order = self._unfinished, self._order
        try:
            for each in ids:
                unfinished.remove(each)
        except KeyError:
            raise StreamError(
                f"IDs {list(ids)} are not all open: each is completed once, by whoever reserved it"
            ) from None
        while order and order[0] not in unfinished:
            order.popleft()
