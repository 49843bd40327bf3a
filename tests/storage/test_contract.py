"""What all databases share: directions, and the errors that name a cure."""

from __future__ import annotations

import pytest

from replication.errors import StoreError, ValueRefusedError
from replication.storage.contract import DOWN, UP, Direction, differs, refuse_another_writer, shown
from replication.streams.definitions import StreamDefinition
from replication.wire.grammar import InstanceName, Token

EVENTS = StreamDefinition("events", table="events", id_column="id", row=["name"])


def test_a_negative_stream_counts_down() -> None:
    assert Direction.of(StreamDefinition("orders")) is UP
    assert Direction.of(StreamDefinition("backfill", negative=True)) is DOWN


def test_a_second_writer_of_a_table_is_refused_with_the_statements_that_rename_the_first() -> None:
    with pytest.raises(StoreError, match="that is 'north', not 'main'") as refused:
        refuse_another_writer(EVENTS, InstanceName("main"), ["north", ""], "follower_positions")
    for table in ("stream_positions", "follower_positions"):
        assert f"UPDATE {table} SET instance_name = 'main' WHERE stream_name = 'events'" in str(refused.value)


def test_of_two_names_with_positions_the_other_one_is_deleted() -> None:
    with pytest.raises(StoreError, match=r"DELETE FROM stream_positions .* instance_name = 'north'"):
        refuse_another_writer(EVENTS, InstanceName("main"), ["main", "north"])


@pytest.mark.parametrize("stored", [[], [""], ["main"]])
def test_the_only_writer_is_not_refused(stored: list[str]) -> None:
    refuse_another_writer(EVENTS, InstanceName("main"), stored)


def test_a_fact_that_differs_is_worth_another_attempt_only_if_its_rows_are_older() -> None:
    """Older rows belong to another fact, so another ID may work; a changed value stays changed."""
    older = differs(EVENTS, Token(2), ["[1]"], ["[2]"], was_there=True)
    changed = differs(EVENTS, Token(2), ["[1]"], ['["1"]'], was_there=False)
    assert not isinstance(older, ValueRefusedError)
    assert isinstance(changed, ValueRefusedError)


def test_rows_in_a_message_are_short() -> None:
    assert shown([]) == "no row"
    assert len(shown(["x" * 300])) == 200
