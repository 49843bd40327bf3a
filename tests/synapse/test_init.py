"""Tests of all streams of Synapse with the recorded rows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from replication.session.connection import ReplicationConnection, Role, Rows
from replication.streams.typed_rows import History
from replication.synapse import STREAMS
from replication.wire import grammar
from tests.transcripts.recordings import read_recording

BY_NAME = {each.name: each for each in STREAMS}
# docs/protocol/streams.md C1: the order of a REPLICATE reply of 1.47
ORDER = (
    "events backfill presence presence_federation typing receipts push_rules pushers caches device_lists to_device "
    "federation tag_account_data account_data groups user_signature"
)


def test_streams_have_the_order_of_an_answer_to_replicate() -> None:
    assert [each.name for each in STREAMS] == ORDER.split()
    for name in ("synapse-sqlite", "synapse-postgres"):
        received = [
            line.split()[1].decode()
            for line in read_recording(f"{name}/recording.txt").splitlines()[:40]
            if line.startswith(b"POSITION")
        ]
        assert received[:16] == [each.name for each in STREAMS]


def plain(row: Any) -> Any:
    """Return the array of a typed row."""
    fields = [getattr(row, name) for name in row.names()]
    tag = row.__struct_config__.tag
    return fields if tag is None else [tag, *[plain(each) for each in fields]]


@pytest.mark.parametrize("name", ["synapse-sqlite", "synapse-postgres"])
def test_every_recorded_row_is_read_without_loss(name: str) -> None:
    received = ReplicationConnection(Role.WORKER, 0.0).receive_data(read_recording(f"{name}/recording.txt"), 0.0)
    rows = Counter[str]()
    for run in received:
        if isinstance(run, Rows):
            for text in run.texts:
                row = BY_NAME[run.stream].read_row(text)
                sent = grammar.read_json(text)
                again = plain(row)
                if run.stream == "events" and sent[0] == "ev":
                    assert again[1].pop() is False  # whether it is an outlier: 1.64
                assert again == sent
                assert set(row.named()) >= {*row.names()} - {"data"}
                rows[run.stream] += 1
    assert len(rows) >= 12
    assert sum(rows.values()) > 6000


def test_each_stream_states_what_its_tables_keep() -> None:
    whole = {each.name for each in STREAMS if each.history is History.WHOLE}
    assert whole == {"events", "backfill", "caches", "push_rules", "groups", "user_signature"}
    assert {each.name for each in STREAMS if each.history is History.NONE} == {
        each.name for each in STREAMS if each.definition.in_memory
    }


def test_rows_have_the_fields_of_their_definition() -> None:
    for each in STREAMS:
        if each.name != "events":
            assert each.definition.row == each.row.names()


def test_trap_17_streams_that_share_ids_are_declared_so() -> None:
    shared = {each.name: each.definition.shares for each in STREAMS if each.definition.shares}
    assert shared == {"account_data": "tag_account_data", "user_signature": "device_lists"}
