"""The table of last client IPs, in both databases."""

from __future__ import annotations

import string
from random import Random
from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.presence.last_seen import LastSeen
from replication.storage.postgres.store import PostgresStore
from replication.storage.sqlite.store import SqliteStore
from replication.storage.tables.client_ips import declare_last_seen, forget_last_seen, put_last_seen, read_last_seen
from replication.wire.commands import UserIp
from tests.storage.on_postgres import HasDatabase
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from replication.streams.interfaces import ISqlExecutor


def seen(last_seen: int, ip: str = "1.2.3.4", device: str | None = "DEV") -> UserIp:
    return UserIp("@u:h", "token", ip, "agent", device, last_seen)


class LastSeenContract(SynchronousTestCase):
    store: SqliteStore | PostgresStore

    def check(self) -> None:
        pump = self.pump

        def write(database: ISqlExecutor) -> None:
            declare_last_seen(database)
            declare_last_seen(database)
            put_last_seen(database, [seen(5), seen(6, "::1", None)])
            put_last_seen(database, [seen(4, device="OLD"), seen(7, "::1"), UserIp("@v:h", "t", "i", "a", None, 2**62)])

        transaction = self.store.transaction()
        pump.wait(transaction.run(write))
        pump.wait(transaction.commit([]))
        read = pump.wait(self.store.read(lambda database: read_last_seen(database, "@u:h")))
        self.assertEqual(read, [seen(7, "::1"), seen(5)])
        transaction = self.store.transaction()
        pump.wait(transaction.run(lambda database: forget_last_seen(database, 7)))
        pump.wait(transaction.commit([]))
        read = pump.wait(self.store.read(lambda database: read_last_seen(database, "@u:h")))
        self.assertEqual(read, [seen(7, "::1")])

    def open(self, store: SqliteStore | PostgresStore) -> None:
        self.store = store
        self.pump.wait(store.open())
        self.addCleanup(lambda: self.pump.wait(store.close()))

    pump: Pump


class SqliteTests(LastSeenContract):
    def test_the_latest_time_of_each_place_is_kept(self) -> None:
        self.pump = Pump()
        self.open(SqliteStore(":memory:", self.pump))
        self.check()


class PostgresTests(HasDatabase, LastSeenContract):
    def test_the_latest_time_of_each_place_is_kept(self) -> None:
        self.pump = Pump()
        self.open(PostgresStore(self.url, self.pump))
        self.check()

    def test_a_key_that_no_index_can_hold_keeps_no_other_row_out(self) -> None:
        self.pump = Pump()
        self.open(PostgresStore(self.url, self.pump))
        places = LastSeen(self.store)
        token = "".join(Random(1).choices(string.ascii_letters, k=12_000))  # an index takes 2704 bytes, compressed
        for each in (
            seen(5),
            UserIp("@bad:h", token, "1.2.3.4", "agent", None, 5),
            UserIp("@v:h", "t", "i", "a", None, 6),
        ):
            places.receive(each)
        self.pump.wait(places.flush())
        self.assertEqual((len(places), places.written, places.dropped), (0, 2, 1))
        self.assertEqual(self.pump.wait(places.of("@u:h")), [seen(5)])
