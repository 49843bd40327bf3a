"""The table of followers that have reported; the first report creates it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage import open_store
from replication.streams.interfaces import KnownFollower
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKER = KnownFollower(InstanceName("worker1"), {StreamName("orders"): {InstanceName("master"): Token(5)}}, 1.5)


class SqliteTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = open_store(self.make_place(), self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))

    def make_place(self) -> str:
        return f"sqlite:///{self.mktemp()}"

    def followers(self) -> Sequence[KnownFollower]:
        return self.pump.wait(self.store.known_followers())

    def test_the_last_report_of_each_counts_until_it_is_forgotten(self) -> None:
        self.pump.wait(self.store.forget_follower(WORKER.name))
        self.assertEqual(self.followers(), [])
        other = KnownFollower(InstanceName("a worker's"), {}, 2.0)
        for each in (KnownFollower(WORKER.name, {}, 1.0), WORKER, other):
            self.pump.wait(self.store.store_follower(each))
        self.assertEqual(self.followers(), [other, WORKER])
        self.pump.wait(self.store.forget_follower(other.name))
        self.assertEqual(self.followers(), [WORKER])

    def test_a_report_that_cannot_be_read_is_named(self) -> None:
        self.pump.wait(self.store.store_follower(WORKER))
        transaction = self.store.transaction()
        self.pump.wait(transaction.execute("UPDATE known_followers SET positions = '[1]'"))
        self.pump.wait(transaction.commit([]))
        with self.assertRaisesRegex(StoreError, "positions of 'worker1' in the table known_followers"):
            self.followers()


class PostgresTests(HasDatabase, SqliteTests):
    def make_place(self) -> str:
        return self.url
