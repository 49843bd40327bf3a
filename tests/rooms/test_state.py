"""Tests of state groups after random graphs: their state, the length of chains, sharing."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given

from replication.errors import RoomError
from replication.rooms import state
from replication.rooms.event import Event
from tests.rooms.graphs import ROOM, Step, graphs, own, sources_of, state_before
from tests.rooms.recorded import Keeper
from tests.rooms.test_extremities import persist_steps


@given(graphs())
def test_the_state_of_every_event_equals_that_computed_from_scratch(steps: list[Step]) -> None:
    keeper = Keeper()
    persist_steps(keeper, steps)
    sources = sources_of(steps)
    tables = keeper.tables()
    for name, stored in tables.metadata(sources).items():
        if not stored.outlier:
            assert stored.state_group is not None
            assert tables.group_state(stored.state_group) == state_before(sources, name) | own(sources[name])
        else:
            assert stored.state_group is None


@given(graphs())
def test_no_chain_of_deltas_is_longer_than_the_limit(steps: list[Step]) -> None:
    keeper = Keeper()
    with patch.object(state, "MAX_CHAIN", 2):
        persist_steps(keeper, steps)
    chains = dict(keeper.rows("SELECT id, prev_group FROM room_state_groups"))
    for below in chains.values():
        length, at = 0, below
        while at is not None:
            length, at = length + 1, chains[at]
        assert length <= 2
    assert keeper.rows("SELECT id FROM room_state_groups WHERE prev_group >= id") == []


def event(name: str, *prev: str, **more: object) -> Event:
    return Event.read(ROOM, {"event_id": name, "type": "note", "prev_event_ids": list(prev), **more})


def test_events_with_the_same_state_share_a_group() -> None:
    keeper = Keeper()
    keeper.take(
        ROOM, [event("a", state_key=""), event("b", "a"), event("c", "b"), event("d", "b"), event("e", "c", "d")]
    )
    groups = {stored.state_group for stored in keeper.tables().metadata("abcde").values()}
    assert len(groups) == 1


def test_groups_are_resolved_once() -> None:
    asked = []

    def resolver(states: object, fetch: object, version: object) -> dict[tuple[str, str], str]:
        asked.append(states)
        return {("note", "x"): "b", ("note", "y"): "c", ("note", ""): "a"}

    keeper = Keeper(resolver=resolver)
    keeper.take(ROOM, [event("a", state_key=""), event("b", "a", state_key="x"), event("c", "a", state_key="y")])
    keeper.take(ROOM, [event("m", "b", "c"), event("n", "b", "c")])
    stored = keeper.tables().metadata("mn")
    assert stored["m"].state_group == stored["n"].state_group
    assert len(asked) == 2  # for the current state while both were ends, and for the events that join them


def test_trap_50_a_removed_key_makes_a_full_group() -> None:
    def resolver(states: object, fetch: object, version: object) -> dict[tuple[str, str], str]:
        return {("note", "x"): "b"}

    keeper = Keeper(resolver=resolver)
    keeper.take(ROOM, [event("a", state_key=""), event("b", "a", state_key="x"), event("c", "a", state_key="y")])
    keeper.take(ROOM, [event("m", "b", "c")])
    group = keeper.tables().metadata(["m"])["m"].state_group
    assert group is not None
    assert keeper.tables().group(group).prev_group is None
    assert keeper.tables().group_state(group) == {("note", "x"): "b"}
    assert keeper.tables().current_state(ROOM) == {("note", "x"): "b"}


def test_trap_50_groups_of_a_failed_transaction_are_forgotten() -> None:
    keeper = Keeper()
    keeper.take(ROOM, [event("a", state_key="")])
    with pytest.raises(RoomError):
        keeper.take(ROOM, [event("b", "a", state_key="lost"), event("c", "gone", depth=9)])
    keeper.take(ROOM, [event("d", "a", state_key="kept")])
    group = keeper.tables().metadata(["d"])["d"].state_group
    assert group is not None
    assert keeper.tables().group_state(group) == {("note", ""): "a", ("note", "kept"): "d"}
