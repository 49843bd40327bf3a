"""Definitions of streams, and finding them."""

from __future__ import annotations

from typing import Any

import pytest

from replication.errors import ConfigError, UnknownStreamError
from replication.streams.registry import CACHES, SourceTable, StreamDefinition, StreamRegistry
from replication.wire.grammar import InstanceName

CATS = SourceTable(table="cats", row=["name"])
ORDERS = StreamDefinition("orders", row=["order_id", "state"], writers=["master"])


def test_names_may_be_any_sequence_of_texts() -> None:
    assert ORDERS.row == ("order_id", "state")
    assert ORDERS.writers == ("master",)
    assert StreamDefinition("orders").row is None


@pytest.mark.parametrize("name", ["", "1st", "-a", "a b", "naïve", "a/b", 'a"b', "a" * 101])
def test_a_bad_stream_name_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="stream name"):
        StreamDefinition(name)


@pytest.mark.parametrize("name", ["a", "_", "tag_account_data", "a.b-c", "a" * 100])
def test_a_good_stream_name_is_taken(name: str) -> None:
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
        ({"row": "order_id"}, "'order_id'"),
        ({"writers": "master"}, "'master'"),
        ({"key": ["a"]}, "key names a, which row does not"),
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
        ({"distinct": True}, "distinct and …_fields are for what is gathered"),
        ({"row": ["a"], "boolean_fields": ["a"]}, "distinct and …_fields are for what is gathered"),
        ({"sequence": "a b"}, "'a b' is not the plain name"),
        ({"in_memory": True, "shares": "backfill"}, "is in memory"),
        ({"in_memory": True, "writers": ["a", "b"]}, "is in memory"),
    ],
)
def test_a_definition_that_cannot_work_is_refused(arguments: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigError, match=culprit):
        StreamDefinition("events", **arguments)


def test_a_stream_says_in_which_kind_of_database_it_is_mapped() -> None:
    tables = [CATS, SourceTable(table="dogs", row=["name"], dialect="sqlite")]
    gathered = StreamDefinition("pets", row=["name"], tables=tables, json_fields=["name"])
    assert gathered.sources("sqlite") == tables
    assert gathered.sources("postgresql") == [CATS]
    assert not gathered.maps("sqlite")
    assert gathered.is_mapped("postgresql")
    mapped = StreamDefinition("fish", row=["name"], table="fish", dialect="postgresql")
    assert (mapped.maps("sqlite"), mapped.maps("postgresql")) == (False, True)
    assert (mapped.is_mapped("sqlite"), mapped.is_mapped("postgresql")) == (False, True)
    assert StreamDefinition("fish", row=["name"], table="fish").maps("sqlite")


def test_a_mapped_stream_is_taken() -> None:
    definition = StreamDefinition(
        "backfill", table="events", row=["event_id"], where="stream_ordering < 0", negative=True
    )
    assert definition.id_column == "stream_id"


def test_only_named_writers_may_write_and_without_names_whoever_serves() -> None:
    assert ORDERS.written_by(InstanceName("master"))
    assert not ORDERS.written_by(InstanceName("worker1"))
    assert StreamDefinition("orders").written_by(InstanceName("worker1"))


def test_a_registry_keeps_the_order_of_declaration() -> None:
    registry = StreamRegistry([ORDERS, StreamDefinition(CACHES)])
    registry.declare(StreamDefinition("backfill"))
    assert [each.name for each in registry] == ["orders", "caches", "backfill"]
    assert len(registry) == 3
    assert registry["orders"] is ORDERS
    assert "orders" in registry
    assert "events" not in registry


def test_declaring_the_same_stream_twice_is_harmless() -> None:
    registry = StreamRegistry([ORDERS, ORDERS])
    assert len(registry) == 1


@pytest.mark.parametrize("other", [StreamDefinition("orders"), StreamDefinition("Orders")])
def test_two_streams_of_one_name_are_refused(other: StreamDefinition) -> None:
    """Letter case does not tell them apart: in SQLite their tables would be one."""
    with pytest.raises(ConfigError, match="declared twice"):
        StreamRegistry([ORDERS, other])


def test_an_unknown_stream_is_told_with_what_there_is() -> None:
    with pytest.raises(UnknownStreamError, match="known streams: orders"):
        StreamRegistry([ORDERS])["events"]
    with pytest.raises(UnknownStreamError, match="known streams: none"):
        StreamRegistry()["events"]


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
    with pytest.raises(ConfigError, match=culprit):
        StreamRegistry([other, TAGS])


def test_nobody_shares_ids_at_second_hand() -> None:
    with pytest.raises(ConfigError, match="which has those of 'account_data' itself"):
        StreamRegistry([StreamDefinition("account_data"), TAGS, StreamDefinition("more", shares="tags")])
