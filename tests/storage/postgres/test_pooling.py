"""A connection pooler before the server: one that pools by transaction is refused, one that pools by session is not."""

from __future__ import annotations

from threading import Event
from typing import Any

import psycopg
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.postgres import holder as holder_module
from replication.storage.postgres import pooling
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.pooling import POOLED, pools_transactions
from replication.storage.postgres.session import PostgresSession
from tests.storage.on_postgres import HasDatabase

READS = {"default_transaction_read_only": "on"}


class PoolingTests(HasDatabase, SynchronousTestCase):
    def connect(self, url: str) -> psycopg.Connection[Any]:
        connection = psycopg.connect(url, autocommit=True)
        self.addCleanup(connection.close)
        return connection

    def make_session(self, url: str, **settings: str) -> PostgresSession:
        session = PostgresSession(Address.parse(url), Event(), Holder(), settings)
        self.addCleanup(session.close)
        return session

    def test_without_a_pooler_no_second_session_is_opened(self) -> None:
        self.assertFalse(pools_transactions(self.connect(self.url), "host=127.0.0.1 port=1"))

    def test_a_pooler_by_transaction_is_refused_before_settings_reach_its_other_clients(self) -> None:
        with self.server.pooler(self.database, "transaction") as url:
            for settings in ({}, {"default_transaction_read_only": "on"}):
                message = str(self.assertRaises(StoreError, self.make_session(url, **settings).run, "SELECT 1"))
                self.assertEqual(message, f"database {url!r}: {POOLED}")
            rows = self.connect(url).execute("SELECT current_setting('default_transaction_read_only')").fetchall()
            self.assertEqual(rows, [("off",)])
            self.assertEqual(self.sql("SELECT * FROM pg_locks WHERE locktype = 'advisory'"), [])

    def test_a_pooler_by_transaction_is_refused_while_its_other_clients_are_busy(self) -> None:
        with self.server.pooler(self.database, "transaction") as url:
            others = [self.connect(url) for _ in range(4)]
            for each in others:
                each.execute("BEGIN")
                each.execute("SELECT 1")
            self.assertTrue(pools_transactions(self.connect(url), url))

    def test_a_pooler_by_transaction_with_one_session_is_refused_at_once(self) -> None:
        with self.server.pooler(self.database, "transaction", sessions=1) as url:
            self.assertTrue(pools_transactions(self.connect(url), url))

    def test_a_pooler_by_statement_is_refused_with_its_own_error(self) -> None:
        with self.server.pooler(self.database, "statement") as url:
            message = str(self.assertRaises(StoreError, self.make_session(url).run, "SELECT 1"))
            self.assertIn("statement pooling", message)

    def test_a_pooler_by_session_is_accepted_and_asked_once(self) -> None:
        with self.server.pooler(self.database, "session") as url:
            session = self.make_session(url)
            self.assertEqual(session.run("SELECT 1"), [(1,)])
            self.patch(pooling, "_ATTEMPTS", None)  # another check would fail
            session.close()
            self.assertEqual(session.run("SELECT 2"), [(2,)])

    def test_a_pooler_by_session_whose_pool_is_full_is_accepted(self) -> None:
        self.patch(pooling, "_PATIENCE", 200)
        with self.server.pooler(self.database, "session", sessions=1) as url:
            self.assertEqual(self.make_session(url).run("SELECT 1"), [(1,)])

    def test_a_missing_prepared_statement_lets_sessions_check_the_pooler_again(self) -> None:
        """A pooler that began to pool by transaction stopped each append, even after its mode was corrected."""
        holder = Holder()
        reading, writing = (PostgresSession(Address.parse(self.url), Event(), holder, each) for each in (READS, {}))
        for session in (reading, writing):
            self.addCleanup(session.close)
            self.assertEqual([session.run("SELECT %s::int", [1]) for _ in range(7)], [[(1,)]] * 7)
        reading.run("DO $$ BEGIN EXECUTE 'DEALLOCATE ALL'; END $$")
        message = str(self.assertRaises(StoreError, reading.run, "SELECT %s::int", [1]))
        self.assertIn("prepared statement", message)
        pools = self.patch(holder_module, "pools_transactions", lambda *_: True)
        for session in (reading, writing):
            self.assertIn(POOLED, str(self.assertRaises(StoreError, session.run, "SELECT %s::int", [1])))
        pools.restore()
        for session in (reading, writing):
            self.assertEqual(session.run("SELECT %s::int", [1]), [(1,)])
