"""The contract of stores, a test for each sentence of ``streams.interfaces``; the tests of each store inherit it."""

from __future__ import annotations

from contextlib import suppress
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from replication.errors import FactsGoneError, PositionMovedError, StoreError, UnknownStreamError
from replication.storage.contract import ReceiptTakenError
from replication.storage.receipts import ReceiptClock
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import FactSlice, Page, Receipt, Write
from replication.streams.skips import FailedFact, SkippedFact, SkipState
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from twisted.internet.defer import Deferred
    from twisted.trial.unittest import SynchronousTestCase as _Case

    from replication.streams.interfaces import IReactorCalls, ISqlExecutor, IStreamStore
else:
    _Case = object

_T = TypeVar("_T")

DAY = 86_400.0
ORDERS = StreamName("orders")
ME = InstanceName("master")
FOLLOWER = InstanceName("worker1")
OTHER = InstanceName("worker2")


def fact(token: int, *texts: str) -> Fact:
    """Return a fact; without ``texts`` it has one row, with its token."""
    return Fact(Token(token), texts or (f'["row of",{token}]',))


def facts(*tokens: int) -> list[Fact]:
    """Return a fact of one row for each token."""
    return [fact(token) for token in tokens]


def empty(token: int) -> Fact:
    """Return a fact without rows."""
    return Fact(Token(token), ())


def write(
    upto: int,
    stored: Sequence[Fact] = (),
    *,
    stream: str = ORDERS,
    writer: InstanceName = ME,
    expected: int | None = None,
    reset: bool = False,
    follower: InstanceName | None = None,
    counts: str | None = None,
) -> Write:
    """Return a Write; by default of the stream ``orders`` and the writer ``master``."""
    before = None if expected is None else Token(expected)
    return Write(StreamName(stream), writer, Token(upto), stored, before, reset, follower, counts=counts)


class UsesStore(_Case):
    """Opens a store that has declared the stream ``orders``."""

    time = 1_800_000_000.0
    jump = 0.0  # of the wall clock

    def make_store(self, clock: ReceiptClock) -> IStreamStore:
        """Return a store that was never used and is not open; ``self.pump`` is its reactor."""
        raise NotImplementedError

    def make_clock(self) -> ReceiptClock:
        """Return the clock of a process that starts now."""
        return ReceiptClock(lambda: self.time + self.jump, lambda: self.time)

    def wait(self, awaited: Coroutine[Any, Any, _T] | Deferred[_T]) -> _T:
        """Return the result, or raise the error, of something that the store was asked."""
        return self.pump.wait(awaited)

    def begin(self, asked: Coroutine[Any, Any, _T]) -> Deferred[_T]:
        """Start ``work`` without waiting for it."""
        return self.pump.start(asked)

    def setUp(self) -> None:
        self.pump = Pump()
        self.store = self.make_store(self.make_clock())
        self.wait(self.store.open())
        self.addCleanup(lambda: self.wait(self.store.close()))
        self.declare(ORDERS)

    def declare(self, name: str, *, negative: bool = False) -> None:
        self.wait(self.store.declare(StreamDefinition(name, negative=negative)))

    def commit(self, *writes: Write, receipt: Receipt | None = None) -> None:
        self.wait(self.store.transaction().commit(writes, receipt))

    def page(
        self, *, after: int = 0, upto: int = 1000, limit: int = 1000, stream: str = ORDERS, writer: InstanceName = ME
    ) -> Page:
        asked = self.store.facts(StreamName(stream), writer, after=Token(after), upto=Token(upto), limit=limit)
        return self.wait(asked)

    def tokens(self, stream: str = ORDERS, writer: InstanceName = ME) -> list[int]:
        return [each.token for each in self.page(stream=stream, writer=writer).facts]

    def positions(self, stream: str = ORDERS) -> dict[InstanceName, Token]:
        return dict(self.wait(self.store.positions(StreamName(stream))))


class SkippedFactsContract(UsesStore):
    """What a follower leaves out (docs/operations.md, Facts that a function cannot take)."""

    def skipped(self, token: int, state: SkipState = SkipState.SKIPPED, writer: InstanceName = ME) -> SkippedFact:
        return SkippedFact(ORDERS, writer, fact(token, '["a\\u0000"]', "[1.0]"), state, "ValueError: é", "function")

    def store_skipped(self, *skipped: SkippedFact, upto: int = 9, reset: bool = False) -> None:
        before = self.wait(self.store.applied_positions(ORDERS, FOLLOWER)).get(ME, Token(0))
        expected = None if reset else before
        whole = Write(ORDERS, ME, Token(upto), (), expected, reset, FOLLOWER, skipped)
        self.wait(self.store.transaction().commit([whole]))

    def found(self, **query: Any) -> list[SkippedFact]:
        return [*self.wait(self.store.skipped_facts(FOLLOWER, **{"limit": 10, **query}))]

    def test_before_the_first_skip_there_is_none(self) -> None:
        self.assertEqual((self.found(), self.wait(self.store.skipped_counts(FOLLOWER, ORDERS))), ([], {}))
        self.store_skipped(upto=5)
        self.store_skipped(upto=3, reset=True)
        self.assertEqual(self.found(), [])

    def test_skipped_facts_are_stored_with_the_position_and_the_time(self) -> None:
        self.store_skipped(self.skipped(3), self.skipped(4))
        self.assertEqual(self.found(), [replace(self.skipped(each), changed_at=self.time) for each in (4, 3)])
        self.assertEqual(self.wait(self.store.applied_positions(ORDERS, FOLLOWER)), {ME: 9})
        self.assertEqual(self.wait(self.store.skipped_counts(FOLLOWER, ORDERS)), {ME: 2})

    def test_the_reason_of_any_exception_can_be_stored(self) -> None:
        failed = FailedFact(ORDERS, ME, self.skipped(3).fact, ValueError("\0 and \ud800"), attempts=1)
        self.store_skipped(replace(self.skipped(3), error=failed.reason))
        self.assertEqual([each.error for each in self.found()], ["ValueError: \\x00 and \\ud800"])

    def test_if_the_position_has_moved_nothing_is_skipped(self) -> None:
        whole = Write(ORDERS, ME, Token(9), (), Token(7), follower=FOLLOWER, skipped=[self.skipped(8)])
        with self.assertRaises(PositionMovedError):
            self.wait(self.store.transaction().commit([whole]))
        self.assertEqual(self.found(), [])

    def test_they_are_found_by_stream_fact_and_state_the_latest_first(self) -> None:
        self.store_skipped(self.skipped(3))
        self.time += 5.0
        self.store_skipped(self.skipped(2, SkipState.APPLIED))
        self.assertEqual([each.fact.token for each in self.found()], [2, 3])
        self.assertEqual([each.fact.token for each in self.found(limit=1)], [2])
        self.assertEqual([each.fact.token for each in self.found(stream=ORDERS, key=(ME, Token(3)))], [3])
        self.assertEqual([each.fact.token for each in self.found(states=[SkipState.APPLIED])], [2])
        self.assertEqual(self.found(stream=StreamName("stock")), [])
        self.assertEqual(self.found(key=(OTHER, Token(3))), [])
        self.assertEqual(self.wait(self.store.skipped_counts(FOLLOWER, ORDERS)), {ME: 1})

    def test_a_fact_whose_retry_is_requested_is_still_left_out(self) -> None:
        states = {3: SkipState.SKIPPED, 4: SkipState.RETRY_REQUESTED, 5: SkipState.APPLIED, 6: SkipState.SKIP_REQUESTED}
        self.store_skipped(*(self.skipped(token, state) for token, state in states.items()))
        self.assertEqual(self.wait(self.store.skipped_counts(FOLLOWER, ORDERS)), {ME: 2})

    def test_a_later_state_replaces_the_earlier_one(self) -> None:
        self.store_skipped(self.skipped(3))
        self.store_skipped(self.skipped(3, SkipState.APPLIED))
        self.assertEqual([each.state for each in self.found()], [SkipState.APPLIED])

    def test_a_reset_forgets_what_the_writer_has_lost(self) -> None:
        self.store_skipped(self.skipped(3), self.skipped(5))
        self.store_skipped(upto=4, reset=True)
        self.assertEqual([each.fact.token for each in self.found()], [3])


