"""Mapped tables, looked at without a daemon."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError, StoreError
from replication.storage.mappings import check, number_first
from replication.streams.registry import SourceTable, StreamDefinition
from tests.storage.on_postgres import HasDatabase

if TYPE_CHECKING:
    from pathlib import Path

MISSING = StreamDefinition("missing", table="missing", id_column="id", row=["name"])
EVENTS = StreamDefinition("events", table="events", id_column="id", row=["name"])


def options_of(definition: StreamDefinition) -> dict[str, Any]:
    """Return what maps a stream."""
    return {"table": definition.table, "id_column": definition.id_column, "row": definition.row}


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

    def said(self, **options: Any) -> list[str]:
        """Return what is said of the stream, without what the trigger would mend."""
        (found,) = check(self.url, [StreamDefinition("events", **{**options_of(EVENTS), **options})])
        self.assertIsNone(found.error)
        return [each for each in found.warnings if "streams install" not in each]

    def test_ids_from_who_knows_where_are_said_until_the_sequence_is_named(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("CREATE FUNCTION next_id() RETURNS bigint LANGUAGE sql AS $$ SELECT nextval('numbers') $$")
        for default in ("nextval('numbers'::text)", "next_id()"):
            self.sql("DROP TABLE IF EXISTS events")
            self.sql(f"CREATE TABLE events (id bigint PRIMARY KEY DEFAULT {default}, name text)")
            (said,) = self.said()
            self.assertIn("stream 'events': table 'events' fills 'id' by a DEFAULT that tells of no sequence", said)
            self.assertIn("name the sequence", said)
            self.assertEqual(self.said(sequence="numbers"), [])

    def test_ids_of_the_column_itself_need_no_words(self) -> None:
        for kind in ("bigserial", "bigint GENERATED ALWAYS AS IDENTITY", "bigint"):
            self.sql("DROP TABLE IF EXISTS events")
            self.sql(f"CREATE TABLE events (id {kind} PRIMARY KEY, name text)")
            self.assertEqual(self.said(), [])

    def test_rows_above_what_the_sequence_has_given_are_said(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
        self.assertEqual(self.said(), [])
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        (said,) = self.said()
        self.assertIn("stream 'events': has rows up to ID 50, but sequence events_id_seq has given 2", said)
        self.assertIn("as sequence in [[streams]]", said)
        self.assertEqual(self.said(where="name LIKE '%b'"), [])
        self.sql("SELECT setval('events_id_seq', 50)")
        self.assertEqual(self.said(), [])

    def test_rows_of_a_sequence_that_there_is_not_are_said(self) -> None:
        self.sql("CREATE TABLE events (id bigint PRIMARY KEY, name text)")
        self.sql("INSERT INTO events VALUES (1, 'a')")
        self.assertEqual(self.said(), [], "ID 1 counts as told")
        self.sql("INSERT INTO events VALUES (-7, 'a'), (3, 'a')")
        self.assertIn('has rows up to ID 3, but sequence "stream_events_seq" has given 0', *self.said())
        self.assertIn("has rows up to ID 7,", *self.said(negative=True))

    def test_a_table_without_an_index_is_not_read_for_that(self) -> None:
        self.sql("CREATE TABLE events (id bigserial, name text)")
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        (said,) = self.said()
        self.assertIn("has no index on 'id'", said)

    def test_gathered_tables_need_a_sequence_where_they_hand_out_ids(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("CREATE TABLE more (id bigint PRIMARY KEY, name text)")
        tables = [SourceTable(table=each, id_column="id", row=["name"]) for each in ("events", "more")]
        options = {"table": None, "id_column": "stream_id", "tables": tables}
        (said,) = self.said(**options)
        self.assertIn("table 'events' fills 'id' from events_id_seq, and the stream has another one", said)
        self.assertEqual(self.said(**options, sequence="events_id_seq"), [])
        self.sql("INSERT INTO more VALUES (7, 'a')")
        self.assertIn("has rows up to ID 7,", *self.said(**options, sequence="events_id_seq"))

    def test_ids_that_anybody_may_draw_are_not_shared(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        tags = StreamDefinition("tags", shares="events")
        (found,) = check(self.url, [EVENTS], [tags, EVENTS])
        self.assertIn(
            "streams 'events', 'tags' share their IDs, but table \"events\" hands them out", found.error or ""
        )
        self.sql((found.error or "").partition("by reserve(), ")[2])
        (found,) = check(self.url, [EVENTS], [tags, EVENTS])
        self.assertIsNone(found.error)

    def test_an_identity_that_shares_is_refused_too(self) -> None:
        self.sql("CREATE TABLE events (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, name text)")
        events = StreamDefinition("events", shares="tags", **options_of(EVENTS))
        (found,) = check(self.url, [StreamDefinition("tags"), events])
        self.sql((found.error or "").partition("by reserve(), ")[2])
        (found,) = check(self.url, [StreamDefinition("tags"), events])
        self.assertIsNone(found.error)

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
