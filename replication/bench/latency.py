"""Time from completing an ID to ``wait_for`` at a worker in another process, at 200 facts/s, on each database.

It begins when the writer's ``async with`` block ends: the fact is durable and its ID complete.  It ends when
``wait_for`` fires at the worker: its function has run and its position is stored.  Both processes read the machine's
monotonic clock.  p99.9 depends on few facts per round.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from twisted.internet.task import deferLater

from replication.bench.cluster import POSTGRES, database_kinds
from replication.bench.daemons import BenchMaster, BenchWorker, address_of, make_worker, serve_master, short_row
from replication.bench.processes import ChildProcess
from replication.bench.series import Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions

PACE: Final = 200  # facts a second
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure one worker of one writer, on each kind of database."""
    facts = options.size(2_000, 20)
    with database_kinds() as every:
        for kind in every:
            rounds = [_delays(kind, facts) for _ in range(options.rounds)]
            variant = f"{kind.name}, {PACE} facts/s" if kind.name == POSTGRES else f"{PACE} facts/s"
            yield from quantiles(variant, rounds, QUANTILES)


def quantiles(variant: str, rounds: Sequence[Sequence[float]], shares: Sequence[tuple[str, float]]) -> Iterator[Series]:
    """Yield a series for each of ``shares``, from the delays of each round."""
    for name, share in shares:
        values = [sorted(delays)[min(int(len(delays) * share), len(delays) - 1)] for delays in rounds]
        yield Series(variant, name, "s", values)


def _delays(kind: DatabaseKind, facts: int) -> list[float]:
    """Return the time of each fact in seconds."""
    with (
        ChildProcess(serve_master, kind.make()) as master,
        ChildProcess(make_worker, master.call(address_of), kind.make()) as worker,
    ):
        return delays_between(master, write_facts, worker, 1, facts)


def delays_between(
    writer: ChildProcess, write: Callable[..., object], worker: ChildProcess, first: int, facts: int
) -> list[float]:
    """Let ``writer`` write the ``facts`` after ``first``; return the seconds until ``worker`` has applied each."""
    worker.call(BenchWorker.start, first)
    worker.begin(_apply, first, facts)
    written: Sequence[float] = writer.call(write, facts)
    applied: Sequence[float] = worker.result()
    return [there - here for here, there in zip(written, applied, strict=True)]


async def write_facts(master: BenchMaster, facts: int) -> list[float]:
    """Write facts at PACE; return when each was complete."""
    completed = []
    start = time.monotonic()
    for number in range(facts):
        await deferLater(master.reactor, max(0.0, start + number / PACE - time.monotonic()))
        async with master.writer.reserve() as fact:
            await fact.write(short_row(number))
        completed.append(time.monotonic())
    return completed


async def _apply(worker: BenchWorker, first: int, facts: int) -> list[float]:
    applied = []
    for token in range(first + 1, first + 1 + facts):
        await worker.wait_for(token)
        applied.append(time.monotonic())
    return applied
