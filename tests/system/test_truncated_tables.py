"""TRUNCATE while a master runs: followers go on rightly, or their stream stops with the cure."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, get_json, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

MAPPING = """
[[streams]]
name = "events"
table = "events"
id_column = "id"
row = ["name"]

[[streams]]
name = "orders"
"""


class Scene:
    """A master with a mapped and a generic stream, and followers with copies."""

    def __init__(self, folder: Path, stack: ExitStack, server: PostgresServer, database: str) -> None:
        self.folder, self.server, self.database = folder, server, database
        self.stack = stack
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        (folder / "master.toml").write_text(f'database = "{server.url(database)}"\n{MAPPING}')
        self.master = Daemon(folder, "master", "--config=master.toml")
        self.wire, self.http = stack.enter_context(fixed_ports(self.master))

    def sql(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL in the master's database."""
        return self.server.sql(sql, database=self.database)

    def follower(self, name: str, *options: str) -> Daemon:
        """Start a worker with a copy."""
        connect = (f"--instance-name={name}", f"--connect=tcp:{self.wire}", f"--catch-up=http://{self.http}")
        return self.stack.enter_context(
            Daemon(self.folder, "worker", *connect, LOCAL[1], *options, name=name),
        )

    def append(self, *rows: str) -> None:
        """Append facts to the generic stream."""
        append(self.http, "orders", [Fact(Token(0), (f'"{each}"',)) for each in rows])

    def copy(self, name: str, stream: str) -> list[str]:
        """Return the rows that a follower has."""
        path = self.folder / f"replication-{name}.db"
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
                rows = database.execute(f'SELECT "row" FROM stream_{stream} ORDER BY stream_id, ord').fetchall()
        except sqlite3.OperationalError:
            return []
        return [row.strip('"[]') for (row,) in rows]

    def has(self, name: str, stream: str, *rows: str) -> None:
        """Wait until a follower has these rows."""
        until(lambda: self.copy(name, stream) == [*rows], f"{name} has {rows}")

    def error(self, http: str, stream: str) -> str:
        """Return why a stream is stopped; empty if it is not."""
        writers = get_json(http, f"/v1/streams/{stream}")["writers"]
        return next((each["error"] for each in writers if each.get("error")), "")


@pytest.fixture
def scene(tmp_path: Path, postgres: PostgresServer) -> Iterator[Scene]:
    with postgres.database() as name, ExitStack() as stack:
        yield Scene(tmp_path, stack, postgres, name)


def test_a_follower_that_lacks_facts_of_a_truncated_stream_table_stops_with_the_cure(scene: Scene) -> None:
    near, far = scene.follower("near"), scene.follower("far")
    scene.append("a")
    scene.has("near", "orders", "a")
    scene.has("far", "orders", "a")
    time.sleep(2.5)  # the master looks at its tables once a second, and needs to have seen a fact there
    far.kill()
    scene.append("b", "c")
    scene.has("near", "orders", "a", "b", "c")
    scene.sql("TRUNCATE stream_orders RESTART IDENTITY")
    until(lambda: "stream orders: its table was truncated" in scene.master.log, "the master has found it")
    scene.append("d")
    scene.has("near", "orders", "a", "b", "c", "d")
    far.start()
    http = f"http://{far.address('HTTP')}"
    until(lambda: "--skip-gone" in scene.error(http, "orders"), "the stream has stopped with the cure")
    assert scene.copy("far", "orders") == ["a"]
    assert far.terminate() == 0
    far.options += ("--skip-gone",)
    far.start()
    scene.has("far", "orders", "a", "d")
    assert not scene.error(f"http://{near.address('HTTP')}", "orders")


def test_rows_of_a_mapped_table_after_restart_identity_reach_followers_once_they_have_new_ids(scene: Scene) -> None:
    scene.follower("copy")
    scene.sql("INSERT INTO events (name) VALUES ('a'), ('b'), ('c')")
    scene.has("copy", "events", "a", "b", "c")
    scene.sql("TRUNCATE events RESTART IDENTITY; INSERT INTO events (name) VALUES ('d'), ('e'), ('f'), ('g')")
    master = f"http://{scene.http}"
    error = until(lambda: scene.error(master, "events"), "the stream has stopped")
    scene.sql("INSERT INTO events (name) VALUES ('h')")
    scene.append("other streams go on")
    scene.has("copy", "orders", "other streams go on")
    assert scene.copy("copy", "events") == ["a", "b", "c"]
    scene.sql(error.rpartition(": ")[2].partition("; ")[0])
    until(lambda: sorted(scene.copy("copy", "events")) == [*"abcdefgh"], "each row has arrived")
    until(lambda: not scene.error(master, "events"), "the stream goes on")


def test_followers_of_a_mapped_table_go_on_after_truncate(scene: Scene) -> None:
    """The IDs go on, too."""
    scene.follower("copy")
    scene.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
    scene.has("copy", "events", "a", "b")
    scene.sql("TRUNCATE events")
    scene.sql("INSERT INTO events (name) VALUES ('c')")
    scene.has("copy", "events", "a", "b", "c")
    until(lambda: "table events was truncated" in scene.master.log.replace('"', ""), "the log has it")
