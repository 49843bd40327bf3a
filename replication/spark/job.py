"""The replay on Spark: one task for each range of tokens; rows never leave the Python worker that reads them.

A task returns only its receipt.  The caller's session decides where Spark runs.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from replication.errors import ConfigError, StoreError, install_command
from replication.segments.run import ORIGIN, SEGMENT_ROWS, ReplayRequest, SegmentOptions, start_run
from replication.spark.java import find_java
from replication.wire.commands import LINE_LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from replication.segments.manifest import Segment
    from replication.segments.run import Task
    from replication.streams.definitions import StreamDefinition

_HOME: Final = str(Path(__file__).parents[2])
NEEDED_HERE: Final = ("pyarrow", "numpy", "zstandard", "adbc_driver_sqlite", "adbc_driver_postgresql")
NEEDED: Final = ("pyspark", "pandas", *NEEDED_HERE)
SESSION: Final = {
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Over TCP, a task's second message waits for the delayed acknowledgement of the first.
    "spark.python.unix.domain.socket.enabled": "true",
    # The JVM only distributes tasks; optimising its code would take longer than it saves.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
_CRASHED: Final = "Python worker exited unexpectedly"  # how Spark begins the error
_CURE: Final = "if memory ran out, use fewer cores, such as --master local[1]; finished ranges are kept: run it again"


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
    """Write segments of all facts that ``database`` has and the folder ``out`` lacks (docs/spark.md).

    Args:
        spark: the session; its executors must reach ``database`` and ``out`` under these names.
        database: ``sqlite:///FILE`` or ``postgresql://…``.
        out: a path or URL.
        streams: names of streams; by default all.
        definitions: the definitions of mapped and joined streams, and of streams with a key.
        instances: names of writers; by default all.
        after: the ID after which new chains begin.
        upto: the last ID; by default the stored positions.
        segment_rows: the most rows in a segment.
        compression: ``none``, ``gzip`` or ``zstd``.
        line_limit: the most bytes in a line.
        compact: keep only the last fact of each key.

    Returns:
        The new segments.

    Raises:
        ConfigError: an argument is invalid.
        StoreError: the database or the folder failed; no segment was added.

    """
    options = SegmentOptions(segment_rows, compression, line_limit, compact)
    with start_run(ReplayRequest(database, out, streams, definitions, instances, after, upto, options)) as run:
        for each in run.warnings:
            warnings.warn(each, stacklevel=2)
        return run.finish(do_tasks(spark, run.tasks))


def do_tasks(spark: SparkSession, tasks: Sequence[Task]) -> list[bytes]:
    """Do ``tasks`` on the executors, in any order, and return their receipts; StoreError if one failed."""
    if not tasks:
        return []

    def work(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa  # noqa: PLC0415 (runs on an executor)

        for batch in batches:
            receipts = [tasks[number].do().decode() for number in batch.column(0).to_pylist()]
            gc.freeze()  # else the garbage collection after each task walks all imported modules
            yield pa.RecordBatch.from_pydict({"receipt": receipts})

    from py4j.protocol import Py4JError, Py4JJavaError  # noqa: PLC0415 (an extra)
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        numbers = spark.range(0, len(tasks), 1, len(tasks))
        return [row.receipt.encode() for row in numbers.mapInArrow(work, "receipt string").collect()]
    except (PySparkException, Py4JJavaError) as error:
        raise StoreError(_cause(str(error))) from error
    except (Py4JError, ConnectionError) as error:
        raise StoreError(f"Spark's Java process has ended: {_CURE}") from error


def _cause(text: str) -> str:
    """Return the error that a Python worker raised, out of the tracebacks of Spark and Java."""
    errors: list[tuple[str, str]] = re.findall(r"^([\w.]+(?:Error|Exception)): (.*)$", text, re.MULTILINE)
    for kind, why in reversed(errors):
        if kind.startswith("replication.errors."):
            return why
    if _CRASHED in text:
        return f"the system has ended a Python process of Spark: {_CURE}"
    if not errors:
        return _cause_in_java(text)
    kind, why = errors[-1]
    cure = "; install it on that machine, or ship it with --py-files" if kind == "ModuleNotFoundError" else ""
    return f"a Spark worker failed: {kind}: {why}{cure}"


def _cause_in_java(text: str) -> str:
    """Return the innermost error of Java that has a text, without the tracebacks."""
    errors = _errors_in_java(text)
    return f"Spark failed: {errors[-1]}" if errors else text


def _errors_in_java(text: str) -> list[str]:
    found: list[str] = re.findall(r'^(?:: |Caused by: |Exception in thread "[^"]*" )([\w.$]+: .*)$', text, re.MULTILINE)
    return found


def _cause_of_no_start(log: str, error: Exception) -> str:
    """Return the error of Java, else the last line of the log, else what Python has raised."""
    lines = log.strip().splitlines()
    return [str(error), *lines[-1:], *_errors_in_java(f"{log}\n{error}")][-1]


def has_spark() -> bool:
    """Return whether Spark and the modules that its workers import are installed."""
    return not _missing(NEEDED)


def _missing(modules: Sequence[str]) -> list[str]:
    return [name for name in modules if find_spec(name) is None]


def check_installed(*, spark: bool = True) -> None:
    """Raise ConfigError if a module is missing that the replay imports; ``spark``: with Spark, or in one process."""
    if missing := _missing(NEEDED if spark else NEEDED_HERE):
        cure = f"{install_command('spark')}, or give --master none" if spark else install_command("segments")
        raise ConfigError(f"replay needs {', '.join(missing)}: {cure}")


def _print(text: str) -> None:
    sys.stderr.write(f"replication: {text}\n")


@contextmanager
def open_session(master: str | None, report: Callable[[str], None] = _print) -> Iterator[SparkSession]:
    """Give a Spark session, started here without log lines or by spark-submit; stop it after the block.

    Args:
        master: where Spark runs, such as ``local[*]``; None leaves it to Spark's configuration, whose default is all
            cores of this machine.
        report: is called with one line when Spark starts; by default the line goes to standard error.

    Raises:
        ConfigError: a module or Java is missing, or Spark does not start.

    """
    check_installed()
    from pyspark.sql import SparkSession  # noqa: PLC0415 (an extra)

    builder = SparkSession.builder.appName("replication-replay")
    if master is not None:
        builder = builder.master(master)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    on_interrupt = signal.getsignal(signal.SIGINT)
    pending: list[int] = []
    with TemporaryDirectory(prefix="replication-java-") as shims:
        if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit: the rest comes from its command line and files
            session = builder.getOrCreate()
        else:
            os.environ["JAVA_HOME"] = str(find_java(os.environ, Path(shims)))
            if master is None or master.startswith("local"):
                os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # else Spark warns about this machine's name
                os.environ["PYTHONPATH"] = os.pathsep.join([_HOME, *filter(None, [os.environ.get("PYTHONPATH")])])
            for key, value in SESSION.items():
                builder = builder.config(key, value)
            report("Spark starts; the first results of a batch or query take 10 s to 60 s")
            _on_interrupt(lambda number, _: pending.append(number))  # a start that is cut short leaves its JVM behind
            try:
                session = _start_silently(builder, Path(shims, "spark.log"))
            except ConfigError as error:
                if pending:  # the JVM received the signal, too
                    raise KeyboardInterrupt from error
                raise
            finally:
                _on_interrupt(on_interrupt)
        _ignore_lost_connections(session)
        with _stopping(session, on_interrupt):
            if pending:
                signal.raise_signal(signal.SIGINT)
            yield session


def _start_silently(builder: Any, log: Path) -> SparkSession:
    """Start a JVM that writes its standard error to a file; an exception carries the important part of it."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        session: SparkSession = builder.getOrCreate()
    except Exception as error:
        why = _cause_of_no_start(log.read_text(encoding="utf-8", errors="replace"), error)
        raise ConfigError(f"Spark does not start: {why}") from error
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
    return session


