"""A writer begins an epoch of each stream at each start."""

from __future__ import annotations

from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.storage.memory import MemoryStore
from replication.streams.definitions import StreamDefinition
from replication.streams.history import Epoch
from replication.streams.interfaces import Write
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.epochs import begin_epochs
from tests.doubles import now

ORDERS, MASTER = StreamName("orders"), InstanceName("master")


class EpochTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store = MemoryStore()
        now(self.store.open())
        now(self.store.declare(StreamDefinition("orders")))

    def begin(self, start: int) -> list[tuple[int, int]]:
        """Begin an epoch, and return where each begins."""
        now(begin_epochs(self.store, MASTER, {ORDERS: Token(start)}))
        return [(each.settled, each.start) for each in now(self.store.history(ORDERS, MASTER))]

    def store_position(self, token: int) -> None:
        now(self.store.transaction().commit([Write(ORDERS, MASTER, Token(token))]))

    def test_an_epoch_begins_where_the_stream_does(self) -> None:
        self.assertEqual(self.begin(1), [(1, 1)])
        self.store_position(9)
        self.assertEqual(self.begin(9), [(1, 1), (9, 9)])

    def test_ids_above_the_stored_position_may_have_been_open(self) -> None:
        self.store_position(4)
        self.assertEqual(self.begin(6), [(4, 6)])

    def test_each_epoch_has_another_name(self) -> None:
        self.begin(1)
        (first,) = now(self.store.history(ORDERS, MASTER))
        self.begin(1)
        kept, second = now(self.store.history(ORDERS, MASTER))
        self.assertEqual(kept, first)
        self.assertNotEqual(first.name, second.name)
        self.assertIsInstance(first, Epoch)

    def test_the_timeline_of_a_server_follows_the_name(self) -> None:
        for answer, ends in (("00000002", ".00000002"), (StoreError("there is no such function"), "")):
            with patch.object(MemoryStore, "read", side_effect=[answer]):
                self.begin(9)
            *_, epoch = now(self.store.history(ORDERS, MASTER))
            self.assertEqual(epoch.name[8:], ends)

    def test_a_timeline_is_not_left_out_while_the_server_is_away(self) -> None:
        """Without it, followers would not detect what a failover loses."""
        away = StoreError("the server is away", temporary=True)
        with patch.object(MemoryStore, "read", side_effect=[away]), self.assertRaises(StoreError):
            self.begin(9)
        self.assertEqual(now(self.store.history(ORDERS, MASTER)), ())

    def test_the_state_of_our_own_tables_is_another_one_at_each_start(self) -> None:
        """Nothing but a loss takes facts out of them, so followers count theirs after each start."""
        for start in (2, 3, 4):
            now(begin_epochs(self.store, MASTER, {ORDERS: Token(start)}, own={ORDERS}))
        states = {each.name[8:] for each in now(self.store.history(ORDERS, MASTER))}
        self.assertEqual([len(each) for each in states], [9, 9, 9])
