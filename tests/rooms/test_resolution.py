"""The small resolution: the same whatever the order; and which rooms have Matrix's."""

from __future__ import annotations

from itertools import permutations

from replication.rooms.event import Event
from replication.rooms.resolution import resolve, resolve_deepest, split, version_of

KNOWN = {
    name: Event.read(
        "!r", {"event_id": name, "type": "t", "prev_event_ids": [], "depth": depth, "origin_server_ts": when}
    )
    for name, depth, when in (("a", 1, 9), ("b", 2, 1), ("c", 2, 5), ("d", 2, 5))
}
X, Y = ("t", "x"), ("t", "y")


def fetch(event_ids: object) -> dict[str, Event]:
    return KNOWN


def test_the_deepest_then_the_latest_then_the_greatest_name_wins_in_any_order() -> None:
    for names, winner in (("ab", "b"), ("bc", "c"), ("cd", "d"), ("abcd", "d")):
        for order in permutations(names):
            assert resolve_deepest([{X: each} for each in order], fetch, None) == {X: winner}


def test_a_key_that_only_some_have_is_kept() -> None:
    assert resolve_deepest([{X: "a"}, {Y: "b"}, {}], fetch, None) == {X: "a", Y: "b"}
    assert split([{X: "a"}, {X: "b", Y: "c"}]) == ({Y: "c"}, {X: {"a", "b"}})


def test_an_event_that_is_not_here_weighs_nothing() -> None:
    assert resolve_deepest([{X: "unknown"}, {X: "a"}], fetch, None) == {X: "a"}


def test_a_room_without_a_creation_is_resolved_in_the_small_way_and_one_with_it_by_its_rules() -> None:
    states = [{X: "a"}, {X: "b"}]
    assert resolve(states, fetch, None) == {X: "b"}
    assert resolve(states, fetch, "9") == {}


def test_the_version_is_what_the_creation_says() -> None:
    def create(content: dict[str, object], version: str | None = None) -> Event:
        source = {"event_id": "$c", "type": "m.room.create", "state_key": "", "prev_event_ids": [], "content": content}
        return Event.read("!r", {**source, "room_version": version})

    assert version_of(create({"room_version": "9"})) == "9"
    assert version_of(create({})) == version_of(create({"room_version": 9})) == "1"
    assert version_of(create({}, "6")) == "6"
