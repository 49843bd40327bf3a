"""A worker applies fewer facts from compacted segments, and reaches the same state."""

from __future__ import annotations

import sqlite3
from functools import partial
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.streams.definitions import StreamDefinition
from tests.segments.histories import fact, write_database
from tests.system.daemons import Daemon, append, fixed_ports, until
from tests.system.test_kills import rows_of

if TYPE_CHECKING:
    from pathlib import Path

STATES = """
def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS states (id INTEGER PRIMARY KEY, state INTEGER)")
        await txn.execute("CREATE TABLE IF NOT EXISTS applied (token INTEGER PRIMARY KEY)")
        for fact in facts:
            await txn.execute("INSERT INTO applied VALUES (?)", [fact.token])
            for order, state in fact.rows:
                await txn.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", [order, state])
"""


def test_a_worker_reaches_the_same_state_from_compacted_segments(tmp_path: Path) -> None:
    """Each range is compacted by itself, so segments of two runs may have the same keys."""
    history = [fact(token, [token % 50, token], [token % 7, -token]) for token in range(2, 3_000)]
    url = write_database(tmp_path / "replication.db", {"master": history[:2_000]})
    orders = StreamDefinition("orders", row=("id", "state"), key=("id",))
    compacting = ReplayRequest(
        url,
        str(tmp_path / "segments"),
        ["orders"],
        [orders],
        options=SegmentOptions(500, compression="gzip", compact=True),
    )
    first = run_in_process(compacting)
    write_database(tmp_path / "replication.db", {"master": history[2_000:2_900]})
    segments = [*first, *run_in_process(compacting)]
    assert all(each.compacted for each in segments)
    kept = sum(each.rows for each in segments)
    write_database(tmp_path / "replication.db", {"master": history[2_900:]})
    want: dict[object, object] = {}
    for each in history:
        want.update(each.rows)
    (tmp_path / "states.py").write_text(STATES)
    with fixed_ports(Daemon(tmp_path, "master", "--stream=orders")) as (wire, http):
        sources = ("--catch-up=segments", f"--catch-up=http://{http}")
        with Daemon(tmp_path, "worker", f"--connect=tcp:{wire}", *sources, "--app=states"):
            live = [fact(0, [3, "live"]), fact(0, [99, "live"])]
            (*_, last) = append(http, "orders", live)
            want |= {3: "live", 99: "live"}
            database = tmp_path / "replication-worker1.db"
            position = (
                "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders' AND instance_name = 'master'"
            )
            until(partial(_is, database, position, [(last,)]), f"the worker reaches {last}")
            assert {row[0]: row[1] for row in rows_of(database, "SELECT id, state FROM states")} == want
            applied = len(rows_of(database, "SELECT token FROM applied"))
    assert kept < len(history) // 2
    assert applied < kept + 200


def _is(database: Path, sql: str, want: object) -> bool:
    try:
        return rows_of(database, sql) == want
    except sqlite3.OperationalError:  # it is being made
        return False
