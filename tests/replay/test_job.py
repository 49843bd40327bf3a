"""Tests of the batch on a real Spark: the same files as without it, retries, kills."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication.errors import ConfigError, StoreError
from replication.replay import job
from replication.replay.history import Shape
from replication.replay.job import do_tasks, replay
from replication.replay.run import Request, begin, run_here
from tests.replay.histories import MASTER, OTHER, fact, write_database

if TYPE_CHECKING:
    from replication.replay.run import Task

FACTS = [fact(token, *[["row", token, index] for index in range(token % 4 + 1)]) for token in range(2, 400, 2)]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = write_database(tmp_path / "m.db", {MASTER: FACTS[::2], OTHER: FACTS[1::2]})
    write_database(tmp_path / "m.db", {MASTER: FACTS[:50]}, stream="caches")
    return url


def test_spark_writes_the_files_that_this_process_would(spark: Any, database: str, tmp_path: Path) -> None:
    """More ranges than cores; Arrow batches of two rows cut inside facts, and there is no coalescing to hide it."""
    here, there = tmp_path / "here", tmp_path / "spark"
    run_here(Request(database, str(here), shape=Shape(60)))
    new = replay(spark, database, str(there), segment_rows=60)
    assert len(new) > 10
    assert {each.stream for each in new} == {"orders", "caches"}
    assert contents(here) == contents(there)
    assert replay(spark, database, str(there), segment_rows=60) == []


def test_a_task_that_fails_once_is_done_again(spark: Any, database: str, tmp_path: Path) -> None:
    run_here(Request(database, str(tmp_path / "here"), shape=Shape(200, "gzip")))
    with begin(Request(database, str(tmp_path / "out"), shape=Shape(200, "gzip"))) as run:
        failing = [FailsOnce(task, str(tmp_path / f"failed-{number}")) for number, task in enumerate(run.tasks)]
        run.finish(do_tasks(spark, failing))  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("failed-*"))) == len(failing)
    assert contents(tmp_path / "here") == contents(tmp_path / "out")


def test_a_task_that_fails_for_good_says_why_in_a_line(spark: Any, database: str, tmp_path: Path) -> None:
    with begin(Request(database, str(tmp_path / "out"), shape=Shape(40, "gzip"))) as run:
        (tmp_path / "m.db").unlink()
        with pytest.raises(StoreError, match=r"^database 'sqlite:.*m\.db': there is no such file$"):
            do_tasks(spark, run.tasks)
    assert not (tmp_path / "out/manifest.json").exists()


def test_nothing_to_do_needs_no_spark(database: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    run_here(Request(database, out, shape=Shape(40)))
    assert replay(None, database, out) == []


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "NEEDED", ("sys", "no_such_module"))
    with pytest.raises(ConfigError, match=r"^not installed: no_such_module: pip install '\.\[spark\]'"):
        job.check_installed()


class FailsOnce:
    """A task whose first attempt dies half-way."""

    def __init__(self, task: Task, mark: str) -> None:
        self.task = task
        self.mark = mark

    def do(self) -> bytes:
        receipt = self.task.do()
        if not Path(self.mark).exists():
            Path(self.mark).touch()
            from replication.replay.folders import open_folder

            open_folder(self.task.out).remove(self.task.receipt)
            raise OSError("the disk is gone for a moment")
        return receipt
