"""Tests of the resolution by depth, and of which rooms use the Matrix rules."""

from __future__ import annotations

from itertools import permutations

from replication.rooms.event import Event
from replication.rooms.matrix.v1 import split
from replication.rooms.resolution import resolve, resolve_deepest, version_of

KNOWN = {
    name: Event.read(
        "!r", {"event_id": name, "type": "t", "prev_event_ids": [], "depth": depth, "origin_server_ts": when}
    )
    for name, depth, when in (("a", 1, 9), ("b", 2, 1), ("c", 2, 5), ("d", 2, 5), ("first", 0, 0))
}
X, Y = ("t", "x"), ("t", "y")


def fetch(event_ids: object) -> dict[str, Event]:
    return KNOWN


def test_the_deepest_then_latest_then_greatest_id_wins_in_any_order() -> None:
    for names, winner in (("ab", "b"), ("bc", "c"), ("cd", "d"), ("abcd", "d")):
        for order in permutations(names):
            assert resolve_deepest([{X: each} for each in order], fetch, None) == {X: winner}


def test_a_key_of_only_some_states_is_kept() -> None:
    assert resolve_deepest([{X: "a"}, {Y: "b"}, {}], fetch, None) == {X: "a", Y: "b"}
    assert split([{X: "a"}, {X: "b", Y: "c"}]) == ({Y: "c"}, {X: {"a", "b"}})


def test_an_event_that_is_not_stored_loses() -> None:
    for known in ("a", "first"):
        assert resolve_deepest([{X: "unknown"}, {X: known}], fetch, None) == {X: known}


def test_only_a_room_with_a_create_event_is_resolved_by_the_matrix_rules() -> None:
    states = [{X: "a"}, {X: "b"}]
    assert resolve(states, fetch, None) == {X: "b"}
    assert resolve(states, fetch, "9") == {}


def test_the_room_version_comes_from_the_create_event() -> None:
    def create(content: dict[str, object], version: str | None = None) -> Event:
        source = {"event_id": "$c", "type": "m.room.create", "state_key": "", "prev_event_ids": [], "content": content}
        return Event.read("!r", {**source, "room_version": version})

    assert version_of(create({"room_version": "9"})) == "9"
    assert version_of(create({})) == version_of(create({"room_version": 9})) == "1"
    assert version_of(create({}, "6")) == "6"


def test_only_room_version_1_uses_resolution_1() -> None:
    """No user may set these topics: version 1 keeps the least deep one all the same, version 2 none."""
    known = {
        name: Event.read("!r", {"event_id": name, "type": "t", "state_key": "", "prev_event_ids": [], "depth": depth})
        for name, depth in (("$a", 1), ("$b", 2))
    }
    states = [{("t", ""): "$a"}, {("t", ""): "$b"}]

    assert resolve(states, lambda _: known, "1") == {("t", ""): "$a"}
    assert resolve(states, lambda _: known, "2") == resolve(states, lambda _: known, "org.example") == {}
