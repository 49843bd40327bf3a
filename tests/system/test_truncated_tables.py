"""TRUNCATE while a master runs: followers continue and lose no row, or their stream stops with the cure."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, fixed_ports, get_json, until
from tests.system.mapped import MAPPING, MappedCluster, on_postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

STREAMS = f"""{MAPPING}
[[streams]]
name = "orders"
"""


class Cluster:
    """A master with a mapped and a generic stream, and followers with copies."""

    def __init__(self, stack: ExitStack, mapped: MappedCluster) -> None:
        self.stack, self.mapped, self.sql = stack, mapped, mapped.sql
        self.master = mapped.writer()
        self.wire, self.http = stack.enter_context(fixed_ports(self.master))

    def follower(self, name: str) -> Daemon:
        """Start a worker with a copy."""
        return self.stack.enter_context(self.mapped.follower(name, self.wire, f"http://{self.http}"))

    def append(self, *rows: str) -> None:
        """Append facts to the generic stream."""
        append(self.http, "orders", [Fact(Token(0), (f'"{each}"',)) for each in rows])

    def copy(self, name: str, stream: str) -> list[str]:
        """Return the values of the rows that a follower has."""
        return [row.strip('"[]') for _, row in self.mapped.copy(name, stream)]

    def wait_for(self, name: str, stream: str, *rows: str) -> None:
        """Wait until a follower has these rows."""
        until(lambda: self.copy(name, stream) == [*rows], f"{name} has {rows}")

    def error(self, http: str, stream: str) -> str:
        """Return why a stream is stopped; empty if it is not, or if the process has not received it yet."""
        streams = get_json(http, "/v1/streams")["streams"]
        writers = [each for found in streams if found["name"] == stream for each in found["writers"]]
        return next((each["error"] for each in writers if each.get("error")), "")


@pytest.fixture
def cluster(tmp_path: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    with on_postgres(tmp_path, postgres, streams=STREAMS) as mapped, ExitStack() as stack:
        yield Cluster(stack, mapped)


def test_a_follower_that_lacks_facts_of_a_truncated_stream_table_stops_with_the_cure(cluster: Cluster) -> None:
    near, far = cluster.follower("near"), cluster.follower("far")
    cluster.append("a")
    cluster.wait_for("near", "orders", "a")
    cluster.wait_for("far", "orders", "a")
    time.sleep(2.5)  # the master reads its tables once a second, and must have read a fact there
    far.kill()
    cluster.append("b", "c")
    cluster.wait_for("near", "orders", "a", "b", "c")
    cluster.sql("TRUNCATE stream_orders RESTART IDENTITY")
    until(lambda: "stream orders: its table was truncated" in cluster.master.log, "the master has found it")
    cluster.append("d")
    cluster.wait_for("near", "orders", "a", "b", "c", "d")
    far.start()
    http = f"http://{far.address('HTTP')}"
    until(lambda: "--skip-gone" in cluster.error(http, "orders"), "the stream has stopped with the cure")
    assert cluster.copy("far", "orders") == ["a"]
    assert far.terminate() == 0
    far.options += ("--skip-gone",)
    far.start()
    cluster.wait_for("far", "orders", "a", "d")
    assert not cluster.error(f"http://{near.address('HTTP')}", "orders")


def test_rows_of_a_mapped_table_after_restart_identity_reach_followers_once_they_have_new_ids(cluster: Cluster) -> None:
    cluster.follower("copy")
    cluster.sql("INSERT INTO events (name) VALUES ('a'), ('b'), ('c')")
    cluster.wait_for("copy", "events", "a", "b", "c")
    cluster.sql("TRUNCATE events RESTART IDENTITY; INSERT INTO events (name) VALUES ('d'), ('e'), ('f'), ('g')")
    master = f"http://{cluster.http}"
    error = until(lambda: cluster.error(master, "events"), "the stream has stopped")
    cluster.sql("INSERT INTO events (name) VALUES ('h')")
    cluster.append("other streams go on")
    cluster.wait_for("copy", "orders", "other streams go on")
    assert cluster.copy("copy", "events") == ["a", "b", "c"]
    cluster.sql(error.rpartition(": ")[2].partition("; ")[0])
    until(lambda: sorted(cluster.copy("copy", "events")) == [*"abcdefgh"], "each row has arrived")
    until(lambda: not cluster.error(master, "events"), "the stream goes on")


def test_followers_of_a_mapped_table_go_on_after_truncate(cluster: Cluster) -> None:
    """The IDs continue, too."""
    cluster.follower("copy")
    cluster.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
    cluster.wait_for("copy", "events", "a", "b")
    cluster.sql("TRUNCATE events")
    cluster.sql("INSERT INTO events (name) VALUES ('c')")
    cluster.wait_for("copy", "events", "a", "b", "c")
    until(lambda: "table events was truncated" in cluster.master.log.replace('"', ""), "the log has it")
