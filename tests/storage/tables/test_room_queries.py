"""Queries about rooms read no more than they return; the rest is in the contract."""

from __future__ import annotations

import pytest

from replication.storage.tables.room_queries import RoomReads
from replication.storage.tables.rooms import declare_rooms
from tests.contract.rooms import ROOM, event
from tests.rooms.recorded import Keeper, in_memory


def test_reading_a_room_locks_and_makes_nothing() -> None:
    statements = in_memory()
    declare_rooms(statements)
    statements.execute("PRAGMA query_only = ON")
    assert RoomReads(statements).rooms() == []


@pytest.mark.parametrize("count", [10, 2_000])
def test_a_page_reads_no_more_than_itself(count: int) -> None:
    """The plan has no scan and no sort, however large the room is."""
    keeper = Keeper()
    keeper.take(ROOM, [event("0"), *[event(str(each), str(each - 1)) for each in range(1, count)]])
    seen: list[str] = []
    keeper.statements.database.set_trace_callback(seen.append)  # type: ignore[attr-defined]
    page = RoomReads(keeper.statements).history(ROOM, None, 5, backwards=True, whole=False)
    keeper.statements.database.set_trace_callback(None)  # type: ignore[attr-defined]
    assert len(page) == 5
    plan = " ".join(str(row[-1]) for row in keeper.rows(f"EXPLAIN QUERY PLAN {seen[-1]}"))
    assert "USING INDEX room_events_history" in plan
    assert "TEMP B-TREE" not in plan
