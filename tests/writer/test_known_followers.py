"""What followers have reported is kept; one that is forgotten is not waited for."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import RemoteProtocolError, StreamError
from replication.storage.memory import MemoryStore
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer import known_followers
from replication.writer.known_followers import LATER, SOON, STORED_AGAIN, KnownFollowers
from tests.doubles import now

ORDERS, OTHER, MASTER = StreamName("orders"), StreamName("other"), InstanceName("master")
WRITERS = {ORDERS: [MASTER], OTHER: [MASTER]}


class KnownFollowersTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store = MemoryStore()
        now(self.store.open())
        self.deletes = False
        self.wall = 7.5
        self.known = KnownFollowers(self.store, lambda: self.wall, self.store.open, lambda: self.deletes, WRITERS.get)

    def report(self, name: str, **positions: int) -> float:
        return now(self.known.report(name, {StreamName(each): {MASTER: Token(at)} for each, at in positions.items()}))

    def needed(self) -> dict[StreamName, dict[str, Token]]:
        found = now(self.known.needed([ORDERS, OTHER], MASTER))
        return {name: dict(each) for name, each in found.items()}

    def test_each_follower_of_a_stream_needs_what_is_above_its_position(self) -> None:
        self.deletes = True
        self.report("w1", orders=5)
        self.report("w2", orders=7, other=3)
        self.report("w2", orders=8, other=3)
        self.assertEqual(self.needed(), {ORDERS: {"follower w1": 5, "follower w2": 8}, OTHER: {"follower w2": 3}})
        now(self.known.forget("w1"))
        self.assertEqual(self.needed()[ORDERS], {"follower w2": 8})

    def test_a_report_about_some_streams_leaves_the_others_as_they_were(self) -> None:
        for self.deletes in (False, True):
            now(self.known.forget("w1"))
            self.report("w1", orders=5, other=3)
            now(self.known.report("w1", {ORDERS: {MASTER: Token(6)}}, {ORDERS}))
            self.assertEqual(
                [each.positions for each in now(self.known.followers())], [{ORDERS: {MASTER: 6}, OTHER: {MASTER: 3}}]
            )
            now(self.known.report("w1", {}, {ORDERS}))
            self.assertEqual([each.positions for each in now(self.known.followers())], [{OTHER: {MASTER: 3}}])

    def test_a_follower_without_a_fact_of_the_writer_needs_all(self) -> None:
        now(self.known.report("w1", {ORDERS: {}}))
        self.assertEqual(self.needed()[ORDERS], {"follower w1": 0})

    def test_only_positions_of_known_streams_and_writers_are_kept(self) -> None:
        for self.deletes in (False, True):
            now(self.known.report("w1", {ORDERS: {MASTER: Token(5), InstanceName("x"): Token(7)}, StreamName("y"): {}}))
            self.assertEqual([each.positions for each in now(self.known.followers())], [{ORDERS: {MASTER: 5}}])
            self.assertEqual([each.positions for each in now(self.store.known_followers())], [{ORDERS: {MASTER: 5}}])

    def test_reports_are_frequent_only_where_facts_are_deleted(self) -> None:
        self.assertEqual(self.report("w1", orders=5), LATER)
        self.deletes = True
        self.assertEqual(self.report("w1", orders=5), SOON)
        (found,) = now(self.known.followers())
        self.assertEqual((found.name, found.reported_at), ("w1", 7.5))

    def test_a_report_is_kept_in_memory_and_stored_once_an_hour_where_nothing_is_deleted(self) -> None:
        for self.wall, at in ((0.0, 5), (60.0, 6), (STORED_AGAIN - 1.0, 7)):
            self.report("w1", orders=at)
            self.assertEqual(self.needed()[ORDERS], {"follower w1": 5})
            (found,) = now(self.known.followers())
            self.assertEqual((found.positions[ORDERS][MASTER], found.reported_at), (at, self.wall))
        self.wall += 1.0
        self.report("w1", orders=8)
        self.assertEqual(self.needed()[ORDERS], {"follower w1": 8})
        self.deletes = True
        self.report("w1", orders=9)
        self.assertEqual(self.needed()[ORDERS], {"follower w1": 9})
        now(self.known.forget("w1"))
        self.deletes = False
        self.assertEqual(now(self.known.followers()), [])
        self.report("w1", orders=10)
        self.assertEqual(self.needed()[ORDERS], {"follower w1": 10})

    def test_a_follower_that_is_forgotten_here_and_reports_to_another_process_has_its_new_position(self) -> None:
        other = KnownFollowers(self.store, lambda: self.wall, self.store.open, lambda: self.deletes, WRITERS.get)
        self.report("w1", orders=5)
        now(self.known.forget("w1"))
        now(other.report("w1", {ORDERS: {MASTER: Token(9)}}))
        self.assertEqual([each.positions for each in now(self.known.followers())], [{ORDERS: {MASTER: 9}}])
        now(self.known.forget("w1"))  # it has not reported here since
        self.assertEqual(now(other.followers()), [])

    def test_names_are_checked_and_their_number_is_bounded(self) -> None:
        with self.assertRaises(RemoteProtocolError):
            self.report("a b", orders=5)
        self.patch(known_followers, "MAX_FOLLOWERS", 1)
        self.report("w1", orders=5)
        self.report("w1", orders=6)
        with self.assertRaisesRegex(StreamError, "which is the limit"):
            self.report("w2", orders=5)
