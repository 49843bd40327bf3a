"""A streaming query of a running master: both are killed, and the sink has every row once.

Smaller by default; more kills, and a master that is away for more than a minute: ``--full``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.spark.sessions import need_spark
from tests.system.daemons import Daemon, append, environment, fixed_ports, until
from tests.system.test_kills import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECRET = "open sesame"
ROWS = 10  # that a running query has to write before the next thing happens to it

QUERY = """
import sys
from replication.replay import ReplicationDataSource, open_session

with open_session("local[1]") as spark:
    spark.dataSource.register(ReplicationDataSource)
    stream = spark.readStream.format("replication").option("http", sys.argv[1]).option("secretFile", "secret")
    stream = stream.option("stream", "visits").option("maxRowsPerBatch", 100).load()
    written = stream.writeStream.format("json").option("path", "sink").option("checkpointLocation", "checkpoint")
    written.trigger(processingTime="5 seconds").start().awaitTermination()
"""

FACTS = [
    Fact(
        Token(0),
        tuple(json.dumps([f"2026-11-22T10:{number:02}:00", page]) for page in ("/", "/caf\u00e9", None)[:rows]),
    )
    for number, rows in ((0, 1), (1, 3), (2, 1), (3, 2))
]


@contextmanager
def query(folder: Path, http: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the query in a process group of its own, which is killed at the end."""
    with (folder / "query.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", QUERY, f"http://{http}"],
            cwd=folder,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def appending(http: str) -> Iterator[Callable[[], None]]:
    """Append facts until the block is left or the yielded function is called."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.4):  # so that little waits for a query that starts
            try:
                append(http, "visits", FACTS, SECRET)
            except HTTPError:
                raise
            except (OSError, HTTPException):
                continue  # the master is away

    thread = threading.Thread(target=work)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    try:
        yield end
    finally:
        end()


def sink(folder: Path) -> list[tuple[Any, ...]]:
    """Return the rows of the files that the sink's metadata lists, in order."""
    account = {each.name: each for each in (folder / "sink" / "_spark_metadata").glob("[0-9]*")}
    compact = max((int(name.partition(".")[0]) for name in account if name.endswith(".compact")), default=-1)
    names = [name for name in account if name.endswith(f"{compact}.compact")]
    names += [name for name in account if name.isdigit() and int(name) > compact]
    files = [json.loads(line)["path"] for name in names for line in account[name].read_text().splitlines()[1:]]
    found = []
    for file in files:
        with open(unquote(urlsplit(file).path), encoding="utf-8") as lines:  # noqa: PTH123 (a URL's path)
            found += [tuple(json.loads(line).values()) for line in lines]
    return sorted(found)


def master_rows(folder: Path) -> list[tuple[Any, ...]]:
    """Return the rows of the master, in order."""
    rows = table(folder / "replication.db", "visits")
    return sorted(("visits", writer, token, text) for token, _, writer, text in rows)


@pytest.mark.timeout(1200)
def test_a_killed_query_continues_from_its_checkpoint_while_the_master_restarts(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_spark()
    kills, away = (6, 65.0) if request.config.getoption("--full") else (1, 3.0)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "master.toml").write_text('[[streams]]\nname = "visits"\nrow = ["at", "page"]\n')
    master = Daemon(tmp_path, "master", "--config=master.toml", "--secret-file=secret")

    def goes_on(process: subprocess.Popen[bytes]) -> None:
        enough = len(sink(tmp_path)) + ROWS
        until(lambda: process.poll() is not None or len(sink(tmp_path)) >= enough, "the query goes on", 180)
        assert process.poll() is None, (tmp_path / "query.log").read_text()

    with ExitStack() as stack:
        _, http = stack.enter_context(fixed_ports(master))
        end = stack.enter_context(appending(http))
        for _ in range(kills):
            with query(tmp_path, http) as process:
                goes_on(process)
        with query(tmp_path, http) as process:
            goes_on(process)
            master.kill()
            time.sleep(away)
            master.start()
            goes_on(process)
            end()
            want = master_rows(tmp_path)
            until(lambda: len(sink(tmp_path)) >= len(want), "the query has everything", 180)
        assert sink(tmp_path) == want
