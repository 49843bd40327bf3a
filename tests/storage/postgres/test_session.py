"""One session: its errors, how it connects again, and the outcome of a COMMIT during which it was lost."""

from __future__ import annotations

import os
import resource
import socket
import warnings
from collections import Counter
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psycopg
from psycopg import errors
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, ValueRefusedError
from replication.storage.postgres import session as postgres_session
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import MARKS, Holder
from replication.storage.postgres.options import KEY_CURE
from replication.storage.postgres.pipeline import Pipeline
from replication.storage.postgres.session import (
    CURES,
    OutcomeUnknownError,
    PostgresSession,
    SessionLostError,
)
from tests.storage.on_postgres import HasDatabase
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Callable


def test_every_cure_belongs_to_an_sqlstate() -> None:
    for start in CURES:
        assert [each for each in errors._sqlcodes if each.startswith(start)], start


class UsesSession(HasDatabase):
    def setUp(self) -> None:
        self.ending = Event()
        self.session = self.make_session()

    def make_session(self, url: str = "", **settings: str) -> PostgresSession:
        session = PostgresSession(Address.parse(url or self.url), self.ending, Holder(), settings)
        self.addCleanup(session.close)
        return session

    def refusal(self, ask: Callable[[], object], kind: type[StoreError] = StoreError) -> str:
        """Return the message of an error, which names this database."""
        message = str(self.assertRaises(kind, ask))
        self.assertIn(repr(self.session.address.name), message)
        return message


