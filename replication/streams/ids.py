"""The IDs of a stream: reserved from a counter of this process or from a shared sequence, completed in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from replication.errors import SequenceRegressedError, StoreError
from replication.streams.pending import PendingIds, regressed
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.interfaces import ISequence
    from replication.wire.grammar import StreamName

LARGEST: Final = 2**63 - 1


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

    @property
    def allocated_in_transactions(self) -> bool:
        """Whether the transaction that stores a fact may allocate its ID.

        Not beside external writers: their horizon passes IDs of a transaction that has written nothing yet.
        """
        return self.sequence is not None and self.horizon is None

    async def reserve(self, count: int) -> Sequence[Token]:
        """Return ``count`` new IDs, which are open until they are completed.

        During an allocation, no ID settles that the sequence may return (docs/protocol/traps.md 36).
        SequenceRegressedError: the sequence returned a used ID.  StoreError: the database does not answer, or too few
        IDs are left.
        """
        if self.sequence is None:
            if self.pending.highest > LARGEST - count:
                raise StoreError(
                    f"too few IDs are left: {self.pending.highest} is used, and the largest is {LARGEST}; "
                    "delete the row with that ID, and restart this process; if the row was published, "
                    "restore a backup from before it"
                )
            return cast("list[Token]", self.pending.reserve(count))
        floor = self.pending.expect()
        try:
            ids = await self.sequence.allocate(count)
            self.pending.open(floor, ids)
        except BaseException:  # cancelled and closed coroutines, too
            self.pending.abandon(floor)
            raise
        return [Token(each) for each in ids]


class Allocation:
    """An ID that is allocated in the transaction that stores its fact; an IAllocation.

    From ``expect`` to ``end``, no ID settles that the sequence may return (docs/protocol/traps.md 36).  ``token`` is
    None until the ID is there.
    """

    def __init__(self, pending: PendingIds, stream: StreamName) -> None:
        self.stream = stream
        self.token: Token | None = None
        self._pending = pending
        self._floor: int | None = None

    def expect(self) -> None:
        """Note that the transaction begins."""
        self._floor = self._pending.expect()

    def allocated(self, id_: int) -> None:
        """Take the ID; SequenceRegressedError if it was used before ``expect``."""
        floor = self._floor or 0
        if id_ <= floor:
            raise regressed([id_], floor)
        self.token = Token(id_)

    def place(self) -> tuple[Token, Token]:
        """Return the ID, and the position that its transaction stores: 0 for none."""
        assert self.token is not None  # noqa: S101 (the store calls a function after ``allocated`` only)
        return self.token, Token(0)

    def end(self) -> Sequence[Token]:
        """Note that the transaction has ended, and return its ID, which is open now; nothing if it has none."""
        if self._floor is None:
            return []
        ids = [] if self.token is None else [self.token]
        try:
            self._pending.open(self._floor, ids)
        except SequenceRegressedError:
            self._pending.abandon(self._floor)
            raise
        return ids
