"""Tests of places in history, and of missing events, compared with sets computed from scratch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import RoomError
from replication.rooms.event import Event
from replication.rooms.ordering import Place, between
from tests.rooms.graphs import ROOM, Step, graphs
from tests.rooms.recorded import Keeper
from tests.rooms.test_extremities import persist_steps


@given(st.integers(0, 2**53 - 1), st.integers(-(2**40), 2**40))
def test_a_place_reads_back(depth: int, stream_ordering: int) -> None:
    place = Place(depth, stream_ordering)
    assert Place.parse(place.encode()) == place


@pytest.mark.parametrize("text", ["", "12", "t1", "t1_", "t-1_2", "t1_2_3", "t1_٣", "t1_2\n", "x" * 1_000])
def test_an_invalid_place_is_refused(text: str) -> None:
    with pytest.raises(RoomError, match="not a place"):
        Place.parse(text)


@given(graphs(), st.data())
def test_missing_events_are_one_past_without_the_other(steps: list[Step], data: st.DataObject) -> None:
    keeper = Keeper()
    persist_steps(keeper, steps)
    names = sorted({step.event.event_id for step in steps if not step.event.outlier})
    have = data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    want = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    edges = keeper.tables().edges_from(names)
    stored = set(keeper.tables().metadata(names)) | {prev for _, prev in edges}
    stored = set(keeper.tables().metadata(stored))

    def past(ends: list[str]) -> set[str]:
        found: set[str] = set()
        edge = set(ends)
        while edge:
            found |= edge
            edge = {prev for each, prev in edges if each in edge and prev in stored} - found
        return found

    found = between(keeper.tables(), ROOM, have, want, 1_000)
    missing = past(want) - past(have)
    assert set(found.events) == missing
    named = {prev for each, prev in edges if each in missing}
    assert set(found.heads) == missing - named
    assert set(found.ground) == named & past(have)
    short = between(keeper.tables(), ROOM, have, want, 2)
    assert short.events == found.events[-2:]
    assert short.limited == (len(missing) > 2)


def event(name: str, depth: int, *prev: str) -> Event:
    source = {"event_id": name, "type": "t", "sender": "@far:away", "depth": depth, "prev_event_ids": list(prev)}
    return Event.read(ROOM, source)


def test_missing_events_are_ordered_by_depth_then_by_id() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("z", 1), event("c", 2, "z"), event("b", 2, "z"), event("a", 3, "b", "c")])
    assert between(keeper.tables(), ROOM, [], ["a"], 9).events == ("z", "b", "c", "a")


def test_a_room_with_wrong_depths_is_walked_to_its_first_events() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a", 50), event("b", 2, "a"), event("c", 1, "b"), event("d", 60, "b")])
    assert between(keeper.tables(), ROOM, ["c"], ["d"], 9).events == ("d",)
