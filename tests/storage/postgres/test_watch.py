"""External writers allocate IDs from PostgreSQL's sequences; no ID is settled that may still be committed."""

from __future__ import annotations

import time
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.session import PostgresSession
from replication.storage.postgres.transaction_id_trigger import install, remove
from replication.storage.postgres.watch import PostgresWatch, _Watched
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.horizon import HOLDERS_AFTER
from replication.wire.grammar import StreamName, Token
from tests.postgres import PostgresServer
from tests.storage.on_postgres import OnPostgres

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.storage.postgres.generic import Table
    from replication.streams.interfaces import IWatch, SequenceState

INSERT = "INSERT INTO events (name) VALUES ('a') RETURNING id"
LONG = 60.0


class UsesWatch(OnPostgres):
    trigger = True

    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        if self.trigger:
            self.number(install)
        self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.poll(3)

    def number(self, act: Any) -> None:
        session = PostgresSession(Address.parse(self.url), Event(), Holder())
        act(session, ['"events"'])
        session.close()

    def watch(self, *definitions: StreamDefinition) -> IWatch:
        for each in definitions:
            self.wait(self.store.declare(each))
        watch = self.store.watch()
        assert watch is not None
        return watch

    def poll(self, times: int = 1, stream: str = "events") -> tuple[int | None, int]:
        for _ in range(times):
            reach = self.wait(self.watched.poll())[StreamName(stream)]
        return reach.settled, reach.last_value

    def error(self) -> str | None:
        return self.wait(self.watched.poll())[StreamName("events")].error

    def poll_for_long(self, stream: str = "events") -> tuple[int | None, int]:
        """Poll for longer than rule 1 of the horizon is tried alone."""
        self.poll(2)
        time.sleep(HOLDERS_AFTER)
        return self.poll(3, stream)

    def connect(self, *statements: str, **options: Any) -> psycopg.Connection:
        """Connect as another program, and begin with ``statements``."""
        connection = psycopg.connect(self.url, **options)
        self.addCleanup(connection.close)
        for each in statements:
            connection.execute(each)
        return connection


