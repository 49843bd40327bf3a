"""Tests of the rows of streams about rooms."""

from __future__ import annotations

import pytest

from replication.errors import RowError
from replication.synapse.rooms import (
    BACKFILL,
    EVENTS,
    RECEIPTS,
    TYPING,
    AllState,
    AllStateRow,
    BackfillRow,
    Event,
    EventRow,
    ReceiptRow,
    State,
    StateRow,
    TypingRow,
)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (
            '["ev",["$e","!r","m.room.member","@u",null,null,"join",0]]',
            EventRow(Event("$e", "!r", "m.room.member", "@u", None, None, "join", False)),
        ),
        ('["ev",["$e","!r","t",null,"$a",null]]', EventRow(Event("$e", "!r", "t", None, "$a", None))),  # before 1.23
        (
            '["ev",["$e","!r","t",null,null,"$b",null,false,true]]',  # 1.64
            EventRow(Event("$e", "!r", "t", None, None, "$b", None, False, True)),
        ),
        ('["state",["!r","m.room.name","",null]]', StateRow(State("!r", "m.room.name", "", None))),
        ('["state-all",["!r"]]', AllStateRow(AllState("!r"))),
    ],
)
def test_a_row_of_events_has_one_of_three_kinds(text: str, row: EventRow | StateRow | AllStateRow) -> None:
    assert EVENTS.read_row(text) == row


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RowError, match="Invalid value 'ex'"):
        EVENTS.read_row('["ex",[]]')


def test_named_fields_begin_with_the_kind() -> None:
    assert EVENTS.read_row('["state",["!r","m.room.name","",null]]').named() == {
        "kind": "state",
        "room_id": "!r",
        "type": "m.room.name",
        "state_key": "",
        "event_id": None,
    }


def test_rows_of_the_other_streams_are_typed() -> None:
    assert BACKFILL.read_row('["$e","!r","t",null,null,null]') == BackfillRow("$e", "!r", "t", None, None, None)
    text = '["!r","m.read","@u","$e",{"ts":1,"hidden":false}]'
    assert RECEIPTS.read_row(text) == ReceiptRow("!r", "m.read", "@u", "$e", {"ts": 1, "hidden": False})
    assert TYPING.read_row('["!r",["@a","@b"]]') == TypingRow("!r", ["@a", "@b"])
