"""IDs from a sequence that others draw from too: the awaiting half of :mod:`replication.streams.pending`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.pending import PendingIds
    from replication.streams.seams import ISequence


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
