"""Mapped tables, looked at without a daemon."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError, StoreError
from replication.storage.mappings import check, number_first
from replication.streams.registry import StreamDefinition
from tests.storage.on_postgres import HasDatabase

if TYPE_CHECKING:
    from pathlib import Path

EVENTS = StreamDefinition("events", table="events", id_column="id", row=["name"])
MISSING = StreamDefinition("missing", table="missing", id_column="id", row=["name"])


class PostgresTests(HasDatabase, SynchronousTestCase):
    def test_tables_are_looked_at_before_any_daemon_was_there(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        one, other = check(self.url, [EVENTS, MISSING])
        self.assertEqual((one.stream, one.error, len(one.warnings)), ("events", None, 1))
        self.assertIn("there is no table of that name", other.error or "")
        self.assertEqual(self.sql("SELECT to_regclass('replication_schema')"), [(None,)])

    def test_a_sequence_of_no_use_is_named_before_a_master_starts(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("ALTER SEQUENCE events_id_seq CACHE 10")
        said = check(self.url, [EVENTS])[0].error or ""
        self.assertIn("of stream 'events' does not hand out IDs in ascending order: ALTER SEQUENCE", said)

    def test_the_trigger_is_installed_and_removed(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.assertEqual(number_first(self.url, [EVENTS, EVENTS]), ["events"])
        self.assertEqual(check(self.url, [EVENTS])[0].warnings, [])
        self.assertEqual(number_first(self.url, [EVENTS], remove=True), ["events"])
        self.assertEqual(len(check(self.url, [EVENTS])[0].warnings), 1)
        self.assertRaises(StoreError, number_first, self.url, [EVENTS, MISSING])


def test_tables_of_a_file(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as database:
        database.execute("CREATE TABLE events (id INTEGER, name TEXT)")
    url = f"sqlite:///{tmp_path}/app.db"
    one, other = check(url, [EVENTS, MISSING])
    assert (one.error, len(one.warnings)) == (None, 1)
    assert "no such table: missing" in (other.error or "")
    with pytest.raises(ConfigError, match="nothing to install or remove: mapped streams work as they are"):
        number_first(url, [EVENTS])


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        check(f"sqlite:///{tmp_path}/none.db", [EVENTS])
    with pytest.raises(ConfigError, match="in memory"):
        check("sqlite://", [EVENTS])
    assert list(tmp_path.iterdir()) == []
