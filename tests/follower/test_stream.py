"""A follower applies each fact once and in order, and stores the position in the same transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import call, patch

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, CommitsLostError, ConfigError, PositionMovedError, StoreError
from replication.follower.stream import FollowMode, StreamFollower
from replication.session.connection import Rows
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import Page, Write
from replication.wire.grammar import StreamName, Token
from tests.doubles import begin, error_of, logged, now
from tests.follower.cases import MASTER, ORDERS, OTHER, FollowerCase, Process, fact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.follower.application import ApplyTransaction
    from replication.streams.cursor import Apply, Reset
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName
    from tests.follower.cases import First


class CopyTests(FollowerCase):
    def test_facts_and_their_position_are_stored(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3, "[1]", "[2]"))
        self.at(3, 5)
        self.assertEqual(self.stored(), ([fact(2), fact(3, "[1]", "[2]")], 5))
        self.assertEqual(self.state(), "live")
        self.assertEqual(self.follower.applied_rows, 3)

    def test_an_unexpected_error_is_not_taken_for_one_of_a_function(self) -> None:
        self.at(0, 1)
        self.store.errors["commit"] = MemoryError()
        with logged() as messages:
            self.rows(fact(2))
        self.assertEqual(messages[-1], "following orders raised")
        self.assertEqual(len(self.flushLoggedErrors(MemoryError)), 1)

    def test_a_new_writer_at_position_one_needs_no_catch_up(self) -> None:
        """IDs begin at 2 (docs/protocol/ids.md F5): after POSITION 1 1 there is nothing to fetch."""
        self.at(1, 1)
        self.assertEqual(self.process.asked, [])
        self.assertEqual(self.stored(), ([], 1))
        self.rows(fact(2))
        self.assertEqual(self.stored(), ([fact(2)], 2))

    def test_a_new_writer_at_position_zero_needs_no_catch_up(self) -> None:
        self.at(0, 0)
        self.rows(fact(1))
        self.assertEqual(self.stored(), ([fact(1)], 1))
        self.assertEqual(self.process.asked, [])

    def test_a_writer_that_went_back_to_its_first_position_is_reset(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.follower.connection_lost("link")
        with logged() as messages:
            self.at(1, 1)
        self.assertEqual(self.stored(), ([], 1))
        self.assertEqual(len(messages), 1)

    def test_trap_25_rows_before_a_position_are_dropped(self) -> None:
        self.rows(fact(2))
        self.assertEqual(self.follower.cursors, {})
        self.assertEqual(self.stored(), ([], 0))

    def test_trap_24_facts_that_were_applied_are_not_applied_again(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.rows(fact(2), fact(3), fact(4))
        self.assertEqual(self.stored()[0], [fact(2), fact(3), fact(4)])
        self.assertEqual(self.follower.cursors[MASTER].duplicates, 2)

    def test_missed_facts_are_fetched_page_by_page(self) -> None:
        self.process.pages = [
            Page([fact(2), fact(3)], Token(3), limited=True),
            Page([fact(5)], Token(6), limited=False),
        ]
        self.at(6, 6)
        self.rows(fact(7))
        self.assertEqual(self.process.asked, [(0, 6), (3, 6)])
        self.assertEqual(self.stored(), ([fact(2), fact(3), fact(5), fact(7)], 7))
        self.assertEqual(self.follower.catch_ups, 2)

    def test_rows_that_arrive_during_a_fetch_are_applied_after_the_page(self) -> None:
        page: Deferred[Page] = Deferred()
        self.process.pages = [page]
        self.at(3, 3)
        self.rows(fact(4))
        self.assertEqual((self.stored(), self.state()), (([], 0), "catching up"))
        page.callback(Page([fact(2)], Token(3), limited=False))
        self.assertEqual(self.stored(), ([fact(2), fact(4)], 4))

    def test_trap_26_two_writers_of_a_stream_do_not_mix(self) -> None:
        self.at(0, 1)
        self.at(0, 1, OTHER)
        self.follower.rows_received("link", Rows(ORDERS, MASTER, [None], ["[1]"]))
        self.follower.rows_received("link", Rows(ORDERS, OTHER, [None], ["[2]"]))
        self.at(1, 1, OTHER)
        self.follower.rows_received("link", Rows(ORDERS, MASTER, [Token(2)], ["[3]"]))
        self.follower.rows_received("link", Rows(ORDERS, OTHER, [Token(3)], ["[4]"]))
        self.assertEqual(self.stored(), ([fact(2, "[1]", "[3]")], 2))
        self.assertEqual(self.stored(OTHER), ([fact(3, "[2]", "[4]")], 3))

    def test_one_transaction_of_a_stream_runs_at_a_time(self) -> None:
        self.at(0, 0)
        self.at(0, 0, OTHER)
        self.store.asked.clear()
        self.store.close_gate("commit")
        self.rows(fact(2))
        self.rows(fact(3), writer=OTHER)
        self.assertEqual(self.store.asked, ["commit"])
        self.store.open_gate("commit")
        self.assertEqual((self.stored()[1], self.stored(OTHER)[1]), (2, 3))

    def test_a_restart_continues_at_the_stored_position(self) -> None:
        self.at(0, 1)
        self.rows(fact(2))
        self.follower = self.make_follower()
        now(self.follower.open())
        self.at(2, 2)
        self.assertEqual(self.process.asked, [])
        self.rows(fact(3))
        self.assertEqual(self.stored(), ([fact(2), fact(3)], 3))

    def test_trap_28_an_old_position_changes_nothing(self) -> None:
        self.at(0, 1)
        self.rows(fact(2))
        self.at(1, 1)
        self.at(2, 2)
        self.assertEqual(self.process.asked, [])
        self.assertEqual(self.stored(), ([fact(2)], 2))

    def test_a_restored_writer_is_followed_from_its_position_and_logged(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 8)))
        self.follower.connection_lost("link")
        self.assertEqual(self.state(), "not connected")
        with logged() as messages:
            self.at(4, 4)
        self.assertEqual(
            messages, ["master went back from 7 to 4 on orders: was its database restored? Following from there"]
        )
        self.assertEqual(self.stored(), ([fact(2), fact(3), fact(4)], 4))
        self.rows(fact(5, '"anew"'))
        self.assertEqual(self.stored()[0][-1], fact(5, '"anew"'))
        self.assertEqual(self.follower.resets, 1)
        self.assertEqual(self.process.notes[-2:], [("moved", MASTER, 4), ("moved", MASTER, 5)])

    def test_an_incomplete_fact_is_dropped_with_its_connection(self) -> None:
        self.at(0, 1)
        self.follower.rows_received("link", Rows(ORDERS, MASTER, [None], ["[1]"]))
        self.follower.connection_lost("link")
        self.process.pages = [Page([fact(2, "[1]", "[2]")], Token(2), limited=False)]
        self.at(2, 2, link="next")
        self.assertEqual(self.stored()[0], [fact(2, "[1]", "[2]")])


class CounterTests(FollowerCase):
    def test_rows_resets_and_failures_are_counted_since_the_start(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3, "[1]", "[2]"))
        self.rows(fact(4))
        self.assertEqual(self.follower.applied_rows, 4)
        for number in (1, 2):
            self.follower.connection_lost("link")
            with logged():
                self.at(4 - number, 4 - number)
            self.assertEqual(self.follower.resets, number)
        self.store.errors["commit"] = StoreError("locked")
        with logged():
            self.rows(fact(5))
            self.process.clock.advance(0.25)
        self.assertEqual(self.follower.errors.count, 2)


class OpenTests(FollowerCase):
    def setUp(self) -> None:
        super().setUp()
        self.follower = self.make_follower()

    def test_rows_that_arrive_while_positions_are_read_are_applied_afterwards(self) -> None:
        self.store.close_gate("positions")
        opened = begin(self.follower.open())
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.assertEqual((opened, self.follower.cursors), ([], {}))
        self.store.open_gate("positions")
        self.assertEqual(opened, [None])
        self.assertEqual(self.stored(), ([fact(2), fact(3)], 3))

    def test_a_connection_lost_while_positions_are_read_is_processed_afterwards(self) -> None:
        self.store.close_gate("positions")
        begin(self.follower.open())
        self.at(0, 1)
        self.follower.connection_lost("link")
        self.rows(fact(2))
        self.store.open_gate("positions")
        self.assertEqual(self.stored(), ([], 1))
        self.assertEqual(self.state(), "not connected")

    def test_rows_that_arrive_while_a_stream_cannot_be_opened_are_dropped(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        for failures in (1, 2):
            self.assertIsInstance(error_of(begin(self.follower.open())), StoreError)
            self.assertEqual((self.follower.error, self.follower.errors.count), ("locked", failures))
        for number in range(2, 100):
            self.at(number, number)
            self.rows(fact(number))
            self.follower.connection_lost("link")
        self.assertIsNone(self.follower._early)
        del self.store.errors["declare"]
        now(self.follower.open())
        self.assertEqual((self.follower.cursors, self.follower.error), ({}, None))
        self.process.pages = [Page([fact(99)], Token(99), limited=False)]
        self.at(99, 99)
        self.assertEqual(self.stored(), ([fact(99)], 99))

    def test_a_name_that_no_table_can_have_is_an_error_of_open(self) -> None:
        self.follower = StreamFollower(name=StreamName("é"), mode=FollowMode.COPIED, **self.process.arguments)
        self.assertIsInstance(error_of(begin(self.follower.open())), ConfigError)
        self.at(1, 1)
        self.assertIsNone(self.follower._early)


class PositionOnlyTests(FollowerCase):
    mode = FollowMode.POSITION_ONLY

    def test_only_the_position_is_followed_and_the_store_is_not_used(self) -> None:
        self.store.asked.clear()
        self.at(50, 50)
        self.rows(fact(51))
        self.at(51, 60)
        self.assertEqual((self.position(), self.state()), (60, "live"))
        self.assertEqual((self.store.asked, self.process.asked), ([], []))

    def test_facts_missed_since_the_first_position_are_fetched(self) -> None:
        self.at(50, 50)
        self.follower.connection_lost("link")
        self.process.pages = [Page([fact(55)], Token(58), limited=False)]
        self.at(58, 58, link="next")
        self.assertEqual((self.process.asked, self.position()), ([(50, 58)], 58))

    def test_a_writer_that_went_back_is_followed_from_its_position(self) -> None:
        self.at(50, 50)
        self.follower.connection_lost("link")
        with logged() as messages:
            self.at(7, 7, link="next")
        self.assertEqual(self.position(), 7)
        self.assertEqual(len(messages), 1)


class ApplyCase(FollowerCase):
    mode = FollowMode.APPLIED

    def setUp(self) -> None:
        self.seen: list[list[int]] = []
        self.error: Exception | None = None
        self.gate: Deferred[None] | None = None
        super().setUp()
        self.at(0, 1)
        self.process.notes.clear()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        return super().make_follower(function or self.apply, first)

    async def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.seen.append([each.token for each in facts])
        await txn.execute("INSERT …")
        if self.gate is not None:
            await self.gate
        if self.error is not None:
            raise self.error

    def stored_position(self) -> int:
        return now(self.store.positions(ORDERS)).get(MASTER, Token(0))


class ApplyTests(ApplyCase):
    def test_facts_and_position_share_one_transaction(self) -> None:
        self.rows(fact(2), fact(3))
        self.assertEqual(self.seen, [[2, 3]])
        self.assertEqual(self.store.ends[-1:], ["committed"])
        self.assertEqual((self.stored_position(), self.stored()[0]), (3, []))

    def test_a_position_without_facts_does_not_call_the_function(self) -> None:
        self.at(1, 9)
        self.assertEqual((self.seen, self.stored_position()), ([], 9))

    def test_a_function_may_be_plain_a_coroutine_function_or_return_a_deferred(self) -> None:
        waiting: Deferred[None] = Deferred()
        for number, function in enumerate([lambda facts, txn: None, lambda facts, txn: waiting], 2):
            self.follower = self.make_follower(function)
            now(self.follower.open())
            self.at(number - 1, number - 1)
            self.rows(fact(number))
        self.assertEqual(self.stored_position(), 2)
        waiting.callback(None)
        self.assertEqual(self.stored_position(), 3)

    def test_the_transaction_has_the_stream_and_the_writer_of_its_facts(self) -> None:
        kept: list[ApplyTransaction] = []

        async def apply(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            kept.append(txn)
            await txn.executemany("INSERT …", [[1], [2]])

        self.follower = self.make_follower(apply)
        now(self.follower.open())
        self.at(1, 1)
        self.rows(fact(2))
        self.assertEqual((kept[0].stream, kept[0].writer), (ORDERS, MASTER))
        self.assertEqual(self.store.executed, ["INSERT …"])

    def test_a_function_that_raises_is_called_again_with_the_fact_that_fails(self) -> None:
        self.error = ZeroDivisionError("no")
        with logged() as messages:
            self.rows(fact(2))
            self.assertEqual((self.stored_position(), self.store.ends[-1]), (1, "rolled back"))
            self.assertEqual(self.state(), "stopped")
            self.assertIn(
                "applying orders of master after 1: ZeroDivisionError: no", self.follower.errors.texts[MASTER]
            )
            self.rows(fact(3))
            self.process.clock.advance(0.25)
            self.process.clock.advance(0.5)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1, "logged once, with a traceback")
        self.assertEqual(len(messages), 2)
        self.assertIn("the application's function for orders raised", messages)
        self.error = None
        self.process.clock.advance(1.0)
        self.assertEqual(self.seen, [[2], [2], [2], [2], [3]])
        self.assertEqual((self.stored_position(), self.state()), (3, "live"))
        self.assertEqual(self.follower.errors.count, 3)

    def test_without_memory_the_process_ends_unless_the_function_has_requested_it(self) -> None:
        """The error may come after COMMIT: then the position has moved, and each further attempt failed."""

        async def commit(*_: object) -> None:
            raise MemoryError

        self.error = MemoryError()
        with logged() as messages:
            self.rows(fact(2))
        self.assertIn("the application's function for orders raised", messages)
        self.error = None
        with patch.object(type(self.store.transaction()), "commit", commit), logged() as messages:
            self.process.clock.advance(0.25)
            self.process.clock.advance(0.5)
        self.assertIn("following orders raised", messages)
        self.flushLoggedErrors(MemoryError)

    def test_the_delay_between_attempts_doubles_up_to_ten_seconds(self) -> None:
        self.error = ValueError("no")
        with logged():
            self.rows(fact(2))
            for seconds in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
                before = len(self.seen)
                self.process.clock.advance(seconds - 0.01)
                self.assertEqual(len(self.seen), before)
                self.process.clock.advance(0.02)
                self.assertEqual(len(self.seen), before + 1)
        self.flushLoggedErrors(ValueError)

    def test_a_database_error_is_logged_without_a_traceback(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as messages:
            self.rows(fact(2))
        self.assertEqual(len(messages), 1)
        self.assertIn("disk full; next attempt in 0.25 s", messages[0])

    def test_facts_of_another_writer_are_applied_meanwhile(self) -> None:
        self.error = ValueError("no")
        with logged():
            self.rows(fact(2))
        self.flushLoggedErrors(ValueError)
        self.error = None
        self.at(0, 1, OTHER)
        self.rows(fact(5), writer=OTHER)
        self.assertEqual((self.position(OTHER), self.position()), (5, 1))

    def test_a_second_worker_on_one_database_stops_and_logs_it(self) -> None:
        write = Write(ORDERS, MASTER, Token(7))
        now(self.store.transaction().commit([write]))
        with logged() as messages:
            self.rows(fact(8))
        self.assertEqual(self.state(), "stopped")
        self.assertIn(PositionMovedError.__name__, messages[0])
        self.assertIn("does another process use this database?", messages[0])
        self.process.clock.advance(0.25)
        self.assertEqual((self.stored_position(), self.position()), (7, 1))

    def test_a_position_that_a_restore_has_moved_is_reported_as_lost_commits(self) -> None:
        now(self.store.transaction().commit([Write(ORDERS, MASTER, Token(7))]))
        self.store.errors["verify"] = CommitsLostError("lost commits: restart it")
        with logged() as messages:
            self.rows(fact(8))
        self.assertEqual(len(messages), 1)
        self.assertIn("CommitsLostError: lost commits: restart it", messages[0])

    def test_nothing_is_undone_after_a_restore_of_the_database_that_has_the_position(self) -> None:
        self.rows(fact(2), fact(3))
        self.follower.connection_lost("link")
        self.store.errors["verify"] = CommitsLostError("lost commits: restart it")
        with logged() as messages:
            self.at(1, 1)
        self.assertEqual((self.stored_position(), self.position()), (3, 3))
        self.assertIn("CommitsLostError: lost commits: restart it", messages[0])

    def test_a_failed_rollback_is_logged_with_the_first_error(self) -> None:
        self.error, self.store.errors["rollback"] = ValueError("no"), StoreError("gone")
        with logged() as messages:
            self.rows(fact(2))
        self.assertIn("cannot roll back orders: gone", messages[0])
        self.assertIn("ValueError: no", messages[1])
        self.flushLoggedErrors(ValueError)

    def test_trap_27_a_failed_fetch_is_retried(self) -> None:
        self.process.pages = [
            CatchUpError("down"),
            Page([], Token(1), limited=True),
            Page([fact(2)], Token(5), limited=False),
        ]
        with logged() as messages:
            self.at(5, 5)
            self.process.clock.advance(0.25)
        self.assertEqual(len(messages), 2)
        self.assertIn("fetching orders of master after 1: CatchUpError: down", messages[0])
        self.assertIn("ends at 1", messages[1])
        self.process.clock.advance(0.5)
        self.assertEqual((self.seen, self.stored_position(), self.state()), ([[2]], 5, "live"))

    def test_an_error_of_a_fetch_ends_when_the_writer_goes_back_to_the_applied_position(self) -> None:
        self.at(5, 5)
        self.assertEqual(self.state(), "stopped")
        self.follower.connection_lost("link")
        self.at(1, 1, link="next")
        self.process.clock.advance(0.25)
        self.assertEqual((self.state(), self.follower.status(MASTER).error), ("live", None))

    def test_a_page_out_of_order_is_not_applied(self) -> None:
        self.process.pages = [Page([fact(4), fact(3)], Token(5), limited=False)]
        with logged() as messages:
            self.at(5, 5)
        self.assertIn("do not ascend", messages[0])
        self.assertEqual(self.seen, [])

    def test_a_connection_lost_while_a_function_runs_loses_no_fact(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.follower.connection_lost("link")
        self.gate.callback(None)
        self.assertEqual(self.stored_position(), 2)
        self.gate = None
        self.at(2, 2, link="next")
        self.rows(fact(3), link="next")
        self.assertEqual(self.seen, [[2], [3]])

    def test_a_writer_that_goes_back_while_a_function_runs_is_reset_after_it(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2), fact(3))
        self.follower.connection_lost("link")
        self.at(2, 2, link="next")
        with logged() as messages:
            self.gate.callback(None)
        self.gate = None
        self.assertEqual(self.stored_position(), 2)
        self.assertEqual(len(messages), 1)
        self.rows(fact(3), link="next")
        self.assertEqual(self.seen, [[2, 3], [3]])


class InvalidationTests(ApplyCase):
    def make_follower(
        self, function: Callable[..., object] | None = None, first: First | None = None
    ) -> StreamFollower:
        return super().make_follower(function, self.note)

    def note(self, _: InstanceName, step: Apply | Reset) -> None:
        self.process.notes.append(("first", type(step).__name__))

    async def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.process.notes.append("function")
        await super().apply(facts, txn)

    def test_trap_30_caches_are_invalidated_before_the_position_moves(self) -> None:
        self.rows(fact(2))
        self.assertEqual(self.process.notes, [("first", "Apply"), "function", ("moved", MASTER, 2)])

    def test_caches_are_invalidated_again_if_the_facts_are_applied_again(self) -> None:
        self.error = StoreError("no")
        with logged():
            self.rows(fact(2))
        self.error = None
        self.process.clock.advance(0.25)
        self.assertEqual(self.process.notes.count(("first", "Apply")), 2)

    def test_caches_are_invalidated_when_a_writer_goes_back(self) -> None:
        self.rows(fact(2))
        self.follower.connection_lost("link")
        self.process.notes.clear()
        with logged():
            self.at(1, 1, link="next")
        self.assertEqual(self.process.notes, [("first", "Reset"), ("moved", MASTER, 1)])


class StopTests(ApplyCase):
    def stop(self) -> None:
        self.process.lifetime.end()

    def test_no_function_is_called_after_the_end(self) -> None:
        self.stop()
        self.rows(fact(2))
        self.assertEqual((self.seen, self.follower.in_progress()), ([], []))

    def test_a_running_function_ends_normally(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.stop()
        self.rows(fact(3))
        (driving,) = self.follower.in_progress()
        ended = begin(driving)
        self.gate.callback(None)
        self.assertEqual((ended, self.seen, self.stored_position()), ([None], [[2]], 2))

    def test_a_function_that_fails_after_the_end_is_logged_and_not_retried(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.stop()
        with logged() as messages:
            self.gate.errback(ValueError("no"))
        self.assertIn("ValueError: no", messages[0])
        self.assertEqual((self.follower.in_progress(), self.stored_position()), ([], 1))
        self.flushLoggedErrors(ValueError)

    def test_a_cancelled_function_is_rolled_back(self) -> None:
        cancelled: list[object] = []
        self.gate = Deferred(cancelled.append)
        self.rows(fact(2))
        self.stop()
        (driving,) = self.follower.in_progress()
        with logged() as messages:
            driving.cancel()
        self.assertEqual((len(cancelled), self.store.ends[-1], messages), (1, "rolled back", []))
        self.assertEqual(self.follower.in_progress(), [])

    def test_the_end_cancels_the_delay_before_the_next_attempt(self) -> None:
        self.error = StoreError("no")
        with logged():
            self.rows(fact(2))
        self.assertEqual(len(self.follower.in_progress()), 1)
        self.stop()
        self.assertEqual(self.follower.in_progress(), [])

    def test_the_end_cancels_a_fetch(self) -> None:
        cancelled: list[object] = []
        self.process.pages = [Deferred(cancelled.append)]
        self.at(9, 9)
        with logged() as messages:
            self.stop()
        self.assertEqual((len(cancelled), messages, self.follower.in_progress()), (1, [], []))

    def test_a_function_cancelled_by_the_application_is_retried(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        with logged():
            self.gate.cancel()
        self.gate = None
        self.flushLoggedErrors(RuntimeError)
        self.process.clock.advance(0.25)
        self.assertEqual(self.stored_position(), 2)

    def test_a_function_may_stop_the_process(self) -> None:
        def stop(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.stop()

        self.follower = self.make_follower(stop)
        now(self.follower.open())
        self.at(1, 1)
        self.rows(fact(2))
        self.assertEqual((self.stored_position(), self.follower.in_progress()), (2, []))


class DeclarationTests(SynchronousTestCase):
    def test_only_the_table_of_a_copied_stream_is_declared_and_claimed(self) -> None:
        process = Process()
        now(process.store.open())
        with (
            patch.object(process.store, "declare", wraps=process.store.declare) as declared,
            patch.object(process.store, "claim_tables", wraps=process.store.claim_tables) as claimed,
        ):
            for mode in FollowMode:
                now(StreamFollower(name=ORDERS, mode=mode, **process.arguments).open())
        self.assertEqual(declared.mock_calls, [call(StreamDefinition("orders"))])
        self.assertEqual(claimed.mock_calls, [call([ORDERS], "worker1", copy=True)])

    def test_a_copy_whose_table_was_dropped_is_an_error_in_the_log(self) -> None:
        process = Process()
        now(process.store.open())
        process.store.warnings += ["stream 'other': not this one", "stream 'orders': its table was missing"]
        with logged() as messages:
            now(StreamFollower(name=ORDERS, mode=FollowMode.COPIED, **process.arguments).open())
        self.assertEqual(messages, ["the copy of stream 'orders': its table was missing"])

    def test_the_sequence_of_a_copy_is_no_error_because_a_copy_takes_no_id_from_it(self) -> None:
        process = Process()
        now(process.store.open())
        process.store.warnings += [
            "stream 'orders': sequence \"stream_orders_seq\" was at 1, behind ID 4, which is stored: moved forward"
        ]
        with logged() as messages:
            now(StreamFollower(name=ORDERS, mode=FollowMode.COPIED, **process.arguments).open())
        self.assertEqual(messages, [])
