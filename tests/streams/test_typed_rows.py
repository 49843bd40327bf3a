"""Typed rows: frozen, with named fields, and tolerant of fields of newer releases."""

from __future__ import annotations

import msgspec
import pytest

from replication.errors import RowError
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.typed_rows import Flag, History, Row, TypedStream, typed_stream
from replication.wire.grammar import Token


class OrderRow(Row, frozen=True):
    """An order."""

    FLAGS = ("paid",)

    order_id: str
    paid: Flag
    note: str | None = None


ORDERS = TypedStream[OrderRow](StreamDefinition("orders", row=OrderRow.names()), OrderRow)


def test_the_rows_of_a_fact_are_objects() -> None:
    assert ORDERS.read(Fact(Token(2), ('["a",true]', '["b",false,"c"]'))) == [
        OrderRow("a", True),
        OrderRow("b", False, "c"),
    ]
    assert (ORDERS.name, ORDERS.history) == ("orders", History.WHOLE)


def test_a_row_is_frozen() -> None:
    row = ORDERS.read_row('["a",true]')
    with pytest.raises(AttributeError):
        row.paid = False  # type: ignore[misc]


def test_trap_35_fields_of_a_newer_release_are_dropped() -> None:
    assert ORDERS.read_row('["a",true,null,{"new":[]},7]') == OrderRow("a", True, None)


@pytest.mark.parametrize(("text", "paid"), [("0", False), ("1", True), ("false", False), ("true", True)])
def test_sqlites_0_and_1_become_booleans(text: str, paid: bool) -> None:
    assert ORDERS.read_row(f'["a",{text}]').paid is paid


def test_a_lone_surrogate_is_accepted_as_the_standard_library_does() -> None:
    assert ORDERS.read_row('["\\ud800",true]').order_id == "\ud800"


def test_a_lone_surrogate_in_the_tag_of_a_row_is_an_error_that_shows_it() -> None:
    """msgspec compares the tag of a union as UTF-8, which no lone surrogate has."""

    class Added(Row, frozen=True, tag="added"):
        order_id: str

    class Removed(Row, frozen=True, tag="removed"):
        order_id: str

    orders = TypedStream[Added | Removed](StreamDefinition("orders", row=("change", "order_id")), Added | Removed)
    with pytest.raises(RowError, match=r"not a row of orders: .*surrogate.*ud800"):
        orders.read_row('["add\\ud800","a"]')


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
        ("[" * 5000, ""),
        ('["a",2,"' + "x" * 300 + '"]', "Invalid enum value 2"),
    ],
)
def test_the_error_for_a_wrong_row_shows_it(text: str, why: str) -> None:
    orders = TypedStream[OrderRow](ORDERS.definition, OrderRow)
    with pytest.raises(RowError, match=rf"^orders 7: not a row of orders: .*{why}.*") as caught:
        orders.read(Fact(Token(7), (text,)))
    assert str(caught.value).endswith(f": {text[:200]}")
    assert caught.value.stream == "orders"
    with pytest.raises(RowError) as caught:
        orders.read_row(text)
    assert caught.value.stream == "orders"


def test_fields_have_names() -> None:
    row = ORDERS.read_row('["a",1]')
    assert row.named() == {"order_id": "a", "paid": True, "note": None}
    assert msgspec.json.encode(row.named()) == b'{"order_id":"a","paid":true,"note":null}'


def test_a_stream_with_one_class_of_rows_has_the_names_of_their_fields() -> None:
    stream = typed_stream("orders", OrderRow, History.NEWEST, key=["order_id"])
    assert (stream.definition.row, stream.definition.key) == (OrderRow.names(), ("order_id",))
    assert (stream.row, stream.history) == (OrderRow, History.NEWEST)
    with pytest.raises(TypeError, match="nothing"):
        typed_stream("orders", OrderRow, nothing=1)
