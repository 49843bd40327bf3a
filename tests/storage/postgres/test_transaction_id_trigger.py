"""The trigger that assigns a transaction ID before an ID is allocated."""

from __future__ import annotations

from threading import Event

import psycopg
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.postgres.address import Address
from replication.storage.postgres.holder import Holder
from replication.storage.postgres.session import PostgresSession
from replication.storage.postgres.transaction_id_trigger import TRIGGER, have_trigger, install, remove
from tests.storage.on_postgres import HasDatabase


class NumberingTests(HasDatabase, SynchronousTestCase):
    def setUp(self) -> None:
        for name in ("one", "two"):
            self.sql(f"CREATE SEQUENCE {name}_ids")
            # Allocates an ID: negative if the transaction has no transaction ID yet.
            self.sql(
                f"CREATE FUNCTION {name}_id() RETURNS bigint LANGUAGE sql VOLATILE AS $$ SELECT CASE WHEN "
                f"pg_current_xact_id_if_assigned() IS NULL THEN -1 ELSE 1 END * nextval('{name}_ids') $$"
            )
            self.sql(f"CREATE TABLE {name} (id bigint DEFAULT {name}_id(), name text)")
        self.session = PostgresSession(Address.parse(self.url), Event(), Holder())
        self.addCleanup(self.session.close)

    def functions(self) -> int:
        ((count,),) = self.sql(f"SELECT count(*) FROM pg_proc WHERE proname = '{TRIGGER}'")
        return int(count)

    def test_every_insert_has_a_transaction_id_before_it_allocates(self) -> None:
        self.sql("INSERT INTO one (name) VALUES ('a')")
        self.assertEqual(self.sql("SELECT id FROM one"), [(-1,)])
        install(self.session, ["one"])
        self.sql("INSERT INTO one (name) VALUES ('a')")
        self.sql("INSERT INTO one (name) SELECT 'b' FROM generate_series(1, 2)")
        with psycopg.connect(self.url) as connection:
            with connection.cursor().copy("COPY one (name) FROM STDIN") as copy:
                copy.write("c\n")
            connection.commit()
            connection.execute("SET session_replication_role = replica")  # which skips ordinary triggers
            connection.execute("INSERT INTO one (name) VALUES ('d')")
        self.assertEqual(self.sql("SELECT id FROM one WHERE id > 0"), [(2,), (3,), (4,), (5,), (6,)])

    def test_it_is_there_until_it_is_removed_or_switched_off(self) -> None:
        self.assertEqual(have_trigger(self.session, ["one", "two", "missing"]), [False, False, False])
        install(self.session, ["one"])
        install(self.session, ["one", "two"])
        self.assertEqual(have_trigger(self.session, ["two", "one"]), [True, True])
        self.sql(f"ALTER TABLE two DISABLE TRIGGER {TRIGGER}")
        self.assertEqual(have_trigger(self.session, ["one", "two"]), [True, False])
        remove(self.session, ["one"])
        self.assertEqual((have_trigger(self.session, ["one"]), self.functions()), ([False], 1))
        remove(self.session, ["one", "two"])
        self.assertEqual(self.functions(), 0)

    def test_all_tables_get_it_or_none(self) -> None:
        self.assertRaises(StoreError, install, self.session, ["one", "missing"])
        self.assertEqual((have_trigger(self.session, ["one"]), self.functions()), ([False], 0))

    def test_the_wait_for_transactions_that_insert_is_limited(self) -> None:
        with psycopg.connect(self.url) as connection:
            connection.execute("INSERT INTO one (name) VALUES ('a')")
            self.assertIn("lock", str(self.assertRaises(StoreError, install, self.session, ["one"])))
        install(self.session, ["one"])
