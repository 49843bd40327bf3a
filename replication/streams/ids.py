"""The IDs of a stream: reserved from a counter of this process or from a shared sequence, completed in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from replication.streams.pending import PendingIds
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.interfaces import ISequence


class StreamIds:
    """The IDs of one stream, or of several streams that share their IDs.

    ``pending`` holds the IDs that are reserved and not complete.  ``durable`` is the largest ID that may be published:
    a crash would lose larger ones.  ``sequence`` is where several processes allocate their IDs; None: this process
    counts.  ``horizon`` is that of docs/protocol/ids.md F4; it counts as 0 until ``horizon_known``, and is None without
    external writers.
    """

    __slots__ = ("durable", "horizon", "horizon_known", "pending", "sequence")

    def __init__(self, start: Token) -> None:
        self.begin(start, None)

    def begin(self, start: Token, sequence: ISequence | None) -> None:
        """Start over with every ID up to ``start`` settled."""
        self.pending = PendingIds(start)
        self.durable = start
        self.sequence = sequence
        self.horizon: Token | None = None
        self.horizon_known = True  # whether any ID is known to be settled

    @property
    def settled(self) -> Token:
        """The largest ID with no incomplete ID at or below it."""
        settled = Token(self.pending.settled)
        return settled if self.horizon is None else min(settled, self.horizon)

    def begin_with_external_writers(self) -> None:
        """Settle no ID before the first ``raise_horizon``."""
        self.horizon, self.horizon_known = Token(0), False

    def raise_horizon(self, upto: Token) -> None:
        """Note that no external writer can still commit an ID at or below ``upto``."""
        self.horizon, self.horizon_known = max(upto, self.horizon or Token(0)), True
        self.pending.note(upto)

    def within_horizon(self, token: int) -> Token:
        """Return ``token``, or the horizon if that is smaller."""
        return Token(token if self.horizon is None else min(token, self.horizon))

    async def reserve(self, count: int) -> Sequence[Token]:
        """Return ``count`` new IDs, which are open until they are completed.

        During an allocation, no ID settles that the sequence may return (docs/protocol/traps.md 36).
        SequenceRegressedError: the sequence returned a used ID.  StoreError: the database does not answer.
        """
        if self.sequence is None:
            return cast("list[Token]", self.pending.reserve(count))
        floor = self.pending.expect()
        try:
            ids = await self.sequence.allocate(count)
            self.pending.open(floor, ids)
        except BaseException:  # cancelled and closed coroutines, too
            self.pending.abandon(floor)
            raise
        return [Token(each) for each in ids]
