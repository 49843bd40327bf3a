"""A master's store to the function of a worker that has nothing yet, over HTTP, from either database, from segments.

From ``start()`` to the moment when the last fact is applied: its rows decoded by the function, the position in SQLite.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from replication.bench.children import PATIENCE, BenchError, Child, hear
from replication.bench.daemons import Address, Wiring, make_worker, serve_master
from replication.bench.databases import kinds
from replication.bench.rows import STREAM, WRITER, short_row
from replication.bench.series import Stopwatch, rates
from replication.replay.job import has_spark
from replication.replay.run import Request, run_here

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from replication.bench.databases import Kind
    from replication.bench.series import Effort, Lap, Series

BATCH: Final = 1_000  # facts in one transaction of the history
_LOOK_EVERY: Final = 0.1  # seconds


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each source, with one history, a row a fact."""
    rows = effort.size(200_000, 2 * BATCH)
    with kinds() as (sqlite, *shared):
        history = sqlite.make()
        with Child(_write, history, rows) as master:
            address: Address = master.hear()
            for name, source in (("HTTP", address.url), ("database", history)):
                yield from rates(name, "rows", _laps(address, source, sqlite, rows, effort))
            if has_spark():
                with TemporaryDirectory(prefix="replication-bench-") as folder:
                    _replay(history, folder, rows + 1)
                    yield from rates("segments", "rows", _laps(address, folder, sqlite, rows, effort))
        for kind in shared:
            history = kind.make()
            with Child(_write, history, rows) as master:
                address = master.hear()
                yield from rates(kind.name, "rows", _laps(address, history, sqlite, rows, effort))


def _laps(address: Address, source: str, place: Kind, rows: int, effort: Effort) -> list[Lap]:
    """Let a fresh worker catch up, once a round."""
    laps = []
    for _ in range(effort.rounds):
        with Child(_catch_up, Wiring(address.endpoint, source, place.make()), rows) as worker:
            lap: Lap = worker.hear()
        if lap.count != rows:
            raise BenchError(f"there are {rows} rows, {lap.count} came to the function")
        laps.append(lap)
    return laps


def _replay(history: str, folder: str, upto: int) -> None:
    """Write segments up to an ID, which the master stores as its position soon."""
    deadline = time.monotonic() + PATIENCE
    reached = 0
    while reached < upto:
        if time.monotonic() > deadline:
            raise BenchError(f"the master has stored no position beyond {reached} for {PATIENCE:.0f} s")
        time.sleep(_LOOK_EVERY)
        reached = max([reached, *[each.upto for each in run_here(Request(history, folder, [STREAM]))]])


async def _write(reactor: Any, pipe: Connection[Any, Any], database: str, rows: int) -> None:
    master, address = await serve_master(reactor, database)
    for start in range(0, rows, BATCH):
        await master.stream(STREAM).append([[short_row(number)] for number in range(start, start + BATCH)])
    pipe.send(address)
    await hear(reactor, pipe)  # until we are ended


async def _catch_up(reactor: Any, pipe: Connection[Any, Any], wiring: Wiring, rows: int) -> None:
    worker, taken = make_worker(reactor, wiring)
    watch = Stopwatch.start()
    await worker.start()
    await worker.wait_for(STREAM, WRITER, rows + 1, timeout=PATIENCE)
    pipe.send(watch.lap(sum(taken)))
    await worker.stop()
