"""A master of version 0.1.0 is replaced by today's while followers stay and a client appends: no fact is lost or twice.

The code of 0.1.0 comes from the history of the checkout.
"""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import pytest

from replication.bench.cluster import free_ports
from tests.system.daemons import CHECKOUT, PATIENCE, Daemon, environment, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

COMMIT = "ba82766e5877a19d65a6667bbc4bea99a6fbd322"  # the last one of 0.1.0
APP = """
def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS applied (n INTEGER PRIMARY KEY, token INTEGER UNIQUE)")
        for fact in facts:
            await txn.execute("INSERT INTO applied (token) VALUES (?)", [fact.token])
"""


class Appender(threading.Thread):
    """A client that appends one fact after the other, each again until it is acknowledged; ``ids`` has the answers."""

    def __init__(self, http: str) -> None:
        super().__init__()
        self.url = f"http://{http}/v1/streams/orders/facts"
        self.ids: list[int] = []
        self.retries = 0
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            number = len(self.ids)
            body = json.dumps({"rows": [[f"o{number}", "placed"]]}).encode()
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"order {number} of {id(self)}"}
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(self.url, body, headers), timeout=PATIENCE
                ) as answer:
                    self.ids += json.load(answer)["ids"]
            except OSError:  # the connection is refused or reset, or the answer is 503
                self.retries += 1
                time.sleep(0.02)

    def end(self) -> list[int]:
        """Return the IDs once the last append is acknowledged."""
        self.ending.set()
        self.join(PATIENCE)
        return self.ids


