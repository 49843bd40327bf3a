"""Tests of events: validation, immutable text, rows."""

from __future__ import annotations

from typing import Any

import pytest

from replication.errors import RoomError
from replication.rooms.event import MAX_DEPTH, Event, encode_backfill, encode_ev, encode_state

ROOM = "!r"


def read(**more: Any) -> Event:
    return Event.read(ROOM, {"event_id": "$e", "type": "t", "prev_event_ids": ["$p"], **more})


@pytest.mark.parametrize("name", ["event_id", "type", "room_id", "sender", "redacts", "state_key"])
@pytest.mark.parametrize("bad", [1, ["a"], "x" * 256, "a\0b", "\ud800"])
def test_an_id_is_a_short_text_without_control_or_surrogate_characters(name: str, bad: object) -> None:
    with pytest.raises(RoomError, match=f"{name} must be"):
        read(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("depth", MAX_DEPTH + 1),
        ("depth", 1.0),
        ("prev_event_ids", "$p"),
        ("prev_event_ids", ["$p", "$p"]),
        ("prev_event_ids", [1]),
        ("auth_event_ids", None),
        ("content", None),
        ("content", {"x": float("nan")}),
        ("content", {"x": object()}),
        ("origin_server_ts", -1),
        ("rejected", ""),
        ("rejected", True),
        ("soft_failed", 0),
        ("out_of_band_membership", None),
        ("state_before", ["$a", ["t", "", "$a"]]),
        ("state_before", [["t", "$a"]]),
        ("state_before", [[1, "", "$a"]]),
        ("room_version", 9),
        ("nonsense", 1),
    ],
)
def test_an_invalid_field_is_named(name: str, bad: object) -> None:
    with pytest.raises(RoomError, match=name):
        read(**{name: bad})


def test_fields_that_other_software_adds_are_ignored() -> None:
    derived = {"name": "e", "hashes": {}, "signatures": {}, "stream_ordering": -5, "topological_ordering": 1}
    assert read(**derived, state_group=7) == read()


def test_an_event_must_be_an_object() -> None:
    with pytest.raises(RoomError, match="not a list"):
        Event.read(ROOM, [])


def test_two_copies_of_an_event_have_the_same_text() -> None:
    assert read(content={"a": 1, "b": 2}).text == read(content={"b": 2, "a": 1}, outlier=True, rejected="no").text
    assert read(content={"a": 1}).text != read(content={"a": 2}).text
    event = read(content={"a": ["é\ud800", 2**70, 1e300]}, state_key="k", auth_event_ids=["$x"], depth=4)
    assert Event.from_text(event.text, depth=4) == event


def test_ev_rows_have_the_fields_of_synapse_1_47() -> None:
    relation = {"m.relates_to": {"rel_type": "m.annotation", "event_id": "$to"}}
    assert encode_ev(read(content=relation), rejected=None, flag=int) == [
        "ev",
        ["$e", ROOM, "t", None, None, "$to", None, 0],
    ]
    assert encode_ev(read(content=relation), rejected="no", flag=bool) == [
        "ev",
        ["$e", ROOM, "t", None, None, None, None, True],
    ]
    member = read(type="m.room.member", state_key="@u", content={"membership": "join"})
    assert encode_ev(member, rejected=None, flag=int)[1] == ["$e", ROOM, "m.room.member", "@u", None, None, "join", 0]
    redaction = read(type="m.room.redaction", redacts="$r")
    assert encode_ev(redaction, rejected=None, flag=int)[1][4] == "$r"  # type: ignore[index]
    assert encode_backfill(redaction, rejected=None) == ["$e", ROOM, "m.room.redaction", None, "$r", None]
    assert encode_backfill(redaction, rejected="no") == ["$e", ROOM, "m.room.redaction", None, None, None]
    assert encode_state(ROOM, ("t", "k"), None) == ["state", [ROOM, "t", "k", None]]


OTHER = {"rel_type": "other", "event_id": "$x"}
ODD = {"rel_type": ["m.replace"], "event_id": "$x"}


@pytest.mark.parametrize("relation", [None, 1, OTHER, ODD, {"rel_type": "m.replace"}])
def test_only_a_known_relation_to_an_event_counts(relation: object) -> None:
    assert read(content={"m.relates_to": relation}).relates_to is None


def test_only_member_events_have_a_membership() -> None:
    assert read(content={"membership": "join"}).membership is None
    assert read(type="m.room.member", content={"membership": 1}).membership is None


def test_event_id_type_and_prev_event_ids_are_required_and_checked() -> None:
    for source, why in (
        ({"type": "t", "prev_event_ids": []}, "event_id is missing"),
        ({"event_id": "$e", "type": "t"}, "prev_event_ids is missing"),
        ({"event_id": "$e", "type": "t", "prev_event_ids": [], "room_id": "!other"}, "its room is '!other'"),
        ({"event_id": "$e", "type": "t", "prev_event_ids": ["$e"]}, "cycle"),
        ({"event_id": "$e", "type": "t", "prev_event_ids": [str(each) for each in range(21)]}, "at most 20"),
    ):
        with pytest.raises(RoomError, match=why):
            Event.read(ROOM, source)
    assert len(read(auth_event_ids=[str(each) for each in range(10)]).auth_event_ids) == 10
