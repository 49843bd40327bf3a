"""The replay on Spark with all cores, compared with a plain scan of the same table; the start of Spark is not included.

The scan is one process that reads all columns into Arrow batches and drops them.  Rows are like those of Synapse's
events stream, of two writers; every tenth fact has three.  A mapped table has the same rows as columns, of one writer.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import time
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import msgspec

from replication.bench.cluster import POSTGRES, database_kinds
from replication.bench.daemons import STREAM
from replication.bench.processes import ChildProcess
from replication.bench.series import Sample, Series
from replication.segments.compression import SUFFIXES
from replication.segments.run import FILL, SEGMENT_ROWS, ReplayRequest, SegmentOptions, run_in_process
from replication.spark.job import check_installed, open_session, replay
from replication.storage import open_store
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, Token, encode_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from replication.bench.series import BenchOptions
    from replication.segments.manifest import Segment
    from replication.streams.interfaces import IStreamStore

WRITERS: Final = (InstanceName("master"), InstanceName("worker1"))
TABLE: Final = f"stream_{STREAM}"
JSON_FIELDS: Final = ("json_extract(\"row\", '$[1][{}]')", '"row"::json -> 1 ->> {}')  # of SQLite and PostgreSQL
FIELDS: Final = ("event_id", "room_id", "type", "state_key", "redacts", "relates_to", "membership")
MAPPED: Final = StreamDefinition("messages", table="messages", id_column="id", row=FIELDS)
RANGES: Final = 4  # per core, so that no core waits long for the last range of another
BATCH: Final = 10_000  # facts that are inserted together


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each database and compression."""
    check_installed()
    rows = options.size(3_000_000, 2_000)
    with (
        database_kinds() as kinds,
        TemporaryDirectory(prefix="replication-bench-") as folder,
        open_session(None, lambda _: None) as spark,
    ):
        part, whole = FILL
        segment_rows = min(SEGMENT_ROWS, rows * whole // (part * RANGES * spark.sparkContext.defaultParallelism) + 1)
        bench = _Bench(spark, Path(folder, "segments"), segment_rows, options.rounds, rows // 2)
        for kind, field in zip(kinds, JSON_FIELDS, strict=False):
            url = kind.make()
            with ChildProcess(_open, url) as writer:
                writer.call(_write, rows, field)
            if kind.name == POSTGRES:
                _vacuum(url)
            yield from bench.measure(kind.name, url)


class _Bench(msgspec.Struct, frozen=True):
    spark: SparkSession
    out: Path
    segment_rows: int
    rounds: int
    mapped_upto: int

    def measure(self, name: str, url: str) -> Iterator[Series]:
        """Measure one database, all variants in each round."""
        on_spark = partial(self._on_spark, url)
        on_spark()  # warm-up: Spark's workers start and import modules
        mapped = {"streams": [MAPPED.name], "definitions": [MAPPED], "upto": self.mapped_upto}
        variants: dict[str, Callable[[], Sample]] = {
            "plain scan": partial(_scan_once, url),
            **{each: partial(on_spark, compression=each) for each in SUFFIXES},
            "zstd, mapped": partial(on_spark, **mapped, segment_rows=self.segment_rows // 2),
            "zstd, one process": partial(self._time, partial(_replay_in_process, url, self.segment_rows)),
        }
        rounds = [{variant: run() for variant, run in variants.items()} for _ in range(self.rounds)]
        for variant in variants:
            rates = [each[variant].count / each[variant].wall for each in rounds]
            yield Series(f"{name}, {variant}", "rows", "rows/s", rates)
        yield Series(f"{name}, a worker of Spark", "memory at most", "bytes", [float(_memory(self.spark))])

    def _on_spark(self, url: str, **options: Any) -> Sample:
        arguments = {"streams": [STREAM], "segment_rows": self.segment_rows, **options}
        return self._time(lambda out: replay(self.spark, url, out, **arguments))

    def _time(self, run: Callable[[str], list[Segment]]) -> Sample:
        """Time a run, from its plan to its manifest."""
        began = time.monotonic()
        rows = sum(each.rows for each in run(str(self.out)))
        sample = Sample(rows, time.monotonic() - began, 0.0)
        shutil.rmtree(self.out)
        return sample


def _memory(spark: SparkSession) -> int:
    """Return the peak memory of a Python worker in bytes."""

    def peak(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 (runs on an executor)

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"peak": [getrusage(RUSAGE_SELF).ru_maxrss * 1024]})

    cores = spark.sparkContext.defaultParallelism
    return max(int(row.peak) for row in spark.range(0, cores, 1, cores).mapInArrow(peak, "peak long").collect())


def _replay_in_process(url: str, segment_rows: int, out: str) -> list[Segment]:
    return run_in_process(ReplayRequest(url, out, [STREAM], options=SegmentOptions(segment_rows)))


def _scan_once(url: str) -> Sample:
    with ChildProcess(_connect, url) as scanning:
        sample: Sample = scanning.call(_scan)
    return sample


def _connect(_: object, url: str) -> Any:
    """Open a database with the driver's default settings."""
    from adbc_driver_postgresql import dbapi as postgres  # noqa: PLC0415 (an extra)
    from adbc_driver_sqlite import dbapi as sqlite  # noqa: PLC0415

    _, is_file, path = url.partition("sqlite:///")
    return sqlite.connect(f"file:{path}?mode=ro") if is_file else postgres.connect(url)


def _scan(connection: Any) -> Sample:
    with closing(connection.cursor()) as cursor:
        began = time.monotonic()
        cursor.execute(f"SELECT * FROM {TABLE}")  # noqa: S608 (a constant name)
        rows = sum(batch.num_rows for batch in cursor.fetch_record_batch())
        return Sample(rows, time.monotonic() - began, 0.0)


def _facts(rows: int) -> Iterator[Fact]:
    """Yield facts with ``rows`` rows in total."""
    token, left = 1, rows
    while left:
        token += 1
        count = min(1 if token % 10 else 3, left)
        left -= count
        yield Fact(Token(token), tuple(_text(token, place) for place in range(count)))


def _text(token: int, place: int) -> str:
    name = base64.urlsafe_b64encode(hashlib.blake2b(b"%d %d" % (token, place), digest_size=32).digest()).decode()
    return encode_row(["ev", [f"${name}", f"!room{token % 300}:example.com", "m.room.message", None, None, None, None]])


async def _open(reactor: Any, url: str) -> IStreamStore:
    store = open_store(url, reactor)
    await store.open()
    await store.declare(StreamDefinition(STREAM))
    return store


async def _write(store: IStreamStore, rows: int, field: str) -> None:
    """Store ``rows`` rows, and create the mapped table from the first row of each fact."""
    facts = _facts(rows)
    while some := list(islice(facts, BATCH)):
        writes = [
            Write(STREAM, writer, some[-1].token, [each for each in some if each.token % len(WRITERS) == number])
            for number, writer in enumerate(WRITERS)
        ]
        await store.transaction().commit(writes)
    transaction = store.transaction()
    columns = ", ".join(f"{field.format(place)} AS {name}" for place, name in enumerate(FIELDS))
    await transaction.execute(f"CREATE TABLE messages AS SELECT stream_id AS id, {columns} FROM {TABLE} WHERE ord = 0")  # noqa: S608
    await transaction.execute("CREATE UNIQUE INDEX messages_id ON messages (id)")
    await transaction.commit([])


def _vacuum(url: str) -> None:
    """Finish the work that PostgreSQL would otherwise do in the background, while the bench measures."""
    import psycopg  # noqa: PLC0415 (an extra)

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
