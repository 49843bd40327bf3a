"""The batch on Spark, which schedules spans of IDs; rows never leave the Python worker that reads them.

What comes back is a receipt per span.  Nothing here says where Spark runs: that is whoever's who makes the session.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from replication.errors import ConfigError, StoreError
from replication.replay.history import SEGMENT_ROWS, Shape
from replication.replay.java import find_java
from replication.replay.run import ORIGIN, Request, begin
from replication.wire.commands import LINE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from replication.replay.run import Task
    from replication.replay.segments import Segment
    from replication.streams.registry import StreamDefinition

_HOME: Final = str(Path(__file__).parents[2])
NEEDED: Final = ("pyspark", "pyarrow", "pandas", "numpy", "zstandard", "adbc_driver_sqlite", "adbc_driver_postgresql")
SESSION: Final = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Over TCP a task's second message waits 40 ms for the acknowledgement of its first.
    "spark.python.unix.domain.socket.enabled": "true",
    # The JVM does nothing but to hand out tasks, and would spend more on its own speed than it gains.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def replay(
    spark: SparkSession,
    database: str,
    out: str,
    *,
    streams: Sequence[str] = (),
    definitions: Sequence[StreamDefinition] = (),
    instances: Sequence[str] = (),
    after: int = ORIGIN,
    upto: int | None = None,
    segment_rows: int = SEGMENT_ROWS,
    compression: str = "zstd",
    line_limit: int = LINE_LIMIT,
    compact: bool = False,
) -> list[Segment]:
    """Write what ``database`` has, and the folder ``out`` has not, as segments; returns the new ones.

    Without ``streams`` it is all of them; ``definitions`` describe those that are mapped onto tables of an application.
    The executors must reach both ``database`` and ``out`` under these names.  ConfigError for what cannot be asked,
    StoreError for what the database or the folder refuses; then nothing has been added.
    """
    shape = Shape(segment_rows, compression, line_limit, compact)
    with begin(Request(database, out, streams, definitions, instances, after, upto, shape)) as run:
        return run.finish(do_tasks(spark, run.tasks))


def do_tasks(spark: SparkSession, tasks: Sequence[Task]) -> list[bytes]:
    """Have the executors do ``tasks``, in any order, and return their receipts; StoreError says what failed."""
    if not tasks:
        return []

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 (this runs elsewhere)

        for batch in batches:
            receipts = [tasks[number].do().decode() for number in batch.column(0).to_pylist()]
            gc.freeze()  # or Spark looks for cycles after each task, among all that is imported, for 20 ms
            yield pa.RecordBatch.from_pydict({"receipt": receipts})

    from pyspark.errors import PySparkException  # noqa: PLC0415 (only who needs it must have it)

    numbers = spark.range(0, len(tasks), 1, len(tasks))
    try:
        return [row.receipt.encode() for row in numbers.mapInArrow(work, "receipt string").collect()]
    except PySparkException as error:
        raise StoreError(_cause(str(error))) from error


def _cause(text: str) -> str:
    """Return what a worker raised: Spark wraps it in pages of its own and of Java's."""
    errors: list[tuple[str, str]] = re.findall(r"^([\w.]+(?:Error|Exception)): (.*)$", text, re.MULTILINE)
    for kind, why in reversed(errors):
        if kind.startswith("replication.errors."):
            return why
    if not errors:
        return text
    kind, why = errors[-1]
    cure = "; ship what its machine lacks with --py-files" if kind == "ModuleNotFoundError" else ""
    return f"a worker of Spark failed: {kind}: {why}{cure}"


def has_spark() -> bool:
    """Whether Spark and what its workers import are installed."""
    return not _missing()


def _missing() -> list[str]:
    return [name for name in NEEDED if find_spec(name) is None]


def check_installed() -> None:
    """Return if what Spark's workers import is there; else ConfigError."""
    if missing := _missing():
        raise ConfigError(f"not installed: {', '.join(missing)}: pip install '.[spark]' in the checkout")


@contextmanager
def open_session(master: str | None) -> Iterator[SparkSession]:
    """Start Spark, quietly, or take the one that spark-submit has started, and stop it in the end.

    ``master`` None leaves it to Spark's own configuration where it runs: all cores of this machine, if there is none.
    ConfigError if it cannot start.
    """
    check_installed()
    from pyspark.sql import SparkSession  # noqa: PLC0415 (only who needs it must have it)

    builder = SparkSession.builder.appName("replication-replay")
    if master is not None:
        builder = builder.master(master)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    shims = Path(tempfile.mkdtemp(prefix="replication-java-"))
    try:
        if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit: its command line and its files say the rest
            session = builder.getOrCreate()
        else:
            os.environ["JAVA_HOME"] = str(find_java(os.environ, shims))
            if master is None or master.startswith("local"):
                os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # else it warns about this machine's name
                os.environ["PYTHONPATH"] = os.pathsep.join([_HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
            for key, value in SESSION.items():
                builder = builder.config(key, value)
            session = _start_silently(builder, shims / "spark.log")
        try:
            yield session
        finally:
            session.stop()
    finally:
        shutil.rmtree(shims, ignore_errors=True)


def _start_silently(builder: Any, log: Path) -> SparkSession:
    """Start a JVM whose standard error is a file: what matters of it comes as an exception, too."""
    sys.stderr.flush()
    ours = os.dup(2)
    with log.open("wb") as theirs:
        os.dup2(theirs.fileno(), 2)
    try:
        session: SparkSession = builder.getOrCreate()
    except Exception as error:
        said = log.read_text(errors="replace").strip().splitlines()
        raise ConfigError(f"Spark does not start: {said[-1] if said else error}") from error
    finally:
        os.dup2(ours, 2)
        os.close(ours)
    return session
