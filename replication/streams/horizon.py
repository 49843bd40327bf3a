"""The horizon of a sequence that any transaction may allocate from: up to which ID all are settled.

A transaction allocates an ID at once and commits its row later, or never.  So a missing ID may still be committed.  A
position may pass it only when every transaction that may have allocated it has ended (docs/protocol/ids.md F1 and F4,
docs/protocol/traps.md 36).

A poll reads the sequence's last value V first, and transactions in progress afterwards.  A transaction that has
allocated an ID up to V and has not ended is among those.  When all of those have ended, V is settled.  There are three
rules:

1. By transaction ID.

   - After reading V, the poll assigns a transaction ID X to itself.  Transactions that allocated before have smaller
     transaction IDs, if each assigns its transaction ID before it allocates (``assigned_first``).
   - V is settled when the oldest transaction ID in progress, at this poll or a later one, is not below X.
   - The upper end of the poll's snapshot cannot replace X: a transaction in progress may have a larger ID.
   - The rule takes little time.  It also waits for transactions that have not used the sequence.

2. By lock.

   - A transaction that allocates holds a lock on the sequence until it ends, also if a savepoint is rolled back.
   - V is settled when all lock holders that were seen after V was read have ended.
   - The rule reads all locks of the server.  So it is used only where rule 1 does not work, or after 0.1 s
     (``wants_holders``).

3. By row.

   - An ID is complete if a snapshot has a committed row of it, provided that all rows of an ID are written in one
     transaction.
   - The IDs that directly follow the settled ones and have committed rows in one snapshot are settled, whatever
     transactions are in progress.  The first ID without a row ends them, because it may still be committed.
   - The snapshot is taken after V was read.  IDs above V do not count: they were allocated
     later, or not from the sequence.
   - The rule needs one more query, so it is used only when an ID waits since an earlier poll (``wants_committed``).

Rule 2 misses no transaction that becomes a prepared one (``PREPARE TRANSACTION``) while it is waited for, though its
name may change then:

1. All transactions that may have allocated up to V and have not ended were lock holders at the first poll of the locks.
   A transaction that was prepared by then keeps its name.
2. A transaction in a session has a name that is not used again.  It is waited for until a poll does not see that name.
3. By then it has ended, or it is prepared and the same poll sees it as prepared.  The poll cannot miss it, because a
   lock moves from the session to the prepared transaction in one step.
4. The poll does not show which prepared transaction it has become.  So from then on, all prepared transactions of that
   poll are waited for.
5. This also holds after a long time without polls.  A prepared transaction that has ended meanwhile need not be waited
   for.  To wait for another one in its place only takes longer.
6. A crash renames prepared transactions; ``reset`` comes before the next poll.
7. New sessions are not waited for.  So step 4 happens at most once for each session of the first poll.  The wait ends,
   however many transactions are prepared meanwhile.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from replication.wire.grammar import Token

WAITS: Final = 32  # at most; a further value joins the last one
NO_HOLDERS: Final[frozenset[Holder]] = frozenset()
HOLDERS_AFTER: Final = 0.1  # seconds after which the locks are read; most transactions end before


class Holder(msgspec.Struct, frozen=True):
    """A transaction that holds the lock on a sequence.

    ``session`` is the process ID of its session.  A prepared transaction has none, and its name may have changed.
    """

    transaction: str
    session: int | None


class SequenceSnapshot(msgspec.Struct, frozen=True):
    """What one poll read about a sequence, in this order.

    ``last_value`` is the last allocated ID.  ``transaction_id`` is that of the poll itself; None if it assigned none,
    as when ``last_value`` has not changed since the last poll.  ``oldest`` is the oldest transaction ID in progress.
    ``assigned_first``: transactions have a transaction ID before they allocate.
    """

    last_value: Token
    oldest: int
    assigned_first: bool
    transaction_id: int | None


@attrs.define
class _Wait:
    """IDs up to ``last_value``, and the transactions that must end before these are settled."""

    last_value: Token
    transaction_id: int | None  # all with smaller IDs must end; None where rule 1 does not work
    since: float
    holders: AbstractSet[Holder] | None = None  # those that are left; None before the first poll of the locks

    def update(self, holders: AbstractSet[Holder]) -> AbstractSet[Holder]:
        """Return which of the present lock ``holders`` are waited for."""
        if self.holders is None:
            left = holders
        else:
            left = self.holders & holders
            if any(each.session is not None for each in self.holders - holders):  # it may be prepared now
                left |= {each for each in holders if each.session is None}
        self.holders = left
        return left


class SequenceHorizon:
    """Up to which ID a sequence is settled.

    ``settled`` is that ID; None until one is known.  ``last_value`` is the last allocated ID at the last poll.
    ``blockers`` are the lock holders that the oldest wait is for, as far as the locks were read.
    """

    def __init__(self) -> None:
        self.settled: Token | None = None
        self.last_value: Token | None = None
        self.blockers: AbstractSet[Holder] = NO_HOLDERS
        self._assigned_first = False
        self._waits: deque[_Wait] = deque()

    @property
    def since(self) -> float | None:
        """The time of the oldest wait; None if every ID is settled."""
        return self._waits[0].since if self._waits else None

    def wants_holders(self, now: float) -> bool:
        """Whether the locks should be read after this poll."""
        if self.since is None:
            return False
        return not self._assigned_first or now - self.since >= HOLDERS_AFTER

    def wants_committed(self, now: float) -> bool:
        """Whether committed rows should be read after this poll."""
        return self.settled is not None and self.since is not None and self.since < now

    def update(self, snapshot: SequenceSnapshot, now: float) -> None:
        """Apply rule 1 to a poll; ``now`` is in seconds of any clock."""
        self.last_value, self._assigned_first = snapshot.last_value, snapshot.assigned_first
        transaction_id = snapshot.transaction_id if snapshot.assigned_first else None
        # A crash has taken these IDs back, and they will be allocated again.
        while self._waits and self._waits[-1].last_value > snapshot.last_value:
            self._waits.pop()
        known = self._waits[-1].last_value if self._waits else self.settled
        if known is None or snapshot.last_value > known:
            since = self._waits.pop().since if len(self._waits) == WAITS else now
            self._waits.append(_Wait(snapshot.last_value, transaction_id, since))
        self._settle(
            [each.transaction_id is not None and snapshot.oldest >= each.transaction_id for each in self._waits]
        )

    def update_holders(self, holders: AbstractSet[Holder]) -> None:
        """Apply rule 2; ``holders`` held the lock on the sequence after the last poll."""
        left = [wait.update(holders) for wait in self._waits]
        self._settle([not blockers for blockers in left])
        self.blockers = left[-len(self._waits)] if self._waits else NO_HOLDERS

    def update_committed(self, upto: Token) -> None:
        """Apply rule 3; the IDs above ``settled`` up to ``upto`` had committed rows in a snapshot after the poll."""
        if self.settled is not None and self.last_value is not None:
            self.settled = max(self.settled, min(upto, self.last_value))
            while self._waits and self._waits[0].last_value <= self.settled:
                self._waits.popleft()
                self.blockers = NO_HOLDERS

    def reset(self) -> None:
        """Drop all waits: a server that crashed may assign transaction IDs and stream IDs again."""
        self._waits.clear()
        self.last_value, self.blockers = None, NO_HOLDERS

    def _settle(self, ended: Sequence[bool]) -> None:
        """End the waits up to the last one whose transactions have ended; it has waited for those before it, too."""
        for _ in range(max((place for place, has in enumerate(ended, 1) if has), default=0)):
            self.settled, self.blockers = self._waits.popleft().last_value, NO_HOLDERS
