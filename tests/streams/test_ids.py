"""IDs from a sequence that has to be waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import SequenceRegressedError, StoreError
from replication.streams.ids import Allocation, StreamIds
from replication.wire.grammar import StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence


class Asked:
    """A sequence whose answers a test gives."""

    def __init__(self) -> None:
        self.ids = StreamIds(Token(1))
        self.ids.begin(Token(1), self)
        self.pending = self.ids.pending
        self.answers: list[Deferred[Sequence[int]]] = []

    async def allocate(self, count: int) -> Sequence[int]:
        assert count == 2
        self.answers.append(Deferred())
        return await self.answers[-1]

    def begin(self) -> Deferred[Sequence[int]]:
        return Deferred.fromCoroutine(self.ids.reserve(2))


class DrawTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.asked = Asked()
        self.pending = self.asked.pending

    def assert_nothing_is_left(self) -> None:
        """No ID is open, and no floor was left behind."""
        self.assertEqual((self.pending.settled, self.pending.open_count), (1, 0))
        self.pending.note(9)
        self.assertEqual(self.pending.settled, 9)

    def test_ids_are_open_once_they_are_there(self) -> None:
        drawing = self.asked.begin()
        self.asked.answers[0].callback([4, 5])
        self.assertEqual(self.successResultOf(drawing), [4, 5])
        self.assertEqual((self.pending.settled, self.pending.open_count), (3, 2))  # 2 and 3 are another process's

    def test_trap_36_nothing_is_passed_that_may_be_on_its_way(self) -> None:
        drawing = self.asked.begin()
        self.pending.note(7)
        self.assertEqual(self.pending.settled, 1)
        self.asked.answers[0].callback([4, 5])
        self.successResultOf(drawing)
        self.assertEqual(self.pending.settled, 3)
        self.pending.complete([4, 5])
        self.assertEqual(self.pending.settled, 7)

    def test_cancelled_while_it_asks(self) -> None:
        drawing = self.asked.begin()
        drawing.cancel()
        self.failureResultOf(drawing, CancelledError)
        self.assert_nothing_is_left()

    def test_a_coroutine_that_is_dropped(self) -> None:
        work = self.asked.ids.reserve(2)
        work.send(None)
        work.close()
        self.assert_nothing_is_left()

    def test_a_sequence_that_fails(self) -> None:
        drawing = self.asked.begin()
        self.asked.answers[0].errback(OSError("gone"))
        self.failureResultOf(drawing, OSError)
        self.assert_nothing_is_left()

    def test_a_sequence_that_repeats_itself_is_refused(self) -> None:
        drawing = self.asked.begin()
        self.asked.answers[0].callback([1, 2])
        self.failureResultOf(drawing, SequenceRegressedError)
        self.assert_nothing_is_left()


def test_ids_settle_no_further_than_others_have_come_who_are_watched() -> None:
    ids = StreamIds(Token(1))
    ids.begin(Token(5), None)
    assert (ids.horizon_known, ids.within_horizon(5)) == (True, 5)
    ids.begin_with_external_writers()
    assert (ids.horizon_known, ids.within_horizon(5)) == (False, 0)
    ids.raise_horizon(Token(0))  # of an empty table, which may begin with ID 1
    assert (ids.horizon_known, ids.within_horizon(5)) == (True, 0)
    ids.raise_horizon(Token(9))
    ids.raise_horizon(Token(7))
    assert (ids.within_horizon(ids.pending.settled), ids.within_horizon(8)) == (9, 8)


def test_without_a_sequence_the_process_counts_from_the_start() -> None:
    ids = StreamIds(Token(5))
    assert (ids.settled, ids.durable) == (5, 5)
    reserving = ids.reserve(2)
    with pytest.raises(StopIteration) as returned:
        reserving.send(None)
    assert returned.value.value == [6, 7]
    ids.begin(Token(9), None)
    assert (ids.settled, ids.durable) == (9, 9)


def test_there_is_no_id_above_64_bits() -> None:
    """A program may have stored the largest ID.  An append then fails, although its rows are right."""
    ids = StreamIds(Token(2**63 - 2))
    with pytest.raises(StoreError, match="too few IDs are left: 9223372036854775806 is used"):
        ids.reserve(2).send(None)
    with pytest.raises(StopIteration) as returned:
        ids.reserve(1).send(None)
    assert returned.value.value == [2**63 - 1]
    with pytest.raises(StoreError, match="too few IDs are left"):
        ids.reserve(1).send(None)
    assert (ids.settled, ids.pending.highest) == (2**63 - 2, 2**63 - 1)


class AllocationTests(SynchronousTestCase):
    """IDs that transactions allocate; they end in any order."""

    def setUp(self) -> None:
        self.pending = Asked().pending
        self.first, self.second = (Allocation(self.pending, StreamName("orders")) for _ in range(2))

    def test_nothing_settles_from_the_beginning_of_a_transaction_to_its_end(self) -> None:
        self.first.expect()
        self.second.expect()
        self.first.allocated(2)
        self.second.allocated(3)
        self.assertEqual(self.second.end(), [3])
        self.pending.complete([3])
        self.assertEqual((self.pending.settled, self.pending.open_count), (1, 1))
        self.assertEqual(self.first.end(), [2])
        self.assertEqual(self.pending.settled, 1)
        self.pending.complete([2])
        self.assertEqual((self.pending.settled, self.pending.open_count), (3, 0))

    def test_a_transaction_that_never_began_or_got_no_id_holds_nothing_back(self) -> None:
        self.first.expect()
        self.assertEqual((self.first.end(), self.second.end()), ([], []))
        self.pending.note(9)
        self.assertEqual((self.pending.settled, self.pending.open_count), (9, 0))

    def test_of_a_transaction_that_is_tried_again_the_last_id_counts(self) -> None:
        self.first.expect()
        self.first.allocated(2)
        self.first.allocated(4)
        self.assertEqual((self.first.place(), self.first.end()), ((4, 0), [4]))

    def test_an_id_that_was_used_is_refused_at_once(self) -> None:
        self.pending.note(5)
        self.first.expect()
        with pytest.raises(SequenceRegressedError):
            self.first.allocated(5)
        self.assertEqual((self.first.end(), self.pending.settled), ([], 5))

    def test_an_id_that_is_open_already_holds_nothing_back(self) -> None:
        for each in self.first, self.second:
            each.expect()
            each.allocated(2)
        self.first.end()
        with pytest.raises(SequenceRegressedError):
            self.second.end()
        self.pending.complete([2])
        self.assertEqual((self.pending.settled, self.pending.open_count), (2, 0))

    def test_transactions_allocate_from_a_sequence_that_external_writers_do_not_use(self) -> None:
        ids = Asked().ids
        self.assertTrue(ids.allocated_in_transactions)
        ids.begin_with_external_writers()
        self.assertFalse(ids.allocated_in_transactions)
        self.assertFalse(StreamIds(Token(1)).allocated_in_transactions, "a counter of this process")
