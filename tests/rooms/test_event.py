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
    assert encode_backfill(read(redacts="$r"), rejected=None)[4] is None, "only a redaction redacts"
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"event_id": None}, "event '$e': event_id is missing"),
        ({"type": None}, "event '$e': type is missing"),
        ({"prev_event_ids": None}, "event '$e': prev_event_ids is missing"),
        ({"room_id": "!other"}, "event '$e': its room is '!other', not '!r'"),
        ({"prev_event_ids": ["$e"]}, "event '$e' names itself in its prev_event_ids: that is a cycle"),
        ({"prev_event_ids": [*"abcdefghijklmnopqrstu"]}, "event '$e': 21 prev_event_ids; at most 20 are allowed"),
        ({"auth_event_ids": [*"abcdefghijk"]}, "event '$e': 11 auth_event_ids; at most 10 are allowed"),
        ({"sender": 1}, "event '$e': sender must be a text of up to 255 characters"),
        ({"depth": -1}, "event '$e': depth must be a number from 0 to 2**53 - 1, or null"),
        ({"depth": True}, "event '$e': depth must be a number from 0 to 2**53 - 1, or null"),
        ({"origin_server_ts": 2**63}, "event '$e': origin_server_ts must be a number of milliseconds"),
        (
            {"content": {"x": float("nan")}},
            "event '$e': content is not JSON: Out of range float values are not JSON compliant",
        ),
    ],
)
def test_a_refused_event_is_named_with_the_reason(changes: dict[str, Any], why: str) -> None:
    source = {"event_id": "$e", "type": "t", "prev_event_ids": ["$p"], **changes}
    given = {name: value for name, value in source.items() if value is not None}
    with pytest.raises(RoomError) as caught:
        Event.read(ROOM, given)
    message = str(caught.value).removesuffix(": nan")  # Python 3.12 does not name the value
    assert message == why.replace("'$e'", repr(given.get("event_id", "without event_id")))


def test_unknown_fields_and_long_ids_are_cut_in_messages() -> None:
    with pytest.raises(RoomError) as caught:
        read(event_id="$" * 200, **{"x" * 200: 1})
    message = str(caught.value)
    assert message.startswith(f"event '{'$' * 100}': unknown field '{'x' * 100}'; known are event_id, room_id, type, ")


def test_the_largest_values_are_taken() -> None:
    names = [f"{each}" for each in range(20)]
    event = read(
        prev_event_ids=names, auth_event_ids=names[:10], depth=MAX_DEPTH, origin_server_ts=2**63 - 1, sender="x" * 255
    )
    assert (len(event.prev_event_ids), len(event.auth_event_ids), event.depth) == (20, 10, MAX_DEPTH)
    assert read(depth=0, origin_server_ts=0, state_key="", state_before=[["t", "", "$a"], "$b"]).state_before == (
        ("t", "", "$a"),
        "$b",
    )


def test_an_event_has_its_defaults() -> None:
    event = Event.read(ROOM, {"event_id": "$e", "type": "t", "prev_event_ids": []})
    assert event == Event(event_id="$e", room_id=ROOM, type="t")
    assert event.is_good
    assert [read(**bad).is_good for bad in ({"outlier": True}, {"rejected": "no"}, {"soft_failed": True})] == [
        False
    ] * 3
