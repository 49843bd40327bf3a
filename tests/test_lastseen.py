"""Where users were last seen: kept for a moment, written in batches, never in the way."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication import lastseen
from replication.errors import StoreError
from replication.lastseen import LIFE_MS, LastSeen
from replication.storage.sqlite import SqliteStore
from replication.wire.commands import UserIp
from tests.doubles import logged
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence


def seen(last_seen: int, user: str = "@u:h", ip: str = "1.2.3.4", agent: str = "UA") -> UserIp:
    return UserIp(user, "token", ip, agent, None, last_seen)


class LastSeenTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        self.store = SqliteStore(":memory:", self.pump)
        self.pump.wait(self.store.open())
        self.addCleanup(lambda: self.pump.wait(self.store.close()))
        self.places = LastSeen(self.store)

    def hear(self, *places: UserIp) -> None:
        for each in places:
            self.places.hear(each)

    def of(self, user: str = "@u:h") -> Sequence[UserIp]:
        return self.pump.wait(self.places.of(user))

    def flush(self) -> None:
        self.pump.wait(self.places.flush())

    def test_a_batch_is_one_transaction_and_of_one_place_the_last_time_counts(self) -> None:
        self.hear(seen(5), seen(7), seen(6), seen(9, ip="::1"))
        self.assertEqual(len(self.places), 2)
        self.flush()
        self.flush()
        self.assertEqual((self.store.commits, len(self.places), self.places.written), (1, 0, 2))
        self.assertEqual(self.of(), [seen(9, ip="::1"), seen(7)])

    def test_who_asks_sees_what_waits(self) -> None:
        self.assertEqual(self.of(), [])
        self.hear(seen(5))
        self.assertEqual(self.of(), [seen(5)])

    def test_what_no_database_takes_is_replaced(self) -> None:
        self.hear(seen(5, agent="a\0b\ud800"))
        self.assertEqual(self.of()[0].user_agent, "a\N{REPLACEMENT CHARACTER}b?")

    def test_what_fails_waits_and_is_logged_once(self) -> None:
        self.hear(seen(5))
        with logged() as said, patch.object(lastseen, "put_last_seen", side_effect=StoreError("disk full")):
            self.flush()
            self.flush()
        self.assertEqual(said, ["cannot write where users were last seen: disk full"])
        self.assertEqual(len(self.places), 1)
        self.flush()
        self.assertEqual((len(self.places), self.of()), (0, [seen(5)]))

    def test_only_so_many_wait(self) -> None:
        with patch.object(lastseen, "MAX_WAITING", 3):
            self.hear(*[seen(5, user=f"@{each}") for each in range(5)])
        self.assertEqual((len(self.places), self.places.dropped), (3, 2))
        self.assertEqual(self.of("@1"), [])
        self.assertEqual(len(self.of("@2")), 1)

    def test_what_is_said_while_a_batch_is_on_its_way_goes_with_the_next(self) -> None:
        self.hear(seen(5), seen(5, ip="::1"))
        writing = self.pump.start(self.places.flush())
        self.hear(seen(6))
        self.pump.wait(writing)
        self.assertEqual(len(self.places), 1)
        self.assertEqual(self.of()[0], seen(6))

    def test_the_old_is_deleted_now_and_then(self) -> None:
        self.hear(seen(5, ip="::1"))
        self.flush()
        with patch.object(lastseen, "FORGET_EVERY", 2):
            self.hear(seen(6 + LIFE_MS))
            self.flush()
        self.assertEqual(self.of(), [seen(6 + LIFE_MS)])