@pytest.fixture
def yesterday(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which ``twistd`` runs version 0.1.0."""
    git = shutil.which("git")
    archive = ["archive", COMMIT, "replication", "twisted"]
    found = subprocess.run([git, *archive], cwd=CHECKOUT, check=False, capture_output=True) if git else None
    if found is None or found.returncode:
        pytest.skip("version 0.1.0 is missing: this needs git, and a checkout with its whole history")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian's Python 3.11.2 has none
        tar.extractall(tmp_path / "0.1.0")
    variables = {**environment(), "PYTHONPATH": str(tmp_path / "0.1.0")}
    show = [sys.executable, "-c", "import replication; print(replication.__version__)"]
    shown = subprocess.run(show, cwd=tmp_path, env=variables, check=True, capture_output=True, text=True)
    assert shown.stdout == "0.1.0\n"
    return variables


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sqlite":
        yield "sqlite:///shop.db"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as name:
        yield server.url(name)


def test_followers_stay_while_the_master_is_replaced_by_todays(
    tmp_path: Path, yesterday: dict[str, str], database: str
) -> None:
    (tmp_path / "app.py").write_text(APP)
    wire, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    listen = [f"--{key}=tcp:{at.split(':')[1]}:interface=127.0.0.1" for key, at in (("listen", wire), ("http", http))]

    def master(name: str) -> Daemon:
        return Daemon(tmp_path, "master", "--stream=orders", f"--database={database}", *listen, name=name)

    def worker(name: str) -> Daemon:
        options = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", f"--instance-name={name}", "--app=app")
        return Daemon(tmp_path, "worker", *options, name=name)

    with ExitStack() as stack:
        old = master("old")
        old.environment = yesterday
        stack.enter_context(old)
        assert old.address("HTTP") == http
        earlier, later = worker("earlier"), worker("later")
        earlier.environment = yesterday
        for each in (earlier, later):
            stack.enter_context(each)
        client = Appender(http)
        client.start()
        stack.callback(client.end)
        for each in (earlier, later):
            until(partial(has_applied, tmp_path, each, 20), f"{each.name} follows 0.1.0")
        assert old.terminate() == 0
        before = len(client.ids)
        new = stack.enter_context(master("new"))
        assert new.address("HTTP") == http
        until(lambda: len(client.ids) >= before + 20, "appends go on")
        assert earlier.terminate() == 0  # the last process of 0.1.0
        earlier.environment = environment()
        earlier.start()
        before = len(client.ids)
        until(lambda: len(client.ids) >= before + 20, "appends go on")
        ids = client.end()
        assert ids == [*range(2, len(ids) + 2)]
        assert client.retries, "the client saw the change"
        for each in (earlier, later):
            until(partial(has_applied, tmp_path, each, len(ids)), f"{each.name} has all")
            assert applied(tmp_path, each) == ids
        assert (later.starts, later.ended) == (1, False)
        for each in (earlier, later, new):
            assert each.terminate() == 0


def test_version_0_1_0_goes_on_with_what_todays_has_written_and_todays_after_it(
    tmp_path: Path, yesterday: dict[str, str]
) -> None:
    """Master and function go back to 0.1.0 on SQLite, and then forward again: no fact is lost or twice."""
    (tmp_path / "app.py").write_text(APP)
    wire, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    listen = [f"--{key}=tcp:{at.split(':')[1]}:interface=127.0.0.1" for key, at in (("listen", wire), ("http", http))]
    master = Daemon(tmp_path, "master", "--stream=orders", "--database=sqlite:///shop.db", *listen)
    follows = f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--instance-name=back", "--app=app"
    worker = Daemon(tmp_path, "worker", *follows, name="back")
    ids: list[int] = []
    with ExitStack() as stack:
        for each in (master, worker):
            stack.enter_context(each)
        for version in (None, yesterday, environment()):
            if version is not None:
                for each in (worker, master):
                    assert each.terminate() == 0
                    each.environment = version
                for each in (master, worker):
                    each.start()
            assert master.address("HTTP") == http
            client = Appender(http)
            client.start()
            stack.callback(client.end)
            until(lambda: len(client.ids) >= 20, "appends go on")  # noqa: B023 (it is used at once)
            ids += client.end()
            until(partial(has_applied, tmp_path, worker, len(ids)), "all are applied")
            claimed = (tmp_path / "shop.db-claim").exists(), (tmp_path / "replication-back.db-claim").exists()
            assert claimed == (version is yesterday,) * 2, "only 0.1.0 has these files"
        assert ids == [*range(2, len(ids) + 2)]
        assert applied(tmp_path, worker) == ids
        with closing(sqlite3.connect(tmp_path / "replication-back.db")) as database:
            assert database.execute("SELECT count(*) FROM applied_counts").fetchone() == (1,), "today's has counted"
        for each in (worker, master):
            assert each.terminate() == 0


def test_a_worker_that_writes_and_the_processes_around_a_relay_are_replaced_by_todays(
    tmp_path: Path, yesterday: dict[str, str]
) -> None:
    """0.1.0 has no relay: today's is replaced by itself, between a writer and a follower that begin as 0.1.0."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "writing.toml").write_text('writes = ["orders"]\nconnect = "tcp:127.0.0.1:1"\n')
    ports = [f"127.0.0.1:{port}" for port in free_ports(4)]

    def at(wire: str, http: str) -> list[str]:
        places = (("listen", wire), ("http", http))
        return [f"--{key}=tcp:{place.split(':')[1]}:interface=127.0.0.1" for key, place in places]

    def following(wire: str, http: str) -> list[str]:
        return [f"--connect=tcp:{wire}", f"--catch-up=http://{http}"]

    def worker(name: str, *options: str) -> Daemon:
        return Daemon(tmp_path, "worker", f"--instance-name={name}", *options, name=name)

    with ExitStack() as stack:
        writer = worker("writer", "--config=writing.toml", *at(*ports[:2]))
        relay = worker("relay", *following(*ports[:2]), *at(*ports[2:]))
        earlier, later = (worker(name, *following(*ports[2:]), "--app=app") for name in ("earlier", "later"))
        writer.environment = earlier.environment = yesterday
        for each in (writer, relay, earlier, later):
            stack.enter_context(each)
        assert writer.address("HTTP") == ports[1]
        client = Appender(ports[1])
        client.start()
        stack.callback(client.end)
        for each in (earlier, later):
            until(partial(has_applied, tmp_path, each, 20), f"{each.name} follows")
        for each in (writer, relay, earlier, relay):
            assert each.terminate() == 0
            each.environment = environment()
            each.start()
            before = len(client.ids)
            until(partial(lambda before: len(client.ids) >= before + 20, before), "appends go on")
        ids = client.end()
        assert ids == [*range(2, len(ids) + 2)]
        for each in (earlier, later):
            until(partial(has_applied, tmp_path, each, len(ids)), f"{each.name} has all")
            assert applied(tmp_path, each) == ids
        assert (later.starts, later.ended) == (1, False)
        for each in (later, earlier, relay, writer):
            assert each.terminate() == 0


def applied(folder: Path, worker: Daemon) -> list[int]:
    """Return the IDs in the order in which a worker's function had them; none before the first."""
    with closing(sqlite3.connect(folder / f"replication-{worker.name}.db", timeout=30)) as database:
        try:
            return [each for (each,) in database.execute("SELECT token FROM applied ORDER BY n")]
        except sqlite3.OperationalError:
            return []


def has_applied(folder: Path, worker: Daemon, count: int) -> bool:
    """Return whether the function had so many facts."""
    return len(applied(folder, worker)) >= count
