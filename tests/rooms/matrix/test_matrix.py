"""Which resolution a room version has."""

from __future__ import annotations

from replication.rooms import matrix
from replication.rooms.event import Event


def test_version_1_has_its_own_way_and_all_others_the_second() -> None:
    """Nobody may set these topics: version 1 keeps the least deep of them all the same, version 2 none."""
    known = {
        name: Event.read("!r", {"event_id": name, "type": "t", "state_key": "", "prev_event_ids": [], "depth": depth})
        for name, depth in (("$a", 1), ("$b", 2))
    }
    states = [{("t", ""): "$a"}, {("t", ""): "$b"}]

    def fetch(ids: object) -> dict[str, Event]:
        return known

    assert matrix.resolve(states, fetch, "1") == {("t", ""): "$a"}
    assert matrix.resolve(states, fetch, "2") == matrix.resolve(states, fetch, "org.example") == {}
