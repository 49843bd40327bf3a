"""Stream definitions, and the registry."""

from __future__ import annotations

from typing import Any

import pytest

from replication.errors import ConfigError, RowError, UnknownStreamError
from replication.streams.definitions import CACHES, SourceTable, StreamDefinition, StreamRegistry
from replication.wire.grammar import InstanceName

CATS = SourceTable(table="cats", row=["name"])
ORDERS = StreamDefinition("orders", row=["order_id", "state"], writers=["master"])


def test_names_may_be_any_sequence_of_texts() -> None:
    assert ORDERS.row == ("order_id", "state")
    assert ORDERS.writers == ("master",)
    assert StreamDefinition("orders").row is None


@pytest.mark.parametrize("name", ["", "1st", "-a", "a b", "naïve", "a/b", 'a"b', "a" * 101])
def test_the_error_for_a_bad_stream_name_has_it(name: str) -> None:
    with pytest.raises(ConfigError, match="stream name"):
        StreamDefinition(name)


@pytest.mark.parametrize("name", ["a", "_", "tag_account_data", "a.b-c", "a" * 100])
def test_a_good_stream_name_is_accepted(name: str) -> None:
    assert StreamDefinition(name).name == name


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"instance_column": "instance_name"}, "need a table"),
        ({"where": "x > 0"}, "need a table"),
        ({"table": "events"}, "row must list its columns"),
        ({"table": "events", "row": []}, "row must list its columns"),
        ({"table": "ev ents", "row": ["a"]}, "'ev ents'"),
        ({"table": "events", "row": ["a", "b;"]}, "'b;'"),
        ({"table": "events", "row": ["a"], "id_column": ""}, "''"),
        ({"table": "events", "row": ["a"], "instance_column": "1"}, "'1'"),
        ({"retention": "1d", "table": "events", "row": ["a"]}, "only facts of a generic table have a retention"),
        ({"retention": "1 fortnight"}, "write 30d"),
        ({"row": "order_id"}, "'order_id'"),
        ({"writers": "master"}, "'master'"),
        ({"key": ["a"]}, "key names a, which row lacks"),
        ({"row": ["a"], "key": ["a", "b", "c"]}, "key names b, c"),
        ({"in_memory": True, "table": "events", "row": ["a"]}, "is in memory"),
        ({"in_memory": True, "tables": [CATS], "row": ["a"]}, "is in memory"),
        ({"tables": [CATS]}, "give row, the names of its fields, and no table"),
        ({"tables": [CATS], "row": ["a"], "table": "events"}, "give row, the names of its fields, and no table"),
        ({"tables": [CATS], "row": ["a", "b"]}, "table 'cats': its row does not give the stream's 2 fields"),
        ({"tables": [SourceTable(table="cats", row=[], kind="k")], "row": ["a", "b"]}, "does not give the stream's 2"),
        ({"tables": [SourceTable(table="cats", row=["a"], kind="k")], "row": ["a"]}, "does not give the stream's 1"),
        ({"tables": [CATS], "row": ["a"], "json_fields": ["b"], "ascii_fields": ["c"]}, "no field b, c in row"),
        ({"tables": [SourceTable(table="c a", row=["a"])], "row": ["a"]}, "'c a' is not the plain name"),
        ({"tables": [SourceTable(table="c", row=["a"], id_column="1")], "row": ["a"]}, "'1' is not the plain name"),
        (
            {"tables": [SourceTable(table="c", row=["a"], instance_column="b c")], "row": ["a"]},
            "'b c' is not the plain",
        ),
        ({"tables": [SourceTable(table="c", row=["a"] * 3, kind="k")], "row": ["a"] * 3}, "the stream's 3 fields"),
        ({"distinct": True}, "distinct and …_fields need tables"),
        ({"row": ["a"], "boolean_fields": ["a"]}, "distinct and …_fields need tables"),
        ({"sequence": "a.b"}, "and '_', and no digit first; PostgreSQL finds the schema by search_path"),
        ({"in_memory": True, "shares": "backfill"}, "is in memory"),
        ({"in_memory": True, "writers": ["a", "b"]}, "is in memory"),
    ],
)
def test_a_definition_that_cannot_work_is_refused(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        StreamDefinition("events", **arguments)


def test_a_stream_may_be_mapped_in_one_kind_of_database_only() -> None:
    tables = [CATS, SourceTable(table="dogs", row=["name"], dialect="sqlite")]
    gathered = StreamDefinition("pets", row=["name"], tables=tables, json_fields=["name"])
    assert gathered.sources("sqlite") == tables
    assert gathered.sources("postgresql") == [CATS]
    dogs = StreamDefinition("dogs", row=["name"], tables=tables[1:])
    assert (dogs.is_mapped("sqlite"), dogs.is_mapped("postgresql")) == (True, False)
    assert not gathered.maps("sqlite")
    assert gathered.is_mapped("postgresql")
    mapped = StreamDefinition("fish", row=["name"], table="fish", dialect="postgresql")
    assert (mapped.maps("sqlite"), mapped.maps("postgresql")) == (False, True)
    assert (mapped.is_mapped("sqlite"), mapped.is_mapped("postgresql")) == (False, True)
    assert StreamDefinition("fish", row=["name"], table="fish").maps("sqlite")


def test_a_stream_in_memory_may_name_its_one_writer() -> None:
    assert StreamDefinition("typing", in_memory=True, writers=["a"]).in_memory


def test_rows_of_a_table_may_have_a_kind_and_a_value() -> None:
    source = SourceTable(table="cats", row=["name", "age", "owner"], kind="cat")
    assert StreamDefinition("pets", row=["kind", "value"], tables=[source]).tables == (source,)


def test_rows_of_several_tables_have_several_kinds_or_none() -> None:
    tables = [SourceTable(table=each, row=["name"], kind=each) for each in ("dogs", "cats")]
    assert StreamDefinition("pets", row=["kind", "value"], tables=tables).has_kinds
    assert not StreamDefinition("pets", row=["kind", "value"], tables=tables[:1]).has_kinds
    assert not StreamDefinition("pets", row=["name"], tables=[SourceTable(table="dogs", row=["name"])]).has_kinds
    assert not StreamDefinition("pets").has_kinds


def test_a_row_has_the_fields_of_the_definition() -> None:
    assert ORDERS.encode(["o1", "é"]) == ORDERS.encode(("o1", "é")) == '["o1","\\u00e9"]'
    assert StreamDefinition("any").encode({"a": 1}) == '{"a":1}'
    for row, got in (
        (["o1"], "an array of 1"),
        (("o1", "b", "c"), "an array of 3"),
        ({"a": 1}, "a dict"),
        ("ab", "a str"),
    ):
        with pytest.raises(RowError) as caught:
            ORDERS.encode(row)
        assert str(caught.value) == f"a row of 'orders' is [order_id, state], not {got}"


def test_a_table_without_a_column_for_the_writer_has_one_writer() -> None:
    master, other = InstanceName("master"), InstanceName("other")
    mapped = StreamDefinition("fish", row=["name"], table="fish", writers=["master"])
    assert (mapped.has_one_writer(master), mapped.has_one_writer(other)) == (True, False)
    assert not ORDERS.has_one_writer(master)
    shared = StreamDefinition("fish", row=["name"], table="fish", instance_column="writer")
    assert not shared.has_one_writer(master)


def test_the_one_table_of_a_mapped_stream_is_a_source_too() -> None:
    mapped = StreamDefinition(
        "fish", row=["name"], table="fish", where="id > 2", id_column="id", instance_column="writer", dialect="sqlite"
    )
    source = SourceTable(table="fish", row=["name"], where="id > 2", id_column="id", instance_column="writer")
    assert (mapped.all_sources("sqlite"), mapped.all_sources("postgresql")) == ([source], [])
    tables = [CATS, SourceTable(table="dogs", row=["name"], dialect="sqlite")]
    assert StreamDefinition("pets", row=["name"], tables=tables).all_sources("sqlite") == tables


def test_a_mapped_stream_is_accepted() -> None:
    definition = StreamDefinition(
        "backfill", table="events", row=["event_id"], where="stream_ordering < 0", negative=True
    )
    assert definition.id_column == "stream_id"


def test_only_named_writers_may_write_and_without_names_every_instance() -> None:
    assert ORDERS.written_by(InstanceName("master"))
    assert not ORDERS.written_by(InstanceName("worker1"))
    assert StreamDefinition("orders").written_by(InstanceName("worker1"))


def test_a_stream_has_a_retention_and_is_stored_under_its_own_name_unless_another_is_given() -> None:
    assert StreamDefinition("orders", retention="1d").retention == "1d"
    assert StreamDefinition("orders").stored_name == "orders"
    assert StreamDefinition("orders", position_name="o").stored_name == "o"
    assert StreamDefinition("orders", position_name="").stored_name is None


def test_the_ids_of_a_stream_are_its_own_or_those_of_the_one_that_it_shares() -> None:
    assert StreamDefinition("orders").generator == "orders"
    assert StreamDefinition("orders", shares="events").generator == "events"


def test_a_registry_keeps_the_order_of_declaration() -> None:
    registry = StreamRegistry([ORDERS, StreamDefinition(CACHES)])
    registry.declare(StreamDefinition("backfill"))
    assert [each.name for each in registry] == ["orders", "caches", "backfill"]
    assert len(registry) == 3
    assert registry["orders"] is ORDERS
    assert "orders" in registry
    assert "events" not in registry


def test_declaring_an_equal_stream_twice_changes_nothing() -> None:
    registry = StreamRegistry([ORDERS, ORDERS])
    assert len(registry) == 1


@pytest.mark.parametrize("other", [StreamDefinition("orders"), StreamDefinition("Orders")])
def test_two_streams_of_one_name_are_refused(other: StreamDefinition) -> None:
    """Names that differ in letter case only would have one table in SQLite."""
    with pytest.raises(ConfigError, match="declared twice"):
        StreamRegistry([ORDERS, other])


def test_the_error_for_an_unknown_stream_lists_the_known_ones() -> None:
    with pytest.raises(UnknownStreamError, match="known streams: orders"):
        StreamRegistry([ORDERS])["events"]
    with pytest.raises(UnknownStreamError, match="known streams: none"):
        StreamRegistry()["events"]
    with pytest.raises(UnknownStreamError) as caught:
        StreamRegistry([ORDERS, StreamDefinition("b")])["x" * 101]
    assert str(caught.value) == f"no stream '{'x' * 100}' here; known streams: orders, b"
    assert caught.value.stream == "x" * 101


TAGS = StreamDefinition("tags", shares="account_data")


def test_a_stream_may_share_the_ids_of_one_that_is_declared_before_or_after_it() -> None:
    account_data = StreamDefinition("account_data")
    assert StreamRegistry([TAGS, account_data])["tags"].shares == "account_data"
    registry = StreamRegistry([account_data])
    registry.declare(TAGS)
    assert "tags" in registry


@pytest.mark.parametrize(
    ("other", "culprit"),
    [
        (StreamDefinition("else"), "which is not declared"),
        (StreamDefinition("account_data", in_memory=True), "which has IDs in memory itself"),
        (StreamDefinition("account_data", writers=["a"]), "the same writers"),
        (StreamDefinition("account_data", negative=True), "the same sign"),
    ],
)
def test_ids_that_cannot_be_shared_are_refused(other: StreamDefinition, culprit: str) -> None:
    with pytest.raises(ConfigError, match=f"^stream 'tags' shares the IDs of 'account_data'.*{culprit}"):
        StreamRegistry([other, TAGS])


def test_a_stream_that_shares_ids_cannot_be_shared_with() -> None:
    with pytest.raises(ConfigError, match="which has those of 'account_data' itself"):
        StreamRegistry([StreamDefinition("account_data"), TAGS, StreamDefinition("more", shares="tags")])


def test_only_with_a_column_in_each_table_do_facts_have_the_name_of_their_writer() -> None:
    named, unnamed = (
        SourceTable(table=each, row=["a"], instance_column=column) for each, column in (("t", "w"), ("u", None))
    )
    assert StreamDefinition("orders").names_writers
    assert StreamDefinition("orders", table="t", row=["a"], instance_column="w").names_writers
    assert not StreamDefinition("orders", table="t", row=["a"]).names_writers
    assert StreamDefinition("orders", tables=[named], row=["a"], sequence="s").names_writers
    assert not StreamDefinition("orders", tables=[named, unnamed], row=["a"], sequence="s").names_writers
