"""The costs of a stream with 10,000 to 10,000,000 stored facts: appends, a start, and pages at three places.

Each fact has one row.  The facts are appended in batches, and the last PART of them are measured.  A start is that of a
master, until it listens.  ``stored position behind`` means that the stored position is below all facts.  After a crash
it is below the facts of the last second at most.  A page has 1,000 rows, over HTTP; its value is the median of PAGES
requests.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from replication.bench.cluster import POSTGRES
from replication.bench.daemons import STREAM, WRITER, BenchMaster, address_of, serve_master, short_row, start_of, stop
from replication.bench.fanout import ROW
from replication.bench.processes import BenchError, ChildProcess
from replication.bench.series import Series, Size, Stopwatch
from replication.web.blocking_client import HttpClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions, Sample

STORED: Final = 10_000, 100_000, 1_000_000, 10_000_000
BATCH: Final = 1_000  # facts in one append, and rows of a page
PART: Final = 100_000  # facts of one call; the last call is measured
PAGES: Final = 20
PLACES: Final = {"beginning": 0.0, "middle": 0.5, "end": 1.0}

_LOWER: Final = f"UPDATE stream_positions SET stream_id = 1 WHERE stream_name = '{STREAM}'"  # noqa: S608 (a constant)


def measure(kind: DatabaseKind, options: BenchOptions) -> Iterator[Series]:
    """Measure each size of one growing database."""
    url = kind.make()
    before = 0
    for stored in (2 * BATCH,) if options.quick else STORED:
        variant = Size(stored, "facts stored", kind.name)
        with ChildProcess(serve_master, url) as master:
            while before < stored:
                count = min(PART, stored - before)
                sample: Sample = master.call(_append, before, count)
                before += count
            master.call(stop)
        yield Series(variant, "append", "facts/s", [sample.count / sample.wall])
        yield Series(variant, "append per CPU second", "facts/s", [sample.count / sample.cpu])
        starts, behind = [], []
        pages: dict[str, list[float]] = {place: [] for place in PLACES}
        for _ in range(options.rounds):
            with ChildProcess(serve_master, url) as master:
                starts.append(master.call(start_of))
                for place, seconds in _read(master.call(address_of).url, stored).items():
                    pages[place].append(seconds)
                master.call(stop)
            lower_position(kind, url)
            with ChildProcess(serve_master, url) as master:
                behind.append(master.call(start_of))
                master.call(stop)
        for metric, samples in (("start", starts), ("start, stored position behind", behind)):
            yield Series(variant, metric, "s", [each.wall for each in samples])
            yield Series(variant, f"{metric}, CPU", "s", [each.cpu for each in samples])
        for place, values in pages.items():
            yield Series(variant, f"page at the {place}", "s", values)


async def _append(master: BenchMaster, stored: int, count: int) -> Sample:
    watch = Stopwatch()
    for start in range(stored, stored + count, BATCH):
        await master.writer.append([[short_row(number)] for number in range(start, start + BATCH)])
    return watch.sample(count)


def _read(url: str, stored: int) -> Mapping[str, float]:
    """Return the seconds of a page at each place."""
    seconds = {}
    with closing(HttpClient(url)) as client:
        for place, share in PLACES.items():
            after = 1 + int((stored - BATCH) * share)
            path = f"/v1/streams/{STREAM}/updates?instance={WRITER}&from={after}&upto={stored + 1}&limit={BATCH}"
            times = []
            for _ in range(PAGES):
                watch = Stopwatch()
                body = client.request("GET", path)
                times.append(watch.sample(1).wall)
                if body.count(ROW) != BATCH:
                    raise BenchError(f"a page has {body.count(ROW)} rows, not {BATCH}")
            seconds[place] = median(times)
    return seconds


def lower_position(kind: DatabaseKind, url: str) -> None:
    """Store the position of an empty stream."""
    if kind.name == POSTGRES:
        import psycopg  # noqa: PLC0415 (an extra)

        connection: Any = psycopg.connect(url)
    else:
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    with closing(connection):
        connection.execute(_LOWER)
        connection.commit()
