"""Catch-up of a new worker: over HTTP, from each database, from segments.

Measured from ``start()`` until the last fact is applied: rows decoded by the function, position stored in SQLite.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from replication.bench.cluster import database_kinds
from replication.bench.daemons import (
    STREAM,
    BenchMaster,
    BenchWorker,
    MasterAddress,
    make_worker,
    serve_master,
    short_row,
)
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Stopwatch, rates
from replication.segments.run import ReplayRequest, run_in_process
from replication.spark.job import has_spark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions, Sample, Series

BATCH: Final = 1_000  # facts in one transaction
_POLL_INTERVAL: Final = 0.1  # seconds


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each source with the same facts of one row."""
    rows = options.size(200_000, 2 * BATCH)
    with database_kinds() as (sqlite, *shared):
        history = sqlite.make()
        with ChildProcess(serve_master, history) as master:
            address: MasterAddress = master.call(_write, rows)
            for name, source in (("HTTP", address.url), ("database", history)):
                yield from rates(name, "rows", options, _catch_up_once, address, source, sqlite, rows)
            if has_spark():
                with TemporaryDirectory(prefix="replication-bench-") as folder:
                    _replay(history, folder, rows + 1)
                    yield from rates("segments", "rows", options, _catch_up_once, address, folder, sqlite, rows)
        for kind in shared:
            history = kind.make()
            with ChildProcess(serve_master, history) as master:
                address = master.call(_write, rows)
                yield from rates(kind.name, "rows", options, _catch_up_once, address, history, sqlite, rows)


def _catch_up_once(address: MasterAddress, source: str, kind: DatabaseKind, rows: int) -> Sample:
    """Start a new worker and let it catch up."""
    with ChildProcess(make_worker, address, kind.make(), source) as worker:
        sample: Sample = worker.call(_catch_up, rows)
    if sample.count != rows:
        raise BenchError(f"there are {rows} rows, but the function received {sample.count}")
    return sample


def _replay(history: str, folder: str, upto: int) -> None:
    """Write segments up to an ID, which the master is about to store as its position."""
    deadline = time.monotonic() + PATIENCE
    reached = 0
    while reached < upto:
        if time.monotonic() > deadline:
            raise BenchError(f"the master has stored no position beyond {reached} for {PATIENCE:.0f} s")
        time.sleep(_POLL_INTERVAL)
        reached = max([reached, *[each.upto for each in run_in_process(ReplayRequest(history, folder, [STREAM]))]])


async def _write(master: BenchMaster, rows: int) -> MasterAddress:
    for start in range(0, rows, BATCH):
        await master.writer.append([[short_row(number)] for number in range(start, start + BATCH)])
    return master.address


async def _catch_up(worker: BenchWorker, rows: int) -> Sample:
    watch = Stopwatch()
    await worker.start(rows + 1)
    return watch.sample(sum(worker.taken))
