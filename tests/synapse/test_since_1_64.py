"""The streams of later releases, over a database whose events say what they want to know."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from replication import synapse
from replication.storage.gathered import GatheredTable
from replication.synapse.rooms import EventRow
from replication.synapse.since_1_64 import STREAMS
from replication.wire.grammar import InstanceName, Token
from tests.synapse.recorded import restore_sqlite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from replication.streams.facts import Fact
    from replication.streams.registry import StreamDefinition

EVENTS = next(each for each in STREAMS if each.name == "events")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """The recorded database, of which every seventh event is an outlier now."""
    with closing(sqlite3.connect(restore_sqlite(tmp_path).removeprefix("sqlite:///"))) as opened:
        opened.execute("UPDATE events SET outlier = 1 WHERE stream_ordering % 7 = 0")
        yield opened


def told(database: sqlite3.Connection, definition: StreamDefinition) -> list[Fact]:
    """Return all that there is of a stream."""
    table = GatheredTable(definition)
    table.declare(database, may_create=False)
    span = {"after": Token(0), "upto": Token(10**6), "limit": 10**6}
    return list(table.rows(database, InstanceName("master"), **span).page().facts)  # type: ignore[arg-type]


def test_the_streams_are_the_same_but_for_groups() -> None:
    assert [each.name for each in STREAMS] == [each.name for each in synapse.STREAMS if each.name != "groups"]
    assert [each.name for each in STREAMS if each not in synapse.STREAMS] == ["events"]


def test_an_event_says_whether_it_is_an_outlier(database: sqlite3.Connection) -> None:
    before, now = told(database, synapse.EVENTS.definition), told(database, EVENTS.definition)
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