class KeptFactsContract(SkippedFactsContract):
    """What a retention deletes, and how that is noted (docs/operations.md, Retention)."""

    def forget(self, upto: int, *, stream: str = ORDERS, writer: InstanceName = ME, delete: bool = True) -> None:
        self.wait(self.store.forget_facts(StreamName(stream), writer, Token(upto), delete=delete))

    def gone(self, stream: str = ORDERS) -> dict[InstanceName, Token]:
        return dict(self.wait(self.store.gone(StreamName(stream))))

    def measured(self, after: int, upto: int, limit: int, stream: str = ORDERS) -> FactSlice:
        asked = self.store.measure(StreamName(stream), ME, after=Token(after), upto=Token(upto), limit=limit)
        return self.wait(asked)

    def slice(self, upto: int, rows: int = 1, size: int = 2, seconds: float = 0.5) -> FactSlice:
        return FactSlice(Token(upto), rows, size, seconds)

    def test_a_page_that_begins_below_what_is_gone_is_refused_with_where_to_begin(self) -> None:
        self.commit(write(9, facts(2, 3, 5, 8)))
        self.assertEqual(self.tokens(), [2, 3, 5, 8])
        self.forget(5)
        for after in (0, 2, 4):
            with self.assertRaisesRegex(FactsGoneError, "facts of orders by master up to 5 are gone") as caught:
                self.page(after=after)
            error = caught.exception
            self.assertEqual((error.stream, error.writer, error.upto), (ORDERS, ME, 5))
        self.assertEqual([each.token for each in self.page(after=5).facts], [8])
        self.assertEqual(self.gone(), {ME: 5})

    def test_what_is_gone_is_of_one_writer_and_one_stream(self) -> None:
        self.declare("other")
        self.commit(write(9, facts(2, 5)), write(9, facts(3), writer=OTHER), write(9, facts(4), stream="other"))
        self.assertEqual((self.gone(), self.tokens("other")), ({}, [4]))
        self.forget(5)
        self.assertEqual(self.tokens(writer=OTHER), [3])
        self.assertEqual((self.tokens("other"), self.gone("other")), ([4], {}))

    def test_a_copy_that_goes_back_has_what_comes_next(self) -> None:
        """What was gone above the position belongs to the history that the writer has lost."""
        self.commit(write(8, facts(7)), write(6, writer=OTHER))
        self.forget(6)
        self.forget(6, writer=OTHER)
        self.commit(write(3, reset=True))
        self.assertEqual(self.gone(), {ME: 3, OTHER: 6})
        self.commit(write(5, facts(4, 5), expected=3))
        self.assertEqual([each.token for each in self.page(after=3, upto=5).facts], [4, 5])
        self.commit(write(4, reset=True))
        self.assertEqual(self.gone(), {ME: 3, OTHER: 6})

    def test_what_is_gone_stays_gone(self) -> None:
        self.commit(write(9, facts(2, 5, 8)))
        self.forget(5)
        self.forget(3)
        self.assertEqual(self.gone(), {ME: 5})

    def test_no_position_goes_back_when_the_newest_fact_is_deleted(self) -> None:
        self.commit(write(2, facts(2, 7)))
        self.forget(7)
        self.assertEqual(self.positions(), {ME: 7})
        self.assertEqual(self.page(after=7, upto=9).facts, [])

    def test_what_a_copy_never_had_is_noted_and_nothing_is_deleted(self) -> None:
        self.commit(write(3, facts(2, 3)))
        self.forget(6, delete=False)
        self.assertEqual((self.gone(), self.positions()), ({ME: 6}, {ME: 3}))
        self.commit(write(8, facts(8), expected=3))
        self.assertEqual([each.token for each in self.page(after=6).facts], [8])

    def test_facts_of_a_negative_stream_are_forgotten_likewise(self) -> None:
        self.declare("backfill", negative=True)
        self.commit(write(9, facts(2, 3, 5), stream="backfill"))
        self.assertEqual(self.measured(2, 9, 9, "backfill"), FactSlice(Token(5), 2, 24, 0.0))
        self.forget(3, stream="backfill")
        with self.assertRaises(FactsGoneError):
            self.page(after=2, stream="backfill")
        self.assertEqual([each.token for each in self.page(after=3, stream="backfill").facts], [5])

    def test_a_slice_counts_rows_and_bytes_and_ends_with_a_fact(self) -> None:
        self.commit(write(9, [fact(2, "[]", "[1]"), fact(3, "[]"), fact(7, "[22]")]))
        self.assertEqual(self.measured(0, 9, 10), FactSlice(Token(7), 4, 11, 0.0))
        self.assertEqual(self.measured(2, 6, 10), FactSlice(Token(3), 1, 2, 0.0))
        self.assertEqual(self.measured(0, 9, 1).upto, 2)
        self.assertEqual(self.measured(7, 9, 10), FactSlice(Token(7), 0, 0, 0.0))

    def test_slices_are_stored_and_go_with_their_facts(self) -> None:
        self.assertEqual(self.wait(self.store.slices(ORDERS, ME)), [])
        self.commit(write(9, facts(2, 5, 8)))
        for each in (self.slice(0), self.slice(5), self.slice(2), self.slice(8, 1), self.slice(8, 2)):
            self.wait(self.store.store_slice(ORDERS, ME, each))
        self.assertEqual(
            self.wait(self.store.slices(ORDERS, ME)), [self.slice(0), self.slice(2), self.slice(5), self.slice(8, 2)]
        )
        self.forget(5)
        self.assertEqual(self.wait(self.store.slices(ORDERS, ME)), [self.slice(0), self.slice(8, 2)])
        self.assertEqual(self.wait(self.store.slices(ORDERS, OTHER)), [])


