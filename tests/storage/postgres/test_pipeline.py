"""Statements that are sent together: their parameters, their errors, and what the server keeps prepared."""

from __future__ import annotations

from threading import Thread
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from twisted.trial.unittest import SynchronousTestCase

from replication.storage.postgres import pipeline
from replication.storage.postgres.pipeline import PREPARED_AT, Pipeline
from tests.storage.on_postgres import HasDatabase
from tests.system.daemons import until

if TYPE_CHECKING:
    from collections.abc import Sequence

ODD = "quotes \" and ', a \\ backslash, {braces}, commas, \n lines, NULL, é and 🎈"


class PipelineTests(HasDatabase, SynchronousTestCase):
    def setUp(self) -> None:
        self.connection = self.connect()
        self.pipeline = Pipeline(self.connection)

    def connect(self, **settings: Any) -> psycopg.Connection:
        connection = psycopg.connect(self.url, autocommit=True, **{"prepare_threshold": None, **settings})
        self.addCleanup(connection.close)
        return connection

    def run_in_turn(self, *statements: tuple[str, Sequence[object]]) -> list[bytes | None]:
        """Return the first value of each result."""
        return [each.get_value(0, 0) if each.ntuples else None for each in self.pipeline.run(statements)]

    def prepared(self) -> int:
        ((count,),) = self.connection.execute(
            "SELECT count(*) FROM pg_prepared_statements WHERE starts_with(name, 'replication')"
        )
        return int(count)

    def test_a_value_arrives_as_it_is(self) -> None:
        given: list[tuple[str, object]] = [("text", ODD), ("bigint", -(2**62)), ("float8", 0.1), ("text", None)]
        for kind, value in given:
            ((arrived,),) = self.connection.execute(f"SELECT %s::{kind}", (value,))
            (text,) = self.run_in_turn((f"SELECT %s::{kind}", (value,)))
            self.assertEqual(text, None if arrived is None else str(arrived).encode(), kind)

    def test_a_list_arrives_as_it_is(self) -> None:
        for kind, values in ("text", ["", ODD, "NULL", '"'] * 2), ("bigint", [1, -2]), ("text", []):
            sql = f"SELECT array_to_json(%s::{kind}[])::text"
            ((arrived,),) = self.connection.execute(sql, (values,))
            self.assertEqual(self.run_in_turn((sql, (values,))), [arrived.encode()])

    def test_a_text_is_in_the_encoding_of_the_connection(self) -> None:
        self.pipeline = Pipeline(self.connect(client_encoding="LATIN1"))
        self.assertEqual(self.run_in_turn(("SELECT ascii(%s), 'é'", ("é",))), [b"233"])

    def test_what_cannot_be_sent_is_refused_and_the_next_statement_works(self) -> None:
        for bad, kind in ("a\0b", psycopg.DataError), ("\ud800", UnicodeEncodeError), (["\0"], psycopg.DataError):
            self.assertRaises(kind, self.pipeline.run, [("SELECT %s::text", (bad,))])
        self.assertEqual(self.run_in_turn(("SELECT 1", ())), [b"1"])

    def test_after_an_error_no_statement_runs_and_the_next_trip_works(self) -> None:
        self.connection.execute("CREATE TABLE mine (a integer)")
        for number in range(4 * PREPARED_AT):
            given = [("INSERT INTO mine VALUES (1 / %s)", (number % 2,)), ("INSERT INTO mine VALUES (%s)", (number,))]
            try:
                self.pipeline.run([("BEGIN", ()), *given, ("ROLLBACK", ())])
            except errors.DivisionByZero:
                self.assertEqual(number % 2, 0)
                self.connection.execute("ROLLBACK")
            else:
                self.assertEqual(number % 2, 1)
        self.assertEqual(self.run_in_turn(("SELECT count(*) FROM mine", ())), [b"0"])

    def test_a_frequent_statement_is_prepared_once(self) -> None:
        for number in range(3 * PREPARED_AT):
            self.assertEqual(
                self.run_in_turn(("SELECT %s + 1", (number,)), ("SELECT 0", ())), [b"%d" % (number + 1), b"0"]
            )
            self.assertEqual(self.prepared(), int(number + 1 >= PREPARED_AT))

    def test_what_the_driver_would_drop_is_not_prepared(self) -> None:
        connection = self.connect(prepare_threshold=1)
        self.pipeline = Pipeline(connection)
        for _ in range(3 * PREPARED_AT):
            self.assertEqual(
                self.run_in_turn(("BEGIN", ()), ("SELECT %s + 1", (1,)), ("ROLLBACK", ())), [None, b"2", None]
            )
            connection.execute("SELECT 1")
            connection.execute("BEGIN")
            connection.execute("ROLLBACK")

    def test_the_server_keeps_a_limited_number_of_statements(self) -> None:
        self.patch(pipeline, "PREPARED", 3)
        for which in range(8):
            for _ in range(PREPARED_AT):
                self.run_in_turn((f"SELECT %s + {which}", (1,)))
        self.assertEqual(self.prepared(), 3)
        self.assertEqual(self.run_in_turn(("SELECT %s + 0", (1,)), ("SELECT %s + 7", (1,))), [b"1", b"8"])

    def test_a_statement_before_one_that_always_fails_is_prepared_once(self) -> None:
        for number in range(3 * PREPARED_AT):
            given = [("SELECT %s + 1", (number,)), ("SELECT 1 / %s", (0,))]
            self.assertRaises(errors.DivisionByZero, self.pipeline.run, given)
        self.assertLessEqual(self.prepared(), 2)
        self.assertEqual(self.run_in_turn(("SELECT %s + 1", (1,)), ("SELECT 1 / %s", (1,))), [b"2", b"1"])

    def test_what_a_function_of_the_server_has_deallocated_is_prepared_again(self) -> None:
        for _ in range(PREPARED_AT):
            self.run_in_turn(("SELECT %s + 1", (1,)), ("SELECT %s + 2", (1,)))
        self.connection.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        both = ("SELECT %s + 1", (1,)), ("SELECT %s + 2", (1,))
        self.assertRaises(errors.InvalidSqlStatementName, self.run_in_turn, *both)
        for _ in range(PREPARED_AT):
            self.assertEqual(self.run_in_turn(*both), [b"2", b"3"])
        self.assertEqual(self.prepared(), 2)

    def test_what_cannot_be_deallocated_fails_a_trip_before_its_commit(self) -> None:
        self.patch(pipeline, "PREPARED", 1)
        self.connection.execute("CREATE TABLE mine (a integer)")
        for _ in range(PREPARED_AT):
            self.run_in_turn(("SELECT %s + 1", (1,)))
        self.connection.execute("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        trip = ("BEGIN", ()), ("INSERT INTO mine VALUES (%s)", (1,)), ("COMMIT", ())
        self.assertRaises(errors.InvalidSqlStatementName, self.run_in_turn, *trip)
        self.assertEqual(self.sql("SELECT a FROM mine"), [])

    def test_an_id_is_allocated_as_the_transaction_begins(self) -> None:
        self.connection.execute('CREATE SEQUENCE "it\'s" START 7')
        self.assertEqual(self.pipeline.begin_with_id('"it\'s"'), 7)
        self.assertEqual(self.connection.info.transaction_status, TransactionStatus.INTRANS)
        self.connection.execute("ROLLBACK")
        self.assertRaises(errors.UndefinedTable, self.pipeline.begin_with_id, "nowhere")

    def test_while_an_id_is_waited_for_other_threads_run(self) -> None:
        """The driver must let go of the interpreter: otherwise a slow server stops the reactor."""
        self.sql("CREATE SEQUENCE ids")
        with psycopg.connect(self.url) as other:
            other.execute("ALTER SEQUENCE ids MAXVALUE 1000")  # which locks it
            waiting = Thread(target=self.pipeline.begin_with_id, args=("ids",))
            waiting.start()
            waits = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            until(lambda: bool(self.sql(waits)), "it waits")
        waiting.join(60.0)
        self.assertFalse(waiting.is_alive())

    def test_a_session_that_the_server_has_ended_has_its_reason(self) -> None:
        ((pid,),) = self.connection.execute("SELECT pg_backend_pid()")
        self.server.end_sessions("FROM pg_stat_activity WHERE pid = %s", pid)
        self.assertRaises(psycopg.OperationalError, self.pipeline.run, [("SELECT 1", ())])
        self.assertRaises(psycopg.OperationalError, self.pipeline.run, [("SELECT 1", ())])
