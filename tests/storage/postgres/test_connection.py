"""One connection, blocking: transactions of several batches, retries, and errors."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING, Any

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import PositionMovedError, SchemaError, StoreError
from replication.storage.contract import Batch
from replication.storage.postgres.address import Address
from replication.storage.postgres.connection import ON_DEMAND, STEPS, TOUCH, PostgresConnection
from replication.storage.postgres.generic import GenericTable
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.ids import create_sequence
from replication.storage.postgres.pipeline import Pipeline
from replication.storage.postgres.session import OutcomeUnknownError, PostgresSession, SessionLostError
from replication.storage.postgres.store import READ_ONLY
from replication.storage.receipts import DELETED_AT_ONCE, receipt_key
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import ISqlExecutor, Receipt, Write
from replication.wire.grammar import StreamName, Token
from tests.contract.stream_store import ME, fact, facts, write
from tests.postgres import PostgresServer
from tests.storage.on_postgres import HasDatabase
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Sequence


class UsesConnection(HasDatabase):
    def setUp(self) -> None:
        self.ending = Event()
        self.connection = self.make_connection()
        self.connection.open()
        self.tables = {
            name: GenericTable(StreamDefinition(name, negative=name == "down")) for name in ("orders", "down")
        }
        for table in self.tables.values():
            self.connection.declare([table])

    def make_connection(self, url: str = "", *, read_only: bool = False) -> PostgresConnection:
        session = PostgresSession(Address.parse(url or self.url), self.ending, Holder())
        self.addCleanup(session.close)
        return PostgresConnection(session, read_only=read_only)

    def batch(self, *writes: Write, receipt: Receipt | None = None) -> Batch:
        return Batch([(self.tables[each.stream], each) for each in writes], receipt, 1_800_000_000.0, 0.0)

    def commit_together(self, *batches: Batch) -> Sequence[type[Exception] | None]:
        outcomes = self.connection.commit_together(batches)
        return [None if each is None else type(each) for each in outcomes]

    def commit(self, *writes: Write, receipt: Receipt | None = None) -> None:
        self.assertEqual(self.commit_together(self.batch(*writes, receipt=receipt)), [None])

    def tokens(self) -> list[int]:
        page = self.connection.page(self.tables["orders"], ME, after=Token(0), upto=Token(999), limit=999)
        return [each.token for each in page.facts]


class GroupTests(UsesConnection, SynchronousTestCase):
    def test_positions_have_the_sign_of_their_table(self) -> None:
        self.commit(write(3), write(3, facts(2, 3), stream="down"))
        self.commit(write(2), write(2, stream="down", expected=3))
        rows = self.sql("SELECT stream_name, instance_name, stream_id FROM stream_positions")
        self.assertEqual(sorted(rows), [("down", "master", -3), ("orders", "master", 3)])

    def test_batches_share_one_transaction(self) -> None:
        outcomes = self.commit_together(*(self.batch(write(token, facts(token))) for token in range(2, 12)))
        self.assertEqual((outcomes, self.tokens()), ([None] * 10, [*range(2, 12)]))
        self.assertEqual((self.connection.commits, self.connection.transactions), (10, 1))
        self.assertEqual(self.sql("SELECT count(DISTINCT xmin::text) FROM stream_orders"), [(1,)])

    def test_what_only_adds_takes_three_statements_and_one_trip_however_many_batches(self) -> None:
        statements: list[str] = []
        run = Pipeline.run

        def note(pipeline: Pipeline, sent: Sequence[tuple[str, Any]]) -> Any:
            statements.extend(["(", *(sql.split(maxsplit=1)[0] for sql, _ in sent), ")"])
            return run(pipeline, sent)

        self.patch(Pipeline, "run", note)
        self.commit_together(*(self.batch(write(token, facts(token))) for token in range(2, 102)))
        self.assertEqual(" ".join(statements), "( BEGIN INSERT INSERT INSERT COMMIT )")

    def test_of_many_batches_every_bad_one_fails_alone_wherever_it_is(self) -> None:
        """The order is kept: each batch expects the position that the good one before it leaves."""
        for bad in ({0}, {15}, {3, 4, 12}, set(range(16))):
            self.sql("TRUNCATE stream_orders, stream_positions")
            commits = self.connection.commits
            before, batches = 0, []
            for number in range(16):
                token = number + 2
                batches.append(self.batch(write(token, facts(token), expected=999 if number in bad else before)))
                before = before if number in bad else token
            outcomes = self.commit_together(*batches)
            self.assertEqual(outcomes, [PositionMovedError if number in bad else None for number in range(16)])
            self.assertEqual(self.tokens(), [number + 2 for number in range(16) if number not in bad])
            self.assertEqual(self.connection.commits - commits, 16 - len(bad))

    def test_a_begin_that_fails_is_tried_once_and_fails_every_batch(self) -> None:
        """The server is away, so halves would fail too."""
        self.connection.close()
        tried: list[int] = []

        def fail() -> None:
            tried.append(1)
            raise SessionLostError("the server is away")

        self.patch(self.connection.session, "connect", fail)
        self.assertEqual(self.commit_together(*[self.batch(write(2))] * 8), [SessionLostError] * 8)
        self.assertEqual(len(tried), 2)

    def test_a_receipt_of_0_1_0_is_found_unless_the_stream_has_its_own(self) -> None:
        for name, token in (("k", 2), (receipt_key("orders", "k"), 3)):
            self.assertEqual(self.commit_together(Batch([], Receipt(name, [Token(token)]), 1.0, 0.0)), [None])
        found = [self.connection.find_receipt(receipt_key(each, "k"), 0.0) for each in ("notes", "orders")]
        self.assertEqual(found, [[2], [3]])
        self.assertIsNone(self.connection.find_receipt(receipt_key("notes", "other"), 0.0))

    def test_old_receipts_are_deleted_when_new_ones_come(self) -> None:
        for day in range(3):
            self.connection.commit_together([Batch([], Receipt(f"day {day}", [Token(2)]), day, day - 1)])
        self.assertEqual(self.sql("SELECT key FROM append_receipts"), [("day 2",)])

    def test_a_commit_deletes_a_limited_number_of_old_receipts_and_that_of_its_key(self) -> None:
        self.sql(
            f"INSERT INTO append_receipts SELECT n::text, '[]', n FROM generate_series(1, {DELETED_AT_ONCE + 9}) n"
        )
        last = Receipt(f"{DELETED_AT_ONCE + 9}", [Token(2)])
        self.assertEqual(self.commit_together(Batch([], last, 1e9, 1e6)), [None])
        self.assertEqual(self.sql("SELECT count(*) FROM append_receipts"), [(9,)])
        self.assertEqual(self.sql("SELECT tokens FROM append_receipts WHERE written_at = 1e9"), [("[2]",)])

    def test_two_processes_delete_old_receipts_at_the_same_time(self) -> None:
        """The second does not wait for the first, whose transaction is still open."""
        self.commit_together(Batch([], Receipt("old", []), 1.0, 0.0))
        other = self.make_connection()
        other.session.begin()
        other._store([Batch([], Receipt("first", []), 3.0, 2.0)])
        other.session.run("SELECT 1")  # sends the statements
        self.assertEqual(self.commit_together(Batch([], Receipt("second", []), 3.0, 2.0)), [None])
        other.session.commit()
        self.assertEqual(self.sql("SELECT key FROM append_receipts ORDER BY key"), [("first",), ("second",)])

    def test_of_two_first_writes_of_a_position_one_fails(self) -> None:
        """Two workers found no position; the second waits for the first, and fails."""
        other = self.make_connection()
        other.session.begin()
        other._store([self.batch(write(5, expected=0))])
        with self.when_waiting_for("transactionid", other.session.commit):
            self.assertEqual(self.commit_together(self.batch(write(6, facts(6), expected=0))), [PositionMovedError])
        self.assertEqual(self.tokens(), [])


class AgainTests(UsesConnection, SynchronousTestCase):
    """A commit that fails by a conflict is retried, unless it has statements of the application."""

    def let_fail(self, how: str, *, times: int) -> None:
        """Let that many inserted rows fail, one after the other."""
        self.at_each("stream_orders", f"IF nextval('times') <= {times} THEN {how}; END IF;")

    def test_f13_conflicts_of_our_own_commits_are_tried_again(self) -> None:
        for state in ("40001", "40P01"):
            self.let_fail(f"RAISE 'in the way' USING ERRCODE = '{state}'", times=3)
            self.assertEqual(self.commit_together(self.batch(write(2, facts(2)))), [None])
            self.assertEqual((self.tokens(), self.times()), ([2], 4))
            self.sql("TRUNCATE stream_orders")
            self.sql("DROP FUNCTION act CASCADE")
            self.sql("DROP SEQUENCE times")

    def test_f13_a_conflict_that_does_not_end_is_an_error_with_a_cure(self) -> None:
        self.let_fail("RAISE 'in the way' USING ERRCODE = '40001'", times=1000)
        (error,) = self.connection.commit_together([self.batch(write(2, facts(2)))])
        self.assertIn("in the way; try again", str(error))
        self.assertEqual(self.times(), 10)

    def test_f13_two_serializable_processes_both_write(self) -> None:
        self.configure("default_transaction_isolation", "serializable")
        one, other = self.make_connection(), self.make_connection()
        other.commit_together([self.batch(write(2))])
        other.session.begin()
        other._store([self.batch(write(5, facts(5)))])
        other.session.run("SELECT")  # sends the statements of the batch
        with self.when_waiting_for("transactionid", other.session.commit):
            self.assertEqual(one.commit_together([self.batch(write(6, facts(6)))]), [None])
        self.assertEqual(self.tokens(), [5, 6])

    def test_f13_with_snapshots_health_does_not_fail_because_another_process_asks_for_it(self) -> None:
        self.configure("default_transaction_isolation", "repeatable read")
        one, other = self.make_connection(), self.make_connection()
        other.session.begin()
        other.session.run(TOUCH)
        with self.when_waiting_for("transactionid", lambda: other.session.run("COMMIT")):
            one.check()

    def test_f13_with_snapshots_a_start_finds_the_tables_for_which_it_has_waited(self) -> None:
        self.configure("default_transaction_isolation", "repeatable read")
        one, other = self.make_connection(), self.make_connection()
        table = GenericTable(StreamDefinition("later"))
        other.session.begin()
        other.session.run(other.EXCLUSIVE)
        table.create(other.session)
        create_sequence(other.session, table)
        other.session.run("SELECT")  # sends the statements
        with self.when_waiting_for("advisory", lambda: other.session.run("COMMIT")):
            self.assertEqual(one.declare([table]), [])

    def test_f13_a_conflict_after_statements_of_the_application_is_an_error(self) -> None:
        self.let_fail("RAISE 'in the way' USING ERRCODE = '40001'", times=1)
        self.connection.run(lambda database: database.execute("CREATE TABLE mine (a integer)"))
        refused = self.assertRaises(StoreError, self.connection.commit, self.batch(write(2, facts(2))))
        self.assertIn("in the way", str(refused))
        self.assertEqual((self.tokens(), self.times()), ([], 1))
        self.assertEqual(self.sql("SELECT to_regclass('mine')"), [(None,)])

    def test_f16_after_an_id_that_is_used_the_sequence_is_past_all_that_are_used(self) -> None:
        """A crash took the sequence back, and another process has stored the IDs that it had allocated before."""
        used = "INSERT INTO stream_orders SELECT id, 0, 'other', '1' FROM generate_series(5, 900) AS id"
        last = "SELECT last_value FROM stream_orders_seq"
        one = self.batch(write(5, facts(5)))
        for commit in (lambda: self.connection.commit_together([one])[0], lambda: self.commit_one(one)):
            self.sql("TRUNCATE stream_orders")
            self.sql("SELECT setval('stream_orders_seq', 5)")
            self.sql(used)
            self.assertIn("(5, 0) already exists", str(commit()))
            self.assertEqual(self.sql(last), [(900,)])
        self.sql("SELECT setval('stream_orders_seq', 1000)")
        self.assertIn("(5, 0) already exists", str(self.commit_one(one)))
        self.assertEqual(self.sql(last), [(1000,)])

    def commit_one(self, batch: Batch) -> StoreError:
        self.connection.session.begin()
        error: StoreError = self.assertRaises(StoreError, self.connection.commit, batch)
        return error

    def test_f14_a_session_that_ends_in_the_middle_is_made_again_once(self) -> None:
        self.let_fail("PERFORM pg_terminate_backend(pg_backend_pid())", times=1)
        self.assertEqual(
            self.commit_together(self.batch(write(2, facts(2))), self.batch(write(3, facts(3)))), [None] * 2
        )
        self.assertEqual(self.tokens(), [2, 3])

    def test_f14_a_session_that_ends_every_time_is_an_error_for_all(self) -> None:
        """A batch that ends sessions is not tried once for each half."""
        self.let_fail("PERFORM pg_terminate_backend(pg_backend_pid())", times=1000)
        batches = [self.batch(write(token, facts(token))) for token in range(2, 10)]
        self.assertEqual(self.commit_together(*batches), [SessionLostError] * 8)
        self.assertEqual(self.times(), 2)

    def test_f10_a_commit_that_was_lost_and_undone_is_done_again(self) -> None:
        self.at_each("stream_orders", "IF nextval('times') = 1 THEN PERFORM pg_sleep(60); END IF;", deferred=True)
        with self.when_waiting_for("PgSleep", self.end_sessions):
            self.assertEqual(self.commit_together(self.batch(write(2, facts(2)))), [None])
        self.assertEqual((self.tokens(), self.times()), ([2], 2))

    def test_f10_a_commit_that_was_lost_and_done_is_not_done_again(self) -> None:
        self.at_each("stream_orders", "PERFORM nextval('times');")
        with self.standby_missing(), self.when_waiting_for("SyncRep", self.end_sessions):
            self.assertEqual(self.commit_together(self.batch(write(2, facts(2)))), [None])
        self.assertEqual((self.tokens(), self.times()), ([2], 1))

    def test_f10_a_commit_with_an_unknown_outcome_is_not_retried_by_halves(self) -> None:
        self.at_each("stream_orders", "PERFORM nextval('times');")

        def lost() -> None:
            self.connection.session.run("SELECT")
            raise OutcomeUnknownError("the session was lost")

        self.patch(self.connection.session, "commit", lost)
        batches = [self.batch(write(token, facts(token))) for token in (2, 3)]
        self.assertEqual(self.commit_together(*batches), [OutcomeUnknownError] * 2)
        self.assertEqual(self.times(), 2)

    def test_f14_a_statement_that_takes_too_long_fails_alone(self) -> None:
        self.configure("statement_timeout", "2s")
        self.connection.close()
        self.at_each("stream_orders", "IF NEW.stream_id = 3 THEN PERFORM pg_sleep(60); END IF;")
        good, bad = None, StoreError
        self.assertEqual(
            self.commit_together(*(self.batch(write(token, facts(token))) for token in (2, 3, 4))), [good, bad, good]
        )
        self.assertEqual(self.tokens(), [2, 4])

    def test_f14_a_server_that_takes_no_writes_is_named_and_works_again_afterwards(self) -> None:
        self.commit(write(2, facts(2)))
        self.configure("default_transaction_read_only", "on")
        self.connection.close()
        (refused,) = self.connection.commit_together([self.batch(write(3, facts(3)))])
        for error in (refused, self.assertRaises(StoreError, self.connection.check)):
            self.assertIn("name the primary", str(error))
        self.assertEqual(self.tokens(), [2], "reading goes on")
        self.configure("default_transaction_read_only", "off")
        self.connection.close()
        self.connection.check()
        self.commit(write(3, facts(3)))
        self.assertEqual(self.tokens(), [2, 3])


class ReadTests(UsesConnection, SynchronousTestCase):
    def test_what_a_function_reads_is_of_one_moment(self) -> None:
        def count_twice(database: ISqlExecutor) -> tuple[object, object]:
            before = database.execute("SELECT count(*) FROM stream_orders")
            self.sql("INSERT INTO stream_orders VALUES (2, 0, 'master', '1')")
            return before, database.execute("SELECT count(*) FROM stream_orders")

        self.assertEqual(self.connection.read(count_twice), ([(0,)], [(0,)]))
        self.assertEqual(self.tokens(), [2])

    def test_what_a_function_writes_while_it_reads_is_refused(self) -> None:
        message = self.assertRaises(StoreError, self.connection.read, lambda it: it.execute("CREATE TABLE mine ()"))
        self.assertIn("read-only", str(message))
        self.assertEqual(self.connection.read(lambda it: it.dialect), "postgresql")

    def test_the_plans_of_pages_are_not_those_of_a_function(self) -> None:
        self.sql("SELECT 1")
        self.connection.session.run("SET enable_seqscan = off")
        shown = self.connection.read(lambda it: it.execute("SHOW enable_seqscan"))
        self.assertEqual((shown, self.connection.session.run("SHOW enable_seqscan")), ([("on",)], [("off",)]))


class OpenTests(HasDatabase, SynchronousTestCase):
    """Databases that do not fit."""

    def setUp(self) -> None:
        self.ending = Event()

    def open(self, *, read_only: bool = False, user: str = "postgres") -> list[str]:
        session = PostgresSession(Address.parse(self.server.url(self.database, user)), self.ending, Holder())
        self.addCleanup(session.close)
        return PostgresConnection(session, read_only=read_only).open()

    def refusal(self, **options: bool) -> str:
        message = str(self.assertRaises(SchemaError, self.open, **options))
        self.assertIn(f"/{self.database}", message)
        return message

    def test_a_server_without_fsync_is_warned_of(self) -> None:
        (warning,) = self.open()
        self.assertIn("fsync is off", warning)

    def test_tables_of_a_newer_version_are_left_alone(self) -> None:
        self.open()
        self.sql("UPDATE replication_schema SET version = 99")
        for read_only in (False, True):
            self.assertIn("version 99", self.refusal(read_only=read_only))
        self.assertEqual(self.sql("SELECT version FROM replication_schema"), [(99,)])

    def test_tables_of_an_older_version_are_upgraded_by_a_connection_that_writes(self) -> None:
        self.sql("CREATE TABLE replication_schema (version integer NOT NULL)")
        self.assertIn("let this version's daemon open it once", self.refusal(read_only=True))
        self.open()
        self.assertEqual(self.sql("SELECT version FROM replication_schema"), [(len(STEPS) - ON_DEMAND,)])

    def test_a_database_of_another_program_is_left_alone(self) -> None:
        self.assertIn('"replication_schema" does not exist', self.refusal(read_only=True))
        self.sql("CREATE TABLE stream_positions (stream_name text)")
        self.assertIn('column "instance_name" of relation "stream_positions" does not exist', self.refusal())
        self.assertEqual(self.sql("SELECT to_regclass('replication_schema')"), [(None,)])

    def test_a_user_without_create_uses_existing_tables(self) -> None:
        self.server.sql("CREATE ROLE humble LOGIN")
        self.addCleanup(lambda: self.server.sql("DROP ROLE humble"))
        self.addCleanup(lambda: self.sql("DROP OWNED BY humble"))
        self.assertIn("GRANT it to this user", str(self.assertRaises(StoreError, self.open, user="humble")))
        self.open()
        self.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO humble")
        self.open(user="humble")

    def test_several_processes_may_open_a_new_database_at_once(self) -> None:
        first = PostgresSession(Address.parse(self.url), self.ending, Holder())
        self.addCleanup(first.close)
        with PostgresConnection(first, read_only=False).exclusive():
            with self.when_waiting_for("advisory", lambda: first.run("COMMIT")):
                self.open()
            first.run("BEGIN")


class DeclareTests(UsesConnection, SynchronousTestCase):
    def test_a_stream_that_cannot_be_declared_leaves_no_transaction_open(self) -> None:
        self.sql("CREATE TABLE stream_mine (stream_id bigint)")
        message = self.assertRaises(SchemaError, self.connection.declare, [GenericTable(StreamDefinition("mine"))])
        self.assertIn(repr(self.connection.session.address.name), str(message))
        self.commit(write(2, [fact(2)]))
        self.assertEqual(self.tokens(), [2])

    def test_a_read_only_connection_creates_nothing(self) -> None:
        reader = self.make_connection(read_only=True)
        reader.declare([self.tables["orders"]])
        message = self.assertRaises(SchemaError, reader.declare, [GenericTable(StreamDefinition("others"))])
        self.assertIn("no table 'stream_others'", str(message))
        reader.check()

    def test_positions_that_another_program_stores_under_its_own_name_are_read(self) -> None:
        self.sql("INSERT INTO stream_positions VALUES ('app_orders', 'one', 7), ('orders', 'two', 9)")
        reader = self.make_connection(read_only=True)
        for name, positions in (("app_orders", {"one": 7}), ("", {}), (None, {"two": 9})):
            table = GenericTable(StreamDefinition("orders", position_name=name))
            self.assertEqual(reader.positions(table), positions)

    def test_a_foreign_database_without_our_tables_is_opened_for_reading_only(self) -> None:
        self.sql("DROP TABLE replication_schema")
        session = PostgresSession(Address.parse(self.url), self.ending, Holder())
        self.addCleanup(session.close)
        with self.assertRaises(SchemaError):
            PostgresConnection(session, read_only=True).open()
        PostgresConnection(session, read_only=True, foreign=True).open()
        self.assertEqual(self.sql("SELECT to_regclass('replication_schema')"), [(None,)])


def test_f1_a_standby_gives_no_fact_before_those_with_smaller_ids() -> None:
    """It replays commits in their order, which is not that of the IDs; below a stored position nothing is missing."""
    with PostgresServer(fsync=False) as primary, primary.standby() as standby:
        table = GenericTable(StreamDefinition("orders"))
        writing = PostgresConnection(PostgresSession(Address.parse(primary.url()), Event(), Holder()), read_only=False)
        writing.open()
        writing.declare([table])
        reading = PostgresConnection(
            PostgresSession(Address.parse(standby.url(), read_only=True), Event(), Holder()), read_only=True
        )

        def replayed() -> bool:
            ((there,),) = primary.sql("SELECT pg_current_wal_flush_lsn()::text")
            return bool(standby.sql("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", there) == [(True,)])

        def page() -> tuple[list[int], int, bool]:
            page = reading.page(table, ME, after=Token(1), upto=Token(3), limit=5)
            return [each.token for each in page.facts], page.upto, page.limited

        primary.sql("INSERT INTO stream_orders VALUES (3, 0, 'master', '3')")  # and 2 is in progress
        until(replayed, "the standby has it")
        assert page() == ([], 1, True)
        table.former = {ME}  # nothing of it is on its way
        assert page() == ([3], 3, False)
        table.former = ()
        assert reading.positions(table) == {}
        primary.sql("INSERT INTO stream_orders VALUES (2, 0, 'master', '2')")
        writing.commit_together([Batch([(table, Write(StreamName("orders"), ME, Token(3)))], None, 0.0, 0.0)])
        until(replayed, "the standby has all")
        assert page() == ([2, 3], 3, False)
        assert reading.positions(table) == {ME: 3}
        for each in (reading, writing):
            each.close()


def test_a_standby_can_be_read_by_a_user_whose_transactions_are_serializable() -> None:
    """A hot standby refuses such transactions, also those of a single SELECT."""
    with PostgresServer(fsync=False) as primary, primary.standby() as standby:
        primary.sql("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'")
        wanted = [("serializable",)]
        until(lambda: standby.sql("SHOW default_transaction_isolation") == wanted, "the standby has the setting")
        with standby.pooler("postgres", "session") as pooled:
            for url in (standby.url(), pooled):
                reading = PostgresSession(Address.parse(url, read_only=True), Event(), Holder(), READ_ONLY)
                assert reading.ask("SELECT pg_is_in_recovery()") == [(True,)]
                reading.close()


def test_f14_a_page_from_a_standby_that_replaces_the_server_ends_at_the_stored_position() -> None:
    """The server of a URL with two hosts stops between two pages; the next session is one of its standby."""
    with PostgresServer(fsync=False) as primary, primary.standby() as standby:
        table = GenericTable(StreamDefinition("orders"))
        writing = PostgresConnection(PostgresSession(Address.parse(primary.url()), Event(), Holder()), read_only=False)
        writing.open()
        writing.declare([table])
        writing.close()
        primary.sql("INSERT INTO stream_orders VALUES (2, 0, 'master', '2')")
        url = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        reading = PostgresConnection(
            PostgresSession(Address.parse(url, read_only=True), Event(), Holder()), read_only=True
        )

        def page() -> tuple[list[int], int, bool]:
            page = reading.page(table, ME, after=Token(1), upto=Token(3), limit=5)
            return [each.token for each in page.facts], page.upto, page.limited

        assert page() == ([2], 3, False)
        primary.stop("immediate")
        assert page() == ([], 1, True)
        reading.close()
