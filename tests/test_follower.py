"""Following a stream: every fact once, in order, in a transaction with its position; whatever fails comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, ConfigError, PositionMovedError, StoreError
from replication.follower import ApplyTransaction, Keeping, StreamFollower
from replication.session.connection import Rows
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Page, Write
from replication.waiting import Waits
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import FragileStore, begin, error_of, logged, now

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from replication.streams.cursor import Apply, CatchUp, Reset

ORDERS = StreamName("orders")
MASTER, OTHER = InstanceName("master"), InstanceName("other")


def fact(token: int, *rows: str) -> Fact:
    return Fact(Token(token), rows or (f"[{token}]",))


class Process:
    """What a follower needs of a worker; ``pages`` are what catching up brings, ``notes`` what happened, in order."""

    def __init__(self) -> None:
        self.instance_name = InstanceName("worker1")
        self.clock = Clock()
        self.waits = Waits(self.clock)
        self.store: Any = FragileStore()
        self.stopping = False
        self.heard_all = True
        self.asked: list[tuple[int, int]] = []
        self.pages: list[Page | Exception | Deferred[Page]] = []
        self.notes: list[object] = []

    async def fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        self.asked.append((step.after, step.upto))
        page = self.pages.pop(0) if self.pages else CatchUpError("nobody has it")
        if isinstance(page, Exception):
            raise page
        return await page if isinstance(page, Deferred) else page

    def all_heard(self) -> bool:
        return self.heard_all

    def moved(self, stream: StreamName, writer: InstanceName, position: Token) -> None:
        self.notes.append(("moved", writer, position))


class FollowerCase(SynchronousTestCase):
    keeping = Keeping.COPIED

    def setUp(self) -> None:
        self.process = Process()
        self.store: FragileStore = self.process.store
        now(self.store.open())
        self.follower = self.make_follower()
        now(self.follower.open())

    def tearDown(self) -> None:
        self.process.stopping = True
        self.process.waits.end()
        for each in self.follower.under_way():
            each.cancel()
        self.assertEqual(self.follower.under_way(), [])
        self.assertEqual(self.process.clock.getDelayedCalls(), [])

    def make_follower(
        self, function: Callable[..., object] | None = None, first: Callable[[Apply | Reset], None] | None = None
    ) -> StreamFollower:
        return StreamFollower(self.process, ORDERS, self.keeping, function, first)

    def at(self, prev: int, new: int, writer: InstanceName = MASTER, link: str = "link") -> None:
        self.follower.position_heard(link, Position(ORDERS, writer, Token(prev), Token(new)))

    def rows(self, *facts: Fact, writer: InstanceName = MASTER, link: str = "link") -> None:
        places: list[Token | None] = []
        texts: list[str] = []
        for token, some in facts:
            places += [*[None] * (len(some) - 1), token]
            texts += some
        self.follower.rows_heard(link, Rows(ORDERS, writer, places, texts))

    def stored(self, writer: InstanceName = MASTER) -> tuple[list[Fact], int]:
        page = now(self.store.facts(ORDERS, writer, after=Token(0), upto=Token(1_000), limit=1_000))
        return [*page.facts], now(self.store.positions(ORDERS)).get(writer, Token(0))

    def position(self, writer: InstanceName = MASTER) -> int:
        return self.follower.cursors[writer].position

    def state(self, writer: InstanceName = MASTER) -> str:
        return self.follower.status(writer).state


class CopyTests(FollowerCase):
    def test_facts_are_kept_with_the_position_that_they_reach(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3, "[1]", "[2]"))
        self.at(3, 5)
        self.assertEqual(self.stored(), ([fact(2), fact(3, "[1]", "[2]")], 5))
        self.assertEqual(self.state(), "live")
        self.assertEqual(self.follower.applied_rows, 3)

    def test_a_writer_that_has_written_nothing_needs_no_source(self) -> None:
        """IDs begin at 2 (protocol F5): POSITION 1 1 says that there is nothing to fetch."""
        self.at(1, 1)
        self.assertEqual(self.process.asked, [])
        self.assertEqual(self.stored(), ([], 1))
        self.rows(fact(2))
        self.assertEqual(self.stored(), ([fact(2)], 2))

    def test_a_writer_at_zero_is_one_that_has_written_nothing_too(self) -> None:
        self.at(0, 0)
        self.rows(fact(1))
        self.assertEqual(self.stored(), ([fact(1)], 1))
        self.assertEqual(self.process.asked, [])

    def test_a_writer_that_went_back_to_the_very_beginning_is_reset(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.follower.link_lost("link")
        with logged() as said:
            self.at(1, 1)
        self.assertEqual(self.stored(), ([], 1))
        self.assertEqual(len(said), 1)

    def test_trap_25_rows_before_a_position_are_not_taken(self) -> None:
        self.rows(fact(2))
        self.assertEqual(self.follower.cursors, {})
        self.assertEqual(self.stored(), ([], 0))

    def test_trap_24_what_was_heard_before_is_not_taken_again(self) -> None:
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.rows(fact(2), fact(3), fact(4))
        self.assertEqual(self.stored()[0], [fact(2), fact(3), fact(4)])
        self.assertEqual(self.follower.cursors[MASTER].duplicates, 2)

    def test_what_is_missing_is_fetched_page_by_page(self) -> None:
        self.process.pages = [
            Page([fact(2), fact(3)], Token(3), limited=True),
            Page([fact(5)], Token(6), limited=False),
        ]
        self.at(6, 6)
        self.rows(fact(7))
        self.assertEqual(self.process.asked, [(0, 6), (3, 6)])
        self.assertEqual(self.stored(), ([fact(2), fact(3), fact(5), fact(7)], 7))
        self.assertEqual(self.follower.catch_ups, 2)

    def test_rows_that_come_while_it_fetches_follow_the_page(self) -> None:
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
        self.follower.rows_heard("link", Rows(ORDERS, MASTER, [None], ["[1]"]))
        self.follower.rows_heard("link", Rows(ORDERS, OTHER, [None], ["[2]"]))
        self.at(1, 1, OTHER)
        self.follower.rows_heard("link", Rows(ORDERS, MASTER, [Token(2)], ["[3]"]))
        self.follower.rows_heard("link", Rows(ORDERS, OTHER, [Token(3)], ["[4]"]))
        self.assertEqual(self.stored(), ([fact(2, "[1]", "[3]")], 2))
        self.assertEqual(self.stored(OTHER), ([fact(3, "[2]", "[4]")], 3))

    def test_one_transaction_at_a_time_whoever_wrote_the_facts(self) -> None:
        self.at(0, 0)
        self.at(0, 0, OTHER)
        self.store.asked.clear()
        self.store.close_gate("commit")
        self.rows(fact(2))
        self.rows(fact(3), writer=OTHER)
        self.assertEqual(self.store.asked, ["commit"])
        self.store.open_gate("commit")
        self.assertEqual((self.stored()[1], self.stored(OTHER)[1]), (2, 3))

    def test_a_restart_goes_on_where_it_stood(self) -> None:
        self.at(0, 1)
        self.rows(fact(2))
        self.follower = self.make_follower()
        now(self.follower.open())
        self.at(2, 2)
        self.assertEqual(self.process.asked, [])
        self.rows(fact(3))
        self.assertEqual(self.stored(), ([fact(2), fact(3)], 3))

    def test_trap_28_a_position_of_the_past_is_no_news(self) -> None:
        self.at(0, 1)
        self.rows(fact(2))
        self.at(1, 1)
        self.at(2, 2)
        self.assertEqual(self.process.asked, [])
        self.assertEqual(self.stored(), ([fact(2)], 2))

    def test_a_writer_that_was_restored_is_followed_from_there_and_loudly(self) -> None:
        self.at(0, 1)
        self.rows(*map(fact, range(2, 8)))
        self.follower.link_lost("link")
        self.assertEqual(self.state(), "not connected")
        with logged() as said:
            self.at(4, 4)
        self.assertEqual(
            said, ["master went back from 7 to 4 on orders: was its database restored? Following from there"]
        )
        self.assertEqual(self.stored(), ([fact(2), fact(3), fact(4)], 4))
        self.rows(fact(5, '"anew"'))
        self.assertEqual(self.stored()[0][-1], fact(5, '"anew"'))
        self.assertEqual(self.follower.resets, 1)
        self.assertEqual(self.process.notes[-2:], [("moved", MASTER, 4), ("moved", MASTER, 5)])

    def test_a_half_fact_is_forgotten_with_its_connection(self) -> None:
        self.at(0, 1)
        self.follower.rows_heard("link", Rows(ORDERS, MASTER, [None], ["[1]"]))
        self.follower.link_lost("link")
        self.process.pages = [Page([fact(2, "[1]", "[2]")], Token(2), limited=False)]
        self.at(2, 2, link="next")
        self.assertEqual(self.stored()[0], [fact(2, "[1]", "[2]")])


class OpenTests(FollowerCase):
    def setUp(self) -> None:
        super().setUp()
        self.follower = self.make_follower()

    def test_what_is_heard_while_positions_are_read_is_taken_in_afterwards(self) -> None:
        self.store.close_gate("positions")
        opened = begin(self.follower.open())
        self.at(0, 1)
        self.rows(fact(2), fact(3))
        self.assertEqual((opened, self.follower.cursors), ([], {}))
        self.store.open_gate("positions")
        self.assertEqual(opened, [None])
        self.assertEqual(self.stored(), ([fact(2), fact(3)], 3))

    def test_and_so_is_a_loss(self) -> None:
        self.store.close_gate("positions")
        begin(self.follower.open())
        self.at(0, 1)
        self.follower.link_lost("link")
        self.rows(fact(2))
        self.store.open_gate("positions")
        self.assertEqual(self.stored(), ([], 1))
        self.assertEqual(self.state(), "not connected")

    def test_what_is_heard_while_it_cannot_be_opened_is_not_kept(self) -> None:
        self.store.errors["declare"] = StoreError("locked")
        self.assertIsInstance(error_of(begin(self.follower.open())), StoreError)
        self.assertEqual((self.follower.error, self.follower.failures), ("locked", 1))
        for number in range(2, 100):
            self.at(number, number)
            self.rows(fact(number))
            self.follower.link_lost("link")
        self.assertIsNone(self.follower._early)
        del self.store.errors["declare"]
        now(self.follower.open())
        self.assertEqual((self.follower.cursors, self.follower.error), ({}, None))
        self.process.pages = [Page([fact(99)], Token(99), limited=False)]
        self.at(99, 99)
        self.assertEqual(self.stored(), ([fact(99)], 99))

    def test_a_name_that_no_table_can_have_is_an_error_like_another(self) -> None:
        self.follower = StreamFollower(self.process, StreamName("é"), Keeping.COPIED)
        self.assertIsInstance(error_of(begin(self.follower.open())), ConfigError)
        self.at(1, 1)
        self.assertIsNone(self.follower._early)


class WatchTests(FollowerCase):
    keeping = Keeping.WATCHED

    def test_only_the_position_is_known_and_nothing_is_asked_of_the_store(self) -> None:
        self.store.asked.clear()
        self.at(50, 50)
        self.rows(fact(51))
        self.at(51, 60)
        self.assertEqual((self.position(), self.state()), (60, "live"))
        self.assertEqual((self.store.asked, self.process.asked), ([], []))

    def test_what_was_missed_since_then_is_fetched(self) -> None:
        self.at(50, 50)
        self.follower.link_lost("link")
        self.process.pages = [Page([fact(55)], Token(58), limited=False)]
        self.at(58, 58, link="next")
        self.assertEqual((self.process.asked, self.position()), ([(50, 58)], 58))

    def test_a_writer_that_went_back_is_followed_from_there(self) -> None:
        self.at(50, 50)
        self.follower.link_lost("link")
        with logged() as said:
            self.at(7, 7, link="next")
        self.assertEqual(self.position(), 7)
        self.assertEqual(len(said), 1)


class ApplyCase(FollowerCase):
    keeping = Keeping.APPLIED

    def setUp(self) -> None:
        self.seen: list[list[int]] = []
        self.error: Exception | None = None
        self.gate: Deferred[None] | None = None
        super().setUp()
        self.at(0, 1)
        self.process.notes.clear()

    def make_follower(
        self, function: Callable[..., object] | None = None, first: Callable[[Apply | Reset], None] | None = None
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
    def test_facts_and_position_are_of_one_transaction(self) -> None:
        self.rows(fact(2), fact(3))
        self.assertEqual(self.seen, [[2, 3]])
        self.assertEqual(self.store.ends[-1:], ["committed"])
        self.assertEqual((self.stored_position(), self.stored()[0]), (3, []))

    def test_a_position_alone_does_not_trouble_the_function(self) -> None:
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

    def test_the_transaction_says_whose_facts_they_are_and_ends_with_the_call(self) -> None:
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

    def test_if_it_raises_nothing_stays_and_the_same_facts_come_again_with_newer_ones(self) -> None:
        self.error = ZeroDivisionError("no")
        with logged() as said:
            self.rows(fact(2))
            self.assertEqual((self.stored_position(), self.store.ends[-1]), (1, "rolled back"))
            self.assertEqual(self.state(), "stopped")
            self.assertIn("applying orders of master after 1: ZeroDivisionError: no", self.follower.errors[MASTER])
            self.rows(fact(3))
            self.process.clock.advance(0.25)
            self.process.clock.advance(0.5)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1, "said once, with a traceback")
        self.assertEqual(len(said), 2)
        self.error = None
        self.process.clock.advance(1.0)
        self.assertEqual(self.seen, [[2], [2, 3], [2, 3], [2, 3]])
        self.assertEqual((self.stored_position(), self.state()), (3, "live"))
        self.assertEqual(self.follower.failures, 3)

    def test_it_is_tried_again_later_and_later(self) -> None:
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

    def test_an_error_of_the_database_needs_no_traceback(self) -> None:
        self.store.errors["commit"] = StoreError("disk full")
        with logged() as said:
            self.rows(fact(2))
        self.assertEqual(len(said), 1)
        self.assertIn("disk full; trying again in 0.25 s and on", said[0])

    def test_another_writers_facts_go_on_meanwhile(self) -> None:
        self.error = ValueError("no")
        with logged():
            self.rows(fact(2))
        self.flushLoggedErrors(ValueError)
        self.error = None
        self.at(0, 1, OTHER)
        self.rows(fact(5), writer=OTHER)
        self.assertEqual((self.position(OTHER), self.position()), (5, 1))

    def test_two_workers_on_one_database_stand_still_and_say_so(self) -> None:
        write = Write(ORDERS, MASTER, Token(7))
        now(self.store.transaction().commit([write]))
        with logged() as said:
            self.rows(fact(8))
        self.assertEqual(self.state(), "stopped")
        self.assertIn(PositionMovedError.__name__, said[0])
        self.assertIn("does another process use this database?", said[0])
        self.process.clock.advance(0.25)
        self.assertEqual((self.stored_position(), self.position()), (7, 1))

    def test_a_rollback_that_fails_is_logged_beside_the_reason(self) -> None:
        self.error, self.store.errors["rollback"] = ValueError("no"), StoreError("gone")
        with logged() as said:
            self.rows(fact(2))
        self.assertIn("rolling back orders: gone", said[0])
        self.assertIn("ValueError: no", said[1])
        self.flushLoggedErrors(ValueError)

    def test_trap_27_a_fetch_that_fails_is_tried_again(self) -> None:
        self.process.pages = [
            CatchUpError("down"),
            Page([], Token(1), limited=True),
            Page([fact(2)], Token(5), limited=False),
        ]
        with logged() as said:
            self.at(5, 5)
            self.process.clock.advance(0.25)
        self.assertEqual(len(said), 2)
        self.assertIn("fetching orders of master after 1: CatchUpError: down", said[0])
        self.assertIn("got nothing beyond 1", said[1])
        self.process.clock.advance(0.5)
        self.assertEqual((self.seen, self.stored_position(), self.state()), ([[2]], 5, "live"))

    def test_a_page_out_of_order_is_not_applied(self) -> None:
        self.process.pages = [Page([fact(4), fact(3)], Token(5), limited=False)]
        with logged() as said:
            self.at(5, 5)
        self.assertIn("do not ascend", said[0])
        self.assertEqual(self.seen, [])

    def test_a_loss_in_the_middle_of_a_function_loses_nothing(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.follower.link_lost("link")
        self.gate.callback(None)
        self.assertEqual(self.stored_position(), 2)
        self.gate = None
        self.at(2, 2, link="next")
        self.rows(fact(3), link="next")
        self.assertEqual(self.seen, [[2], [3]])

    def test_a_writer_that_goes_back_in_the_middle_of_a_function_is_undone_after_it(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2), fact(3))
        self.follower.link_lost("link")
        self.at(2, 2, link="next")
        with logged() as said:
            self.gate.callback(None)
        self.gate = None
        self.assertEqual(self.stored_position(), 2)
        self.assertEqual(len(said), 1)
        self.rows(fact(3), link="next")
        self.assertEqual(self.seen, [[2, 3], [3]])


class FirstTests(ApplyCase):
    def make_follower(
        self, function: Callable[..., object] | None = None, first: Callable[[Apply | Reset], None] | None = None
    ) -> StreamFollower:
        return super().make_follower(function, self.note)

    def note(self, step: Apply | Reset) -> None:
        self.process.notes.append(("first", type(step).__name__))

    async def apply(self, facts: Sequence[Fact], txn: ApplyTransaction) -> None:
        self.process.notes.append("function")
        await super().apply(facts, txn)

    def test_trap_30_what_is_remembered_is_dropped_before_the_position_moves(self) -> None:
        self.rows(fact(2))
        self.assertEqual(self.process.notes, [("first", "Apply"), "function", ("moved", MASTER, 2)])

    def test_and_again_if_the_facts_come_again(self) -> None:
        self.error = StoreError("no")
        with logged():
            self.rows(fact(2))
        self.error = None
        self.process.clock.advance(0.25)
        self.assertEqual(self.process.notes.count(("first", "Apply")), 2)

    def test_and_when_a_writer_goes_back(self) -> None:
        self.rows(fact(2))
        self.follower.link_lost("link")
        self.process.notes.clear()
        with logged():
            self.at(1, 1, link="next")
        self.assertEqual(self.process.notes, [("first", "Reset"), ("moved", MASTER, 1)])


class StopTests(ApplyCase):
    def stop(self) -> None:
        self.process.stopping = True
        self.process.waits.end()

    def test_nothing_begins_any_more(self) -> None:
        self.stop()
        self.rows(fact(2))
        self.assertEqual((self.seen, self.follower.under_way()), ([], []))

    def test_a_function_under_way_is_left_to_finish(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.stop()
        self.rows(fact(3))
        (driving,) = self.follower.under_way()
        ended = begin(driving)
        self.gate.callback(None)
        self.assertEqual((ended, self.seen, self.stored_position()), ([None], [[2]], 2))

    def test_one_that_fails_then_is_logged_and_not_tried_again(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        self.stop()
        with logged() as said:
            self.gate.errback(ValueError("no"))
        self.assertIn("ValueError: no", said[0])
        self.assertEqual((self.follower.under_way(), self.stored_position()), ([], 1))
        self.flushLoggedErrors(ValueError)

    def test_one_that_takes_too_long_is_cancelled_and_rolled_back(self) -> None:
        cancelled: list[object] = []
        self.gate = Deferred(cancelled.append)
        self.rows(fact(2))
        self.stop()
        (driving,) = self.follower.under_way()
        with logged() as said:
            driving.cancel()
        self.assertEqual((len(cancelled), self.store.ends[-1], said), (1, "rolled back", []))
        self.assertEqual(self.follower.under_way(), [])

    def test_the_wait_for_another_try_ends(self) -> None:
        self.error = StoreError("no")
        with logged():
            self.rows(fact(2))
        self.assertEqual(len(self.follower.under_way()), 1)
        self.stop()
        self.assertEqual(self.follower.under_way(), [])

    def test_a_fetch_ends(self) -> None:
        cancelled: list[object] = []
        self.process.pages = [Deferred(cancelled.append)]
        self.at(9, 9)
        with logged() as said:
            self.stop()
        self.assertEqual((len(cancelled), said, self.follower.under_way()), (1, [], []))

    def test_a_function_that_is_cancelled_by_somebody_else_is_tried_again(self) -> None:
        self.gate = Deferred()
        self.rows(fact(2))
        with logged():
            self.gate.cancel()
        self.gate = None
        self.flushLoggedErrors(CancelledError)
        self.process.clock.advance(0.25)
        self.assertEqual(self.stored_position(), 2)

    def test_stopping_from_within_a_function_is_no_trouble(self) -> None:
        def stop(facts: Sequence[Fact], txn: ApplyTransaction) -> None:
            self.stop()

        self.follower = self.make_follower(stop)
        now(self.follower.open())
        self.at(1, 1)
        self.rows(fact(2))
        self.assertEqual((self.stored_position(), self.follower.under_way()), (2, []))


class DeclarationTests(SynchronousTestCase):
    def test_only_a_copy_has_a_table_of_its_own(self) -> None:
        process = Process()
        declared: list[StreamDefinition] = []

        class Store(FragileStore):
            async def declare(self, definition: StreamDefinition) -> None:
                declared.append(definition)
                await super().declare(definition)

        process.store = Store()
        now(process.store.open())
        for keeping in Keeping:
            now(StreamFollower(process, ORDERS, keeping).open())
        self.assertEqual(declared, [StreamDefinition("orders")])
