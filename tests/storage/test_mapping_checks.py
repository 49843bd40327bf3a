"""Checks of mapped tables without a daemon."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError, StoreError
from replication.storage.mapping_checks import check, install_trigger
from replication.storage.postgres.options import POLICY_CURE
from replication.streams.definitions import SourceTable, StreamDefinition
from tests.storage.on_postgres import HasDatabase

if TYPE_CHECKING:
    from pathlib import Path

MISSING = StreamDefinition("missing", table="missing", id_column="id", row=["name"])
EVENTS = StreamDefinition("events", table="events", id_column="id", row=["name"])


def options_of(definition: StreamDefinition) -> dict[str, Any]:
    """Return what maps a stream."""
    return {"table": definition.table, "id_column": definition.id_column, "row": definition.row}


class PostgresTests(HasDatabase, SynchronousTestCase):
    def test_tables_are_checked_before_a_daemon_has_run(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        one, other = check(self.url, [EVENTS, MISSING])
        self.assertEqual((one.stream, one.error, len(one.warnings)), ("events", None, 1))
        self.assertIn("there is no table of that name", other.error or "")
        self.assertEqual(self.sql("SELECT to_regclass('replication_schema')"), [(None,)])

    def test_a_sequence_with_a_cache_is_reported_before_a_master_starts(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("ALTER SEQUENCE events_id_seq CACHE 10")
        message = check(self.url, [EVENTS])[0].error or ""
        self.assertIn("of stream 'events' does not hand out IDs in ascending order: ALTER SEQUENCE", message)

    def test_a_descending_sequence_of_a_stream_that_counts_down_is_reported_with_its_default(
        self,
    ) -> None:
        self.sql("CREATE SEQUENCE downwards INCREMENT -1")
        self.sql("CREATE TABLE events (id bigint PRIMARY KEY DEFAULT nextval('downwards'), name text)")
        message = check(self.url, [StreamDefinition("events", **options_of(EVENTS), negative=True)])[0].error or ""
        self.assertIn("set the column's DEFAULT to -nextval('NAME')", message)

    def test_a_policy_that_hides_rows_is_reported_before_a_master_starts(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("ALTER TABLE events ENABLE ROW LEVEL SECURITY")
        self.sql("CREATE ROLE partial LOGIN")
        self.addCleanup(self.sql, "DROP OWNED BY partial; DROP ROLE partial")
        self.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO partial")
        [finding] = check(self.server.url(self.database, "partial"), [EVENTS])
        self.assertIn(f'row-level security policy for table "events"; {POLICY_CURE}', str(finding.error))

    def warnings(self, **options: Any) -> list[str]:
        """Return the warnings about the stream, except the one about the trigger."""
        (found,) = check(self.url, [StreamDefinition("events", **{**options_of(EVENTS), **options})])
        self.assertIsNone(found.error)
        return [each for each in found.warnings if "streams install" not in each]

    def test_a_default_whose_sequence_is_unknown_is_a_warning_until_the_sequence_is_named(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("CREATE FUNCTION next_id() RETURNS bigint LANGUAGE sql AS $$ SELECT nextval('numbers') $$")
        for default in ("nextval('numbers'::text)", "next_id()"):
            self.sql("DROP TABLE IF EXISTS events")
            self.sql(f"CREATE TABLE events (id bigint PRIMARY KEY DEFAULT {default}, name text)")
            (warning,) = self.warnings()
            self.assertIn("stream 'events': table 'events' fills 'id' by a DEFAULT whose sequence is unknown", warning)
            self.assertIn("name that sequence", warning)
            self.assertEqual(self.warnings(sequence="numbers"), [])

    def test_ids_of_the_column_itself_cause_no_warning(self) -> None:
        for kind in ("bigserial", "bigint GENERATED ALWAYS AS IDENTITY", "bigint"):
            self.sql("DROP TABLE IF EXISTS events")
            self.sql(f"CREATE TABLE events (id {kind} PRIMARY KEY, name text)")
            self.assertEqual(self.warnings(), [])

    def test_rows_above_the_sequence_are_a_warning(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
        self.assertEqual(self.warnings(), [])
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        (warning,) = self.warnings()
        self.assertIn("stream 'events': has rows up to ID 50, but sequence events_id_seq has given 2", warning)
        self.assertIn("as sequence in [[streams]]", warning)
        self.assertEqual(self.warnings(where="name LIKE '%b'"), [])
        self.sql("SELECT setval('events_id_seq', 50)")
        self.assertEqual(self.warnings(), [])

    def test_rows_without_a_sequence_are_a_warning(self) -> None:
        self.sql("CREATE TABLE events (id bigint PRIMARY KEY, name text)")
        self.sql("INSERT INTO events VALUES (1, 'a')")
        self.assertEqual(self.warnings(), [], "a start uses ID 1 up")
        self.sql("INSERT INTO events VALUES (3, 'a')")
        self.assertIn('has rows up to ID 3, but sequence "stream_events_seq" has given 0', *self.warnings())
        self.sql("INSERT INTO events VALUES (-7, 'a')")
        self.assertIn("has rows up to ID 7,", *self.warnings(negative=True))

    def test_an_id_that_no_follower_receives_is_an_error_unless_another_stream_has_it(self) -> None:
        self.sql("CREATE TABLE events (id bigint PRIMARY KEY, name text)")
        self.sql("INSERT INTO events VALUES (-7, 'a')")
        past = StreamDefinition("past", **{**options_of(EVENTS), "negative": True})
        (found,) = check(self.url, [EVENTS])
        self.assertIn("stream 'events': table 'events' has a row with the ID -7", found.error or "")
        self.assertEqual([each.error for each in check(self.url, [EVENTS, past])], [None, None])
        self.assertIsNone(check(self.url, [EVENTS], [past])[0].error)

    def test_a_table_without_an_index_is_reported_and_not_read(self) -> None:
        self.sql("CREATE TABLE events (id bigserial, name text)")
        self.sql("INSERT INTO events VALUES (50, 'by hand')")
        (warning,) = self.warnings()
        self.assertIn("has no index on 'id'", warning)

    def test_a_joined_table_with_a_default_id_needs_a_named_sequence(self) -> None:
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        self.sql("CREATE TABLE more (id bigint PRIMARY KEY, name text)")
        tables = [SourceTable(table=each, id_column="id", row=["name"]) for each in ("events", "more")]
        options = {"table": None, "id_column": "stream_id", "tables": tables}
        (warning,) = self.warnings(**options)
        self.assertIn("table 'events' fills 'id' from events_id_seq, and the stream has another sequence", warning)
        self.assertEqual(self.warnings(**options, sequence="events_id_seq"), [])
        self.sql("INSERT INTO more VALUES (7, 'a')")
        self.assertIn("has rows up to ID 7,", *self.warnings(**options, sequence="events_id_seq"))

    def test_a_sequence_of_a_default_is_not_shared(self) -> None:
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
        self.assertEqual(install_trigger(self.url, [EVENTS, EVENTS]), ["events"])
        self.assertEqual(check(self.url, [EVENTS])[0].warnings, [])
        self.assertEqual(install_trigger(self.url, [EVENTS], remove=True), ["events"])
        self.assertEqual(len(check(self.url, [EVENTS])[0].warnings), 1)
        self.assertRaises(StoreError, install_trigger, self.url, [EVENTS, MISSING])


def test_tables_of_a_sqlite_file_are_checked(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "app.db")) as database:
        database.execute("CREATE TABLE events (id INTEGER, name TEXT)")
    url = f"sqlite:///{tmp_path}/app.db"
    one, other = check(url, [EVENTS, MISSING])
    assert (one.error, len(one.warnings)) == (None, 1)
    assert "no such table: missing" in (other.error or "")
    with pytest.raises(ConfigError, match="nothing to install or remove: mapped streams work as they are"):
        install_trigger(url, [EVENTS])


def test_a_missing_database_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="unable to open"):
        check(f"sqlite:///{tmp_path}/none.db", [EVENTS])
    with pytest.raises(ConfigError, match="in memory"):
        check("sqlite://", [EVENTS])
    assert list(tmp_path.iterdir()) == []
