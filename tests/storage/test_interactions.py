"""Interactions on a session: refused statements, undone transactions, second calls.  The contract tests the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.contract import Batch
from replication.storage.interactions import CheckedStatements, Interaction
from replication.storage.sqlite.session import SqliteSession

if TYPE_CHECKING:
    from replication.streams.interfaces import ISqlExecutor


def refuse_commit(sql: str) -> None:
    if sql == "COMMIT":
        raise StoreError("not for the application")


class InteractionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.session = SqliteSession(":memory:")
        self.session.connect()
        self.addCleanup(self.session.close)
        self.session.begin()
        self.statements = CheckedStatements(self.session, refuse_commit)

    def test_statements_run_in_the_transaction(self) -> None:
        self.statements.execute("CREATE TABLE mine (a)")
        self.statements.executemany("INSERT INTO mine VALUES (?)", [(1,), (2,)])
        self.assertEqual(self.statements.execute("SELECT a FROM mine"), [(1,), (2,)])
        self.session.rollback()
        self.assertEqual(self.session.run("SELECT * FROM sqlite_master"), [])
        self.assertEqual(self.statements.dialect, "sqlite")

    def test_a_statement_that_ends_the_transaction_is_refused(self) -> None:
        self.assertRaises(StoreError, self.statements.execute, "COMMIT")
        self.assertRaises(StoreError, self.statements.executemany, "COMMIT", [()])
        self.assertTrue(self.session.begun)

    def test_after_the_database_has_undone_the_transaction_no_statement_becomes_durable_by_itself(self) -> None:
        self.session.run("ROLLBACK")  # as after an I/O error
        create = "CREATE TABLE mine (a)"
        self.assertIn("undone", str(self.assertRaises(StoreError, self.statements.execute, create)))
        self.assertRaises(StoreError, self.statements.executemany, create, [()])
        self.session.rollback()
        self.assertEqual(self.session.run("SELECT * FROM sqlite_master"), [])

    def test_a_function_that_passes_over_an_undone_transaction_fails(self) -> None:
        def work(_: ISqlExecutor) -> Batch:
            self.session.run("ROLLBACK")
            return Batch([], None, 0.0, 0.0)

        self.assertRaises(StoreError, Interaction(work, refuse_commit).run, self.session)

    def test_a_second_call_starts_over(self) -> None:
        batches = [Batch([], None, 1.0, 0.0)]
        interaction = Interaction(lambda _: batches.pop(), refuse_commit)
        first = interaction.run(self.session)
        self.assertIs(interaction.batch, first)
        self.assertRaises(IndexError, interaction.run, self.session)
        self.assertIsNone(interaction.batch)
