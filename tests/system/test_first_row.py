"""The row with ID 1 of a mapped table reaches every follower and segment; rows at 0 or below are refused."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.system.daemons import LOCAL, Daemon, fixed_ports, get_json, run_command, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

MAPPING = """
[[streams]]
name = "events"
table = "events"
id_column = "id"
row = ["name"]
"""


class Shop:
    """An application with a table whose first row has ID 1."""

    def __init__(self, folder: Path, url: str, run: Callable[[str], object]) -> None:
        self.folder = folder
        self.run = run
        (folder / "master.toml").write_text(f'database = "{url}"\n{MAPPING}')
        writes = 'connect = ["tcp:127.0.0.1:1"]\nwrites = ["events"]\ninstance_name = "master"'
        (folder / "writer.toml").write_text(f'database = "{url}"\n{writes}\n{MAPPING}')

    def writer(self, role: str = "master") -> Daemon:
        """Return a master or a worker that writes, not yet started."""
        return Daemon(self.folder, role, f"--config={'master' if role == 'master' else 'writer'}.toml", *LOCAL)

    def follower(self, name: str, wire: str, *sources: str) -> Daemon:
        """Return a worker with a copy, not yet started."""
        catch_up = [f"--catch-up={each}" for each in sources]
        options = [f"--instance-name={name}", f"--connect=tcp:{wire}"]
        return Daemon(self.folder, "worker", *options, *catch_up, name=name)

    def copy(self, name: str) -> list[tuple[Any, ...]]:
        """Return the facts that a worker has copied, with its position."""
        path = self.folder / f"replication-{name}.db"
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                return database.execute('SELECT stream_id, "row" FROM stream_events ORDER BY stream_id').fetchall()
        except sqlite3.OperationalError:
            return []

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this package."""
        return run_command("replication", *arguments, folder=self.folder)


@pytest.fixture(params=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Return the application on each kind of database; its table is empty."""
    if request.param == "sqlite":
        with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT)")
            yield Shop(tmp_path, f"sqlite:///{tmp_path}/shop.db", lambda sql: database.execute(sql).fetchall())
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as name:
        server.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)", database=name)
        yield Shop(tmp_path, server.url(name), partial(server.sql, database=name))


@pytest.mark.parametrize("role", ["master", "worker"])
def test_the_first_row_reaches_every_follower_and_page(shop: Shop, role: str) -> None:
    shop.run("INSERT INTO events (name) VALUES ('one')")
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(shop.writer(role)))
        stack.enter_context(shop.follower("by_http", wire, f"http://{http}"))
        until(lambda: shop.copy("by_http") == [(1, '["one"]')], "the worker has the first row")
        stack.enter_context(shop.follower("by_copy", wire, f"sqlite:///{shop.folder}/replication-by_http.db"))
        until(lambda: shop.copy("by_copy") == [(1, '["one"]')], "a worker has it from the copy of the other")
        url = f"http://{http}"
        assert get_json(url, "/v1/streams/events/updates?instance=master&from=0&upto=9")["updates"] == [[1, ["one"]]]
        assert get_json(url, "/v1/streams/events/updates?since=0")["updates"] == [[1, "master", ["one"]]]
        shop.run("INSERT INTO events (name) VALUES ('two')")
        until(lambda: shop.copy("by_http") == shop.copy("by_copy") == [(1, '["one"]'), (2, '["two"]')], "both go on")


def test_a_first_row_that_comes_later_reaches_live_and_later_followers(shop: Shop) -> None:
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(shop.writer()))
        live = stack.enter_context(shop.follower("live", wire, f"http://{http}"))
        until(lambda: "following localhost" in live.log, "a worker follows")
        shop.run("INSERT INTO events (name) VALUES ('one')")
        until(lambda: [row for _, row in shop.copy("live")] == ['["one"]'], "the live worker has the row")
        stack.enter_context(shop.follower("late", wire, f"http://{http}"))
        until(lambda: shop.copy("late") == shop.copy("live"), "the later worker has the row")


def test_a_restart_after_the_first_row_is_no_other_history(shop: Shop) -> None:
    """The first row belongs to the run of the writer that published it (docs/protocol/following.md E7)."""
    master = shop.writer()
    with fixed_ports(master) as (wire, http), shop.follower("live", wire, f"http://{http}") as live:
        until(lambda: "following localhost" in live.log, "a worker follows")
        shop.run("INSERT INTO events (name) VALUES ('one')")
        until(lambda: len(shop.copy("live")) == 1, "the worker has the first row")
        master.kill()
        master.start()
        master.address("HTTP")  # the new run begins before the second row
        shop.run("INSERT INTO events (name) VALUES ('two')")
        until(lambda: len(shop.copy("live")) == 2 or "accept" in live.log, "the worker goes on, or has stopped")
        assert [row for _, row in shop.copy("live")] == ['["one"]', '["two"]']


def test_a_segment_has_the_first_row(shop: Shop) -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    shop.run("INSERT INTO events (name) VALUES ('one')")
    with ExitStack() as stack:
        wire, _ = stack.enter_context(fixed_ports(shop.writer()))

        def replayed() -> bool:
            written = shop.command("replay", "--out=segments", "--config=master.toml", "--master=none")
            return written.returncode == 0 and any((shop.folder / "segments/events").rglob("*.zst"))

        until(replayed, "the first row is in a segment")
        stack.enter_context(shop.follower("by_segments", wire, "segments"))
        until(lambda: shop.copy("by_segments") == [(1, '["one"]')], "the worker has the first row")


@pytest.mark.parametrize("token", [0, -3])
def test_a_row_at_0_or_below_is_refused_with_the_cure(shop: Shop, token: int) -> None:
    shop.run(f"INSERT INTO events (id, name) VALUES ({token}, 'none'), (2, 'two')")
    checked = shop.command("streams", "check", "--config", "master.toml")
    assert checked.returncode == 1
    assert f"table 'events' has a row with the ID {token}, which no follower would receive" in checked.stdout
    cure = checked.stdout.strip().rpartition("leave it out by ")[2].replace("'", '"')
    with shop.writer() as master:
        until(lambda: f"has a row with the ID {token}" in master.log, "the start is refused")
    mapping = shop.folder / "master.toml"
    mapping.write_text(f"{mapping.read_text()}{cure}\n")
    assert shop.command("streams", "check", "--config", "master.toml").returncode == 0
    with shop.writer() as master:
        url = f"http://{master.address('HTTP')}"
        assert get_json(url, "/v1/streams/events/updates?since=0")["updates"] == [[2, "master", ["two"]]]
