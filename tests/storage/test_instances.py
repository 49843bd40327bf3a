"""The numbers of writers' names: the same for ever, for everybody who uses the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage import open_store
from replication.storage.instances import number_instances
from replication.wire.grammar import InstanceName
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.streams.seams import IStreamStore

ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


class SqliteTests(SynchronousTestCase):
    synapse = "CREATE TABLE instance_map (instance_id INTEGER PRIMARY KEY, instance_name TEXT NOT NULL)"
    add = "INSERT INTO instance_map (instance_name) VALUES ('two')"

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = self.make_store()

    def make_store(self) -> IStreamStore:
        store = open_store("sqlite://", self.pump)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def number(self, *names: InstanceName) -> dict[InstanceName, int]:
        return self.pump.wait(number_instances(self.store, names))

    def execute(self, sql: str) -> None:
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute(sql))
        self.pump.wait(transaction.commit([]))

    def test_a_name_keeps_its_number(self) -> None:
        self.assertEqual(self.number(), {})
        self.assertEqual(self.number(TWO), {TWO: 1})
        self.assertEqual(self.number(ONE, TWO, THREE), {ONE: 2, THREE: 3, TWO: 1})
        self.assertEqual(self.number(), {ONE: 2, THREE: 3, TWO: 1})

    def test_the_table_of_a_synapse_is_used_as_it_is(self) -> None:
        self.execute(self.synapse)
        self.execute(self.add)
        self.assertEqual(self.number(ONE), {TWO: 1, ONE: 2})

    def test_a_table_of_that_name_that_is_another_is_named(self) -> None:
        self.execute("CREATE TABLE instance_map (mine integer)")
        self.assertIn("instance_", str(self.assertRaises(StoreError, self.number, ONE)))
        self.pump.wait(self.store.check())


class PostgresTests(HasDatabase, SqliteTests):
    synapse = (
        "CREATE TABLE instance_map (instance_id serial PRIMARY KEY, instance_name text NOT NULL); "
        "CREATE UNIQUE INDEX instance_map_idx ON instance_map (instance_name)"
    )

    def make_store(self) -> IStreamStore:
        store = open_store(self.url, self.pump)
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))
        return store

    def execute(self, sql: str) -> None:
        self.sql(sql)

    def test_two_processes_that_ask_at_once_get_the_same(self) -> None:
        other = self.make_store()
        both = [self.pump.start(number_instances(store, [ONE, TWO])) for store in (self.store, other)]
        first, second = (self.pump.wait(each) for each in both)
        self.assertEqual(first, second)
