"""Programs draw IDs from PostgreSQL's sequences; a position passes none that may still be committed."""

from __future__ import annotations

import time
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.postgres_numbering import install, remove
from replication.storage.postgres_session import Address, Holder, PostgresSession
from replication.storage.postgres_watch import PostgresWatch
from replication.streams.gate import PATIENCE
from replication.streams.registry import StreamDefinition
from replication.wire.grammar import StreamName
from tests.postgres import PostgresServer
from tests.storage.on_postgres import OnPostgres

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.streams.seams import IWatch, Reach

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
        self.look(3)

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

    def look(self, times: int = 1, stream: str = "events") -> tuple[int | None, int]:
        for _ in range(times):
            reach = self.wait(self.watched.look())[StreamName(stream)]
        return reach.complete, reach.drawn

    def error(self) -> str | None:
        return self.wait(self.watched.look())[StreamName("events")].error

    def look_on(self, stream: str = "events") -> tuple[int | None, int]:
        """Look until numbers alone would long have been given up."""
        self.look(2)
        time.sleep(PATIENCE)
        return self.look(3, stream)

    def connect(self, *statements: str, **options: Any) -> psycopg.Connection:
        """Connect as another program, and begin with ``statements``."""
        connection = psycopg.connect(self.url, **options)
        self.addCleanup(connection.close)
        for each in statements:
            connection.execute(each)
        return connection


class NumberedTests(UsesWatch, SynchronousTestCase):
    """With the trigger, and, inherited, without."""

    def test_an_id_that_commits_later_is_not_passed(self) -> None:
        slow = self.connect(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (1, 3))
        slow.commit()
        self.assertEqual(self.look(), (3, 3))

    def test_a_rolled_back_id_is_passed(self) -> None:
        slow = self.connect(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (1, 3))
        slow.rollback()
        self.assertEqual(self.look(), (3, 3))

    def test_an_id_of_a_savepoint_that_is_undone_is_waited_for_with_its_transaction(self) -> None:
        slow = self.connect("SAVEPOINT here", INSERT, "ROLLBACK TO here")
        self.assertEqual(self.look_on(), (1, 2))
        slow.execute(INSERT)
        self.assertEqual(self.look_on(), (1, 3))
        slow.commit()
        self.assertEqual(self.look(3), (3, 3))

    def test_an_id_that_an_update_draws_is_waited_for(self) -> None:
        self.sql(INSERT)
        self.look(2)
        slow = self.connect("UPDATE events SET id = DEFAULT")
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (2, 4))
        slow.commit()
        self.assertEqual(self.look(), (4, 4))

    def test_who_holds_the_sequence_itself_is_seen(self) -> None:
        slow = self.connect("TRUNCATE events RESTART IDENTITY")
        self.assertIn("another session holds the lock", str(self.assertRaises(StoreError, self.look)))
        slow.rollback()
        self.sql(INSERT)
        self.assertEqual(self.look(3), (2, 2))

    def test_rows_that_are_copied_are_waited_for(self) -> None:
        slow = self.connect()
        with slow.cursor().copy("COPY events (name) FROM STDIN") as copy:
            copy.write("a\n" * 100_000)
            time.sleep(PATIENCE)
            self.assertEqual(self.look_on()[0], 1)
        self.assertEqual(self.look_on(), (1, 100_001))
        slow.commit()
        self.assertEqual(self.look(), (100_001, 100_001))

    def test_a_transaction_that_is_older_than_its_id_is_waited_for(self) -> None:
        slow = self.connect("CREATE TEMPORARY TABLE here (a int)")
        for _ in range(3):
            self.sql(INSERT)
        self.assertEqual(self.look_on(), (4, 4))
        slow.execute(INSERT)
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (4, 6))
        slow.commit()
        self.assertEqual(self.look(), (6, 6))

    def test_transactions_that_drew_nothing_here_hold_nothing_up_for_long(self) -> None:
        self.connect("CREATE TABLE elsewhere (a int)")
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (2, 2))

    def test_those_who_are_waited_for_are_named(self) -> None:
        slow = self.connect(INSERT, application_name="import of 2026")
        self.assertEqual(self.look_on(), (1, 2))
        time.sleep(1.0)
        reach = next(iter(self.wait(self.watched.look()).values()))
        self.assertGreater(reach.waits, 1.0)
        (blocker,) = reach.blockers
        self.assertRegex(blocker, rf"session {slow.info.backend_pid} of postgres \(import of 2026\) since 20..-.*Z")

    def test_the_trigger_may_come_and_go_while_we_look(self) -> None:
        """The race that it is for: an ID is drawn, and its transaction has no number for a while."""
        self.number(remove)
        self.sql(INSERT)  # so that the next ones need not be logged, which would take a number
        self.look(3)
        slow = self.connect("SELECT nextval('events_id_seq')")
        self.assertEqual(slow.execute("SELECT pg_current_xact_id_if_assigned()").fetchall(), [(None,)])
        self.sql(INSERT)
        self.assertEqual(self.look_on(), (2, 4))
        slow.execute("INSERT INTO events VALUES (3, 'late')")
        slow.commit()
        self.assertEqual(self.look(3), (4, 4))
        self.number(install)
        slow.execute(INSERT)
        self.assertEqual(self.look_on(), (4, 5))
        slow.commit()
        self.assertEqual(self.look(3), (5, 5))

    def test_a_sequence_that_goes_back_is_moved_forward_and_said(self) -> None:
        self.sql("INSERT INTO events (name) SELECT 'a' FROM generate_series(1, 9)")
        self.assertEqual(self.look(3), (10, 10))
        self.sql("SELECT setval('events_id_seq', 4)")
        self.look(2)
        self.assertIn("went back to 4, and 10 was announced", self.store.warnings[-1])
        self.assertEqual(self.sql(INSERT), [(11,)])
        self.assertEqual(self.look(3), (11, 11))

    def test_a_sequence_that_begins_again_is_moved_forward_before_anybody_draws(self) -> None:
        self.sql(INSERT)
        self.assertEqual(self.look(3), (2, 2))
        self.sql("TRUNCATE events RESTART IDENTITY")
        self.look(2)
        self.assertIsNone(self.error())
        self.assertIn("went back to 0, and 2 was announced", self.store.warnings[-1])
        self.assertEqual(self.sql(INSERT), [(3,)])
        self.assertEqual(self.look(3), (3, 3))

    def test_a_sequence_that_is_gone_is_said_until_it_is_found_again(self) -> None:
        self.sql("ALTER SEQUENCE events_id_seq RENAME TO away")
        self.assertEqual(self.look(3), (1, 1))
        self.assertEqual(self.error(), "there is no sequence events_id_seq, or no reading it")
        self.sql("ALTER SEQUENCE away RENAME TO events_id_seq")
        self.sql(INSERT)
        self.assertEqual(self.look(3), (2, 2))
        self.assertIsNone(self.error())

    def test_a_session_that_is_lost_is_made_again(self) -> None:
        slow = self.connect(INSERT)
        self.look(2)
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'replication%'"
        )
        self.assertEqual(self.look_on(), (1, 2))
        slow.commit()
        self.assertEqual(self.look(3), (2, 2))


