"""Rows as objects: frozen, named, and patient with fields that they do not know."""

from __future__ import annotations

import msgspec
import pytest

from replication.errors import RowError
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.streams.typed import Flag, History, Row, TypedStream
from replication.wire.grammar import Token


class OrderRow(Row, frozen=True):
    """An order."""

    FLAGS = ("paid",)

    order_id: str
    paid: Flag
    note: str | None = None


ORDERS = TypedStream[OrderRow](StreamDefinition("orders", row=OrderRow.names()), OrderRow)


def test_a_fact_is_read_row_by_row() -> None:
    assert ORDERS.read(Fact(Token(2), ('["a",true]', '["b",false,"c"]'))) == [
        OrderRow("a", True),
        OrderRow("b", False, "c"),
    ]
    assert (ORDERS.name, ORDERS.history) == ("orders", History.WHOLE)


def test_a_row_is_frozen() -> None:
    row = ORDERS.read_row('["a",true]')
    with pytest.raises(AttributeError):
        row.paid = False  # type: ignore[misc]


def test_trap_35_fields_that_a_later_version_adds_are_let_go() -> None:
    assert ORDERS.read_row('["a",true,null,{"new":[]},7]') == OrderRow("a", True, None)


@pytest.mark.parametrize(("text", "paid"), [("0", False), ("1", True), ("false", False), ("true", True)])
def test_what_sqlite_has_for_a_boolean_becomes_one(text: str, paid: bool) -> None:
    assert ORDERS.read_row(f'["a",{text}]').paid is paid


def test_a_lone_surrogate_is_a_character_as_the_standard_library_has_it() -> None:
    assert ORDERS.read_row('["\\ud800",true]').order_id == "\ud800"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "at least length 2, got 0"),
        ('["a",2]', "Invalid enum value 2"),
        ('["a","true"]', "got `str`"),
        ("[null,true]", r"Expected `str`, got `null` - at `\$\[0\]`"),
        ('{"order_id":"a"}', "Expected `array`, got `object`"),
        ('["a",', "truncated"),
        ("", "truncated"),
        ("[" * 5000, "not a row of orders"),
    ],
)
def test_what_is_no_row_is_refused_and_shown(text: str, why: str) -> None:
    with pytest.raises(RowError, match=rf"orders 7: not a row of orders: .*{why}|not a row of orders") as caught:
        ORDERS.read(Fact(Token(7), (text,)))
    assert text[:200] in str(caught.value)


def test_fields_have_names() -> None:
    row = ORDERS.read_row('["a",1]')
    assert row.named() == {"order_id": "a", "paid": True, "note": None}
    assert msgspec.json.encode(row.named()) == b'{"order_id":"a","paid":true,"note":null}'