# What py4j logs, with a traceback, if an interrupt cuts off a call to Java.
_OF_AN_INTERRUPT: Final = {
    "KeyboardInterrupt while sending command.",
    "Exception occurred while shutting down connection",
}


@contextmanager
def _stopping(session: SparkSession, on_interrupt: Any) -> Iterator[None]:
    """Stop ``session`` after the block; Ctrl-C does ``on_interrupt``, and py4j logs no traceback about it.

    Spark's own handler of SIGINT calls Java in the middle of another call, which fails.
    """
    pending: list[int] = []

    def note(number: int, frame: Any) -> None:
        pending.append(number)
        on_interrupt(number, frame)

    _on_interrupt(note if callable(on_interrupt) else on_interrupt)
    loggers = [logging.getLogger(), logging.getLogger("py4j.clientserver")]
    for each in loggers:
        each.addFilter(_is_no_interrupt)
    failed = False
    try:
        yield
    except Exception as error:
        failed = True
        if pending:  # py4j has made its own error of the interrupt
            raise KeyboardInterrupt from error
        raise
    finally:
        _on_interrupt(signal.SIG_IGN)
        try:
            session.stop()
        except Exception:
            if not pending and not failed:  # else an interrupt, or what the block has failed of, has ended Java
                raise
        for each in loggers:
            each.removeFilter(_is_no_interrupt)
        _on_interrupt(on_interrupt)


def _ignore_lost_connections(session: SparkSession) -> None:
    """Print no traceback when the JVM closes its connection for accumulators: calls to Java report that it has ended.

    An interrupt at a terminal reaches the JVM, too, and often ends it first.
    """
    server: Any = getattr(session.sparkContext, "_accumulatorServer", None)  # pyspark has no public name for it
    if server is None:
        return
    usual = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            usual(request, address)

    server.handle_error = handle_error


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return record.msg not in _OF_AN_INTERRUPT


def _on_interrupt(action: Any) -> None:
    if threading.current_thread() is threading.main_thread():  # no other thread may set it
        signal.signal(signal.SIGINT, action)
