"""From ``append`` to the function of a worker, with rows of 50 bytes to 64 KiB, and with 1 to 16 writers of one stream.

The time ends when the worker's position of the last fact is durable.  The CPU time is that of all writers and the
worker.  A row that is longer than a line of the wire is fetched over HTTP.  Each writer is a process of its own.  The
writers divide the facts of a round, so their number does not change the number of facts.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from replication.bench.cluster import POSTGRES
from replication.bench.daemons import (
    STREAM,
    BenchMaster,
    BenchWorker,
    address_of,
    cpu_time,
    make_worker,
    serve_master,
)
from replication.bench.processes import PATIENCE, ChildProcess
from replication.bench.series import Sample, Series, Size, Stopwatch, rates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions

LENGTHS: Final = 50, 500, 4_096, 16_000, 65_536  # bytes of a row
WRITERS: Final = 1, 2, 4, 8, 16
BATCH: Final = 1_000  # facts in one append, if their rows have not more than BLOCK bytes
BLOCK: Final = 2**20


def measure(kind: DatabaseKind, options: BenchOptions) -> Iterator[Series]:
    """Measure rows of each length on SQLite, and each number of writers on PostgreSQL (SQLite has one)."""
    for length in () if kind.name == POSTGRES else (65_536,) if options.quick else LENGTHS:
        variant = Size(length, "bytes a row", kind.name)
        facts = options.size(min(200_000, 2**27 // length), 20)
        samples = [_follow_once(kind, 1, facts, length) for _ in range(options.rounds)]
        walls, cpus = [each.wall for each in samples], [each.cpu for each in samples]
        for metric, seconds in (("", walls), (" per CPU second", cpus)):
            yield Series(variant, f"facts{metric}", "facts/s", [facts / each for each in seconds])
            yield Series(variant, f"bytes{metric}", "bytes/s", [facts * length / each for each in seconds])
    for writers in () if kind.name != POSTGRES else (2,) if options.quick else WRITERS:
        variant = Size(writers, "writers", kind.name)
        facts = options.size(160_000, 100) // writers
        yield from rates(variant, "facts", options, _follow_once, kind, writers, facts, 50)


def _follow_once(kind: DatabaseKind, writers: int, facts: int, length: int) -> Sample:
    """Let each writer append ``facts`` facts, and return the time until a worker has applied all."""
    database = kind.make()
    with ExitStack() as stack:
        names = [f"writer{number}" for number in range(writers)]
        masters = [stack.enter_context(ChildProcess(serve_master, database, name)) for name in names]
        first, *others = [each.call(address_of) for each in masters]
        worker = stack.enter_context(ChildProcess(make_worker, first, kind.make(), None, others))
        worker.call(_start)
        everyone = [*masters, worker]
        before = sum(each.call(cpu_time) for each in everyone)
        watch = Stopwatch()
        for each in masters:
            each.begin(append, facts, length)
        last = {name: each.result() for name, each in zip(names, masters, strict=True)}
        worker.call(_wait, last)
        wall = watch.sample(1).wall
        return Sample(writers * facts, wall, sum(each.call(cpu_time) for each in everyone) - before)


async def append(master: BenchMaster, facts: int, length: int) -> int:
    """Append facts in batches, and return the last ID."""
    row = ["x" * (length - len('[""]'))]
    batch = max(1, min(BATCH, BLOCK // length))
    last = 0
    for start in range(0, facts, batch):
        *_, last = await master.writer.append([[row]] * min(batch, facts - start))
    return last


async def _start(worker: BenchWorker) -> None:
    await worker.worker.start()


async def _wait(worker: BenchWorker, last: Mapping[str, int]) -> None:
    for name, token in last.items():
        await worker.worker.wait_for(STREAM, name, token, timeout=PATIENCE)