class StreamStoreContract(KeptFactsContract):
    """Facts, positions and receipts: the contract of every store."""

    # ---- facts

    def test_committed_facts_come_back_as_they_were(self) -> None:
        stored = [fact(2, '["a",1]'), fact(3, "null", "{}", '"x"'), fact(7, "3.5")]
        self.commit(write(7, stored))
        self.assertEqual(list(self.page().facts), stored)

    def test_texts_come_back_character_for_character(self) -> None:
        texts = [
            '"\\u0000\\u001e\\n"',
            '"\\ud800"',
            '"snowman ☃, ,;\'\\""',
            '{"a": [1,\t2]}',
            '"' + "x" * 1_000_000 + '"',
        ]
        self.commit(write(3, [fact(2, *texts), fact(3, *reversed(texts))]))
        self.assertEqual(list(self.page().facts), [fact(2, *texts), fact(3, *reversed(texts))])

    def test_after_excludes_and_upto_includes(self) -> None:
        self.commit(write(6, facts(2, 3, 4, 5, 6)))
        self.assertEqual([each.token for each in self.page(after=2, upto=5).facts], [3, 4, 5])

    def test_trap_16_facts_are_ascending_in_whichever_order_they_were_committed(self) -> None:
        for token in (9, 2, 10, 4):
            self.commit(write(token, facts(token)))
        self.assertEqual(self.tokens(), [2, 4, 9, 10])

    def test_rows_of_a_fact_keep_their_order(self) -> None:
        texts = [str(number) for number in range(300)]
        self.commit(write(2, [fact(2, *texts)]))
        self.assertEqual(self.page(limit=10).facts[0].texts, tuple(texts))

    def test_each_writer_has_its_own_facts(self) -> None:
        self.commit(write(5, facts(2, 5)), write(4, facts(3, 4), writer=OTHER))
        self.assertEqual(self.tokens(), [2, 5])
        self.assertEqual(self.tokens(writer=OTHER), [3, 4])
        self.assertEqual(self.tokens(writer=InstanceName("unknown")), [])

    def test_each_stream_has_its_own_facts(self) -> None:
        self.declare("orders.old-2")
        self.commit(write(2, facts(2)), write(3, facts(2, 3), stream="orders.old-2"))
        self.assertEqual((self.tokens(), self.tokens("orders.old-2")), ([2], [2, 3]))

    def test_a_page_that_is_not_limited_reaches_as_far_as_it_was_asked(self) -> None:
        self.commit(write(3, facts(2, 3)))
        self.assertEqual(self.page(upto=50), Page(self.page().facts, Token(50), limited=False))

    def test_a_page_of_nothing_reaches_as_far_as_it_was_asked(self) -> None:
        self.commit(write(3, facts(2, 3)))
        page = self.page(after=3, upto=50)
        self.assertEqual((list(page.facts), page.upto, page.limited), ([], 50, False))

    def test_a_page_as_long_as_the_limit_is_not_limited(self) -> None:
        self.commit(write(3, [fact(2, "1", "2"), fact(3)]))
        page = self.page(upto=9, limit=3)
        self.assertEqual((len(page.facts), page.upto, page.limited), (2, 9, False))

    def test_trap_13_a_limited_page_ends_with_a_whole_fact(self) -> None:
        """The limit falls into a fact, so the page ends before that fact, and its ``upto`` too."""
        self.commit(write(9, [fact(2, "1", "2"), fact(5, "1", "2", "3"), fact(9, "1")]))
        for limit in (2, 3, 4):
            page = self.page(limit=limit)
            self.assertEqual(([each.token for each in page.facts], page.upto, page.limited), ([2], 2, True))
        page = self.page(limit=5)
        self.assertEqual(([each.token for each in page.facts], page.upto, page.limited), ([2, 5], 5, True))

    def test_a_fact_longer_than_the_limit_comes_alone_and_whole(self) -> None:
        long = fact(5, *map(str, range(25)))
        self.commit(write(9, [long, *facts(9)]))
        page = self.page(limit=10)
        self.assertEqual((list(page.facts), page.upto, page.limited), ([long], 5, True))

    def test_a_long_fact_with_nothing_asked_beyond_it_is_not_limited(self) -> None:
        self.commit(write(5, [fact(5, "1", "2", "3")]))
        page = self.page(upto=5, limit=2)
        self.assertEqual((len(page.facts), page.upto, page.limited), (1, 5, False))

    def test_trap_14_pages_of_every_size_add_up_to_the_whole(self) -> None:
        stored = [fact(2 + 3 * number, *map(str, range(1 + number % 4))) for number in range(12)]
        self.commit(write(40, stored))
        for limit in range(1, 35):
            seen: list[Fact] = []
            page = self.page(upto=40, limit=limit)
            while page.limited:
                self.assertGreater(len(page.facts), 0)
                seen += page.facts
                page = self.page(after=page.upto, upto=40, limit=limit)
            self.assertEqual([*seen, *page.facts], stored)
            self.assertEqual(page.upto, 40)

    def test_a_page_of_no_rows_is_refused(self) -> None:
        self.assertRaises(StoreError, self.page, limit=0)

    def test_a_fact_without_rows_is_in_no_page_but_its_token_is_remembered(self) -> None:
        self.commit(write(2, [fact(2), empty(6), empty(7)]))
        self.assertEqual(self.tokens(), [2])
        self.assertEqual(self.positions(), {ME: 7})

    def test_a_token_is_used_once_by_any_writer(self) -> None:
        self.commit(write(3, [fact(3, "1", "2")]))
        for writer in (ME, OTHER):
            self.assertRaises(StoreError, self.commit, write(9, facts(9, 3), writer=writer))
        self.assertEqual(self.tokens(), [3])
        self.assertEqual(self.positions(), {ME: 3})

    def test_negative_streams_count_up_here_like_all_others(self) -> None:
        self.declare("backfill", negative=True)
        stored = [fact(2, "1", "2"), fact(3), fact(4, "1", "2", "3")]
        self.commit(write(4, stored[1:], stream="backfill"))
        self.commit(write(2, stored[:1], stream="backfill"))
        self.assertEqual(list(self.page(stream="backfill").facts), stored)
        self.assertEqual(list(self.page(stream="backfill", after=2, upto=3).facts), stored[1:2])
        self.assertEqual(self.page(stream="backfill", limit=3).upto, 3)
        self.assertEqual(list(self.page(stream="backfill", after=3, limit=2).facts), stored[2:])
        self.assertEqual(self.positions("backfill"), {ME: 4})
        self.commit(write(3, stream="backfill", reset=True))
        self.assertEqual((self.tokens("backfill"), self.positions("backfill")), ([2, 3], {ME: 3}))

    # ---- positions

    def test_a_new_stream_has_no_positions(self) -> None:
        self.assertEqual(self.positions(), {})

    def test_a_position_is_per_writer_what_was_stored(self) -> None:
        self.commit(write(7), write(0, writer=OTHER))
        self.assertEqual(self.positions(), {ME: 7, OTHER: 0})

    def test_a_position_is_the_largest_committed_token_if_that_is_more(self) -> None:
        self.commit(write(3, facts(5, 9)), write(4, facts(6), writer=OTHER))
        self.assertEqual(self.positions(), {ME: 9, OTHER: 6})

    def test_the_positions_of_an_idle_writer_and_of_a_busy_one_are_both_right(self) -> None:
        self.commit(write(2, facts(4), writer=OTHER))
        for token in range(10, 20):
            self.commit(write(token, facts(token)))
        self.assertEqual(self.positions(), {ME: 19, OTHER: 4})

    def test_upto_never_lowers_a_position(self) -> None:
        self.commit(write(9))
        self.commit(write(4, facts(3)))
        self.assertEqual(self.positions(), {ME: 9})
        self.commit(write(10, expected=9))
        self.assertEqual(self.positions(), {ME: 10})

    def test_expected_lets_a_position_move_on_from_where_it_is(self) -> None:
        self.commit(write(5, facts(5), expected=0))
        self.commit(write(6, facts(6), expected=5))
        self.assertEqual(self.positions(), {ME: 6})

    def test_expected_is_about_the_stored_position_not_about_committed_tokens(self) -> None:
        self.commit(write(5, facts(8)))
        self.assertRaises(PositionMovedError, self.commit, write(9, expected=8))
        self.commit(write(9, expected=5))

    def test_a_moved_position_fails_the_whole_transaction_and_is_named(self) -> None:
        self.declare("others")
        self.commit(write(5))
        writes = [write(3, facts(3), stream="others"), write(6, facts(6), expected=4)]
        error = self.assertRaises(PositionMovedError, self.commit, *writes)
        for word in ("orders", "master", "5", "4"):
            self.assertIn(word, str(error))
        self.assertEqual((self.tokens(), self.tokens("others"), self.positions("others")), ([], [], {}))
        self.assertRaises(PositionMovedError, self.commit, write(6, writer=OTHER, expected=1))

    def test_reset_lowers_the_position_and_deletes_what_the_writer_has_above_it(self) -> None:
        self.commit(write(9, facts(2, 5, 6, 9)), write(8, facts(4, 8), writer=OTHER))
        self.commit(write(5, reset=True))
        self.assertEqual((self.tokens(), self.tokens(writer=OTHER)), ([2, 5], [4, 8]))
        self.assertEqual(self.positions(), {ME: 5, OTHER: 8})
        self.commit(write(6, facts(6), expected=5))

    def test_a_reset_may_bring_facts_and_expect_a_position(self) -> None:
        self.commit(write(9, facts(2, 9)))
        self.assertRaises(PositionMovedError, self.commit, write(3, reset=True, expected=8))
        self.assertEqual(self.tokens(), [2, 9])
        self.commit(write(3, facts(3), reset=True, expected=9))
        self.assertEqual((self.tokens(), self.positions()), ([2, 3], {ME: 3}))

    def test_writes_of_one_transaction_follow_each_other(self) -> None:
        self.commit(write(2, facts(2), expected=0), write(3, facts(3), expected=2), write(1, reset=True, expected=3))
        self.assertEqual((self.tokens(), self.positions()), ([], {ME: 1}))

    # ---- receipts

    def test_a_receipt_is_recalled_by_its_key(self) -> None:
        self.commit(write(3, facts(2, 3)), receipt=Receipt("order 17", [Token(2), Token(3)]))
        self.assertEqual(self.wait(self.store.find_receipt("order 17")), [2, 3])
        self.assertIsNone(self.wait(self.store.find_receipt("order 18")))

    def test_a_second_receipt_of_one_key_fails_its_transaction(self) -> None:
        self.commit(write(2, facts(2)), receipt=Receipt("secret", [Token(2)]))
        error = self.assertRaises(
            ReceiptTakenError, self.commit, write(3, facts(3)), receipt=Receipt("secret", [Token(3)])
        )
        self.assertNotIn("secret", str(error), "the health of a process shows its last error to all")
        self.assertEqual((self.tokens(), self.wait(self.store.find_receipt("secret"))), ([2], [2]))

    def test_a_receipt_of_a_failed_transaction_is_not_kept(self) -> None:
        self.assertRaises(StoreError, self.commit, write(3, expected=1), receipt=Receipt("k", [Token(3)]))
        self.assertIsNone(self.wait(self.store.find_receipt("k")))

    def test_a_receipt_is_forgotten_after_a_day_and_its_key_is_free_again(self) -> None:
        self.commit(write(2, facts(2)), receipt=Receipt("k", [Token(2)]))
        self.time += DAY - 1
        self.assertEqual(self.wait(self.store.find_receipt("k")), [2])
        self.time += 1
        self.assertIsNone(self.wait(self.store.find_receipt("k")))
        self.commit(write(3, facts(3)), receipt=Receipt("k", [Token(3)]))
        self.assertEqual(self.wait(self.store.find_receipt("k")), [3])

    def test_a_jump_of_the_wall_clock_forgets_no_receipt(self) -> None:
        self.time += DAY  # it was steady
        self.commit(write(2, facts(2)), receipt=Receipt("k", [Token(2)]))
        for jump in (2 * DAY, 2000 * DAY, -2000 * DAY, 0.0):
            self.jump = jump
            self.assertEqual(self.wait(self.store.find_receipt("k")), [2])
            self.commit(receipt=Receipt(f"after {jump}", []))
            self.assertEqual(self.wait(self.store.find_receipt("k")), [2])
        self.time += DAY
        self.assertIsNone(self.wait(self.store.find_receipt("k")))

    # ---- transactions

    def test_a_transaction_ends_once(self) -> None:
        for end in ("commit", "rollback"):
            transaction = self.store.transaction()
            self.wait(transaction.commit([]) if end == "commit" else transaction.rollback())
            self.assertRaises(StoreError, self.wait, transaction.commit([write(9)]))
            self.assertRaises(StoreError, self.wait, transaction.execute("SELECT 1"))
        self.assertEqual(self.positions(), {})

    def test_rollback_after_a_commit_that_failed_is_harmless_and_after_another_is_refused(self) -> None:
        transaction = self.store.transaction()
        self.assertRaises(StoreError, self.wait, transaction.commit([write(9, expected=1)]))
        self.wait(transaction.rollback())
        transaction = self.store.transaction()
        self.wait(transaction.commit([write(9)]))
        self.assertRaises(StoreError, self.wait, transaction.rollback())

    def test_a_commit_of_nothing_is_done(self) -> None:
        self.commit()
        self.assertEqual(self.positions(), {})

    def test_commits_that_are_asked_for_together_are_all_done(self) -> None:
        asked = [self.store.transaction().commit([write(token, facts(token))]) for token in range(2, 102)]
        for each in [self.begin(each) for each in asked]:
            self.wait(each)
        self.assertEqual(self.tokens(), [*range(2, 102)])

    def test_a_transaction_that_does_not_wait_for_the_disk_is_stored_as_any_other(self) -> None:
        self.wait(self.store.transaction(synchronous=False).commit([write(2, facts(2))]))
        self.assertEqual((self.tokens(), self.positions()), ([2], {ME: 2}))
        self.wait(self.store.sync())
        self.assertRaises(
            StoreError, self.wait, self.store.transaction(synchronous=False).commit([write(5, expected=1)])
        )
        self.assertEqual(self.positions(), {ME: 2})

    def test_of_commits_that_are_asked_for_together_the_bad_ones_fail_alone(self) -> None:
        self.commit(write(5, facts(5)))
        writes = [write(token, facts(token)) for token in range(10, 40)]
        writes[3] = write(41, facts(41), expected=3)
        writes[17] = write(42, facts(42, 5))
        writes[18] = write(43, facts(43), expected=26)
        asked = [self.begin(self.store.transaction().commit([each])) for each in writes]
        failed = []
        for number, each in enumerate(asked):
            try:
                self.wait(each)
            except StoreError:
                failed.append(number)
        self.assertEqual(failed, [3, 17])
        self.assertEqual(self.tokens(), [5, *(token for token in range(10, 40) if token not in (13, 27, 28)), 43])

    # ---- the store

    def test_a_stream_that_was_not_declared_is_refused_by_name(self) -> None:
        for ask in (
            lambda: self.page(stream="nowhere"),
            lambda: self.positions("nowhere"),
            lambda: self.store.sequence(StreamName("nowhere")),
            lambda: self.commit(write(2, facts(2)), write(2, stream="nowhere")),
        ):
            self.assertIn("nowhere", str(self.assertRaises(UnknownStreamError, ask)))
        self.assertEqual(self.tokens(), [])

    def test_declaring_a_stream_twice_is_harmless(self) -> None:
        self.commit(write(2, facts(2)))
        self.declare(ORDERS)
        self.assertEqual(self.tokens(), [2])

    def test_any_name_that_a_stream_may_have_will_do(self) -> None:
        for name in ("select", "_", "a.b-c", "Order", "x" * 100):
            self.declare(name)
            self.commit(write(2, facts(2), stream=name))
            self.assertEqual((self.tokens(name), self.positions(name)), ([2], {ME: 2}))

    def test_a_process_may_claim_its_name_again(self) -> None:
        for _ in range(3):
            self.wait(self.store.claim(ME))

    def test_a_process_without_a_claim_is_not_present(self) -> None:
        self.commit(write(2, facts(2), writer=OTHER))
        self.assertEqual(self.wait(self.store.claimed_elsewhere([OTHER])), {})

    def test_a_name_without_a_claim_is_not_taken_over(self) -> None:
        self.commit(write(2, facts(2), writer=OTHER))
        self.assertFalse(self.wait(self.store.take_over(OTHER)))
        self.wait(self.store.claim(OTHER))

    def test_ids_come_from_a_sequence_or_the_writer_counts(self) -> None:
        sequence = self.store.sequence(ORDERS)
        if sequence is not None:
            self.assertEqual([*self.wait(sequence.allocate(2)), *self.wait(sequence.allocate(3))], [2, 3, 4, 5, 6])

    def test_a_follower_keeps_its_positions_in_a_stream_that_is_not_declared(self) -> None:
        self.assertEqual(self.applied(), {})
        self.commit(write(5, stream="copied", expected=0, follower=FOLLOWER))
        self.commit(write(7, stream="copied", writer=OTHER, expected=0, follower=FOLLOWER))
        self.commit(write(9, stream="copied", expected=5, follower=FOLLOWER))
        self.assertEqual(self.applied(), {ME: 9, OTHER: 7})
        with self.assertRaisesRegex(PositionMovedError, "is 9, not 5"):
            self.commit(write(10, stream="copied", expected=5, follower=FOLLOWER))
        self.commit(write(3, stream="copied", reset=True, follower=FOLLOWER))
        self.assertEqual(self.applied(), {ME: 3, OTHER: 7})

    def test_what_a_follower_counts_is_stored_with_its_position(self) -> None:
        def counts() -> dict[InstanceName, str]:
            return dict(self.wait(self.store.applied_counts(StreamName("copied"), FOLLOWER)))

        self.assertEqual(counts(), {})
        of: dict[str, Any] = {"stream": "copied", "follower": FOLLOWER}
        with self.assertRaises(PositionMovedError):
            self.commit(write(5, expected=3, counts="never", **of))
        self.assertEqual(counts(), {})
        self.commit(
            write(5, expected=0, counts="first", **of), write(7, writer=OTHER, expected=0, counts="[7,[]]", **of)
        )
        self.assertEqual(counts(), {ME: "first", OTHER: "[7,[]]"})
        with self.assertRaises(PositionMovedError):
            self.commit(write(6, expected=5, counts="lost", **of), write(9, writer=OTHER, expected=3, **of))
        self.commit(write(9, expected=5, counts="next", **of))
        self.commit(write(12, expected=9, **of))  # of an older program
        self.assertEqual(counts(), {ME: "next", OTHER: "[7,[]]"})
        self.commit(write(3, reset=True, counts="back", **of))
        self.assertEqual((counts(), self.applied()), ({ME: "back", OTHER: "[7,[]]"}, {ME: 3, OTHER: 7}))

    def applied(self, follower: InstanceName | None = None) -> Mapping[InstanceName, Token]:
        return self.wait(self.store.applied_positions(StreamName("copied"), follower or FOLLOWER))

    def test_a_table_may_be_claimed_again_by_its_writer(self) -> None:
        for _ in range(2):
            self.wait(self.store.claim_tables([ORDERS], ME, copy=True))
        self.commit(write(5, facts(5), expected=0))
        self.wait(self.store.claim_tables([ORDERS], ME, copy=True))
        self.declare("others")
        for _ in range(2):
            self.wait(self.store.claim_tables([StreamName("others")], ME, copy=False))

    def test_streams_that_are_declared_together_are_as_if_declared_one_by_one(self) -> None:
        names = [StreamName(f"s{number}") for number in range(7)]
        for _ in range(2):
            self.wait(self.store.declare(*[StreamDefinition(each, negative=each == "s3") for each in names[:5]]))
        self.commit(write(2, facts(2), stream="s1"), write(3, stream="s2"), write(4, facts(4, 6), stream="s3"))
        self.wait(self.store.declare(*[StreamDefinition(each, negative=each == "s3") for each in names]))
        self.commit(write(0, facts(5), stream="s6", writer=OTHER))
        expected = {"s1": {ME: 2}, "s2": {ME: 3}, "s3": {ME: 6}, "s6": {OTHER: 5}}
        found = self.wait(self.store.positions_of(names))
        self.assertEqual(
            {stream: {w: at for w, at in each.items() if at} for stream, each in found.items()},
            {**{name: {} for name in names}, **expected},
        )
        for name in names:
            self.assertEqual(self.wait(self.store.positions(name)), found[name])
        with self.assertRaises(UnknownStreamError):
            self.wait(self.store.positions_of([names[0], StreamName("unknown")]))

    def test_stored_positions_of_all_streams_come_in_one_answer(self) -> None:
        """A committed fact does not count, because it may be above an open ID."""
        self.declare("debts", negative=True)
        self.commit(write(2, facts(2, 7)), write(4, facts(4), stream="debts", writer=OTHER))
        self.assertEqual(self.wait(self.store.stored_positions()), {ORDERS: {ME: 2}, "debts": {OTHER: 4}})
        self.assertEqual(self.positions(), {ME: 7})

    def test_a_history_is_stored_per_stream_writer_and_follower(self) -> None:
        first, second = (
            [Epoch("a", Token(1), Token(1))],
            [Epoch("a", Token(1), Token(1)), Epoch("b", Token(4), Token(6))],
        )
        invoices = StreamName("invoices")
        self.assertEqual([*self.wait(self.store.history(ORDERS, ME))], [])
        self.wait(self.store.store_histories(ME, {ORDERS: first, invoices: second}))
        self.wait(self.store.store_histories(ME, {ORDERS: second}, FOLLOWER))
        self.assertEqual([*self.wait(self.store.history(ORDERS, ME))], first)
        self.assertEqual([*self.wait(self.store.history(invoices, ME))], second)
        self.assertEqual([*self.wait(self.store.history(ORDERS, ME, FOLLOWER))], second)
        self.assertEqual([*self.wait(self.store.history(ORDERS, OTHER))], [])
        self.wait(self.store.store_histories(ME, {ORDERS: second}))
        self.assertEqual([*self.wait(self.store.history(ORDERS, ME))], second)
        own = self.wait(self.store.histories(ME))
        self.assertEqual({stream: [*each] for stream, each in own.items()}, {ORDERS: second, invoices: second})
        self.assertEqual(self.wait(self.store.histories(OTHER)), {})

    def test_a_position_and_a_history_are_raised_together_or_not_at_all(self) -> None:
        first, second, third = (Epoch(name, Token(at), Token(at)) for name, at in (("a", 1), ("b", 4), ("c", 5)))

        def raise_to(upto: int, expected: int, history: list[Epoch], former: list[Epoch]) -> None:
            self.wait(self.store.raise_position(write(upto, expected=expected), history, former))

        def stored() -> tuple[dict[InstanceName, Token], list[Epoch]]:
            return self.positions(), [*self.wait(self.store.history(ORDERS, ME))]

        raise_to(4, 0, [first], [])  # the writer of an older version has no history
        self.assertEqual(stored(), ({ME: 4}, [first]))
        for expected, former in ((3, [first]), (4, [])):
            with self.assertRaises(PositionMovedError):
                raise_to(6, expected, [first, third], former)
            self.assertEqual(stored(), ({ME: 4}, [first]))
        both = [
            self.begin(self.store.raise_position(write(upto, expected=4), [first, epoch], [first]))
            for upto, epoch in ((5, second), (6, third))
        ]
        stored_by = 0
        for each in both:
            with suppress(PositionMovedError):
                self.wait(each)
                stored_by += 1
        self.assertEqual(stored_by, 1)
        self.assertIn(stored(), (({ME: 5}, [first, second]), ({ME: 6}, [first, third])))
        raise_to(7, max(stored()[0].values()), [first], stored()[1])
        self.assertEqual(stored(), ({ME: 7}, [first]))

    def test_what_is_left_out_is_noted_with_the_position_that_passes_it(self) -> None:
        """A copy that is killed between the two would refuse facts that another source may still have."""
        left_out = Write(ORDERS, ME, Token(7), (), expected=Token(3), gone=Token(6))
        with self.assertRaises(PositionMovedError):
            self.commit(left_out)
        self.assertEqual(dict(self.wait(self.store.gone(ORDERS))), {})
        self.commit(write(3, facts(2, 3)))
        self.commit(left_out)
        self.assertEqual((self.positions(), dict(self.wait(self.store.gone(ORDERS)))), ({ME: 7}, {ME: 6}))
        self.assertRaises(FactsGoneError, self.page, after=5)
        self.commit(write(4, reset=True))
        self.assertEqual(dict(self.wait(self.store.gone(ORDERS))), {ME: 4})

    def test_check_returns_while_the_store_works(self) -> None:
        self.wait(self.store.check())
        self.assertEqual(self.positions(), {})

    def test_nothing_is_answered_before_open_and_after_close(self) -> None:
        unopened = self.make_store(self.make_clock())
        self.wait(self.store.close())
        self.wait(self.store.close())
        for store in (unopened, self.store):
            self.assertRaises(StoreError, self.wait, store.check())
            self.assertRaises(StoreError, self.wait, store.find_receipt("k"))
            self.assertRaises(StoreError, self.wait, store.claim(ME))
            self.assertRaises(StoreError, self.wait, store.declare(StreamDefinition("orders")))
            self.assertRaises(StoreError, self.wait, store.transaction().commit([]))
        self.wait(unopened.close())


