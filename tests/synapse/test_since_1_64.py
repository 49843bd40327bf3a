"""Tests of the streams of Synapse 1.64 to 1.66, over a changed recorded database."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from replication import synapse
from replication.storage.sqlite.joined import JoinedTable
from replication.storage.sqlite.session import SqliteSession
from replication.synapse.rooms import EventRow
from replication.synapse.since_1_64 import STREAMS
from replication.wire.grammar import InstanceName, Token
from tests.synapse.recorded import restore_sqlite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact

EVENTS = next(each for each in STREAMS if each.name == "events")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteSession]:
    """The recorded database; every seventh event is made an outlier."""
    with closing(SqliteSession(restore_sqlite(tmp_path).removeprefix("sqlite:///"))) as opened:
        opened.connect()
        opened.run("UPDATE events SET outlier = 1 WHERE stream_ordering % 7 = 0")
        yield opened


def facts_of(database: SqliteSession, definition: StreamDefinition) -> list[Fact]:
    """Return all facts of a stream."""
    table = JoinedTable(definition)
    table.declare(database, may_create=False)
    span = {"after": Token(0), "upto": Token(10**6), "limit": 10**6}
    return list(table.rows(database, InstanceName("master"), **span).page().facts)  # type: ignore[arg-type]


def test_all_streams_but_groups_are_the_same() -> None:
    assert [each.name for each in STREAMS] == [each.name for each in synapse.STREAMS if each.name != "groups"]
    assert [each.name for each in STREAMS if each not in synapse.STREAMS] == ["events"]


def test_rows_of_events_have_the_field_outlier(database: SqliteSession) -> None:
    before, now = facts_of(database, synapse.EVENTS.definition), facts_of(database, EVENTS.definition)
    marked = 0
    for old, new in zip(before, now, strict=True):
        for text, more in zip(old.texts, new.texts, strict=True):
            row = json.loads(text)
            if row[0] == "ev":
                flag = json.loads(more)[1].pop()
                assert flag == (new.token % 7 == 0)
                row[1].append(flag)
                marked += flag
                read = EVENTS.read_row(more)
                assert isinstance(read, EventRow)
                assert read.data.outlier == bool(flag)
            assert json.loads(more) == row
    assert marked > 100
