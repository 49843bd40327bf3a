"""Where users were last seen: rows written in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, ValueRefusedError
from replication.presence import last_seen as lastseen
from replication.presence.last_seen import MAX_AGE_MS, LastSeen
from replication.storage.sqlite.store import SqliteStore
from replication.storage.tables.client_ips import put_last_seen
from replication.wire.commands import UserIp
from tests.doubles import logged
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.interfaces import ISqlExecutor


def seen(last_seen: int, user: str = "@u:h", ip: str = "1.2.3.4", agent: str = "UA") -> UserIp:
    return UserIp(user, "token", ip, agent, None, last_seen)


class LastSeenTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = SqliteStore(":memory:", self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.places = LastSeen(self.store)

    def receive(self, *places: UserIp) -> None:
        for each in places:
            self.places.receive(each)

    def of(self, user: str = "@u:h") -> Sequence[UserIp]:
        return self.pump.wait(self.places.of(user))

    def flush(self) -> None:
        self.pump.wait(self.places.flush())

    def test_a_batch_is_one_transaction_with_the_latest_row_of_each_key(self) -> None:
        self.receive(seen(5), seen(7), seen(6), seen(9, ip="::1"))
        self.assertEqual(len(self.places), 2)
        self.flush()
        self.flush()
        self.assertEqual((self.store.commits, len(self.places), self.places.written), (1, 0, 2))
        self.assertEqual(self.of(), [seen(9, ip="::1"), seen(7)])

    def test_rows_that_wait_are_returned_too(self) -> None:
        self.assertEqual(self.of(), [])
        self.receive(seen(5))
        self.assertEqual(self.of(), [seen(5)])

    def test_characters_that_a_database_refuses_are_replaced(self) -> None:
        self.receive(seen(5, agent="a\0b\ud800"))
        self.assertEqual(self.of()[0].user_agent, "a\N{REPLACEMENT CHARACTER}b?")

    def test_after_an_error_rows_wait_and_the_error_is_logged_once(self) -> None:
        self.receive(seen(5))
        with logged() as lines, patch.object(lastseen, "put_last_seen", side_effect=StoreError("disk full")):
            self.flush()
            self.flush()
        self.assertEqual(lines, ["cannot write users_last_seen: disk full"])
        self.assertEqual(len(self.places), 1)
        self.flush()
        self.assertEqual((len(self.places), self.of()), (0, [seen(5)]))

    def test_rows_that_the_database_refuses_are_left_out_and_the_others_are_written(self) -> None:
        sizes = []

        def refuse(database: ISqlExecutor, rows: Sequence[UserIp]) -> None:
            sizes.append(len(rows))
            if any("bad" in each.user_id for each in rows):
                raise ValueRefusedError("no such character")
            put_last_seen(database, rows)

        self.receive(*[seen(5, user=f"@{each}{'bad' if each in (3, 60) else ''}") for each in range(99)])
        with logged() as lines, patch.object(lastseen, "put_last_seen", refuse):
            self.flush()
        self.assertEqual((len(self.places), self.places.written, self.places.dropped), (0, 97, 2))
        self.assertEqual(
            lines, ["2 rows of users_last_seen are left out, which the database refuses: no such character"]
        )
        self.assertEqual((len(self.of("@3bad")), len(self.of("@4"))), (0, 1))
        self.assertLess(len(sizes), 30)

    def test_a_flood_of_refused_rows_takes_a_bounded_number_of_transactions(self) -> None:
        self.receive(*[seen(5, user=f"@{each}") for each in range(300)])
        refused = ValueRefusedError("no such character")
        with logged(), patch.object(lastseen, "put_last_seen", side_effect=refused) as put:
            self.flush()
        self.assertEqual(put.call_count, lastseen.MAX_ATTEMPTS)
        self.assertGreater(self.places.dropped, 10)
        self.assertEqual(len(self.places) + self.places.dropped, 300)
        self.flush()
        self.assertEqual((len(self.places), self.places.written), (0, 300 - self.places.dropped))

    def test_rows_that_are_dropped_meanwhile_because_too_many_wait_are_not_reported_as_refused(self) -> None:
        def refuse(*_: object) -> None:
            self.receive(*[seen(5, user=f"@new{each}") for each in range(3)])
            raise ValueRefusedError("no such character")

        self.receive(seen(5))
        with (
            logged() as lines,
            patch.object(lastseen, "MAX_WAITING", 2),
            patch.object(lastseen, "put_last_seen", refuse),
        ):
            self.flush()
        self.assertIn("1 rows of users_last_seen are left out", lines[-1])

    def test_the_number_of_waiting_rows_is_limited(self) -> None:
        with patch.object(lastseen, "MAX_WAITING", 3):
            self.receive(*[seen(5, user=f"@{each}") for each in range(5)])
        self.assertEqual((len(self.places), self.places.dropped), (3, 2))
        self.assertEqual(self.of("@1"), [])
        self.assertEqual(len(self.of("@2")), 1)

    def test_the_bytes_of_waiting_rows_are_limited(self) -> None:
        with patch.object(lastseen, "MAX_WAITING_BYTES", 200):
            for time in (5, 6):
                self.receive(*[seen(time, user=f"@{'x' * 60}{each}") for each in range(9)])
            self.assertLess(len(self.places), 4)
            self.assertEqual(self.places.dropped, 18 - len(self.places))
            self.flush()
        self.assertEqual((len(self.places), self.places._bytes), (0, 0))

    def test_rows_that_come_while_a_batch_is_written_are_in_the_next_batch(self) -> None:
        self.receive(seen(5), seen(5, ip="::1"))
        writing = self.pump.start(self.places.flush())
        self.receive(seen(6))
        self.pump.wait(writing)
        self.assertEqual(len(self.places), 1)
        self.assertEqual(self.of()[0], seen(6))

    def test_old_rows_are_deleted_at_intervals(self) -> None:
        self.receive(seen(5, ip="::1"))
        self.flush()
        with patch.object(lastseen, "DELETE_EVERY", 2):
            self.receive(seen(6 + MAX_AGE_MS))
            self.flush()
        self.assertEqual(self.of(), [seen(6 + MAX_AGE_MS)])

    def test_a_follower_whose_clock_is_ahead_deletes_no_rows(self) -> None:
        self.places = LastSeen(self.store, lambda: 2.0 * MAX_AGE_MS / 1000)
        with patch.object(lastseen, "DELETE_EVERY", 1):
            self.receive(seen(MAX_AGE_MS - 1, ip="::1"), seen(MAX_AGE_MS))
            self.flush()
            self.receive(seen(9 * MAX_AGE_MS, user="@other:h"))
            self.flush()
        self.assertEqual(self.of(), [seen(MAX_AGE_MS)], "only what is old by the clock of this process, too")