class SessionTests(UsesSession, SynchronousTestCase):
    def test_a_statement_returns_its_rows_and_is_committed_by_itself(self) -> None:
        self.assertEqual(self.session.run("CREATE TABLE mine (a integer)"), [])
        self.assertEqual(self.session.run("INSERT INTO mine VALUES (%s) RETURNING a", (7,)), [(7,)])
        self.assertEqual(self.sql("SELECT a FROM mine"), [(7,)])

    def test_a_child_of_fork_has_no_session_of_its_parent(self) -> None:
        """It would keep the parent's name after a kill of the parent, and its end would end the session."""
        (before,) = self.session.run("SELECT pg_backend_pid()")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # this process may have threads
            child = os.fork()
        if not child:
            try:
                self.session.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.assertEqual(self.session.run("SELECT pg_backend_pid()"), [before])

    def test_a_percent_sign_stands_for_itself_where_there_are_no_parameters(self) -> None:
        self.assertEqual(self.session.execute("SELECT 'x' LIKE '%'"), [(True,)])
        self.assertEqual(self.session.execute("SELECT %s::text LIKE '%%'", ("x",)), [(True,)])

    def test_two_statements_in_one_are_refused_and_neither_is_done(self) -> None:
        self.session.begin()
        message = self.refusal(lambda: self.session.execute("CREATE TABLE mine (a integer); COMMIT"))
        self.assertIn("multiple commands", message)
        self.session.rollback()
        self.assertEqual(self.sql("SELECT to_regclass('mine')"), [(None,)])

    def test_an_error_has_its_cure(self) -> None:
        self.assertIn('relation "nowhere" does not exist', self.refusal(lambda: self.session.run("TABLE nowhere")))
        self.configure("statement_timeout", "1s")
        slow = self.make_session()
        self.assertIn("statement timeout; statement_timeout, or", self.refusal(lambda: slow.run("SELECT pg_sleep(9)")))
        self.assertEqual(slow.run("SELECT 1"), [(1,)], "the next statement works")
        locks = "DO $$ BEGIN RAISE 'out of shared memory' USING ERRCODE = '53200'; END $$"
        self.assertIn("shared memory; raise max_locks_per_tra", self.refusal(lambda: self.session.run(locks)))

    def test_after_a_setting_was_changed_back_no_session_keeps_it(self) -> None:
        """ALTER DATABASE, and ALTER ROLE, change it for new sessions only."""
        self.sql("CREATE TABLE mine (a integer)")
        write = "INSERT INTO mine SELECT 1 FROM pg_sleep(0.1)"
        for setting, value, symptom in (
            ("default_transaction_read_only", "on", "read-only transaction"),
            ("statement_timeout", "50ms", "statement timeout"),
        ):
            for in_transaction in (False, True):
                self.configure(setting, value)
                session = self.make_session()
                session.refresh()
                self.server.sql(f"ALTER DATABASE {self.database} RESET {setting}")
                if in_transaction:
                    session.begin()
                self.assertIn(symptom, self.refusal(partial(session.run, write)))
                session.rollback()
                self.assertEqual(session.run(write), [], f"{setting}, in a transaction: {in_transaction}")

    def test_a_pooler_gives_no_session_with_former_settings_again(self) -> None:
        """The pool has two sessions: the first statement checks the pooler with one more.  Each failure ends one."""
        self.sql("CREATE TABLE mine (a integer)")
        write = "INSERT INTO mine SELECT 1 FROM pg_sleep(0.1)"
        for setting, value in (("default_transaction_read_only", "on"), ("statement_timeout", "50ms")):
            for in_transaction in (False, True):
                self.configure(setting, value)
                with self.server.pooler(self.database, "session") as url:
                    session = self.make_session(url)
                    session.refresh()
                    self.server.sql(f"ALTER DATABASE {self.database} RESET {setting}")
                    for _ in range(2):
                        if in_transaction:
                            session.begin()
                        self.assertRaises(StoreError, session.run, write)
                        session.rollback()
                    self.assertEqual(session.run(write), [], f"{setting}, in a transaction: {in_transaction}")
                    session.close()

    def test_a_transaction_with_a_timeout_of_its_own_leaves_the_session(self) -> None:
        self.session.begin("READ ONLY", bounded=True)
        self.session.run("SET LOCAL statement_timeout = '10ms'")
        self.assertIn("statement timeout", self.refusal(lambda: self.session.run("SELECT pg_sleep(9)")))
        self.session.rollback()
        self.session.run("SELECT 1")
        self.assertEqual(self.session.number, 1)

    def test_a_session_without_file_descriptors_is_lost_and_is_opened_again_later(self) -> None:
        self.session.run("SELECT 1")
        self.session.close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        failed, free = list[SessionLostError](), os.dup(0)
        os.close(free)
        try:
            for left in range(5):  # with 0, no socket can be opened; with a few, the driver cannot wait for the server
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + left, hard))
                try:
                    self.session.run("SELECT 1")
                except SessionLostError as error:
                    failed.append(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self.assertTrue([each for each in failed if "ulimit" in str(each) and each.temporary], failed)
        self.assertEqual(self.session.run("SELECT 1"), [(1,)])

    def test_a_sequence_at_its_end_is_no_fault_of_a_value(self) -> None:
        self.session.run("CREATE SEQUENCE used_up MAXVALUE 2")
        self.session.run("SELECT nextval('used_up'), nextval('used_up')")
        error = self.assertRaises(StoreError, self.session.run, "SELECT nextval('used_up')")
        self.assertNotIsInstance(error, ValueRefusedError)
        self.assertIn("ALTER SEQUENCE … NO MAXVALUE", str(error))

    def test_a_value_that_cannot_be_sent_is_an_error_of_the_store(self) -> None:
        for value in ("\ud800", "nul \x00", {1, 2}, object()):
            self.refusal(lambda value=value: self.session.run("SELECT %s::text", (value,)))  # type: ignore[misc]

    def test_a_commit_is_durable_when_it_returns_whatever_is_configured(self) -> None:
        for configured, used in (("off", "on"), ("remote_write", "remote_write")):
            self.configure("synchronous_commit", configured)
            self.assertEqual(self.make_session().run("SHOW synchronous_commit"), [(used,)])

    def test_a_session_has_settings_of_its_own(self) -> None:
        self.assertEqual(self.make_session(work_mem="64kB").run("SHOW work_mem"), [("64kB",)])
        message = self.refusal(lambda: self.make_session(work_memory="64kB").run("SELECT 1"))
        self.assertIn("work_memory", message)

    def test_a_session_names_its_process(self) -> None:
        self.assertEqual(
            self.session.run("SHOW application_name"), [(f"replication {socket.gethostname()}:{os.getpid()}"[:63],)]
        )

    def test_a_server_that_is_too_old_is_refused(self) -> None:
        self.patch(postgres_session, "OLDEST", 99)
        self.assertIn("use 99 or newer", self.refusal(self.session.connect))

    def test_a_session_that_only_reads_holds_no_lock_and_bounds_its_statements(self) -> None:
        """The database may be that of another program, whose administrator has set other limits."""
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
        idle_sql = "SELECT current_setting(name) FROM pg_settings WHERE name = 'idle_session_timeout'"
        idle = self.sql(idle_sql)  # PostgreSQL 13 has no such setting
        for found, expected in (("0", "30s"), ("2min", "2min")):
            self.configure("statement_timeout", found)
            if idle:
                self.configure("idle_session_timeout", "1h")
            session = self.make_session(default_transaction_read_only="on")
            self.assertEqual(session.ask(locks), [(0,)])
            self.assertEqual(session.ask("SHOW statement_timeout"), [(expected,)])
            self.assertEqual(session.ask(idle_sql), [("1h",)] * len(idle))
            with self.assertRaisesRegex(StoreError, "read-only transaction"):
                session.run("CREATE TABLE mine (n int)")


class ConnectTests(UsesSession, SynchronousTestCase):
    """Every error about an address has a cure, and no password."""

    def connect_error(self, url: str) -> str:
        session = self.make_session(url)
        message = str(self.assertRaises(SessionLostError, session.connect))
        self.assertIn(repr(session.address.name), message)
        self.assertNotIn("hunter2", message)
        return message

    def test_a_server_that_has_answered_before_is_lost_for_now_and_others_may_never_answer(self) -> None:
        nowhere = self.make_session("postgresql://127.0.0.1:1/x")
        self.assertFalse(self.assertRaises(SessionLostError, nowhere.connect).temporary)
        nowhere.holder.connected = True
        self.assertTrue(self.assertRaises(SessionLostError, nowhere.connect).temporary)
        self.session.run("SET statement_timeout = '10ms'")
        self.assertTrue(self.assertRaises(StoreError, self.session.run, "SELECT pg_sleep(10)").temporary)
        self.assertFalse(self.assertRaises(StoreError, self.session.run, "SELECT nothing").temporary)

    def test_a_wrong_password_is_named_not_quoted(self) -> None:
        self.server.sql("CREATE ROLE locked LOGIN PASSWORD 'right'")
        self.addCleanup(lambda: self.server.sql("DROP ROLE locked"))
        here = f"127.0.0.1:{self.server.port}/{self.database}"
        self.assertIn("in PGPASSWORD or in ~/.pgpass", self.connect_error(f"postgresql://locked:hunter2@{here}"))
        self.assertIn("in PGPASSWORD or in ~/.pgpass", self.connect_error(f"postgresql://locked@{here}"))
        self.make_session(f"postgresql://locked:right@{here}").connect()

    def test_a_password_in_the_servers_message_is_left_out(self) -> None:
        message = self.connect_error(f"postgresql://missing:exist@127.0.0.1:{self.server.port}/{self.database}")
        self.assertIn('role "missing" does not …', message)

    def test_a_key_that_a_wrong_password_decrypts_to_something_else_has_the_cure(self) -> None:
        """As about one of 200 wrong passwords does."""

        def fail(*_: object, **__: object) -> None:
            raise psycopg.OperationalError('could not load private key file "client.key": unsupported')

        self.patch(psycopg, "connect", fail)
        self.assertIn(f": unsupported; {KEY_CURE}", str(self.assertRaises(StoreError, self.session.connect)))

    def test_each_reason_of_tls_has_its_own_cure(self) -> None:
        """A missing file of an authority was to be created with createdb; others had no cure."""
        for words, cure in (
            ('root certificate file "ca.pem" does not exist\nEither provide the file', "sslrootcert"),
            ("SSL error: certificate verify failed", "sslrootcert"),
            ('server certificate for "db1" does not match host name "db2"', "as its certificate does"),
            ("FATAL: connection requires a valid client certificate", "sslcert and sslkey"),
            ("SSL error: tlsv1 alert unknown ca", "ssl_ca_file"),
        ):
            with patch.object(psycopg, "connect", side_effect=psycopg.OperationalError(words)):
                message = str(self.assertRaises(StoreError, self.session.connect))
            self.assertIn(cure, message)
            self.assertNotIn("createdb", message)

    def test_a_server_that_ends_while_the_first_session_is_configured_is_lost_for_now(self) -> None:
        """The server has let this process in, so its URL is right, and a start waits."""
        session = self.make_session(self.server.url(self.database))
        configure = session._configure

        def lose(connection: psycopg.Connection) -> None:
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            configure(connection)

        session._configure = lose  # type: ignore[method-assign]
        self.assertTrue(self.assertRaises(SessionLostError, session.connect).temporary)

    def test_a_database_or_a_server_that_is_not_there_is_named(self) -> None:
        self.assertIn("create it with createdb", self.connect_error(self.server.url("nowhere")))
        self.assertIn("start the server", self.connect_error("postgresql://me:hunter2@127.0.0.1:1/x"))
        self.assertIn("start the server", self.connect_error("postgresql:///x?host=/nowhere&password=hunter2"))

    def test_a_full_server_is_named_and_waited_for(self) -> None:
        self.server.sql("CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
        self.addCleanup(lambda: self.server.sql("DROP ROLE crowded"))
        session = self.make_session(self.server.url(self.database, "crowded"))
        error = self.assertRaises(SessionLostError, session.connect)
        self.assertIn("too many connections", str(error))
        self.assertTrue(error.temporary)

    def test_a_server_that_starts_or_recovers_is_waited_for(self) -> None:
        system = "the database system is"
        states = [f"{system} {each}" for each in ("starting up", "in recovery mode", "not yet accepting connections")]
        for state in (*states, f"{system} shutting down", "out of shared memory"):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                answering = Thread(target=self.refuse, args=(listening, state))
                answering.start()
                session = self.make_session(f"postgresql://127.0.0.1:{listening.getsockname()[1]}/x?sslmode=disable")
                self.assertTrue(self.assertRaises(SessionLostError, session.connect).temporary, state)
                answering.join()

    def refuse(self, listening: socket.socket, message: str) -> None:
        """Answer one connection like a server that accepts none now."""
        with listening.accept()[0] as connection:
            connection.recv(1_000)
            fields = b"SFATAL\0VFATAL\0C57P03\0M%s\0\0" % message.encode()
            connection.sendall(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)

    def test_a_socket_of_this_machine_is_accepted(self) -> None:
        url = f"postgresql://postgres@/{self.database}?host={self.server.folder}&port={self.server.port}"
        session = self.make_session(url, tcp_keepalives_idle="15")
        self.assertEqual(session.run("SELECT inet_client_addr()"), [(None,)])


class LossTests(UsesSession, SynchronousTestCase):
    """After a session was lost, the next statement outside a transaction connects again."""

    def test_a_lost_session_is_an_error_once(self) -> None:
        self.session.run("SELECT 1")
        self.end_sessions()
        self.refusal(lambda: self.session.run("SELECT 1"), SessionLostError)
        self.assertEqual((self.session.run("SELECT 1"), self.session.number), ([(1,)], 2))

    def test_a_statement_that_may_run_twice_runs_again(self) -> None:
        self.session.ask("SELECT 1")
        self.end_sessions()
        self.assertEqual((self.session.ask("SELECT 1"), self.session.number), ([(1,)], 2))
        self.end_sessions()
        self.session.begin()
        self.assertEqual(self.session.run("SELECT 1"), [(1,)])
        self.session.rollback()

    def test_a_server_that_is_away_is_asked_once_and_found_again(self) -> None:
        self.session.run("SELECT 1")
        self.server.stop()
        try:
            for _ in range(2):
                self.refusal(lambda: self.session.ask("SELECT 1"), SessionLostError)
        finally:
            self.server.start()
        self.assertEqual(self.session.ask("SELECT 1"), [(1,)])

    def test_a_transaction_whose_session_was_lost_does_not_go_on_in_another_one(self) -> None:
        self.session.run("CREATE TABLE mine (a integer)")
        for last in (self.session.commit, lambda: self.session.run("INSERT INTO mine VALUES (2)")):
            self.session.begin()
            self.session.run("INSERT INTO mine VALUES (1)")
            self.end_sessions()
            self.refusal(lambda: self.session.run("INSERT INTO mine VALUES (2)"), SessionLostError)
            self.assertIn("undone", self.refusal(last))
            self.session.rollback()
        self.assertEqual(self.session.run("SELECT count(*) FROM mine"), [(0,)])

    def test_after_an_error_a_transaction_can_only_be_undone(self) -> None:
        self.session.run("CREATE TABLE mine (a integer)")
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")
        self.refusal(lambda: self.session.run("TABLE nowhere"))
        self.assertIn("undone", self.refusal(self.session.commit))
        self.session.rollback()
        self.assertEqual(self.session.run("SELECT count(*) FROM mine"), [(0,)])

    def test_a_session_that_cannot_even_undo_is_ended(self) -> None:
        self.session.begin()
        self.session.connect().pgconn.send_query(b"COPY (SELECT 1) TO STDOUT")
        self.session.rollback()
        self.assertEqual((self.session.run("SELECT 1"), self.session.number), ([(1,)], 2))

    def test_what_failed_in_one_trip_is_not_taken_for_prepared(self) -> None:
        """The driver prepares a statement at its sixth use; the server may have skipped it after an error."""
        self.session.run("CREATE TABLE mine (a integer)")
        self.sql(MARKS)
        for number in range(20):
            self.session.begin()
            self.session.add("INSERT INTO mine VALUES (1 / %s)", (int(number > 9),))
            self.session.add("INSERT INTO mine VALUES (%s)", (2,))
            if number > 9:
                self.session.commit()
                continue
            self.assertIn("division by zero", self.refusal(self.session.commit))
            self.session.rollback()
        self.assertEqual(self.session.run("SELECT sum(a), count(*) FROM mine"), [(30, 20)])

    def test_questions_of_one_trip_that_fail_can_be_asked_again(self) -> None:
        ask = ("SELECT 1 / a FROM mine", ()), ("SELECT count(*) FROM mine", ())
        self.session.run("CREATE TABLE mine (a integer)")
        self.session.run("INSERT INTO mine VALUES (0)")
        for _ in range(10):
            self.assertIn("division by zero", self.refusal(lambda: self.session.run_in_turn(*ask)))
        self.session.run("UPDATE mine SET a = 1")
        self.assertEqual(self.session.run_in_turn(*ask), [[(1,)], [(1,)]])

    def test_each_question_of_a_trip_has_a_snapshot_of_its_own(self) -> None:
        """The horizon needs this: transactions in progress are read after the sequence."""
        self.session.run("CREATE TABLE mine (a integer)")
        with psycopg.connect(self.url, autocommit=True) as other:
            other.execute("SELECT pg_advisory_lock(7)")

            def write_and_let_go() -> None:
                other.execute("INSERT INTO mine VALUES (1)")
                other.execute("SELECT pg_advisory_unlock(7)")

            with self.when_waiting_for("advisory", write_and_let_go):
                _, ((count,),) = self.session.run_in_turn(
                    ("SELECT pg_advisory_lock(7)", ()), ("SELECT count(*) FROM mine", ())
                )
        self.assertEqual(count, 1)

    def test_what_was_never_begun_is_not_committed(self) -> None:
        self.assertIn("undone", self.refusal(self.session.commit))


class OutcomeTests(UsesSession, SynchronousTestCase):
    """The session is lost at COMMIT, and the server has the outcome of the transaction."""

    def setUp(self) -> None:
        super().setUp()
        self.sql("CREATE TABLE mine (a integer)")
        self.sql(MARKS)
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")

    def committed(self) -> int:
        ((count,),) = self.sql("SELECT count(*) FROM mine")
        return int(count)

    def wait_at_commit(self) -> None:
        """Let COMMIT wait before it takes effect."""
        self.session.rollback()
        self.at_each("mine", "PERFORM pg_sleep(60);", deferred=True)
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")

    def test_f10_killed_before_it_was_committed(self) -> None:
        self.wait_at_commit()
        with self.when_waiting_for("PgSleep", self.end_sessions):
            self.assertIn("nothing was committed", self.refusal(self.session.commit, SessionLostError))
        self.assertEqual(self.committed(), 0)

    def test_f10_the_mark_of_an_earlier_commit_is_not_that_of_this_one(self) -> None:
        self.session.commit()
        self.wait_at_commit()
        with self.when_waiting_for("PgSleep", self.end_sessions):
            self.assertIn("nothing was committed", self.refusal(self.session.commit, SessionLostError))
        self.assertEqual(self.committed(), 1)

    def test_f10_killed_after_it_was_committed(self) -> None:
        with self.standby_missing(), self.when_waiting_for("SyncRep", self.end_sessions):
            self.session.commit()
        self.assertEqual(self.committed(), 1)
        self.assertEqual((self.session.begun, self.session.run("SELECT 1")), (False, [(1,)]))

    def after_commit(self, act: Callable[[], object]) -> None:
        """Let the driver call ``act`` once COMMIT has taken effect, before it returns."""
        run = Pipeline.run

        def run_and_act(pipeline: Pipeline, statements: Any) -> Any:
            results = run(pipeline, statements)
            self.patch(Pipeline, "run", run)
            act()
            return results

        self.patch(Pipeline, "run", run_and_act)

    def test_f10_the_driver_fails_after_it_was_committed(self) -> None:
        """The server has crashed, and the driver does not note that the connection is lost."""

        def fail() -> None:
            raise psycopg.OperationalError("cannot exit pipeline mode while busy")

        self.after_commit(fail)
        self.session.commit()
        self.assertEqual((self.committed(), self.session.number), (1, 2))

    def test_f10_another_session_has_reached_another_server_which_is_away_for_now(self) -> None:
        connect, attempts = psycopg.connect, Counter[str]()

        def fail_once(*arguments: Any, **options: Any) -> psycopg.Connection:
            attempts["connect"] += 1
            if attempts["connect"] == 1:
                raise psycopg.OperationalError("connection failed")
            return connect(*arguments, **options)

        self.patch(psycopg, "connect", fail_once)
        self.after_commit(lambda: setattr(self.session.holder, "server", "another"))
        self.session.commit()
        self.assertEqual((self.session.number, attempts["connect"] > 1), (2, True))
        self.assertEqual(self.session.run("SELECT count(*) FROM mine"), [(1,)])

    def test_f10_the_server_crashes_before_it_was_committed(self) -> None:
        self.wait_at_commit()
        with self.when_waiting_for("PgSleep", lambda: self.server.restart("immediate")):
            self.assertIn("nothing was committed", self.refusal(self.session.commit, SessionLostError))
        self.assertEqual(self.committed(), 0)

    def test_f10_the_server_crashes_after_it_was_committed(self) -> None:
        with self.standby_missing(), self.when_waiting_for("SyncRep", lambda: self.server.restart("immediate")):
            self.session.commit()
        self.assertEqual(self.committed(), 1)

    def test_f10_the_network_fails_and_the_server_does_not_notice(self) -> None:
        """Otherwise the transaction would stay open, with its locks, until the server notices the loss."""
        self.wait_at_commit()
        wire = socket.socket(fileno=os.dup(self.session.connect().fileno()))
        self.addCleanup(wire.close)
        with self.when_waiting_for("PgSleep", lambda: wire.shutdown(socket.SHUT_RDWR)):
            self.assertIn("nothing was committed", self.refusal(self.session.commit, SessionLostError))
        self.assertEqual(self.committed(), 0)

    def test_f10_a_process_that_ends_does_not_wait_for_a_server_that_is_away(self) -> None:
        self.wait_at_commit()
        self.ending.set()
        try:
            with self.when_waiting_for("PgSleep", lambda: self.server.stop("immediate")):
                message = self.refusal(self.session.commit, OutcomeUnknownError)
        finally:
            self.server.start()
        self.assertIn("the outcome of this commit is unknown", message)

    def test_f10_a_standby_without_the_commit_is_the_primary_now(self) -> None:
        """Its database is older than the commit."""
        self.session.commit()
        self.sql("UPDATE commit_marks SET mark = mark - 1")
        self.assertFalse(self.session._was_committed((0, "")))
        self.sql("DELETE FROM commit_marks")
        self.assertFalse(self.session._was_committed((0, "")))

    def test_f10_another_transaction_has_its_number_after_a_crash(self) -> None:
        """After a crash PostgreSQL assigns transaction IDs again that it had not logged."""
        self.wait_at_commit()
        ((number,),) = self.session.run("SELECT pg_current_xact_id()::text")

        def crash_and_use_numbers() -> None:
            self.server.restart("immediate")
            until(lambda: int(self.sql("SELECT pg_current_xact_id()::text")[0][0]) >= int(number), "it is used")

        with self.when_waiting_for("PgSleep", crash_and_use_numbers):
            self.refusal(self.session.commit, SessionLostError)
        ((status,),) = self.sql("SELECT pg_xact_status(%s::text::xid8)", number)
        self.assertIn(status, ("committed", "aborted"))

    def test_a_transaction_that_wrote_nothing_has_nothing_to_lose(self) -> None:
        self.session.rollback()
        self.session.begin()
        self.session.run("SELECT 1")
        self.session.commit()
        self.assertEqual(self.committed(), 0)

    def test_a_commit_that_the_server_refuses_is_undone(self) -> None:
        self.session.rollback()
        self.at_each("mine", "RAISE 'not on my watch';", deferred=True)
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")
        self.assertIn("not on my watch", self.refusal(self.session.commit))
        self.session.rollback()
        self.assertEqual(self.committed(), 0)
