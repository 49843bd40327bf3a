"""Tests of views."""

from __future__ import annotations

from replication.rooms.event import Event
from replication.rooms.ordering import Place
from replication.rooms.views import RoomView, StoredEvent, encode_state_map


def test_a_state_is_encoded_sorted() -> None:
    assert encode_state_map({("b", ""): "$2", ("a", "x"): "$1"}) == [["a", "x", "$1"], ["b", "", "$2"]]


def test_a_stored_event_has_a_place() -> None:
    event = Event.read("!r", {"event_id": "$e", "type": "t", "prev_event_ids": []})
    node = StoredEvent(event, 7, -3, "master", False, None, False, False, 1)
    assert node.place == Place(7, -3)


def test_a_stored_event_is_an_object_with_all_its_fields() -> None:
    source = {
        "event_id": "$e",
        "room_id": "!r",
        "type": "t",
        "state_key": "k",
        "sender": "@u:h",
        "redacts": "$x",
        "content": {"a": 1},
        "origin_server_ts": 1700,
        "prev_event_ids": ["$p"],
        "auth_event_ids": ["$q"],
    }
    stored = StoredEvent(Event.read("!r", source), 7, -3, "master", True, "no", False, True, 5)
    assert stored.to_json() == source | {
        "depth": 7,
        "topological_ordering": 7,
        "stream_ordering": -3,
        "instance_name": "master",
        "outlier": True,
        "rejected": "no",
        "soft_failed": False,
        "out_of_band_membership": True,
        "state_group": 5,
    }


def test_a_room_is_an_object_with_its_state_and_its_gaps() -> None:
    view = RoomView("!r", "9", ("$f",), ("$b",), 3, {("t", "k"): "$e"})
    assert view.to_json([("$b", 4)]) == {
        "room_id": "!r",
        "room_version": "9",
        "forward_extremities": ["$f"],
        "backward_extremities": ["$b"],
        "min_depth": 3,
        "current_state": [["t", "k", "$e"]],
        "gaps": [{"event_id": "$b", "depth": 4}],
    }
