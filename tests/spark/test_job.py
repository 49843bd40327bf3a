"""Tests of the replay on a real Spark: the same files as without it, retries, errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

pytest.importorskip("py4j")

from py4j.protocol import Py4JNetworkError

from replication.errors import ConfigError, StoreError
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process, start_run
from replication.spark import job
from replication.spark.job import do_tasks, replay
from tests.segments.histories import MASTER, OTHER, fact, write_database

if TYPE_CHECKING:
    from replication.segments.run import Task

FACTS = [fact(token, *[["row", token, index] for index in range(token % 4 + 1)]) for token in range(2, 400, 2)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = write_database(tmp_path / "m.db", {MASTER: FACTS[::2], OTHER: FACTS[1::2]})
    write_database(tmp_path / "m.db", {MASTER: FACTS[:50]}, stream="caches")
    return url


def test_spark_writes_the_same_files_as_one_process(spark: Any, database: str, tmp_path: Path) -> None:
    """More ranges than cores; Arrow batches of two rows end inside facts."""
    here, there = tmp_path / "here", tmp_path / "spark"
    run_in_process(ReplayRequest(database, str(here), options=SegmentOptions(60)))
    new = replay(spark, database, str(there), segment_rows=60)
    assert len(new) > 10
    assert {each.stream for each in new} == {"orders", "caches"}
    assert contents(here) == contents(there)
    assert replay(spark, database, str(there), segment_rows=60) == []


def test_a_failed_task_is_retried(spark: Any, database: str, tmp_path: Path) -> None:
    run_in_process(ReplayRequest(database, str(tmp_path / "here"), options=SegmentOptions(200, "gzip")))
    with start_run(ReplayRequest(database, str(tmp_path / "out"), options=SegmentOptions(200, "gzip"))) as run:
        failing = [FailsOnce(task, str(tmp_path / f"failed-{number}")) for number, task in enumerate(run.tasks)]
        run.finish(do_tasks(spark, failing))  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("failed-*"))) == len(failing)
    assert contents(tmp_path / "here") == contents(tmp_path / "out")


def test_a_task_that_keeps_failing_is_an_error_of_one_line(spark: Any, database: str, tmp_path: Path) -> None:
    with start_run(ReplayRequest(database, str(tmp_path / "out"), options=SegmentOptions(40, "gzip"))) as run:
        (tmp_path / "m.db").unlink()
        with pytest.raises(StoreError, match=r"^database 'sqlite:.*m\.db': there is no such file$"):
            do_tasks(spark, run.tasks)
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_killed_python_process_is_an_error_of_one_line(spark: Any) -> None:
    with pytest.raises(StoreError, match=r"^the system has ended a Python process of Spark: if memory ran out.*again$"):
        do_tasks(spark, [Killed()])  # type: ignore[list-item]


@pytest.mark.parametrize("error", [Py4JNetworkError("Answer from Java side is empty"), ConnectionRefusedError()])
def test_a_killed_java_process_is_an_error_of_one_line(error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    with pytest.raises(StoreError, match=r"^Spark's Java process has ended: if memory ran out.*again$"):
        do_tasks(SimpleNamespace(range=fail), [Killed()])  # type: ignore[list-item]


def test_an_error_of_the_block_is_not_replaced_by_one_of_the_end_of_the_session() -> None:
    def stop() -> None:
        raise ConnectionRefusedError

    session: Any = SimpleNamespace(stop=stop)
    with pytest.raises(StoreError, match=r"^the first$"), job._stopping(session, signal.default_int_handler):
        raise StoreError("the first")
    with pytest.raises(ConnectionRefusedError), job._stopping(session, signal.default_int_handler):
        pass


def test_of_an_error_of_java_the_cause_is_shown() -> None:
    text = """An error occurred while calling o51.collectToPython.
: org.apache.spark.SparkException: Job aborted
\tat org.apache.spark.Some.where(Some.scala:1)
Caused by: java.io.IOException: No space left on device
\t... 21 more
Caused by: java.io.EOFException
"""
    assert job._cause(text) == "Spark failed: java.io.IOException: No space left on device"
    assert job._cause("no traceback") == "no traceback"


def test_spark_that_does_not_start_is_an_error_with_the_cause() -> None:
    log = """WARNING: Using incubator modules: jdk.incubator.vector
Exception in thread "main" org.apache.spark.SparkException: Master must either be yarn or start with spark
\tat org.apache.spark.deploy.SparkSubmit.main(SparkSubmit.scala)

"""
    why = "org.apache.spark.SparkException: Master must either be yarn or start with spark"
    assert job._cause_of_no_start(log, RuntimeError("Java gateway process exited")) == why
    error = RuntimeError("An error occurred.\n: java.lang.Exception: too few MiB\n\tat java.lang.Thread.run")
    assert job._cause_of_no_start("a warning\n\tat a.b.c", error) == "java.lang.Exception: too few MiB"
    assert job._cause_of_no_start("first\nno space left\n", error.__class__("ended")) == "no space left"
    assert job._cause_of_no_start("", RuntimeError("ended")) == "ended"


def test_a_run_without_tasks_needs_no_spark(database: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    run_in_process(ReplayRequest(database, out, options=SegmentOptions(40)))
    assert replay(None, database, out) == []


def test_a_missing_module_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "NEEDED", ("sys", "no_such_module"))
    with pytest.raises(ConfigError, match=r"^replay needs no_such_module: pip install 'twisted-replication\[spark\]'"):
        job.check_installed()


class Killed:
    """A task that ends like one that the system kills because memory has run out."""

    def do(self) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


class FailsOnce:
    """A task whose first attempt fails after its segments were written."""

    def __init__(self, task: Task, mark: str) -> None:
        self.task = task
        self.mark = mark

    def do(self) -> bytes:
        receipt = self.task.do()
        if not Path(self.mark).exists():
            Path(self.mark).touch()
            from replication.segments.folders import open_folder

            open_folder(self.task.out).remove(self.task.receipt)
            raise OSError("the disk is gone for a moment")
        return receipt


def test_a_lost_connection_for_accumulators_prints_nothing_and_other_errors_are_printed() -> None:
    printed: list[object] = []
    server = SimpleNamespace(handle_error=lambda *given: printed.append(given))
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(_accumulatorServer=server))
    job._ignore_lost_connections(session)
    for error in (ConnectionResetError(), ZeroDivisionError()):
        try:
            raise error
        except (OSError, ArithmeticError):
            server.handle_error("request", "address")
    assert printed == [("request", "address")]
    job._ignore_lost_connections(SimpleNamespace(sparkContext=SimpleNamespace()))
