"""Tests of views."""

from __future__ import annotations

from replication.rooms.event import Event
from replication.rooms.ordering import Place
from replication.rooms.views import StoredEvent, encode_state_map


def test_a_state_is_encoded_sorted() -> None:
    assert encode_state_map({("b", ""): "$2", ("a", "x"): "$1"}) == [["a", "x", "$1"], ["b", "", "$2"]]


def test_a_stored_event_has_a_place() -> None:
    event = Event.read("!r", {"event_id": "$e", "type": "t", "prev_event_ids": []})
    node = StoredEvent(event, 7, -3, "master", False, None, False, False, 1)
    assert node.place == Place(7, -3)
    assert node.to_json()["stream_ordering"] == -3
