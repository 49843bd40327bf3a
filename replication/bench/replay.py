"""The batch on Spark, on all cores, against a plain scan of the same table; the start of the session is left out.

The scan is one process that reads all columns into Arrow batches and drops them.  Rows are like those of a Synapse's
events, of two writers; every tenth fact has three.  A mapped table has the same rows as real columns, of one writer.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sqlite3
import time
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import attrs

from replication.bench.children import Child
from replication.bench.databases import kinds
from replication.bench.series import Lap, Series
from replication.replay.history import FULL, SEGMENT_ROWS, Shape
from replication.replay.job import check_installed, open_session, replay
from replication.replay.run import Request, run_here
from replication.replay.segments import SUFFIXES
from replication.storage.connection import LOWER_POSITION, STEPS
from replication.storage.migrate import upgrade
from replication.storage.tables import GenericTable
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.wire.grammar import InstanceName, Token, spell_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from replication.bench.series import Effort
    from replication.replay.segments import Segment

STREAM: Final = "events"
WRITERS: Final = (InstanceName("master"), InstanceName("worker1"))
TABLE: Final = GenericTable(StreamDefinition(STREAM))
COLUMNS: Final = ", ".join(f'"{each}"' for each in GenericTable.COLUMNS)
FIELDS: Final = ("event_id", "room_id", "type", "state_key", "redacts", "relates_to", "membership")
MAPPED: Final = StreamDefinition("messages", table="messages", id_column="id", row=FIELDS)
SPANS: Final = 4  # for each core, so that none waits long for the last one of another
AT_ONCE: Final = 10_000  # facts that are written together


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each database and compression."""
    check_installed()
    rows = effort.size(3_000_000, 2_000)
    with (
        kinds() as (sqlite, *shared),
        TemporaryDirectory(prefix="replication-bench-") as folder,
        open_session(None) as spark,
    ):
        part, whole = FULL
        shape = min(SEGMENT_ROWS, rows * whole // (part * SPANS * spark.sparkContext.defaultParallelism) + 1)
        bench = _Bench(spark, Path(folder, "segments"), shape, effort.rounds, rows // 2)
        history = sqlite.make()
        _write_sqlite(history, rows)
        yield from bench.measure(sqlite.name, history)
        for kind in shared:
            url = kind.make()
            _write_postgres(url, history)
            yield from bench.measure(kind.name, url)


@attrs.frozen
class _Bench:
    spark: SparkSession
    out: Path
    segment_rows: int
    rounds: int
    mapped_upto: int

    def measure(self, name: str, url: str) -> Iterator[Series]:
        """Measure one database, everything in each round."""
        on_spark = partial(self._on_spark, url)
        on_spark()  # Spark's workers start, and import what they need
        scans: list[Lap] = []
        batches: dict[str, list[Lap]] = {each: [] for each in SUFFIXES}
        mapped: list[Lap] = []
        alone: list[Lap] = []
        for _ in range(self.rounds):
            with Child(_scan, url) as scanning:
                scans.append(scanning.hear())
            for compression, laps in batches.items():
                laps.append(on_spark(compression=compression))
            mapped.append(
                on_spark(
                    streams=[MAPPED.name],
                    definitions=[MAPPED],
                    upto=self.mapped_upto,
                    segment_rows=self.segment_rows // 2,
                )
            )
            alone.append(self._time(lambda out: run_here(Request(url, out, [STREAM], shape=Shape(self.segment_rows)))))
        yield _rate(f"{name}, plain scan", scans)
        for compression, laps in batches.items():
            yield _rate(f"{name}, {compression}", laps)
        yield Series(f"{name}, a worker of Spark", "memory at most", "bytes", [float(_memory(self.spark))])
        yield _rate(f"{name}, zstd, mapped", mapped)
        yield _rate(f"{name}, zstd, one process", alone)

    def _on_spark(self, url: str, **options: Any) -> Lap:
        asked = {"streams": [STREAM], "segment_rows": self.segment_rows, **options}
        return self._time(lambda out: replay(self.spark, url, out, **asked))

    def _time(self, run: Callable[[str], list[Segment]]) -> Lap:
        """Time a whole run, from its plan to its manifest."""
        began = time.monotonic()
        rows = sum(each.rows for each in run(str(self.out)))
        lap = Lap(rows, time.monotonic() - began, 0.0)
        shutil.rmtree(self.out)
        return lap


def _memory(spark: SparkSession) -> int:
    """Return the most bytes that a Python worker has ever held."""

    def ask(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 (this runs elsewhere)

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"peak": [getrusage(RUSAGE_SELF).ru_maxrss * 1024]})

    cores = spark.sparkContext.defaultParallelism
    return max(int(row.peak) for row in spark.range(0, cores, 1, cores).mapInArrow(ask, "peak long").collect())


def _rate(variant: str, laps: Sequence[Lap]) -> Series:
    return Series(variant, "rows", "rows/s", [lap.count / lap.wall for lap in laps])


def _scan(pipe: Connection[Any, Any], url: str) -> None:
    """Read the table as the driver gives it, with its own settings."""
    if url.startswith("sqlite:"):
        from adbc_driver_sqlite import dbapi  # noqa: PLC0415 (an extra)

        connection = dbapi.connect(f"file:{_path(url)}?mode=ro")
    else:
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415 (likewise)

        connection = dbapi.connect(url)
    with closing(connection), closing(connection.cursor()) as cursor:
        began = time.monotonic()
        cursor.execute(f'SELECT {COLUMNS} FROM "{TABLE.name}"')  # noqa: S608 (names of our own)
        rows = sum(batch.num_rows for batch in cursor.fetch_record_batch())
        pipe.send(Lap(rows, time.monotonic() - began, 0.0))


def _facts(rows: int) -> Iterator[Fact]:
    """Yield facts with so many rows in all."""
    token, left = 1, rows
    while left:
        token += 1
        count = min(1 if token % 10 else 3, left)
        left -= count
        yield Fact(Token(token), tuple(_text(token, place) for place in range(count)))


def _text(token: int, place: int) -> str:
    name = base64.urlsafe_b64encode(hashlib.blake2b(b"%d %d" % (token, place), digest_size=32).digest()).decode()
    return spell_row(["ev", [f"${name}", f"!room{token % 300}:example.com", "m.room.message", None, None, None, None]])


def _path(url: str) -> str:
    return url.removeprefix("sqlite:///")


def _write_sqlite(url: str, rows: int) -> None:
    facts = _facts(rows)
    last = Token(1)
    with closing(sqlite3.connect(_path(url))) as database, database:
        database.execute("PRAGMA synchronous = OFF")
        upgrade(lambda sql: database.execute(sql).fetchall(), nullcontext, STEPS)
        TABLE.declare(database, may_create=True)
        while some := list(islice(facts, AT_ONCE)):
            for number, writer in enumerate(WRITERS):
                TABLE.insert(database, writer, [each for each in some if each.token % len(WRITERS) == number])
            last = some[-1].token
        for writer in WRITERS:
            database.execute(LOWER_POSITION, (STREAM, writer, last))
        _map(database.execute, "json_extract(\"row\", '$[1][{}]')")


def _map(execute: Callable[[str], object], field: str) -> None:
    """Make the mapped table of the first row of each fact."""
    columns = ", ".join(f"{field.format(place)} AS {name}" for place, name in enumerate(FIELDS))
    execute(f'CREATE TABLE messages AS SELECT stream_id AS id, {columns} FROM "{TABLE.name}" WHERE ord = 0')  # noqa: S608
    execute("CREATE UNIQUE INDEX messages_id ON messages (id)")


def _write_postgres(url: str, history: str) -> None:
    """Copy what SQLite has."""
    import psycopg  # noqa: PLC0415 (an extra)

    with closing(sqlite3.connect(_path(history))) as source, psycopg.connect(url) as target:
        target.execute(
            f'CREATE TABLE "{TABLE.name}" (stream_id bigint, ord integer, instance_name text NOT NULL, '
            '"row" text NOT NULL, PRIMARY KEY (stream_id, ord))'
        )
        target.execute(
            "CREATE TABLE stream_positions (stream_name text NOT NULL, instance_name text NOT NULL, "
            "stream_id bigint NOT NULL, PRIMARY KEY (stream_name, instance_name))"
        )
        for table in (TABLE.name, "stream_positions"):
            with target.cursor().copy(f'COPY "{table}" FROM STDIN') as rows:
                for row in source.execute(f'SELECT * FROM "{table}"'):  # noqa: S608 (see above)
                    rows.write_row(row)
        _map(target.execute, '"row"::json -> 1 ->> {}')
    with psycopg.connect(url, autocommit=True) as target:
        target.execute("VACUUM ANALYZE")