class SqlTransactionContract(UsesStore):
    """SQL of the application in a transaction: the contract of every store on a database."""

    mark = "?"  # the place of a parameter

    def setUp(self) -> None:
        super().setUp()
        self.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)")
        self.insert = f"INSERT INTO orders VALUES ({self.mark}, {self.mark})"

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own."""
        transaction = self.store.transaction()
        rows = self.wait(transaction.execute(sql, parameters))
        self.wait(transaction.commit([]))
        return rows

    def orders(self) -> list[tuple[Any, ...]]:
        return self.execute("SELECT id, state FROM orders ORDER BY id")

    def test_a_statement_returns_its_rows(self) -> None:
        self.execute(self.insert, (1, "placed"))
        self.assertEqual(self.execute(f"SELECT state, id FROM orders WHERE id = {self.mark}", [1]), [("placed", 1)])
        self.assertEqual(self.execute("SELECT * FROM orders WHERE id = 9"), [])

    def test_executemany_runs_a_statement_per_item(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.executemany(self.insert, [(1, "placed"), (2, "paid")]))
        self.wait(transaction.commit([]))
        self.assertEqual(self.orders(), [(1, "placed"), (2, "paid")])

    def test_a_function_runs_inside_the_transaction(self) -> None:
        def work(database: ISqlExecutor) -> list[tuple[Any, ...]]:
            database.executemany(self.insert, [(2, "paid"), (3, "sent")])
            return database.execute("SELECT id FROM orders ORDER BY id")

        transaction = self.store.transaction()
        self.wait(transaction.execute(self.insert, (1, "placed")))
        self.assertEqual(self.wait(transaction.run(work)), [(1,), (2,), (3,)])
        self.wait(transaction.commit([]))
        self.assertEqual(self.wait(self.store.read(lambda it: it.execute("SELECT count(*) FROM orders"))), [(3,)])

    def test_what_a_function_raises_comes_back_and_its_statements_can_be_undone(self) -> None:
        def work(database: ISqlExecutor) -> None:
            database.execute(self.insert, (1, "placed"))
            raise ZeroDivisionError

        transaction = self.store.transaction()
        self.assertRaises(ZeroDivisionError, self.wait, transaction.run(work))
        self.wait(transaction.rollback())
        self.assertEqual(self.orders(), [])
        transaction = self.store.transaction()
        self.assertRaises(StoreError, self.wait, transaction.run(lambda database: database.execute("SELECT nothing")))
        self.wait(transaction.rollback())
        self.assertRaises(StoreError, self.wait, self.store.read(lambda database: database.execute("SELECT nothing")))

    def test_commit_stores_facts_and_what_was_executed_together(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute(self.insert, (1, "placed")))
        self.wait(transaction.commit([write(2, facts(2))], Receipt("k", [Token(2)])))
        self.assertEqual(
            (self.orders(), self.tokens(), self.wait(self.store.find_receipt("k"))), ([(1, "placed")], [2], [2])
        )

    def test_a_commit_that_fails_undoes_what_was_executed(self) -> None:
        for bad in (write(3, facts(3), expected=1), write(3, stream="nowhere")):
            transaction = self.store.transaction()
            self.wait(transaction.execute(self.insert, (1, "placed")))
            self.assertRaises(
                (StoreError, UnknownStreamError), self.wait, transaction.commit([write(2, facts(2)), bad])
            )
            self.wait(transaction.rollback())
            self.assertEqual((self.orders(), self.tokens()), ([], []))

    def test_rollback_undoes_what_was_executed(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute(self.insert, (1, "placed")))
        self.wait(transaction.rollback())
        self.assertEqual(self.orders(), [])
        self.assertRaises(StoreError, self.wait, transaction.execute(self.insert, (2, "late")))

    def test_statements_run_one_after_the_other_however_they_are_awaited(self) -> None:
        transaction = self.store.transaction()
        asked = [self.begin(transaction.execute(self.insert, (number, "placed"))) for number in range(20)]
        asked.append(self.begin(transaction.execute("UPDATE orders SET state = 'paid'")))
        end = self.begin(transaction.commit([write(2, facts(2))]))
        for each in asked:
            self.wait(each)
        self.wait(end)
        self.assertEqual(self.orders(), [(number, "paid") for number in range(20)])

    def test_statements_that_are_asked_for_before_it_is_their_turn_keep_their_order(self) -> None:
        first, second = self.store.transaction(), self.store.transaction()
        self.wait(first.execute("SELECT 1"))
        asked = [self.begin(second.execute(self.insert, (number, "placed"))) for number in range(3)]
        asked.append(self.begin(second.execute("UPDATE orders SET state = 'paid'")))
        end = self.begin(second.commit([]))
        self.wait(first.rollback())
        for each in asked:
            self.wait(each)
        self.wait(end)
        self.assertEqual(self.orders(), [(number, "paid") for number in range(3)])

    def test_a_refused_statement_has_the_databases_message_and_can_be_rolled_back(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute(self.insert, (1, "placed")))
        for sql, parameters, word in (
            ("SELECT * FROM nowhere", (), "nowhere"),
            ("SELEKT 1", (), "SELEKT"),
            (self.insert, (1, [2]), ""),
            (self.insert, (1,), ""),
        ):
            self.assertIn(word, str(self.assertRaises(StoreError, self.wait, transaction.execute(sql, parameters))))
        self.wait(transaction.rollback())
        self.assertEqual(self.orders(), [])

    def test_an_application_may_not_begin_or_end_transactions_itself(self) -> None:
        transaction = self.store.transaction()
        self.wait(transaction.execute(self.insert, (1, "placed")))
        comments = "-- so\n/* or\nso */ ;Rollback"
        for sql in ("COMMIT", " begin", comments, "SAVEPOINT a", "release a", "END;", "\ufeffEND"):
            self.assertRaises(StoreError, self.wait, transaction.execute(sql))
        error = self.assertRaises(StoreError, self.wait, transaction.executemany("COMMIT", [()]))
        self.assertIn(
            "COMMIT cannot run here: this transaction commits by itself when its block or function", str(error)
        )
        self.wait(transaction.rollback())
        self.assertEqual(self.orders(), [])

    async def interact(self, work: Callable[[ISqlExecutor, IReactorCalls], Sequence[Write]]) -> None:
        await self.store.interact(work)

    def place(self, order: int, *, raises: type[BaseException] | None = None) -> Deferred[None]:
        """Interact: insert an order, write a fact with its number as the token, and raise."""

        def work(database: ISqlExecutor, _: object) -> Sequence[Write]:
            database.execute(self.insert, (order, "placed"))
            if raises is not None:
                raise raises
            return [write(order, facts(order))]

        return self.begin(self.interact(work))

    def test_a_function_and_the_facts_that_it_returns_are_one_transaction(self) -> None:
        self.wait(self.place(2))
        self.assertEqual((self.orders(), self.tokens()), ([(2, "placed")], [2]))

    def test_of_functions_that_wait_each_fails_alone(self) -> None:
        bad = {3: ZeroDivisionError, 7: SystemExit, 9: ZeroDivisionError}
        asked = [(number, self.place(number, raises=bad.get(number))) for number in range(2, 10)]
        for number, each in asked:
            if number in bad:
                self.assertRaises(bad[number], self.wait, each)
            else:
                self.wait(each)
        self.assertRaises(StoreError, self.wait, self.place(5))  # of a number that is stored
        good = [2, 4, 5, 6, 8]
        self.assertEqual((self.orders(), self.tokens()), ([(number, "placed") for number in good], good))

    def test_facts_that_cannot_be_stored_undo_the_function_that_returned_them(self) -> None:
        def work(database: ISqlExecutor, _: object) -> Sequence[Write]:
            database.execute(self.insert, (1, "placed"))
            return [write(2, facts(2), expected=99)]

        self.assertRaises(PositionMovedError, self.wait, self.interact(work))
        self.assertEqual((self.orders(), self.tokens()), ([], []))

    def test_a_function_may_not_end_the_transaction(self) -> None:
        def work(database: ISqlExecutor, _: object) -> Sequence[Write]:
            database.execute(self.insert, (1, "placed"))
            for sql in ("COMMIT", "RELEASE interaction", "ROLLBACK", ";\ufeff;COMMIT"):
                self.assertRaises(StoreError, database.execute, sql)
                self.assertRaises(StoreError, database.executemany, sql, [()])
            raise ZeroDivisionError

        self.assertRaises(ZeroDivisionError, self.wait, self.interact(work))
        self.assertEqual(self.orders(), [])

    def test_a_function_may_wait_for_the_reactors_thread(self) -> None:
        here = get_ident()

        async def ask() -> bool:
            return get_ident() == here

        answers = []

        def work(_: ISqlExecutor, call_reactor: IReactorCalls) -> Sequence[Write]:
            answers.extend([get_ident() == here, call_reactor(ask)])
            return []

        self.wait(self.interact(work))
        self.assertEqual(answers, [False, True])

    def test_transactions_take_turns_in_the_order_in_which_they_began(self) -> None:
        first, second = self.store.transaction(), self.store.transaction()
        self.wait(first.execute(self.insert, (1, "first")))
        waiting = self.begin(second.execute("UPDATE orders SET state = 'second' WHERE state = 'first'"))
        alone = self.begin(self.store.transaction().commit([write(5, facts(5), expected=2)]))
        third = self.store.transaction()
        last = self.begin(third.execute("SELECT state FROM orders"))
        self.wait(first.commit([]))
        self.wait(waiting)
        self.wait(second.commit([write(2, facts(2))]))
        self.wait(alone)
        self.assertEqual(self.wait(last), [("second",)])
        self.wait(third.rollback())
        self.assertEqual(self.tokens(), [2, 5])
