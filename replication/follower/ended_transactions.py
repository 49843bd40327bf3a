"""Up to which ID all transactions of a writers' database have ended, in a stream without stored positions.

A Synapse sends rows of ``caches`` as soon as they are committed.  Smaller IDs of the same process may be open then.  So
no position shows that a missing ID was rolled back: only the end of every transaction does that could have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

from replication.wire.grammar import Token

if TYPE_CHECKING:
    from replication.streams.interfaces import ISqlExecutor

# The oldest transaction in progress, and the next one that will begin; ``age`` counts up to the latter.
TRANSACTIONS: Final = (
    "SELECT oldest::text::bigint, oldest::text::bigint + age(oldest::xid) "
    "FROM (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS oldest OFFSET 0) AS snapshot"
)


def read_transactions(database: ISqlExecutor) -> tuple[int, int] | None:
    """Return the numbers of the oldest transaction in progress and of the next one; None on SQLite, which has one."""
    if database.dialect != "postgresql":
        return None
    ((oldest, following),) = database.execute(TRANSACTIONS)
    return int(oldest), int(following)


@attrs.define
class EndedTransactions:
    """What was seen at several looks at one stream: ``upto`` is the ID up to which no ID is open."""

    upto: Token = attrs.field(init=False, default=Token(0))
    # Of a look each, the next transaction and the newest ID.
    _marks: list[tuple[int, Token]] = attrs.field(init=False, factory=list)
    _following: int = attrs.field(init=False, default=0)

    def needs_look(self, newest: Token) -> bool:
        """Whether a look may change ``upto``; at rest none does."""
        return bool(self._marks) or newest != self.upto

    def look(self, newest: Token, oldest: int, following: int) -> None:
        """Note the newest ID in the tables, and what ``read_transactions`` returned after that."""
        last = self._marks[-1][1] if self._marks else self.upto
        if newest < last or following < self._following:  # it was restored, or is another server
            self.upto = last = min(self.upto, newest)
            self._marks = []
        self._following = following
        if newest > last:
            self._marks.append((following, newest))
        while self._marks and self._marks[0][0] <= oldest:
            self.upto = self._marks.pop(0)[1]
