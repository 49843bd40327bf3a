"""The marks of one process: they show, at the next session or transaction, that the database has lost commits."""

from __future__ import annotations

from threading import Event

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CommitsLostError, StoreError
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import DELETE_MARKS, MARKS, Holder
from replication.storage.postgres.session import PostgresSession
from tests.storage.on_postgres import HasDatabase

CLAIMS = "CREATE TABLE writer_claims (instance_name text, holder text, number bigint)"


class LostCommitsTests(HasDatabase, SynchronousTestCase):
    def setUp(self) -> None:
        self.sql("CREATE TABLE mine (a integer)")
        self.sql(MARKS)
        self.lost: list[CommitsLostError] = []
        self.holder = Holder(self.lost.append)
        self.session, self.other = self.make_session(), self.make_session()

    def make_session(self) -> PostgresSession:
        session = PostgresSession(Address.parse(self.url), Event(), self.holder)
        self.addCleanup(session.close)
        return session

    def write(self, session: PostgresSession) -> None:
        """Commit a row."""
        try:
            session.begin()
            session.run("INSERT INTO mine VALUES (1)")
            session.commit()
        finally:
            session.rollback()

    def back_up(self) -> None:
        self.sql("CREATE TABLE kept AS SELECT * FROM commit_marks")

    def restore(self) -> None:
        """Go back as a server does: the table is the same."""
        self.sql("TRUNCATE commit_marks")
        self.sql("INSERT INTO commit_marks SELECT * FROM kept")
        self.end_sessions()

    def restore_dump(self) -> None:
        """Make the table anew while all sessions live."""
        self.sql("DROP TABLE commit_marks")
        self.sql(MARKS)
        self.sql("INSERT INTO commit_marks SELECT * FROM kept")

    def is_lost(self, session: PostgresSession) -> None:
        error = self.assertRaises(CommitsLostError, self.write, session)
        self.assertEqual(str(error), f"database {self.session.name!r} has lost commits of this process: restart it")
        self.assertEqual(self.lost, [error])

    def test_a_lost_commit_of_any_session_is_noticed_by_the_next_session_and_ends_all(self) -> None:
        self.write(self.other)
        self.back_up()
        self.write(self.session)
        self.restore()
        for session in (self.other, self.session, self.make_session()):
            self.is_lost(session)
        self.assertEqual(self.sql("SELECT count(*) FROM mine"), [(2,)])

    def test_commits_that_the_database_still_has_let_sessions_go_on(self) -> None:
        self.write(self.session)
        self.write(self.other)
        self.back_up()
        self.restore()
        self.write(self.session)
        self.write(self.other)
        self.assertEqual(self.lost, [])

    def test_a_transaction_that_wrote_nothing_leaves_no_mark_to_look_for(self) -> None:
        self.write(self.session)
        self.session.begin()
        self.session.run("SELECT 1")
        self.session.commit()
        self.end_sessions()
        self.write(self.session)

    def test_a_dump_that_is_restored_under_a_session_is_noticed_before_the_commit(self) -> None:
        """Also by a session that has committed nothing since the backup, and in a transaction begun before."""
        self.write(self.other)
        self.back_up()
        self.write(self.session)
        self.other.begin()
        self.other.run("INSERT INTO mine VALUES (1)")
        self.restore_dump()
        self.assertRaises(CommitsLostError, self.other.commit)
        self.is_lost(self.session)
        self.assertEqual(self.sql("SELECT count(*) FROM mine"), [(2,)])

    def test_a_dump_without_a_loss_costs_the_transaction_in_progress_only(self) -> None:
        self.write(self.session)
        self.back_up()
        self.restore_dump()
        error = self.assertRaises(StoreError, self.write, self.session)
        self.assertIn("its tables were made anew: try again", str(error))
        self.assertTrue(error.temporary)
        self.write(self.session)
        self.assertEqual(self.lost, [])

    def test_an_emptied_database_has_lost_all_commits(self) -> None:
        self.write(self.session)
        self.sql("DROP TABLE commit_marks")
        self.end_sessions()
        self.is_lost(self.other)

    def test_a_session_at_another_server_than_the_newest_one_ends_and_looks_for_marks(self) -> None:
        """Its server may still run, without connections to the one that has taken its place."""
        self.write(self.session)
        number = self.session.number
        self.holder.server = "another"
        self.write(self.session)
        self.assertEqual(self.session.number, number + 1)
        self.session.begin()
        self.session.run("INSERT INTO mine VALUES (1)")
        self.holder.server = "another"
        self.assertIn("has undone this transaction", str(self.assertRaises(StoreError, self.session.commit)))
        self.session.rollback()
        self.write(self.session)
        self.assertEqual(self.sql("SELECT count(*) FROM mine"), [(3,)])

    def test_old_marks_are_deleted_except_those_of_a_process_that_holds_a_name(self) -> None:
        self.sql(CLAIMS)
        self.write(self.session)
        self.sql("UPDATE commit_marks SET marked_at = now() - interval '31 days'")
        self.sql("INSERT INTO writer_claims VALUES ('master', %s, 1)", self.holder.id)
        self.sql(DELETE_MARKS)
        self.assertEqual(self.sql("SELECT count(*) FROM commit_marks"), [(1,)])
        self.sql("DELETE FROM writer_claims")
        self.sql(DELETE_MARKS)
        self.assertEqual(self.sql("SELECT count(*) FROM commit_marks"), [(0,)])
