"""IDs from a sequence that others draw from too: the awaiting half of :mod:`replication.streams.pending`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from replication.streams.pending import PendingIds
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.seams import ISequence

_Writer = TypeVar("_Writer")


class StreamIds(Generic[_Writer]):
    """The IDs of one stream, or of several that share them; the first of ``writers`` is whose they are.

    ``durable`` is how far they may be announced: a crash would take back what is above.  ``reached`` is how far those
    are complete that programs draw which know nothing of us: 0 until that is known, None if there are no such programs.
    """

    def __init__(self, start: Token) -> None:
        """Begin with ``start`` and every ID below it settled."""
        self.writers: list[_Writer] = []
        self.begin(start, None)

    def begin(self, start: Token, sequence: ISequence | None) -> None:
        """Take up where the store says that the streams stand; without a ``sequence`` we count by ourselves."""
        self.pending = PendingIds(start)
        self.durable = start
        self.sequence = sequence
        self.reached: Token | None = None

    @property
    def are_known(self) -> bool:
        """Whether it is known of any ID that it is complete."""
        return self.reached != 0

    def reach(self, upto: Token) -> None:
        """Learn that nobody else's ID at or below ``upto``, or at or below 1, is open any more."""
        self.reached = max(upto, self.reached or Token(1))
        self.pending.note(upto)

    def within_reach(self, place: int) -> Token:
        """Return ``place``, or how far others are if that is less."""
        return Token(place if self.reached is None else min(place, self.reached))


async def draw(pending: PendingIds, sequence: ISequence, count: int) -> Sequence[Token]:
    """Return ``count`` new IDs, open; while they are on their way nothing settles that they might be (trap 36).

    SequenceRegressedError if the sequence repeats itself; whatever else it raises is passed on.  Nothing stays open or
    expected then.
    """
    floor = pending.expect()
    try:
        ids = await sequence.draw(count)
        pending.open(floor, ids)
    except BaseException:  # a cancelled task and a closed coroutine count too
        pending.abandon(floor)
        raise
    return [Token(each) for each in ids]
