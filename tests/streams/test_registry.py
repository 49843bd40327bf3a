"""Definitions of streams."""

from __future__ import annotations

from typing import Any

import pytest

from replication.errors import ConfigError, UnknownStreamError
from replication.streams.registry import StreamDefinition, StreamRegistry
from replication.wire.grammar import InstanceName, StreamName


def test_a_name_is_enough() -> None:
    definition = StreamDefinition(StreamName("orders"))
    assert definition.row is None
    assert definition.table is None
    assert definition.written_by(InstanceName("anybody"))


def test_only_its_writers_write() -> None:
    definition = StreamDefinition(StreamName("orders"), writers=["a", "b"])
    assert definition.written_by(InstanceName("a"))
    assert not definition.written_by(InstanceName("c"))


@pytest.mark.parametrize(
    ("name", "options", "culprit"),
    [
        ("", {}, "''"),
        ("a b", {}, "'a b'"),
        ("1st", {}, "'1st'"),
        ("x" * 101, {}, "xxx"),
        ("s", {"where": "1"}, "need a table"),
        ("s", {"instance_column": "i"}, "need a table"),
        ("s", {"table": "t"}, "row must list"),
        ("s", {"table": 't"; DROP', "row": ["a"]}, "DROP"),
        ("s", {"table": "t", "row": ["a", "b-c"]}, "'b-c'"),
        ("s", {"table": "t", "row": ["a"], "id_column": "a b"}, "'a b'"),
        ("s", {"table": "t", "row": ["a"], "instance_column": "é"}, "'é'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(name: str, options: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StreamDefinition(StreamName(name), **options)
    assert culprit in str(refused.value)


def test_streams_are_found_by_name_in_the_order_of_their_declaration() -> None:
    orders, caches = StreamDefinition(StreamName("orders")), StreamDefinition(StreamName("caches"))
    registry = StreamRegistry([orders, caches])
    assert registry["orders"] is orders
    assert "orders" in registry
    assert "other" not in registry
    assert list(registry) == [orders, caches]
    assert len(registry) == 2


def test_an_unknown_stream_is_named_beside_those_there_are() -> None:
    with pytest.raises(UnknownStreamError, match="'other' here; known streams: orders"):
        StreamRegistry([StreamDefinition(StreamName("orders"))])["other"]
    with pytest.raises(UnknownStreamError, match="known streams: none"):
        StreamRegistry()["other"]


def test_declaring_the_same_stream_twice_is_harmless() -> None:
    registry = StreamRegistry([StreamDefinition(StreamName("orders"))])
    registry.declare(StreamDefinition(StreamName("orders")))
    assert len(registry) == 1


@pytest.mark.parametrize(
    "other", [StreamDefinition(StreamName("Orders")), StreamDefinition(StreamName("orders"), row=["a"])]
)
def test_two_streams_of_one_name_are_refused_and_letter_case_tells_none_apart(other: StreamDefinition) -> None:
    registry = StreamRegistry([StreamDefinition(StreamName("orders"))])
    with pytest.raises(ConfigError, match="declared twice"):
        registry.declare(other)