class TriggerTests(UsesWatch, SynchronousTestCase):
    """With the trigger; a subclass runs the same without it."""

    def test_an_id_that_commits_later_is_not_passed(self) -> None:
        slow = self.connect(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (1, 3))
        slow.commit()
        self.assertEqual(self.poll(), (3, 3))

    def test_a_committed_id_does_not_wait_for_a_transaction_with_a_later_id(self) -> None:
        quick = self.connect(INSERT)
        slow = self.connect(INSERT)
        self.assertEqual(self.poll(), (1, 3))
        quick.commit()
        self.assertEqual(self.poll(2), (2, 3))
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (2, 4), "3 may still be committed")
        slow.commit()
        self.assertEqual(self.poll(2), (4, 4))

    def test_ids_up_to_the_first_gap_are_settled_while_later_ones_are_open(self) -> None:
        self.connect(INSERT, "SAVEPOINT here")
        quick = self.connect("INSERT INTO events (name) SELECT 'a' FROM generate_series(1, 5)")
        slow = self.connect(INSERT)
        quick.commit()
        self.assertEqual(self.poll_for_long(), (1, 8), "2 is open")
        self.assertEqual(slow.execute("SELECT max(id) FROM events").fetchall(), [(8,)])

    def test_a_gap_is_passed_by_the_rule_for_transactions_in_progress(self) -> None:
        undone, quick = self.connect(INSERT), self.connect(INSERT)
        slow = self.connect(INSERT)
        quick.commit()
        undone.rollback()
        self.assertEqual(self.poll_for_long(), (1, 4), "2 has no row and 4 is open")
        slow.commit()
        self.assertEqual(self.poll(2), (4, 4))

    def test_a_locked_table_delays_only_the_question_for_committed_ids(self) -> None:
        slow = self.connect("SELECT nextval('events_id_seq')")
        quick = self.connect(INSERT)
        later = self.connect("SELECT nextval('events_id_seq')")
        quick.commit()
        slow.rollback()
        lock = self.connect("LOCK TABLE events")
        self.assertEqual(self.poll_for_long(), (1, 4), "the table cannot be read")
        later.rollback()
        self.assertEqual(self.poll(2), (4, 4))
        lock.rollback()

    def test_a_rolled_back_id_is_passed(self) -> None:
        slow = self.connect(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (1, 3))
        slow.rollback()
        self.assertEqual(self.poll(), (3, 3))

    def test_an_id_of_a_savepoint_that_is_undone_is_waited_for_with_its_transaction(self) -> None:
        slow = self.connect("SAVEPOINT here", INSERT, "ROLLBACK TO here")
        self.assertEqual(self.poll_for_long(), (1, 2))
        slow.execute(INSERT)
        self.assertEqual(self.poll_for_long(), (1, 3))
        slow.commit()
        self.assertEqual(self.poll(3), (3, 3))

    def test_an_id_that_an_update_allocates_is_waited_for(self) -> None:
        self.sql(INSERT)
        self.poll(2)
        slow = self.connect("UPDATE events SET id = DEFAULT")
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (2, 4))
        slow.commit()
        self.assertEqual(self.poll(), (4, 4))

    def test_a_user_for_whom_null_in_an_array_is_a_text_can_poll(self) -> None:
        self.configure("array_nulls", "off")
        self.end_sessions()
        self.sql(INSERT)
        self.assertEqual(self.poll(3), (2, 2))

    def test_rows_that_are_copied_are_waited_for(self) -> None:
        slow = self.connect()
        with slow.cursor().copy("COPY events (name) FROM STDIN") as copy:
            copy.write("a\n" * 100_000)
            time.sleep(HOLDERS_AFTER)
            self.assertEqual(self.poll_for_long()[0], 1)
        self.assertEqual(self.poll_for_long(), (1, 100_001))
        slow.commit()
        self.assertEqual(self.poll(), (100_001, 100_001))

    def test_a_transaction_that_is_older_than_its_id_is_waited_for(self) -> None:
        slow = self.connect("CREATE TEMPORARY TABLE here (a int)")
        for _ in range(3):
            self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (4, 4))
        slow.execute(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (4, 6))
        slow.commit()
        self.assertEqual(self.poll(), (6, 6))

    def test_transactions_that_have_not_used_the_sequence_delay_nothing_for_long(self) -> None:
        self.connect("CREATE TABLE elsewhere (a int)")
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (2, 2))

    def test_blockers_are_named(self) -> None:
        slow = self.connect(INSERT, application_name="import of 2026")
        self.assertEqual(self.poll_for_long(), (1, 2))
        time.sleep(1.0)
        reach = next(iter(self.wait(self.watched.poll()).values()))
        self.assertGreater(reach.waits, 1.0)
        (blocker,) = reach.blockers
        self.assertRegex(blocker, rf"session {slow.info.backend_pid} of postgres \(import of 2026\) since 20..-.*Z")

    def test_the_trigger_may_be_installed_and_removed_between_polls(self) -> None:
        """The race that the trigger prevents: an ID is allocated before its transaction has a transaction ID."""
        self.number(remove)
        self.sql(INSERT)  # so that the next ones need not be logged, which would take a number
        self.poll(3)
        slow = self.connect("SELECT nextval('events_id_seq')")
        self.assertEqual(slow.execute("SELECT pg_current_xact_id_if_assigned()").fetchall(), [(None,)])
        self.sql(INSERT)
        self.assertEqual(self.poll_for_long(), (2, 4))
        slow.execute("INSERT INTO events VALUES (3, 'late')")
        slow.commit()
        self.assertEqual(self.poll(3), (4, 4))
        self.number(install)
        slow.execute(INSERT)
        self.assertEqual(self.poll_for_long(), (4, 5))
        slow.commit()
        self.assertEqual(self.poll(3), (5, 5))

    def test_a_sequence_that_goes_back_is_moved_forward_with_a_warning(self) -> None:
        self.sql("INSERT INTO events (name) SELECT 'a' FROM generate_series(1, 9)")
        self.assertEqual(self.poll(3), (10, 10))
        self.sql("SELECT setval('events_id_seq', 4)")
        self.poll(2)
        self.assertIn("went back to 4, and 10 was published", self.store.warnings[-1])
        self.assertEqual(self.sql(INSERT), [(11,)])
        self.assertEqual(self.poll(3), (11, 11))

    def test_a_restarted_sequence_is_moved_forward_before_its_next_use(self) -> None:
        self.sql(INSERT)
        self.assertEqual(self.poll(3), (2, 2))
        self.sql("TRUNCATE events RESTART IDENTITY")
        self.poll(2)
        self.assertIsNone(self.error())
        self.assertIn("went back to 0, and 2 was published", self.store.warnings[-1])
        self.assertEqual(self.sql(INSERT), [(3,)])
        self.assertEqual(self.poll(3), (3, 3))

    def truncate(self, rows: int) -> None:
        """Publish three rows; then truncate the table, and insert rows before the next poll."""
        self.sql("INSERT INTO events (name) SELECT 'old' FROM generate_series(1, 3)")
        self.assertEqual(self.poll(3), (4, 4))
        self.sql(
            f"TRUNCATE events RESTART IDENTITY; INSERT INTO events (name) SELECT 'new' FROM generate_series(1, {rows})"
        )

    def test_rows_with_ids_that_were_published_before_a_truncation_stop_the_stream_until_they_have_others(self) -> None:
        """The sequence may be behind the published position at the next poll, at it, or beyond it."""
        for rows, above in ((2, []), (4, []), (6, [5, 6])):
            with self.subTest(rows=rows):
                self.sql("DROP TABLE events; CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
                if self.trigger:
                    self.number(install)
                self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
                self.poll(3)
                self.truncate(rows)
                self.poll_for_long()
                self.assertEqual(self.poll()[0], 4)
                error = self.error() or ""
                self.assertIn("truncated with RESTART IDENTITY, and rows have IDs up to 4 again", error)
                self.sql(INSERT)
                self.assertEqual(self.poll_for_long()[0], 4, "later rows wait")
                before = self.sql("SELECT id FROM events WHERE id > 4 ORDER BY 1")
                self.assertEqual(before[:-1], [(each,) for each in above])
                self.sql(error.rpartition(": ")[2])
                self.poll_for_long()
                self.assertIsNone(self.error())
                ((least, last, count),) = self.sql("SELECT min(id), max(id), count(*) FROM events")
                self.assertEqual(count, rows + 1)
                self.assertGreater(least, 4)
                self.assertEqual(self.poll(), (last, last))

    def test_a_stream_with_reused_ids_is_stopped_after_a_restart_too(self) -> None:
        self.truncate(2)
        self.poll(2)
        self.assertIn("IDs up to 4 again", self.error() or "")
        self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.poll_for_long()
        error = self.error() or ""
        self.assertIn("IDs up to 4 again", error)
        self.sql(error.rpartition(": ")[2])
        self.poll_for_long()
        self.assertIsNone(self.error())
        self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.assertEqual((self.poll(3), self.error()), ((6, 6), None))

    def test_a_mark_of_reused_ids_is_stored_by_a_later_poll_if_that_fails(self) -> None:
        self.sql("INSERT INTO events (name) VALUES ('a')")
        self.assertEqual(self.poll(3), (2, 2))
        locked = self.connect("SELECT pg_advisory_xact_lock(hashtextextended('replication tables', 0))")
        self.sql("TRUNCATE events RESTART IDENTITY")
        self.assertRaises(StoreError, self.poll)
        locked.rollback()
        self.poll()
        self.assertEqual(self.sql("SELECT * FROM reused_ids"), [("events", 2)])

    def test_a_reused_id_that_is_committed_late_stops_the_stream_at_the_next_check(self) -> None:
        self.truncate(0)
        slow = self.connect("INSERT INTO events (name) VALUES ('late')")
        self.poll(3)
        self.assertEqual(self.sql(INSERT), [(5,)])
        slow.commit()
        self.assertEqual(self.poll_for_long(), (5, 5))
        self.assertIsNone(self.error())
        self.store._watches[-1].connection._check_at = 0.0
        self.assertIn('SET "id" = DEFAULT WHERE "id" <= 4', self.error() or "")

    def test_a_table_that_was_truncated_is_named_and_one_that_was_rewritten_is_not(self) -> None:
        self.sql("INSERT INTO events (name) SELECT 'old' FROM generate_series(1, 3)")
        self.assertEqual(self.poll(3), (4, 4))
        self.sql("VACUUM FULL events")
        self.poll(2)
        self.assertEqual([each for each in self.store.warnings if "truncated" in each], [])
        self.sql("TRUNCATE events")
        self.poll(2)
        self.assertIn("truncated: a follower that has not received the rows up to ID 4", self.store.warnings[-1])
        self.assertEqual(self.sql(INSERT), [(5,)])
        self.assertEqual((self.poll(3), self.error()), ((5, 5), None))

    def test_a_truncation_of_a_partitioned_table_is_found(self) -> None:
        """Only its partitions have files."""
        for what in ("events", "events_1"):
            with self.subTest(truncated=what):
                self.partition()
                self.sql("INSERT INTO events (name) SELECT 'old' FROM generate_series(1, 3)")
                self.assertEqual(self.poll_for_long(), (4, 4))
                self.sql(f"TRUNCATE {what}")
                self.poll(2)
                self.assertIn("a follower that has not received the rows up to ID 4", self.store.warnings[-1])
                self.assertEqual(self.sql(INSERT), [(5,)])
                self.assertEqual((self.poll_for_long(), self.error()), ((5, 5), None))

    def test_a_table_and_a_sequence_that_are_changed_are_not_taken_for_truncated(self) -> None:
        """These statements, too, write both anew.  The cure of a truncation would publish each row once more."""
        self.sql("DROP TABLE events")
        self.sql("CREATE TABLE events (id integer PRIMARY KEY GENERATED ALWAYS AS IDENTITY, name text)")
        self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.sql("INSERT INTO events (name) VALUES ('a'), ('b'), ('c')")
        self.poll(3)
        for last, change in enumerate(("SET UNLOGGED", "SET LOGGED", "ALTER id TYPE bigint"), 5):
            with self.subTest(change=change):
                self.sql(f"ALTER TABLE events {change}; {INSERT}")
                self.assertEqual((self.poll_for_long(), self.error()), ((last, last), None))
                self.assertEqual([each for each in self.store.warnings if "restarted" in each], [])
        self.sql(f"TRUNCATE events RESTART IDENTITY; {INSERT}")
        self.poll_for_long()
        self.assertIn("IDs up to 7 again", self.error() or "")

    def test_a_sequence_that_keeps_its_options_is_not_taken_for_restarted(self) -> None:
        """``AS bigint`` is a usual part of a change of the column to bigint; the sequence may be one already."""
        self.sql(INSERT)
        self.poll(3)
        for change in (
            "ALTER SEQUENCE events_id_seq CACHE 1",
            "ALTER TABLE events ALTER name TYPE varchar(9); ALTER SEQUENCE events_id_seq AS bigint",
            "ALTER TABLE events ALTER name TYPE char(5); ALTER SEQUENCE events_id_seq RESTART WITH 50",
        ):
            with self.subTest(change=change):
                self.sql(change)
                ((last,),) = self.sql("SELECT last_value FROM events_id_seq")
                self.assertEqual((self.poll_for_long(), self.error()), ((last, last), None))
                found = [each for each in self.store.warnings if "published" in each]
                self.assertEqual(found, [])

    def test_a_sequence_that_alter_has_taken_back_is_restarted(self) -> None:
        self.sql(f"{INSERT}; {INSERT}")
        self.poll(3)
        self.sql(f"TRUNCATE events; ALTER SEQUENCE events_id_seq RESTART; {INSERT}")
        self.poll_for_long()
        self.assertIn("IDs up to 3 again", self.error() or "")

    def test_a_table_that_was_truncated_and_filled_beyond_the_old_ids_is_found(self) -> None:
        """In one transaction.  Statements that only write a table anew, also before that, are not taken for it."""
        fill = "INSERT INTO events (name) SELECT 'new' FROM generate_series(1, 999)"
        for rewritten in (False, True):
            with self.subTest(rewritten=rewritten):
                self.sql(INSERT)
                self.poll(3)
                if rewritten:
                    self.sql("VACUUM FULL events")
                    self.poll(3)
                ((last,),) = self.sql("SELECT last_value FROM events_id_seq")
                self.assertIsNone(self.error())
                self.sql(f"BEGIN; TRUNCATE events; ALTER SEQUENCE events_id_seq RESTART; {fill}; COMMIT")
                self.poll_for_long()
                self.assertIn(f"IDs up to {last} again", self.error() or "")
                self.sql(f"UPDATE events SET id = DEFAULT WHERE id <= {last}")
                self.poll_for_long()

    def test_a_sequence_that_gets_a_cache_stops_the_stream_until_it_has_none(self) -> None:
        one, other = (psycopg.connect(self.url, autocommit=True) for _ in range(2))
        self.addCleanup(one.close)
        self.addCleanup(other.close)
        self.sql("ALTER SEQUENCE events_id_seq CACHE 20")
        given = [each.execute(INSERT).fetchall() for each in (one, other, one)]
        self.assertEqual(given, [[(2,)], [(22,)], [(3,)]])
        self.assertEqual(self.poll_for_long(), (1, 1))
        error = self.error() or ""
        self.assertIn("sequence events_id_seq of stream 'events' does not hand out IDs in ascending order", error)
        self.sql(error.rpartition(": ")[2])
        self.assertEqual((self.poll_for_long(), self.error()), ((41, 41), None))
        self.assertEqual([each.execute(INSERT).fetchall() for each in (one, other)], [[(42,)], [(43,)]])

    def test_a_column_that_gets_another_sequence_stops_the_stream(self) -> None:
        self.sql(INSERT)
        self.poll(3)
        self.sql("CREATE SEQUENCE other START 9")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('other')")
        self.sql(INSERT)
        self.poll()
        self.store._watches[-1].connection._check_at = 0.0
        self.assertIn('"id" of table "events" takes its IDs from other now', self.error() or "")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('events_id_seq')")
        self.store._watches[-1].connection._check_at = 0.0
        self.assertEqual((self.error(), self.poll_for_long()), (None, (2, 2)))

    def test_a_table_in_the_place_of_another_one_stops_the_stream_if_its_ids_begin_anew(self) -> None:
        self.sql(INSERT)
        self.poll(3)
        self.sql("ALTER TABLE events RENAME TO old; CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        error = self.error() or ""
        self.assertIn("from events_id_seq1 now, not from events_id_seq: restart this process", error)
        self.assertIn("inserted since the change with IDs up to 2: otherwise no follower receives them", error)

    def test_a_table_in_the_place_of_another_one_stops_the_stream_also_if_its_sequence_has_the_same_name(self) -> None:
        """Before, rows of both tables were mixed without a word if the new one had more rows than were published."""
        make, fill = "CREATE TABLE events (id bigserial PRIMARY KEY, name text)", ";".join([INSERT] * 5)
        away = "DROP SCHEMA IF EXISTS away CASCADE; CREATE SCHEMA away; ALTER TABLE events SET SCHEMA away"
        for change in (
            f"DROP TABLE events; {make}; {fill}",
            f"DROP TABLE events|{make}; {fill}",
            f"{away}; {make}; {fill}",
        ):
            with self.subTest(change=change):
                self.sql(f"DROP TABLE events; {make}; {INSERT}; {INSERT}")
                self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
                settled, _ = self.poll(3)
                for step in change.split("|"):
                    self.sql(step)
                    self.poll()
                self.assertIn('another table is in the place of table "events"', self.error() or "")
                self.assertIn(f"its rows with IDs up to {settled}, unless they are copies", self.error() or "")
                self.assertEqual(self.poll_for_long()[0], settled)

    def test_a_new_sequence_of_the_same_table_goes_on(self) -> None:
        self.sql(INSERT)
        self.poll(3)
        self.sql("ALTER TABLE events ALTER id DROP DEFAULT; DROP SEQUENCE events_id_seq")
        self.sql(f"ALTER TABLE events ALTER id ADD GENERATED BY DEFAULT AS IDENTITY (START 3); {INSERT}")
        self.assertEqual((self.poll_for_long(), self.error()), ((3, 3), None))

    def test_reused_ids_of_a_partitioned_table_stop_the_stream(self) -> None:
        for rows in (2, 6):
            with self.subTest(rows=rows):
                self.partition()
                self.truncate(rows)
                self.poll_for_long()
                error = self.error() or ""
                self.assertIn("truncated with RESTART IDENTITY, and rows have IDs up to 4 again", error)
                self.sql(error.rpartition(": ")[2])
                last = self.poll_for_long()[1]
                self.assertEqual((self.poll(), self.error()), ((last, last), None))

    def partition(self) -> None:
        """Make the table anew, with a partition."""
        self.sql("DROP TABLE events; CREATE TABLE events (id bigserial, name text) PARTITION BY RANGE (id)")
        self.sql("CREATE INDEX ON events (id); CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (1) TO (999)")
        self.watched = self.watch(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        self.poll(3)

    def test_the_last_row_is_that_of_any_writer(self) -> None:
        self.assertEqual(self.wait(self.store.last_row(StreamName("events"))), 0)
        self.sql("INSERT INTO events (name) VALUES ('a'), ('b')")
        self.assertEqual(self.wait(self.store.last_row(StreamName("events"))), 3)

    def test_a_missing_sequence_is_an_error_until_it_exists_again(self) -> None:
        self.sql("ALTER SEQUENCE events_id_seq RENAME TO away")
        self.assertEqual(self.poll(3), (1, 1))
        self.assertIn("takes its IDs from away now, not from events_id_seq: restart this process", self.error() or "")
        self.sql("ALTER TABLE events ALTER id DROP DEFAULT")
        self.assertEqual(self.error(), "there is no sequence events_id_seq, or no reading it")
        self.sql("ALTER TABLE events ALTER id SET DEFAULT nextval('away')")
        self.sql("ALTER SEQUENCE away RENAME TO events_id_seq")
        self.sql(INSERT)
        self.assertEqual(self.poll(3), (2, 2))
        self.assertIsNone(self.error())

    def test_a_session_that_is_lost_is_made_again(self) -> None:
        slow = self.connect(INSERT)
        self.poll(2)
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'replication%'"
        )
        self.assertEqual(self.poll_for_long(), (1, 2))
        slow.commit()
        self.assertEqual(self.poll(3), (2, 2))


class WithoutTriggerTests(TriggerTests):
    trigger = False


class KindTests(UsesWatch, SynchronousTestCase):
    def test_many_streams_take_one_question(self) -> None:
        names = [f"t{number}" for number in range(50)]
        for name in names:
            self.sql(f"CREATE TABLE {name} (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, name text)")
        self.watched = self.watch(*[StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in names])
        self.poll(3)
        self.sql("INSERT INTO t7 (name) VALUES ('a')")
        states = self.wait(self.watched.poll())
        self.assertEqual({name: reach.last_value for name, reach in states.items() if reach.last_value > 1}, {"t7": 2})

    def test_what_a_failed_poll_has_read_is_published_by_the_next_one(self) -> None:
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        definitions = [
            StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in ("events", "others")
        ]
        self.watched = self.watch(*definitions)
        self.poll(2)
        self.sql(INSERT)
        self.sql("INSERT INTO others (name) VALUES ('a')")  # has no trigger, so the locks are looked at
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def fail(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            raise StoreError("the session has ended")

        session.ask = fail  # type: ignore[method-assign]
        self.assertRaises(StoreError, self.wait, self.watched.poll())
        self.assertEqual(self.poll(), (2, 2))

    def test_holders_from_another_session_settle_nothing(self) -> None:
        """The server may have crashed after the poll, and have lost allocations."""
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.poll(2)
        slow = self.connect("INSERT INTO others (name) VALUES ('a')")
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def after_a_loss(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            slow.rollback()
            session.close()
            return ask(sql, *parameters, **options)

        session.ask = after_a_loss  # type: ignore[method-assign]
        self.assertEqual(self.poll(1, "others"), (1, 2))
        self.assertEqual(self.poll(2, "others"), (2, 2))

    def test_a_poll_that_finds_a_holder_without_a_name_settles_nothing(self) -> None:
        """As PostgreSQL 13.4 and 14.0 show a transaction for a moment while it is being prepared."""
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.poll(2)
        slow = self.connect("INSERT INTO others (name) VALUES ('a')")
        self.assertEqual(self.poll(1, "others"), (1, 2))
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def without_a_name(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            ((sequence, _, pid),) = ask(sql, *parameters, **options)
            return [(sequence, "3/0", pid)]

        session.ask = without_a_name  # type: ignore[method-assign]
        self.assertEqual(self.poll(1, "others"), (1, 2))
        self.assertEqual(self.poll(1, "others"), (1, 2))
        slow.commit()
        self.assertEqual(self.poll(1, "others"), (2, 2))

    def test_an_insert_into_a_partition_is_waited_for(self) -> None:
        """It does not fire the trigger of the whole table."""
        self.sql("CREATE TABLE parted (id bigserial, name text) PARTITION BY LIST (name)")
        self.sql("CREATE TABLE part PARTITION OF parted DEFAULT")
        session = PostgresSession(Address.parse(self.url), Event(), Holder())
        install(session, ['"parted"'])
        session.close()
        self.watched = self.watch(StreamDefinition("parted", table="parted", id_column="id", row=["name"]))
        self.poll(2)
        slow = self.connect("SELECT nextval('parted_id_seq')")  # the first one is logged, which takes a number
        slow.commit()
        slow.execute("SELECT 1 FROM part, nextval('parted_id_seq')")
        self.assertEqual(slow.execute("SELECT nextval('parted_id_seq')").fetchall(), [(4,)])
        self.assertEqual(slow.execute("SELECT pg_current_xact_id_if_assigned()").fetchall(), [(None,)])
        self.assertEqual(self.poll_for_long("parted"), (1, 4))
        slow.execute("INSERT INTO part VALUES (4, 'late')")
        slow.commit()
        self.assertEqual(self.poll(1, "parted"), (4, 4))

    def test_an_insert_into_the_parent_of_a_mapped_partition_is_waited_for(self) -> None:
        """It does not fire the trigger of the partition."""
        self.sql("CREATE TABLE parted (id bigint, name text) PARTITION BY LIST (name)")
        self.sql("CREATE TABLE part PARTITION OF parted DEFAULT")
        self.sql("CREATE SEQUENCE numbers OWNED BY part.id")
        self.sql("ALTER TABLE part ALTER id SET DEFAULT nextval('numbers')")
        session = PostgresSession(Address.parse(self.url), Event(), Holder())
        install(session, ['"part"'])
        session.close()
        self.watched = self.watch(StreamDefinition("parted", table="part", id_column="id", row=["name"]))
        self.poll(2)
        slow = self.connect("SELECT nextval('numbers')")
        slow.commit()
        slow.execute("SELECT 1 FROM parted, nextval('numbers')")
        self.assertEqual(slow.execute("SELECT nextval('numbers')").fetchall(), [(4,)])
        self.assertEqual(self.poll_for_long("parted"), (1, 4))
        slow.rollback()
        self.assertEqual(self.poll(1, "parted"), (4, 4))

    def test_committed_ids_of_any_kind_of_table_do_not_wait_for_later_ones(self) -> None:
        """A table may count down, have steps between its IDs, a ``where``, rows in several tables, and partitions."""
        self.sql("CREATE SEQUENCE down INCREMENT 7")
        self.sql("CREATE TABLE past (id bigint PRIMARY KEY DEFAULT -nextval('down'), name text)")
        self.sql("CREATE TABLE part (id bigserial PRIMARY KEY, name text) PARTITION BY RANGE (id)")
        self.sql("CREATE TABLE part_1 PARTITION OF part DEFAULT")
        self.sql("CREATE SEQUENCE pairs")
        for table in ("one", "two"):
            self.sql(f"CREATE TABLE {table} (id bigint PRIMARY KEY DEFAULT nextval('pairs'), name text)")
        sources = [SourceTable(table=each, id_column="id", row=["name"]) for each in ("one", "two")]
        self.watched = self.watch(
            StreamDefinition("past", table="past", id_column="id", row=["name"], negative=True, where="name <> 'a'"),
            StreamDefinition("part", table="part", id_column="id", row=["name"]),
            StreamDefinition("pairs", tables=sources, row=["name"], sequence="pairs"),
        )
        self.poll(3, "part")
        before = {name: each.last_value for name, each in self.wait(self.watched.poll()).items()}
        inserts = [f"INSERT INTO {each} (name) VALUES ('a')" for each in ("past", "part", "one")]
        quick, slow = self.connect(*inserts, "INSERT INTO two (name) VALUES ('a')"), self.connect(*inserts)
        self.poll(1, "part")
        quick.commit()
        self.poll(2, "part")
        states = {name: (each.settled, each.last_value) for name, each in self.wait(self.watched.poll()).items()}
        states.pop(StreamName("events"))
        steps: dict[str, tuple[int, int]] = {"past": (7, 14), "part": (1, 2), "pairs": (2, 3)}
        expected = {
            name: (before[StreamName(name)] + one, before[StreamName(name)] + two) for name, (one, two) in steps.items()
        }
        self.assertEqual(states, expected)
        slow.commit()
        self.assertEqual(self.poll(2, "past"), (expected["past"][1],) * 2)

    def test_a_table_that_counts_down_and_has_several_rows_an_id(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("CREATE TABLE past (id bigint DEFAULT -nextval('numbers'), name text)")
        definition = StreamDefinition("past", table="past", id_column="id", row=["name"], negative=True)
        self.watched = self.watch(definition)
        allocate = "WITH n AS (SELECT -nextval('numbers') AS id)"
        several = f"{allocate} INSERT INTO past SELECT id, name FROM n, unnest('{{a,b}}'::text[]) AS name"

        def poll() -> tuple[int | None, int]:
            reach = self.wait(self.watched.poll())[StreamName("past")]
            return reach.settled, reach.last_value

        self.assertEqual([poll() for _ in range(3)][-1], (1, 1))
        slow = self.connect(several)
        self.sql(several)
        self.assertEqual([poll() for _ in range(3)][-1], (1, 3))
        slow.commit()
        self.assertEqual(poll(), (3, 3))


def test_prepared_transactions_are_waited_for_and_named() -> None:
    with PostgresServer(fsync=False, max_prepared_transactions="5") as server:
        server.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        for trigger in (False, True):
            session = PostgresSession(Address.parse(server.url()), Event(), Holder())
            if trigger:
                install(session, ["events"])
            _try_prepared(server, session)
            _try_load(server, session)
            session.close()


def _watch(
    server: PostgresServer, session: PostgresSession, now: Callable[[], float]
) -> tuple[PostgresWatch, SequenceState]:
    from replication.storage.postgres.mapped import MappedTable

    table = MappedTable(StreamDefinition("events", table="events", id_column="id", row=["name"]))
    table.declare(session, may_create=False)
    server.sql(INSERT)
    warnings: list[str] = []
    watch = PostgresWatch(session, [table], warnings, now)
    for _ in range(3):
        (start,) = watch.poll().values()
    assert start.settled == start.last_value
    return watch, start


def _try_prepared(server: PostgresServer, session: PostgresSession) -> None:
    time_ = 0.0
    watch, start = _watch(server, session, lambda: time_)
    with psycopg.connect(server.url(), autocommit=True) as slow:
        slow.execute("BEGIN")
        slow.execute(INSERT)
        watch.poll()
        watch.poll()
        slow.execute("PREPARE TRANSACTION 'payment 7'")
    server.sql(INSERT)
    for time_ in (0.5, 1.0, 5.0, 6.0):  # noqa: B007 - what the watch's clock shows
        (reach,) = watch.poll().values()
        assert reach.settled == start.last_value
    assert [each.partition(" since ")[0] for each in reach.blockers] == ["prepared transaction 'payment 7'"]
    server.sql("COMMIT PREPARED 'payment 7'")
    (reach,) = watch.poll().values()
    assert reach.settled == start.last_value + 2


def test_an_allocation_is_on_disk_when_the_log_is_up_to_a_place_behind_it() -> None:
    watched = _Watched(
        cast("Table", SimpleNamespace(definition=StreamDefinition("x"), sequence="x_id_seq", sources=()))
    )
    assert not watched.is_flushed(1_000)
    for last_value, place in ((5, 100), (7, 200), (7, 300)):
        watched.add_logged(Token(last_value), place)
    for settled, enough in ((5, 100), (6, 200), (7, 200)):
        watched.horizon.settled = Token(settled)
        assert (watched.is_flushed(enough - 1), watched.is_flushed(enough)) == (False, True)
    watched.horizon.settled = Token(8)
    assert not watched.is_flushed(1_000)


@pytest.mark.parametrize(
    ("rows", "rolled_back"), [(0, 100), (1, 100), (33, 1)], ids=["only rollbacks", "a row below", "a row just below"]
)
def test_f9_a_crash_takes_back_no_published_id(rows: int, rolled_back: int) -> None:
    """A crash takes back allocations of transactions that rolled back, unless a later commit flushed them.

    PostgreSQL logs an allocation for itself and the next 32.  So the commit of 33 does not flush the allocation of 34.
    """
    from replication.storage.postgres.mapped import MappedTable

    with PostgresServer(fsync=False, wal_writer_delay="10s") as server:
        server.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        session = PostgresSession(Address.parse(server.url()), Event(), Holder())
        install(session, ["events"])
        table = MappedTable(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        table.declare(session, may_create=False)
        warnings: list[str] = []
        watch = PostgresWatch(session, [table], warnings)
        for _ in range(rows):
            server.sql(INSERT)
        with psycopg.connect(server.url()) as other:
            for _ in range(rolled_back):
                other.execute(INSERT)
            other.rollback()
        for _ in range(2):
            (horizon,) = watch.poll().values()
        assert horizon.settled == horizon.last_value == rows + rolled_back
        server.restart("immediate")
        assert server.sql(INSERT) > [(horizon.settled,)]
        (again,) = watch.poll().values()
        assert warnings == []
        assert again.settled is not None
        assert again.settled >= horizon.settled
        session.close()


def _try_load(server: PostgresServer, session: PostgresSession) -> None:
    """At every poll a transaction is prepared, none for long; for some polls, one stays longer."""
    watch, start = _watch(server, session, time.monotonic)
    with (
        psycopg.connect(server.url(), autocommit=True) as slow,
        psycopg.connect(server.url(), autocommit=True) as quick,
    ):

        def go_on(number: int) -> int:
            """Prepare one more transaction, poll, and commit the one before."""
            quick.execute("BEGIN")
            ((last_value,),) = quick.execute(INSERT).fetchall()
            watch.poll()
            quick.execute(f"PREPARE TRANSACTION 'load {number}'")
            if number:
                quick.execute(f"COMMIT PREPARED 'load {number - 1}'")
            watch.poll()
            time.sleep(HOLDERS_AFTER / 4)
            return int(last_value)

        last_value = [go_on(number) for number in range(12)]
        (reach,) = watch.poll().values()
        assert reach.settled is not None
        assert last_value[-4] <= reach.settled < last_value[-1]
        slow.execute("BEGIN")
        ((held,),) = slow.execute(INSERT).fetchall()
        go_on(12)
        slow.execute("PREPARE TRANSACTION 'held'")
        slow.execute("BEGIN")
        slow.execute(INSERT)
        for number in range(13, 24):
            go_on(number)
        (reach,) = watch.poll().values()
        assert reach.settled == held - 1
        slow.execute("ROLLBACK")
        slow.execute("COMMIT PREPARED 'held'")
        last = [go_on(number) for number in range(24, 36)][-4]
        (reach,) = watch.poll().values()
        assert reach.settled is not None
        assert reach.settled >= last
        quick.execute("COMMIT PREPARED 'load 35'")
    for _ in range(2):
        (reach,) = watch.poll().values()
    assert reach.settled == reach.last_value > start.last_value
