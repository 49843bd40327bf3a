"""One linear stream of several writers: an application sees one order, and a worker that waits says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import StoreError
from replication.follower import Keeping
from replication.linear import PATIENCE, LinearFollower
from replication.session.connection import Rows
from replication.streams.seams import Page, Write
from replication.wire.grammar import InstanceName, Token
from tests.doubles import logged, now
from tests.test_follower import MASTER, ORDERS, OTHER, FollowerCase, fact
from tests.test_worker import HELLO, WIRE, WorkerCase, position, rdata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.linear import LinearTransaction
    from replication.streams.cursor import Apply, Reset
    from replication.streams.facts import Fact


class LinearCase(FollowerCase):
    keeping = Keeping.APPLIED

    def setUp(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.calls = 0
        self.error: Exception | None = None
        super().setUp()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: Callable[[Apply | Reset], None] | None = None
    ) -> LinearFollower:
        return LinearFollower(self.process, ORDERS, self.keeping, function or self.note, first)

    def note(self, facts: Sequence[Fact], txn: LinearTransaction) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.seen += [(each.token, txn.writer_of(each)) for each in facts]

    def both_at(self, prev: int, new: int, other: int | None = None) -> None:
        """Be two links that speak for the first time."""
        self.process.heard_all = False
        self.at(prev, new, MASTER, "one")
        self.process.heard_all = True
        self.at(other or prev, other or new, OTHER, "two")


class OrderTests(LinearCase):
    def test_facts_of_all_writers_come_in_the_order_of_their_tokens(self) -> None:
        self.both_at(1, 1)
        self.rows(fact(3), fact(4), fact(7), writer=OTHER, link="two")
        self.assertEqual(self.seen, [])
        self.assertEqual(self.state(OTHER), "waiting for others")
        self.rows(fact(2), fact(5), writer=MASTER, link="one")
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (4, OTHER), (5, MASTER)])
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1]), (5, 5))
        self.at(5, 9, MASTER, "one")
        self.assertEqual(self.seen[-1], (7, OTHER))
        self.assertEqual((self.position(MASTER), self.position(OTHER), self.follower.applied_rows), (7, 7, 5))

    def test_positions_move_where_there_are_no_facts(self) -> None:
        self.both_at(1, 6)
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1], self.calls), (6, 6, 0))
        self.assertEqual(set(self.process.notes[-2:]), {("moved", MASTER, 6), ("moved", OTHER, 6)})

    def test_what_one_of_them_has_to_fetch_the_others_wait_for(self) -> None:
        self.process.pages = [Page([fact(2)], Token(4), limited=True), Page([fact(5)], Token(8), limited=False)]
        self.both_at(8, 8, other=1)
        self.rows(fact(3), fact(7), writer=OTHER, link="two")
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (5, MASTER), (7, OTHER)])

    def test_nothing_comes_until_every_link_has_spoken(self) -> None:
        self.process.heard_all = False
        self.at(1, 1, MASTER, "one")
        self.rows(fact(2), link="one")
        self.assertEqual(self.seen, [])
        self.process.heard_all = True
        self.follower.look_again()
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_a_function_that_raises_stops_all_and_the_same_comes_again(self) -> None:
        self.error = ValueError("no")
        with logged() as said:
            self.both_at(1, 1)
            self.rows(fact(2), writer=MASTER, link="one")
            self.rows(fact(3), writer=OTHER, link="two")
            self.at(2, 3, MASTER, "one")
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertIn("applying orders of all writers after 1: ValueError: no", said[0])
        self.assertEqual((self.state(MASTER), self.state(OTHER)), ("stopped", "stopped"))
        self.assertEqual(self.stored(MASTER)[1], 1)
        self.error = None
        self.process.clock.advance(1)
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER)])
        self.assertEqual((self.state(MASTER), self.state(OTHER)), ("live", "live"))

    def test_a_store_that_fails_moves_no_position_of_any(self) -> None:
        self.both_at(1, 1)
        self.store.errors["commit"] = StoreError("away")
        with logged():
            self.rows(fact(2), writer=MASTER, link="one")
            self.rows(fact(3), writer=OTHER, link="two")
        self.assertEqual((self.position(MASTER), self.position(OTHER)), (1, 1))
        self.store.errors.clear()
        self.process.clock.advance(1)
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1]), (2, 2))

    def test_caches_are_told_before_the_function_is(self) -> None:
        steps: list[Apply | Reset] = []
        self.follower = self.make_follower(first=steps.append)
        now(self.follower.open())
        self.both_at(1, 1)
        self.rows(fact(2), writer=MASTER, link="one")
        self.at(1, 2, OTHER, "two")
        self.assertEqual([each for step in steps for each in getattr(step, "facts", ())], [fact(2)])

    def test_a_writer_that_went_back_is_set_back_alone(self) -> None:
        self.both_at(1, 5)
        self.follower.link_lost("one")
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual((self.position(MASTER), self.position(OTHER)), (3, 5))
        self.rows(fact(4), writer=MASTER, link="one")
        self.assertEqual(self.seen, [(4, MASTER)])

    def test_no_link_rests_for_another_writer(self) -> None:
        """Else it would be cut off for not keeping up, because somebody else is away."""
        self.both_at(1, 1)
        long = "x" * 2**20
        rests = [self.follower.rows_heard("two", Rows(ORDERS, OTHER, [Token(token)], [long])) for token in range(2, 12)]
        self.assertEqual(rests, [False] * 10)
        self.assertGreater(self.follower.cursors[OTHER].dropped, 0)
        self.assertLess(self.follower.cursors[OTHER].held_bytes, 9 * 2**20)


class ComingAndGoingTests(LinearCase):
    def begin_again(self, *stored: InstanceName) -> None:
        for each in stored:
            kept = Write(ORDERS, each, Token(4), follower=self.process.instance_name)
            now(self.store.transaction().commit([kept]))
        self.follower = self.make_follower()
        now(self.follower.open())

    def test_who_was_there_before_is_waited_for(self) -> None:
        self.begin_again(MASTER, OTHER)
        self.at(4, 4, MASTER, "one")
        self.rows(fact(6), link="one")
        self.assertEqual(self.seen, [])
        self.at(4, 4, OTHER, "two")
        self.rows(fact(5), writer=OTHER, link="two")
        self.assertEqual(self.seen, [(5, OTHER)])

    def test_whom_nobody_speaks_for_any_more_is_named_and_let_go(self) -> None:
        self.begin_again(MASTER, OTHER)
        self.at(4, 4, MASTER, "one")
        self.rows(fact(6), link="one")
        self.follower.look_again()
        self.follower.look_again()
        with logged() as said:
            self.process.clock.advance(PATIENCE)
        self.assertIn("does not wait for other", said[0])
        self.assertEqual(self.seen, [(6, MASTER)])

    def test_who_spoke_in_time_is_not_let_go(self) -> None:
        self.begin_again(MASTER, OTHER)
        self.follower.look_again()
        self.both_at(4, 4)
        with logged() as said:
            self.process.clock.advance(PATIENCE)
        self.assertEqual(said, [])

    def test_nobody_waits_for_the_old_name_of_a_writer(self) -> None:
        self.both_at(1, 1)
        self.follower.link_lost("two")
        self.at(1, 1, InstanceName("renamed"), "two")
        self.rows(fact(2), link="one")
        self.at(1, 2, InstanceName("renamed"), "two")
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_a_link_that_is_lost_is_waited_for(self) -> None:
        self.both_at(1, 1)
        self.follower.link_lost("two")
        self.rows(fact(3), link="one")
        self.assertEqual(self.seen, [])
        self.at(1, 1, OTHER, "two again")
        self.rows(fact(2), writer=OTHER, link="two again")
        self.at(2, 3, OTHER, "two again")
        self.assertEqual(self.seen, [(2, OTHER), (3, MASTER)])

    def test_what_a_new_writer_wrote_before_it_was_followed_comes_late_but_comes(self) -> None:
        self.both_at(1, 9)
        self.process.pages = [Page([fact(4)], Token(9), limited=False)]
        self.at(9, 9, InstanceName("third"), "three")
        self.assertEqual(self.seen, [(4, "third")])


class WorkerTests(WorkerCase):
    def test_a_worker_hands_over_one_order_of_two_writers(self) -> None:
        self.worker = self.make_worker(connect=[f"tcp:127.0.0.1:{WIRE}", f"tcp:127.0.0.1:{WIRE + 10}"])
        seen: list[tuple[int, str]] = []

        @self.worker.on("orders", linear=True)
        async def note(facts: Sequence[Fact], txn: LinearTransaction) -> None:
            await txn.execute("INSERT INTO anything")
            seen.extend((each.token, txn.writer_of(each)) for each in facts)

        one = self.serve(HELLO + position(1, 1, writer="one"))
        two = self.serve(HELLO + position(1, 1, writer="two"), port=WIRE + 10)
        self.start()
        self.say(one, rdata(3, writer="one"), rdata(4, writer="one"))
        self.assertEqual(seen, [])
        self.say(two, rdata(2, writer="two"), position(2, 4, writer="two"))
        self.assertEqual(seen, [(2, "two"), (3, "one"), (4, "one")])
        self.assertEqual((self.at(writer="one"), self.at(writer="two")), (4, 4))
