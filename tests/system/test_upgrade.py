"""Files that version 0.1.0 left: today's code opens each, serves every fact and continues from every position.

``tests/data/v0_1/README.md`` describes the files and how they were made.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replication import config
from tests.system.daemons import LOCAL, Daemon, get_json, run_command, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

ROOT = Path(__file__).parent.parent.parent
YESTERDAY = ROOT / "tests/data/v0_1"
LOST_IN_MEMORY = {"typing"}  # a restart forgets the facts of a stream in memory


class Shop:
    """The databases of a master and of two workers, as 0.1.0 left them, in one kind of database."""

    def __init__(
        self, folder: Path, server: PostgresServer | None = None, databases: tuple[str, str] = ("", "")
    ) -> None:
        self.folder = folder
        self.server = server
        self.expected = json.loads((YESTERDAY / f"{'sqlite' if server is None else 'postgres'}.json").read_text())
        self._names = dict(zip(("shop", "copy"), databases, strict=True))
        for name in ("shop.toml", "shop_app.py"):
            shutil.copy(YESTERDAY / name, folder)
        if server is None:
            for name in ("shop", "replication-copier", "replication-reader"):
                (folder / f"{name}.db").write_bytes(gzip.decompress((YESTERDAY / f"{name}.db.gz").read_bytes()))
        else:
            for name, database in self._names.items():
                server.sql((YESTERDAY / f"postgres-{name}.sql").read_text(), database=database)

    def master(self) -> Daemon:
        """Return the master, not yet started."""
        return Daemon(self.folder, "master", "--config=shop.toml", *self._option("shop"), *LOCAL)

    def worker(self, name: str, wire: str, http: str, *options: str) -> Daemon:
        """Return a worker, not yet started; ``reader`` shares the master's database in PostgreSQL."""
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--server-name=shop.example")
        database = self._option("copy" if name == "copier" else "shop")
        return Daemon(self.folder, "worker", f"--instance-name={name}", *options, *database, *follow, name=name)

    def rows(self, of: str, sql: str) -> list[tuple[Any, ...]]:
        """Read the database of the master (``shop``) or of a worker."""
        if self.server is not None:
            return self.server.sql(sql, database=self._names["copy" if of == "copier" else "shop"])
        path = self.folder / ("shop.db" if of == "shop" else f"replication-{of}.db")
        with closing(sqlite3.connect(path, timeout=30)) as database:
            return database.execute(sql).fetchall()

    def execute(self, sql: str) -> None:
        """Change the master's database."""
        if self.server is not None:
            self.server.sql(sql, database=self._names["shop"])
            return
        with closing(sqlite3.connect(self.folder / "shop.db", timeout=30)) as database, database:
            database.execute(sql)

    def _option(self, name: str) -> tuple[str, ...]:
        return () if self.server is None else (f"--database={self.server.url(self._names[name])}",)


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    if request.param == "sqlite":
        yield Shop(tmp_path)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as one, server.database() as other:
        yield Shop(tmp_path, server, (one, other))


def append(http: str, stream: str, *rows: Any, **headers: str) -> int:
    """Append one fact and return its token."""
    body = json.dumps({"rows": rows}).encode()
    status, answer = ask(
        f"http://{http}/v1/streams/{stream}/facts", body, {"Content-Type": "application/json", **headers}
    )
    assert status == 200, answer
    (token,) = answer["ids"]
    return int(token)


def updates(http: str, stream: str) -> list[Any]:
    """Return all facts of a stream, as ``[token, row]``."""
    path = f"/v1/streams/{stream}/updates?instance=master&from=0&upto={2**40}"
    found: list[Any] = get_json(f"http://{http}", path)["updates"]
    return found


def test_a_master_serves_every_fact_and_appends(shop: Shop) -> None:
    with shop.master() as master:
        http = master.address("HTTP")
        for stream, page in shop.expected["streams"].items():
            assert updates(http, stream) == ([] if stream in LOST_IN_MEMORY else page["updates"]), stream
        assert get_json(f"http://{http}", "/v1/rooms/!tour:shop.example") == shop.expected["room"]
        assert get_json(f"http://{http}", "/v1/users/@anna:shop.example")["seen"] == shop.expected["user"]["seen"]
        for stream, row in (("orders", ["o5", "placed"]), ("payments", ["p3", 30])):
            last = shop.expected["streams"][stream]["upto_token"]
            assert append(http, stream, row) == last + 1
            newest = partial(lambda stream, fact: updates(http, stream)[-1] == fact, stream, [last + 1, row])
            until(newest, f"the new fact of {stream} is served")
        # IDs of a stream in memory go on above all that 0.1.0 may have given.
        assert append(http, "typing", ["!room", []]) > shop.expected["streams"]["typing"]["upto_token"]


