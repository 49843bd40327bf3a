"""The row with ID 1 of a mapped table reaches every follower and segment; rows at 0 or below are refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import LOCAL, fixed_ports, get_json, until
from tests.system.mapped import MappedCluster, on_postgres, on_sqlite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["sqlite", "postgres"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MappedCluster]:
    """Return a cluster on each kind of database."""
    with (
        on_sqlite(tmp_path)
        if request.param == "sqlite"
        else on_postgres(tmp_path, request.getfixturevalue("postgres")) as found
    ):
        yield found


@pytest.mark.parametrize("role", ["master", "worker"])
def test_the_first_row_reaches_every_follower_and_page(cluster: MappedCluster, role: str) -> None:
    cluster.sql("INSERT INTO events (name) VALUES ('one')")
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(cluster.writer(role=role)))
        stack.enter_context(cluster.follower("by_http", wire, f"http://{http}"))
        until(lambda: cluster.copy("by_http") == [(1, '["one"]')], "the worker has the first row")
        stack.enter_context(cluster.follower("by_copy", wire, f"sqlite:///{cluster.folder}/replication-by_http.db"))
        until(lambda: cluster.copy("by_copy") == [(1, '["one"]')], "a worker has it from the copy of the other")
        url = f"http://{http}"
        assert get_json(url, "/v1/streams/events/updates?instance=master&from=0&upto=9")["updates"] == [[1, ["one"]]]
        assert get_json(url, "/v1/streams/events/updates?since=0")["updates"] == [[1, "master", ["one"]]]
        cluster.sql("INSERT INTO events (name) VALUES ('two')")
        both = [(1, '["one"]'), (2, '["two"]')]
        until(lambda: cluster.copy("by_http") == cluster.copy("by_copy") == both, "both workers have both rows")


def test_a_first_row_that_comes_later_reaches_live_and_later_followers(cluster: MappedCluster) -> None:
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(cluster.writer()))
        live = stack.enter_context(cluster.follower("live", wire, f"http://{http}"))
        until(lambda: "following localhost" in live.log, "a worker follows")
        cluster.sql("INSERT INTO events (name) VALUES ('one')")
        until(lambda: [row for _, row in cluster.copy("live")] == ['["one"]'], "the live worker has the row")
        stack.enter_context(cluster.follower("late", wire, f"http://{http}"))
        until(lambda: cluster.copy("late") == cluster.copy("live"), "the later worker has the row")


def test_a_restart_after_the_first_row_is_no_other_history(cluster: MappedCluster) -> None:
    """The first row belongs to the run of the writer that published it (docs/protocol/following.md E7)."""
    master = cluster.writer()
    with fixed_ports(master) as (wire, http), cluster.follower("live", wire, f"http://{http}") as live:
        until(lambda: "following localhost" in live.log, "a worker follows")
        cluster.sql("INSERT INTO events (name) VALUES ('one')")
        until(lambda: len(cluster.copy("live")) == 1, "the worker has the first row")
        master.kill()
        master.start()
        master.address("HTTP")  # the new run begins before the second row
        cluster.sql("INSERT INTO events (name) VALUES ('two')")
        until(lambda: len(cluster.copy("live")) == 2 or "accept" in live.log, "the worker goes on, or has stopped")
        assert [row for _, row in cluster.copy("live")] == ['["one"]', '["two"]']


def test_a_segment_has_the_first_row(cluster: MappedCluster) -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    cluster.sql("INSERT INTO events (name) VALUES ('one')")
    with ExitStack() as stack:
        wire, _ = stack.enter_context(fixed_ports(cluster.writer()))

        def replayed() -> bool:
            written = cluster.command("replay", "--out=segments", "--config=master.toml", "--master=none")
            return written.returncode == 0 and any((cluster.folder / "segments/events").rglob("*.zst"))

        until(replayed, "the first row is in a segment")
        stack.enter_context(cluster.follower("by_segments", wire, "segments"))
        until(lambda: cluster.copy("by_segments") == [(1, '["one"]')], "the worker has the first row")


@pytest.mark.parametrize("token", [0, -3])
def test_a_row_at_0_or_below_is_refused_with_the_cure(cluster: MappedCluster, token: int) -> None:
    cluster.sql(f"INSERT INTO events (id, name) VALUES ({token}, 'none'), (2, 'two')")
    checked = cluster.command("streams", "check", "--config", "master.toml")
    assert checked.returncode == 1
    assert f"table 'events' has a row with the ID {token}, which no follower would receive" in checked.stdout
    cure = checked.stdout.strip().rpartition("leave it out by ")[2].replace("'", '"')
    with cluster.writer(*LOCAL) as master:
        until(lambda: f"has a row with the ID {token}" in master.log, "the start is refused")
    mapping = cluster.folder / "master.toml"
    mapping.write_text(f"{mapping.read_text()}{cure}\n")
    assert cluster.command("streams", "check", "--config", "master.toml").returncode == 0
    with cluster.writer(*LOCAL) as master:
        url = f"http://{master.address('HTTP')}"
        assert get_json(url, "/v1/streams/events/updates?since=0")["updates"] == [[2, "master", ["two"]]]