class UnnumberedTests(NumberedTests):
    trigger = False


class KindTests(UsesWatch, SynchronousTestCase):
    def test_many_streams_take_one_question(self) -> None:
        names = [f"t{number}" for number in range(50)]
        for name in names:
            self.sql(f"CREATE TABLE {name} (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, name text)")
        self.watched = self.watch(*[StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in names])
        self.look(3)
        self.sql("INSERT INTO t7 (name) VALUES ('a')")
        reaches = self.wait(self.watched.look())
        self.assertEqual({name: reach.drawn for name, reach in reaches.items() if reach.drawn > 1}, {"t7": 2})

    def test_what_was_seen_in_a_look_that_failed_later_is_told_by_the_next_one(self) -> None:
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        definitions = [
            StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in ("events", "others")
        ]
        self.watched = self.watch(*definitions)
        self.look(2)
        self.sql(INSERT)
        self.sql("INSERT INTO others (name) VALUES ('a')")  # has no trigger, so the locks are looked at
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def fail(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            raise StoreError("somebody has ended it")

        session.ask = fail  # type: ignore[method-assign]
        self.assertRaises(StoreError, self.wait, self.watched.look())
        self.assertEqual(self.look(), (2, 2))

    def test_holders_that_another_session_saw_pass_nothing(self) -> None:
        """The server may have crashed after the look, and have lost what was drawn."""
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.look(2)
        slow = self.connect("INSERT INTO others (name) VALUES ('a')")
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def after_a_loss(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            slow.rollback()
            session.close()
            return ask(sql, *parameters, **options)

        session.ask = after_a_loss  # type: ignore[method-assign]
        self.assertEqual(self.look(1, "others"), (1, 2))
        self.assertEqual(self.look(2, "others"), (2, 2))

    def test_a_look_that_meets_somebody_without_a_name_passes_nothing(self) -> None:
        """As PostgreSQL 13.4 and 14.0 show a transaction for a moment while it is being prepared."""
        self.sql("CREATE TABLE others (id bigserial PRIMARY KEY, name text)")
        self.watched = self.watch(StreamDefinition("others", table="others", id_column="id", row=["name"]))
        self.look(2)
        slow = self.connect("INSERT INTO others (name) VALUES ('a')")
        self.assertEqual(self.look(1, "others"), (1, 2))
        session = self.store._watches[-1].connection.session
        ask = session.ask

        def without_a_name(sql: str, *parameters: Any, **options: Any) -> Any:
            session.ask = ask  # type: ignore[method-assign]
            ((sequence, _, pid),) = ask(sql, *parameters, **options)
            return [(sequence, "3/0", pid)]

        session.ask = without_a_name  # type: ignore[method-assign]
        self.assertEqual(self.look(1, "others"), (1, 2))
        self.assertEqual(self.look(1, "others"), (1, 2))
        slow.commit()
        self.assertEqual(self.look(1, "others"), (2, 2))

    def test_who_inserts_into_a_partition_is_waited_for(self) -> None:
        """The trigger of the whole table does not see it."""
        self.sql("CREATE TABLE parted (id bigserial, name text) PARTITION BY LIST (name)")
        self.sql("CREATE TABLE part PARTITION OF parted DEFAULT")
        session = PostgresSession(Address.parse(self.url), Event(), Holder())
        install(session, ['"parted"'])
        session.close()
        self.watched = self.watch(StreamDefinition("parted", table="parted", id_column="id", row=["name"]))
        self.look(2)
        slow = self.connect("SELECT nextval('parted_id_seq')")  # the first one is logged, which takes a number
        slow.commit()
        slow.execute("SELECT 1 FROM part, nextval('parted_id_seq')")
        self.assertEqual(slow.execute("SELECT nextval('parted_id_seq')").fetchall(), [(4,)])
        self.assertEqual(slow.execute("SELECT pg_current_xact_id_if_assigned()").fetchall(), [(None,)])
        self.assertEqual(self.look_on("parted"), (1, 4))
        slow.execute("INSERT INTO part VALUES (4, 'late')")
        slow.commit()
        self.assertEqual(self.look(1, "parted"), (4, 4))

    def test_who_inserts_into_the_whole_of_a_mapped_partition_is_waited_for(self) -> None:
        """The trigger of the partition does not see it."""
        self.sql("CREATE TABLE parted (id bigint, name text) PARTITION BY LIST (name)")
        self.sql("CREATE TABLE part PARTITION OF parted DEFAULT")
        self.sql("CREATE SEQUENCE numbers OWNED BY part.id")
        self.sql("ALTER TABLE part ALTER id SET DEFAULT nextval('numbers')")
        session = PostgresSession(Address.parse(self.url), Event(), Holder())
        install(session, ['"part"'])
        session.close()
        self.watched = self.watch(StreamDefinition("parted", table="part", id_column="id", row=["name"]))
        self.look(2)
        slow = self.connect("SELECT nextval('numbers')")
        slow.commit()
        slow.execute("SELECT 1 FROM parted, nextval('numbers')")
        self.assertEqual(slow.execute("SELECT nextval('numbers')").fetchall(), [(4,)])
        self.assertEqual(self.look_on("parted"), (1, 4))
        slow.rollback()
        self.assertEqual(self.look(1, "parted"), (4, 4))

    def test_a_table_that_counts_down_and_has_several_rows_an_id(self) -> None:
        self.sql("CREATE SEQUENCE numbers")
        self.sql("CREATE TABLE past (id bigint DEFAULT -nextval('numbers'), name text)")
        definition = StreamDefinition("past", table="past", id_column="id", row=["name"], negative=True)
        self.watched = self.watch(definition)
        draw = "WITH n AS (SELECT -nextval('numbers') AS id)"
        several = f"{draw} INSERT INTO past SELECT id, name FROM n, unnest('{{a,b}}'::text[]) AS name"

        def look() -> tuple[int | None, int]:
            reach = self.wait(self.watched.look())[StreamName("past")]
            return reach.complete, reach.drawn

        self.assertEqual([look() for _ in range(3)][-1], (1, 1))
        slow = self.connect(several)
        self.sql(several)
        self.assertEqual([look() for _ in range(3)][-1], (1, 3))
        slow.commit()
        self.assertEqual(look(), (3, 3))


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


def _watch(server: PostgresServer, session: PostgresSession, now: Callable[[], float]) -> tuple[PostgresWatch, Reach]:
    from replication.storage.postgres_mapped import MappedTable

    table = MappedTable(StreamDefinition("events", table="events", id_column="id", row=["name"]))
    table.declare(session, may_create=False)
    server.sql(INSERT)
    warnings: list[str] = []
    watch = PostgresWatch(session, [table], warnings.append, now)
    for _ in range(3):
        (start,) = watch.look().values()
    assert start.complete == start.drawn
    return watch, start


def _try_prepared(server: PostgresServer, session: PostgresSession) -> None:
    time_ = 0.0
    watch, start = _watch(server, session, lambda: time_)
    with psycopg.connect(server.url(), autocommit=True) as slow:
        slow.execute("BEGIN")
        slow.execute(INSERT)
        watch.look()
        watch.look()
        slow.execute("PREPARE TRANSACTION 'payment 7'")
    server.sql(INSERT)
    for time_ in (0.5, 1.0, 5.0, 6.0):  # noqa: B007 - what the watch's clock shows
        (reach,) = watch.look().values()
        assert reach.complete == start.drawn
    assert [each.partition(" since ")[0] for each in reach.blockers] == ["prepared transaction 'payment 7'"]
    server.sql("COMMIT PREPARED 'payment 7'")
    (reach,) = watch.look().values()
    assert reach.complete == start.drawn + 2


@pytest.mark.parametrize("rows", [0, 1], ids=["only rollbacks", "a row below"])
def test_f9_a_crash_takes_back_no_id_that_was_told(rows: int) -> None:
    """A sequence forgets what was drawn by those who rolled back, unless something was committed since."""
    from replication.storage.postgres_mapped import MappedTable

    with PostgresServer(fsync=False, wal_writer_delay="10s") as server:
        server.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)")
        session = PostgresSession(Address.parse(server.url()), Event(), Holder())
        install(session, ["events"])
        table = MappedTable(StreamDefinition("events", table="events", id_column="id", row=["name"]))
        table.declare(session, may_create=False)
        warnings: list[str] = []
        watch = PostgresWatch(session, [table], warnings.append)
        for _ in range(rows):
            server.sql(INSERT)
        with psycopg.connect(server.url()) as other:
            for _ in range(100):
                other.execute(INSERT)
            other.rollback()
        for _ in range(2):
            (told,) = watch.look().values()
        assert told.complete == told.drawn == rows + 100
        server.restart("immediate")
        assert server.sql(INSERT) > [(told.complete,)]
        (again,) = watch.look().values()
        assert warnings == []
        assert again.complete is not None
        assert again.complete >= told.complete
        session.close()


def _try_load(server: PostgresServer, session: PostgresSession) -> None:
    """Somebody is prepared at every look, never the same for long; and for some looks, somebody for longer."""
    watch, start = _watch(server, session, time.monotonic)
    with (
        psycopg.connect(server.url(), autocommit=True) as slow,
        psycopg.connect(server.url(), autocommit=True) as quick,
    ):

        def go_on(number: int) -> int:
            """Let one transaction more be prepared, a look be taken, and the one before be committed."""
            quick.execute("BEGIN")
            ((drawn,),) = quick.execute(INSERT).fetchall()
            watch.look()
            quick.execute(f"PREPARE TRANSACTION 'load {number}'")
            if number:
                quick.execute(f"COMMIT PREPARED 'load {number - 1}'")
            watch.look()
            time.sleep(PATIENCE / 4)
            return int(drawn)

        drawn = [go_on(number) for number in range(12)]
        (reach,) = watch.look().values()
        assert reach.complete is not None
        assert drawn[-4] <= reach.complete < drawn[-1]
        slow.execute("BEGIN")
        ((held,),) = slow.execute(INSERT).fetchall()
        go_on(12)
        slow.execute("PREPARE TRANSACTION 'held'")
        slow.execute("BEGIN")
        slow.execute(INSERT)
        for number in range(13, 24):
            go_on(number)
        (reach,) = watch.look().values()
        assert reach.complete == held - 1
        slow.execute("ROLLBACK")
        slow.execute("COMMIT PREPARED 'held'")
        last = [go_on(number) for number in range(24, 36)][-4]
        (reach,) = watch.look().values()
        assert reach.complete is not None
        assert reach.complete >= last
        quick.execute("COMMIT PREPARED 'load 35'")
    for _ in range(2):
        (reach,) = watch.look().values()
    assert reach.complete == reach.drawn > start.drawn