def test_a_table_that_was_converted_as_documented_is_served(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    section = (ROOT / "docs/operations.md").read_text().partition("### A table that 0.1.0 made")[2]
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.executescript(section.partition("```sql")[2].partition("```")[0])
    ((created,),) = shop.rows("shop", "SELECT sql FROM sqlite_master WHERE name = 'stream_orders'")
    assert "ROWID" not in created
    with shop.master() as master:
        http = master.address("HTTP")
        page = shop.expected["streams"]["orders"]
        assert updates(http, "orders") == page["updates"]
        assert append(http, "orders", ["o5", "placed"]) == page["upto_token"] + 1


def test_an_append_that_was_stored_is_not_stored_again(shop: Shop) -> None:
    with shop.master() as master:
        http = master.address("HTTP")
        shop.execute(f"UPDATE append_receipts SET written_at = {time.time()}")  # a receipt lives for a day
        assert append(http, "orders", ["o1", "placed"], **{"Idempotency-Key": "first order"}) == 2
        assert append(http, "orders", ["o5", "placed"], **{"Idempotency-Key": "another"}) == 7


def test_workers_continue_from_their_positions(shop: Shop) -> None:
    """The primary key of ``applied`` refuses a fact that comes again, and the stream would stop."""
    table = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"
    with ExitStack() as stack:
        master = stack.enter_context(shop.master())
        wire, http = master.address("the wire"), master.address("HTTP")
        append(http, "orders", ["o5", "placed"])
        copier = stack.enter_context(shop.worker("copier", wire, http))
        reader = stack.enter_context(shop.worker("reader", wire, http, "--app=shop_app"))
        last = append(http, "orders", ["o6", "placed"], ["o6", "paid"])
        until(lambda: shop.rows("copier", table) == shop.rows("shop", table), "the copy is complete")
        applied = [(2, 0), (3, 0), (3, 1), (5, 0), (6, 0), (7, 0), (last, 0), (last, 1)]
        until(lambda: shop.rows("reader", "SELECT token, ord FROM applied ORDER BY 1, 2") == applied, "all is applied")
        payments = "SELECT stream_id, row FROM stream_payments ORDER BY 1"
        assert [token for token, _ in shop.rows("copier", payments)] == [2, 3, 4]
        for daemon in (reader, copier, master):
            assert daemon.terminate() == 0


@contextmanager
def segments(folder: Path, compression: str) -> Iterator[str]:
    """Yield the name of a copy of the segments; all files are still the same at the end."""
    yesterday = YESTERDAY / f"segments-{compression}"
    name = shutil.copytree(yesterday, folder / "segments").name
    yield name
    for file in yesterday.rglob("*.rdata*"):
        assert (folder / name / file.relative_to(yesterday)).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_a_new_worker_takes_segments(tmp_path: Path, compression: str) -> None:
    """Some rows of ``payments`` are gone from the master's database. Only the segments still have them."""
    if compression == "zstd":
        pytest.importorskip("zstandard", reason="the extra zstd is missing")
    shop = Shop(tmp_path)
    shop.execute("DELETE FROM payments WHERE id < 4")
    with segments(tmp_path, compression) as folder, shop.master() as master:
        wire, http = master.address("the wire"), master.address("HTTP")
        with shop.worker("new", wire, http, f"--catch-up={folder}"):
            expected = shop.expected["streams"]
            for stream in ("payments", "orders", "events", "backfill", "caches"):
                rows = [(token, json.dumps(row, separators=(",", ":"))) for token, row in expected[stream]["updates"]]
                sql = f"SELECT stream_id, row FROM stream_{stream} ORDER BY stream_id, ord"

                def copied(sql: str = sql, rows: list[Any] = rows) -> bool:
                    try:
                        return shop.rows("new", sql) == rows
                    except sqlite3.OperationalError:  # its table is not there yet
                        return False

                until(copied, f"{stream} comes from segments")


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_replay_verifies_segments_and_adds_new_ones(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("pyarrow", reason="the extra spark is missing")
    pytest.importorskip("adbc_driver_sqlite", reason="the extra spark is missing")
    shop = Shop(tmp_path)
    with shop.master() as master:
        append(master.address("HTTP"), "orders", ["o5", "placed"])
        assert master.terminate() == 0
    with segments(tmp_path, compression) as folder:

        def replay(*options: str) -> str:
            done = run_command("replication", "replay", *options, folder=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert replay("--verify", folder) == "segments: 7 segments with 15 rows are whole\n"
        written = replay("--config=shop.toml", "--master=none", f"--compression={compression}", "--out", folder)
        assert written.startswith("segments: 1 rows in 1 new segments")
        assert replay("--verify", folder) == "segments: 8 segments with 16 rows are whole\n"


@pytest.mark.parametrize(
    ("role", "file"),
    [
        ("master", "conf/master.toml"),
        ("master", "conf/synapse.toml"),
        ("worker", "conf/worker.toml"),
        ("master", "shop.toml"),
    ],
)
def test_configuration_files_load(role: config.Role, file: str) -> None:
    assert config.load(role, str(YESTERDAY / file)).role == role


def test_a_configuration_that_is_open_to_other_hosts_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """0.1.0 started with it. Nothing of the database is changed before."""
    shop = Shop(tmp_path)
    before = (tmp_path / "shop.db").read_bytes()
    listen = ("--listen=tcp:0", "--http=tcp:0:interface=127.0.0.1")
    with Daemon(tmp_path, "master", "--config=shop.toml", *listen) as master:
        assert master.wait() == 1
        last = master.log.splitlines()[-1]
    assert last.startswith("replication: cannot listen on tcp:0 (listen): it is open to other hosts without TLS")
    assert last.endswith("give an ssl: endpoint, or interface=127.0.0.1; in a network where every host is trusted, "
                         "insecure = true or --insecure allows it")  # fmt: skip
    assert (tmp_path / "shop.db").read_bytes() == before
    with Daemon(tmp_path, "master", "--config=shop.toml", "--insecure", *listen) as master:
        http = master.address("HTTP")
        assert updates(http, "orders") == shop.expected["streams"]["orders"]["updates"]
        assert "tcp:0 (listen) is open to other hosts without TLS" in master.log
