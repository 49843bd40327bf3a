"""IDs reserved and completed per second, while 1, 100 or 10,000 are outstanding; the settled ID is asked for each time.

With several outstanding, any of them is completed next, whichever chance picks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from replication.bench.series import Stopwatch, rates
from replication.streams.pending import PendingIds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.series import Effort, Lap, Series


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each number of outstanding IDs."""
    pairs = effort.size(500_000, 500)
    for outstanding in (1, 100, 10_000):
        laps = [_churn(outstanding, pairs) for _ in range(effort.rounds)]
        yield from rates(f"{outstanding:,} outstanding", "pairs", laps)


def _churn(outstanding: int, pairs: int) -> Lap:
    chance = random.Random(outstanding)  # noqa: S311 (nothing is secret)
    victims = [chance.randrange(outstanding) for _ in range(pairs)]
    pending = PendingIds(1)
    ids = [pending.reserve() for _ in range(outstanding)]
    reserve, complete = pending.reserve, pending.complete
    watch = Stopwatch.start()
    for victim in victims:
        complete(ids[victim])
        pending.settled  # noqa: B018 (a writer asks for it)
        ids[victim] = reserve()
    return watch.lap(pairs)
