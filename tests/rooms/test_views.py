"""What is shown."""

from __future__ import annotations

from replication.rooms.event import Event
from replication.rooms.ordering import Place
from replication.rooms.views import Node, spell_state_map


def test_a_state_is_shown_sorted() -> None:
    assert spell_state_map({("b", ""): "$2", ("a", "x"): "$1"}) == [["a", "x", "$1"], ["b", "", "$2"]]


def test_a_node_knows_its_place() -> None:
    event = Event.read("!r", {"event_id": "$e", "type": "t", "prev_event_ids": []})
    node = Node(event, 7, -3, "master", False, None, False, False, 1)
    assert node.place == Place(7, -3)
    assert node.describe()["stream_ordering"] == -3
