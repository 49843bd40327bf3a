"""Linear order: facts of several writers are applied in token order, and a status shows which writer waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import StoreError
from replication.follower.merge import LOSS_PATIENCE, PATIENCE, MergingFollower
from replication.follower.stream import FollowMode
from replication.session.connection import Rows
from replication.streams.interfaces import Page, Write
from replication.wire.grammar import InstanceName, Token
from tests.doubles import begin, logged, now
from tests.follower.cases import HELLO, MASTER, ORDERS, OTHER, WIRE, FollowerCase, WorkerCase, fact, position, rdata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import Apply, Reset
    from replication.streams.facts import Fact
    from tests.follower.cases import First


class LinearCase(FollowerCase):
    mode = FollowMode.APPLIED

    def setUp(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.calls = 0
        self.error: Exception | None = None
        super().setUp()

    def make_follower(
        self,
        function: Callable[..., object] | None = None,
        first: First | None = None,
    ) -> MergingFollower:
        return MergingFollower(
            name=ORDERS,
            mode=self.mode,
            function=function or self.note,
            first=first,
            all_positions_received=lambda: self.process.all_received,
            **self.process.arguments,
        )

    def note(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error
        self.seen += [(each.token, txn.writer_of(each)) for each in facts]

    def both_positions(self, prev: int, new: int, other: int | None = None) -> None:
        """Send the first positions of two connections."""
        self.process.all_received = False
        self.at(prev, new, MASTER, "one")
        self.process.all_received = True
        self.at(other or prev, other or new, OTHER, "two")


class OrderTests(LinearCase):
    def test_facts_of_all_writers_are_applied_in_token_order(self) -> None:
        self.both_positions(1, 1)
        self.rows(fact(3), fact(4), fact(7), writer=OTHER, link="two")
        self.assertEqual(self.seen, [])
        self.assertEqual(self.state(OTHER), "waiting for others")
        self.rows(fact(2), fact(5), writer=MASTER, link="one")
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (4, OTHER), (5, MASTER)])
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1]), (5, 5))
        self.at(5, 9, MASTER, "one")
        self.assertEqual(self.seen[-1], (7, OTHER))
        self.assertEqual((self.position(MASTER), self.position(OTHER), self.follower.applied_rows), (7, 7, 5))

    def test_facts_of_two_writers_with_one_id_stop_the_stream_and_none_is_lost(self) -> None:
        """Writers with databases of their own: a transaction that ended between the two would lose the second one."""
        self.both_positions(1, 1)
        with logged() as messages:
            for writer, link in ((MASTER, "one"), (OTHER, "two")):
                self.rows(*(fact(token) for token in range(2, 200)), writer=writer, link=link)
        self.assertIn("fact 2 of other has the ID of a fact of master", messages[0])
        self.assertEqual((self.state(MASTER), self.state(OTHER)), ("stopped", "stopped"))
        self.assertEqual((self.seen, self.stored(MASTER)[1], self.stored(OTHER)[1]), ([], 1, 1))

    def test_a_writer_whose_facts_are_being_applied_waits_for_no_other(self) -> None:
        self.both_positions(1, 1)
        self.store.close_gate("commit")
        self.rows(fact(2), link="one")
        self.at(1, 2, OTHER, "two")
        self.assertEqual(self.state(MASTER), "catching up")
        self.store.open_gate("commit")
        self.assertEqual(self.state(MASTER), "live")

    def test_positions_move_without_facts(self) -> None:
        self.both_positions(1, 6)
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1], self.calls), (6, 6, 0))
        self.assertEqual(set(self.process.notes[-2:]), {("moved", MASTER, 6), ("moved", OTHER, 6)})

    def test_facts_wait_for_the_catch_up_of_another_writer(self) -> None:
        self.process.pages = [Page([fact(2)], Token(4), limited=True), Page([fact(5)], Token(8), limited=False)]
        self.both_positions(8, 8, other=1)
        self.rows(fact(3), fact(7), writer=OTHER, link="two")
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (5, MASTER), (7, OTHER)])

    def test_facts_wait_for_the_first_positions_of_every_connection(self) -> None:
        self.process.all_received = False
        self.at(1, 1, MASTER, "one")
        self.rows(fact(2), link="one")
        self.assertEqual(self.seen, [])
        self.process.all_received = True
        self.follower.resume()
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_a_function_that_raises_stops_all_writers_and_is_called_again(self) -> None:
        self.error = ValueError("no")
        with logged() as messages:
            self.both_positions(1, 1)
            self.rows(fact(2), writer=MASTER, link="one")
            self.rows(fact(3), writer=OTHER, link="two")
            self.at(2, 3, MASTER, "one")
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.assertIn("applying orders of all writers after 1: ValueError: no", messages[0])
        self.assertEqual((self.state(MASTER), self.state(OTHER)), ("stopped", "stopped"))
        self.assertIn("ValueError: no", str(self.follower.status(OTHER).error))
        self.assertEqual(self.stored(MASTER)[1], 1)
        self.error = None
        self.process.clock.advance(1)
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER)])
        self.assertEqual((self.state(MASTER), self.state(OTHER)), ("live", "live"))

    def test_a_failing_store_moves_no_position(self) -> None:
        self.both_positions(1, 1)
        self.store.errors["commit"] = StoreError("away")
        with logged():
            self.rows(fact(2), writer=MASTER, link="one")
            self.rows(fact(3), writer=OTHER, link="two")
        self.assertEqual((self.position(MASTER), self.position(OTHER)), (1, 1))
        self.store.errors.clear()
        self.process.clock.advance(1)
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1]), (2, 2))

    def test_caches_are_invalidated_before_the_function_is_called(self) -> None:
        steps: list[Apply | Reset] = []
        self.follower = self.make_follower(first=lambda _, step: steps.append(step))
        now(self.follower.open())
        self.both_positions(1, 1)
        self.rows(fact(2), writer=MASTER, link="one")
        self.at(1, 2, OTHER, "two")
        self.assertEqual([each for step in steps for each in getattr(step, "facts", ())], [fact(2)])

    def test_a_writer_that_went_back_is_reset_alone(self) -> None:
        self.both_positions(1, 5)
        self.follower.connection_lost("one")
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual((self.position(MASTER), self.position(OTHER)), (3, 5))
        self.rows(fact(4), writer=MASTER, link="one")
        self.assertEqual(self.seen, [])
        self.process.clock.advance(LOSS_PATIENCE)
        self.assertEqual(self.seen, [(4, MASTER)])

    def test_a_position_from_before_commits_were_lost_does_not_count(self) -> None:
        """Both writers have lost facts, and one of them goes back later."""
        self.both_positions(1, 9)
        self.follower.connection_lost("one")
        self.follower.connection_lost("two")
        with logged():
            self.at(3, 3, MASTER, "one")
            self.rows(fact(6), fact(8), writer=MASTER, link="one")
            self.assertEqual(self.seen, [])
            self.at(4, 4, OTHER, "two")
        self.rows(fact(5), fact(7), writer=OTHER, link="two")
        self.at(7, 8, OTHER, "two")
        self.assertEqual(self.seen, [(5, OTHER), (6, MASTER), (7, OTHER), (8, MASTER)])

    def test_a_writer_that_has_not_come_back_since_commits_were_lost_is_waited_for(self) -> None:
        self.both_positions(1, 9)
        self.follower.connection_lost("one")
        self.follower.connection_lost("two")
        with logged():
            self.at(3, 3, MASTER, "one")
            self.rows(fact(6), writer=MASTER, link="one")
            self.process.clock.pump([LOSS_PATIENCE] * 4)
            self.assertEqual(self.seen, [])
            self.at(5, 5, OTHER, "two")
        self.at(5, 7, OTHER, "two")
        self.assertEqual(self.seen, [(6, MASTER)])

    def test_a_later_loss_is_waited_for_again(self) -> None:
        self.both_positions(1, 9)
        for to in (5, 3):
            with logged():
                self.follower.connection_lost("one")
                self.at(to, to, MASTER, "one")
                self.rows(fact(to + 1), link="one")
                self.assertNotIn((to + 1, MASTER), self.seen)
                self.process.clock.advance(LOSS_PATIENCE)
            self.assertIn((to + 1, MASTER), self.seen)

    def test_no_connection_is_paused_for_another_writer(self) -> None:
        """Otherwise the writer would close the paused connection, because of another writer."""
        self.both_positions(1, 1)
        long = "x" * 2**20
        rests = [
            self.follower.rows_received("two", Rows(ORDERS, OTHER, [Token(token)], [long])) for token in range(2, 12)
        ]
        self.assertEqual(rests, [False] * 10)
        self.assertGreater(self.follower.cursors[OTHER].dropped, 0)
        self.assertLess(self.follower.cursors[OTHER].held_bytes, 9 * 2**20)

    def test_late_facts_are_applied_in_steps_of_their_own_and_counted(self) -> None:
        self.both_positions(1, 9)
        for count, token in enumerate((4, 6), 1):
            self.assertTrue(self.follower.cursors[MASTER].found_late([fact(token)]))
            self.follower.resume()
            self.assertEqual((self.seen[-1], self.follower.late), ((token, MASTER), {MASTER: count}))


class UndoTests(LinearCase):
    """With a function of ``on_reset``, the facts of all writers above a loss are undone, and applied in order again."""

    def make_follower(
        self,
        function: Callable[..., object] | None = None,
        first: First | None = None,
    ) -> MergingFollower:
        self.undone: list[tuple[str, int]] = []
        return MergingFollower(
            name=ORDERS,
            mode=self.mode,
            function=function or self.note,
            undo=self.undo,
            first=first,
            all_positions_received=lambda: self.process.all_received,
            **self.process.arguments,
        )

    def undo(self, writer: InstanceName, to: Token, _: ApplyTransaction) -> None:
        self.undone.append((writer, to))
        self.seen = [(token, each) for token, each in self.seen if each != writer or token <= to]

    def apply_five(self) -> None:
        self.both_positions(1, 1)
        self.rows(fact(3), fact(6), writer=OTHER, link="two")
        self.rows(fact(2), fact(4), fact(5), writer=MASTER, link="one")
        self.at(5, 6, MASTER, "one")
        self.assertEqual([token for token, _ in self.seen], [2, 3, 4, 5, 6])

    def test_a_larger_fact_of_a_writer_that_lost_none_is_applied_after_those_that_come_again(self) -> None:
        """A writer may go back below where the backup ended: its position was not settled there."""
        self.apply_five()
        self.follower.connection_lost("one")
        self.follower.connection_lost("two")
        self.process.pages = [Page([fact(6)], Token(6), limited=False)]
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual((self.undone, self.seen), ([(OTHER, 3), (MASTER, 3)], [(2, MASTER), (3, OTHER)]))
        self.assertEqual((self.stored(MASTER)[1], self.stored(OTHER)[1]), (3, 3))
        self.at(6, 6, OTHER, "two")
        self.rows(fact(4), fact(5), writer=MASTER, link="one")
        self.at(5, 6, MASTER, "one")
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (4, MASTER), (5, MASTER), (6, OTHER)])

    def test_after_a_kill_between_the_two_nothing_is_applied_out_of_order(self) -> None:
        """The writer that lost nothing goes back first: the other one is still known to go back."""
        self.apply_five()
        self.follower.connection_lost("one")
        self.store.ends.clear()
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual([writer for writer, _ in self.undone], [OTHER, MASTER])
        self.assertEqual(self.store.ends, ["committed", "committed"])

    def test_a_connected_writer_sends_what_is_applied_again(self) -> None:
        self.apply_five()
        self.follower.connection_lost("one")
        self.process.pages = [Page([fact(6)], Token(6), limited=False)]
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual(self.process.asked, [(3, 6)])
        self.rows(fact(4, "again"), writer=MASTER, link="one")
        self.at(4, 7, MASTER, "one")
        self.process.clock.advance(LOSS_PATIENCE)
        self.assertEqual(self.seen[-2:], [(4, MASTER), (6, OTHER)])

    def test_a_writer_that_was_given_up_stays_where_it_is(self) -> None:
        """No process sends its position, so its facts could not be fetched again, and linear order would wait."""
        self.apply_five()
        self.follower.connection_lost("two")
        assert isinstance(self.follower, MergingFollower)
        self.follower._former.clear()
        self.follower.connection_lost("one")
        with logged():
            self.at(3, 3, MASTER, "one")
        self.assertEqual(self.undone, [(MASTER, 3)])


class MissingWriterTests(LinearCase):
    def restart(self, *stored: InstanceName) -> None:
        for each in stored:
            kept = Write(ORDERS, each, Token(4), follower=InstanceName("worker1"))
            now(self.store.transaction().commit([kept]))
        self.follower = self.make_follower()
        now(self.follower.open())

    def give_up(self) -> None:
        """Let the time end in which a missing writer is waited for."""
        self.follower.resume()
        with logged() as messages:
            self.process.clock.advance(PATIENCE)
        self.assertIn(f"does not wait for {OTHER}", messages[0])

    def test_a_writer_of_the_last_run_is_waited_for(self) -> None:
        self.restart(MASTER, OTHER)
        self.at(4, 4, MASTER, "one")
        self.rows(fact(6), link="one")
        self.assertEqual(self.seen, [])
        self.at(4, 4, OTHER, "two")
        self.rows(fact(5), writer=OTHER, link="two")
        self.assertEqual(self.seen, [(5, OTHER)])

    def test_a_missing_writer_is_logged_and_no_longer_waited_for(self) -> None:
        self.restart(MASTER, OTHER)
        self.at(4, 4, MASTER, "one")
        self.rows(fact(6), link="one")
        self.follower.resume()
        self.follower.resume()
        with logged() as messages:
            self.process.clock.advance(PATIENCE)
        self.assertEqual(messages[0], "orders does not wait for other: no connected writer has that name")
        self.assertEqual(self.seen, [(6, MASTER)])

    def test_a_writer_that_sent_a_position_in_time_is_waited_for(self) -> None:
        self.restart(MASTER, OTHER)
        self.follower.resume()
        self.both_positions(4, 4)
        with logged() as messages:
            self.process.clock.advance(PATIENCE)
        self.assertEqual(messages, [])

    def test_the_old_name_of_a_renamed_writer_is_not_waited_for(self) -> None:
        self.both_positions(1, 1)
        self.follower.connection_lost("two")
        self.at(1, 1, InstanceName("renamed"), "two")
        self.follower.following("two")
        self.rows(fact(2), link="one")
        self.at(1, 2, InstanceName("renamed"), "two")
        self.assertEqual(self.seen, [])
        self.give_up()
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_facts_that_a_renamed_writer_sent_before_are_applied_in_order(self) -> None:
        self.both_positions(1, 1)
        self.rows(fact(3), writer=OTHER, link="two")
        self.follower.connection_lost("two")
        self.at(1, 1, InstanceName("renamed"), "two")
        self.follower.following("two")
        self.rows(fact(2), fact(4), link="one")
        self.at(1, 4, InstanceName("renamed"), "two")
        self.give_up()
        self.assertEqual(self.seen, [(2, MASTER), (3, OTHER), (4, MASTER)])

    def test_every_writer_of_one_connection_is_waited_for(self) -> None:
        """Over Redis, and behind a relay, one connection brings many writers of a stream."""
        self.at(1, 1, MASTER, "one")
        self.at(1, 1, OTHER, "one")
        self.rows(fact(3), link="one")
        self.assertEqual(self.seen, [])
        self.rows(fact(2), writer=OTHER, link="one")
        self.at(2, 3, OTHER, "one")
        self.assertEqual(self.seen, [(2, OTHER), (3, MASTER)])

    def test_after_a_loss_only_writers_that_come_back_are_waited_for(self) -> None:
        """Those that do not are waited for until the others had time to send their positions."""
        self.at(1, 1, MASTER, "one")
        self.at(1, 1, OTHER, "one")
        self.follower.connection_lost("one")
        self.at(1, 1, MASTER, "one")
        self.rows(fact(2), link="one")
        self.assertEqual(self.seen, [])
        self.follower.following("one")
        self.give_up()
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_the_positions_of_a_connection_may_come_in_several_reads(self) -> None:
        self.at(1, 1, MASTER, "one")
        self.at(1, 1, OTHER, "one")
        self.follower.connection_lost("one")
        self.process.pages = [Page([], Token(3), limited=False)]
        self.at(3, 3, MASTER, "one")
        self.follower.following("one")
        self.follower.resume()
        self.process.clock.advance(PATIENCE - 1)
        self.assertEqual(self.position(MASTER), 1)
        self.at(1, 1, OTHER, "one")
        self.rows(fact(2), writer=OTHER, link="one")
        self.at(2, 3, OTHER, "one")
        self.assertEqual((self.seen, self.position(MASTER)), ([(2, OTHER)], 3))

    def test_each_loss_of_a_connection_begins_a_new_wait(self) -> None:
        self.at(1, 1, MASTER, "one")
        self.at(1, 1, OTHER, "one")
        for _ in range(3):
            self.follower.connection_lost("one")
            self.process.clock.advance(PATIENCE)
            self.at(1, 1, MASTER, "one")
            self.follower.following("one")
            self.follower.resume()
            self.process.clock.advance(PATIENCE - 1)
        self.rows(fact(2), link="one")
        self.assertEqual(self.seen, [])
        self.give_up()
        self.assertEqual(self.seen, [(2, MASTER)])

    def test_a_lost_connection_is_waited_for(self) -> None:
        self.both_positions(1, 1)
        self.follower.connection_lost("two")
        self.rows(fact(3), link="one")
        self.assertEqual(self.seen, [])
        self.at(1, 1, OTHER, "two again")
        self.rows(fact(2), writer=OTHER, link="two again")
        self.at(2, 3, OTHER, "two again")
        self.assertEqual(self.seen, [(2, OTHER), (3, MASTER)])

    def test_the_position_of_a_lost_connection_does_not_count(self) -> None:
        """That writer may come back with a lower one, if its database has lost commits."""
        self.at(1, 1, MASTER, "one")
        self.at(1, 9, OTHER, "two")
        self.follower.connection_lost("two")
        self.rows(fact(3), link="one")
        self.assertEqual((self.seen, self.state(MASTER)), ([], "waiting for others"))
        self.at(9, 9, OTHER, "two")
        self.assertEqual(self.seen, [(3, MASTER)])

    def test_earlier_facts_of_a_new_writer_are_applied_late(self) -> None:
        self.both_positions(1, 9)
        self.process.pages = [Page([fact(4)], Token(9), limited=False)]
        self.at(9, 9, InstanceName("third"), "three")
        self.assertEqual(self.seen, [(4, "third")])


class WorkerTests(WorkerCase):
    def test_a_worker_applies_facts_of_two_writers_in_one_order(self) -> None:
        self.worker = self.make_worker(connect=[f"tcp:127.0.0.1:{WIRE}", f"tcp:127.0.0.1:{WIRE + 10}"])
        seen: list[tuple[int, str]] = []

        @self.worker.on("orders", linear=True)
        async def note(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            await txn.execute("INSERT INTO anything")
            seen.extend((each.token, txn.writer_of(each)) for each in facts)

        one = self.serve(HELLO + position(1, 1, writer="one"))
        two = self.serve(HELLO + position(1, 1, writer="two"), port=WIRE + 10)
        self.start()
        self.send(one, rdata(3, writer="one"), rdata(4, writer="one"))
        self.assertEqual(seen, [])
        waiting = begin(self.worker.wait_for("orders", "one", 4))
        self.send(two, rdata(2, writer="two"), position(2, 4, writer="two"))
        self.assertEqual(waiting, [None])
        self.assertEqual(seen, [(2, "two"), (3, "one"), (4, "one")])
        self.assertEqual((self.at(writer="one"), self.at(writer="two")), (4, 4))
