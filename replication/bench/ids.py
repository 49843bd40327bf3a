"""IDs reserved and completed per second with 1, 100 or 10,000 outstanding; the settled ID is read each time.

With several outstanding, a random one is completed next.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from replication.bench.series import Stopwatch, rates
from replication.streams.pending import PendingIds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.series import BenchOptions, Sample, Series


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each number of outstanding IDs."""
    pairs = options.size(500_000, 500)
    for outstanding in (1, 100, 10_000):
        yield from rates(f"{outstanding:,} outstanding", "pairs", options, reserve_and_complete, outstanding, pairs)


def reserve_and_complete(outstanding: int, pairs: int) -> Sample:
    """Return the rate of ``pairs`` of calls while ``outstanding`` IDs are open."""
    chance = random.Random(outstanding)  # noqa: S311 (nothing is secret)
    indexes = [chance.randrange(outstanding) for _ in range(pairs)]
    pending = PendingIds(1)
    ids = [pending.reserve() for _ in range(outstanding)]
    reserve, complete = pending.reserve, pending.complete
    watch = Stopwatch()
    for index in indexes:
        complete(ids[index])
        pending.settled  # noqa: B018 (a writer reads it)
        ids[index] = reserve()
    return watch.sample(pairs)
