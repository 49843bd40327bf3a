"""Stream IDs that complete in any order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replication.errors import SequenceRegressedError, StreamError
from replication.streams.pending import PendingIds


def test_the_example_of_the_streams_document() -> None:
    """docs/protocol/ids.md F1: a stream at 1 follows its writer through completions in any order."""
    pending = PendingIds(1)
    assert [*pending.reserve(), *pending.reserve()] == [2, 3]
    assert pending.settled == 1
    pending.complete([3])
    assert pending.settled == 1  # waiting for 2
    pending.complete([2])
    assert pending.settled == 3  # jumps
    assert [*pending.reserve(), *pending.reserve(), *pending.reserve()] == [4, 5, 6]
    assert pending.settled == 3
    pending.complete([5])
    assert pending.settled == 3
    pending.complete([4])
    assert pending.settled == 5  # even though 6 is pending
    pending.complete([6])
    assert pending.settled == 6


def test_many_ids_may_be_reserved_and_completed_at_once() -> None:
    pending = PendingIds(1)
    assert pending.reserve(3) == [2, 3, 4]
    assert pending.reserve(2) == [5, 6]
    pending.complete([4, 2, 6])
    assert (pending.settled, pending.open_count, pending.oldest()) == (2, 2, 3)
    pending.complete(range(3, 4))
    pending.complete([5])
    assert (pending.settled, pending.open_count, pending.oldest(), pending.highest) == (6, 0, None, 6)


@pytest.mark.parametrize("ids", [[3, 3], [1], [4], [2], [3, 4]])
def test_an_id_is_completed_once(ids: list[int]) -> None:
    pending = PendingIds(1)
    pending.complete(pending.reserve())
    pending.reserve()
    with pytest.raises(StreamError, match="not all open"):
        pending.complete(ids)


def test_trap_36_an_id_that_is_being_allocated_does_not_settle() -> None:
    """The position does not pass an ID between its allocation and its arrival here."""
    pending = PendingIds(1)
    slow, fast = pending.expect(), pending.expect()
    pending.open(fast, [3])  # 2 was allocated before, for the slow request
    pending.complete([3])
    assert pending.settled == 1
    pending.open(slow, [2])
    assert pending.settled == 1
    pending.complete([2])
    assert pending.settled == 3


def test_ids_of_a_slower_request_are_open_below_those_of_a_faster_one() -> None:
    pending = PendingIds(1)
    floors = [pending.expect() for _ in range(3)]
    pending.open(floors[0], [9, 4])
    pending.open(floors[1], [8])
    pending.complete([8])
    pending.open(floors[2], [7, 3])
    assert pending.highest == 9
    settled = []
    for each in (3, 7, 4, 9):
        pending.complete([each])
        settled.append(pending.settled)
    assert settled == [3, 3, 8, 9]


def test_ids_of_other_processes_do_not_delay_settling() -> None:
    pending = PendingIds(1)
    pending.open(pending.expect(), [5])
    assert pending.settled == 4
    pending.complete([5])
    assert pending.settled == 5


def test_an_abandoned_request_does_not_delay_settling() -> None:
    pending = PendingIds(1)
    failed = pending.expect()
    pending.complete(pending.reserve())
    assert pending.settled == 1
    pending.abandon(failed)
    assert pending.settled == 2


def test_an_unknown_request_cannot_be_abandoned() -> None:
    pending = PendingIds(1)
    with pytest.raises(StreamError, match="no request"):
        pending.abandon(1)
    with pytest.raises(StreamError, match="no request"):
        pending.open(1, [2])


def test_a_request_may_bring_no_ids() -> None:
    pending = PendingIds(1)
    pending.open(pending.expect(), [])
    assert (pending.settled, pending.open_count) == (1, 0)


@pytest.mark.parametrize("ids", [[5], [4, 7], [7, 7], [6]])
def test_trap_41_a_sequence_that_goes_back_is_refused_and_the_request_kept(ids: list[int]) -> None:
    pending = PendingIds(5)
    first, second = pending.expect(), pending.expect()
    pending.open(first, [6])
    expected = r"others are open: set it forward, past every ID that is stored$"
    with pytest.raises(SequenceRegressedError, match=expected) as caught:
        pending.open(second, ids)
    assert (caught.value.ids, caught.value.used_upto) == (ids, second)
    pending.complete([6])
    assert pending.settled == 5
    pending.abandon(second)
    assert pending.settled == 6


class LocalCounter(RuleBasedStateMachine):
    """IDs of an own counter, completed in any order, against a model that checks every ID."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()
        self.reported = 0

    @initialize(start=st.integers(1, 3))
    def begin(self, start: int) -> None:
        self.pending = PendingIds(start)
        self.highest = start

    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        ids = self.pending.reserve(count)
        assert ids == [*range(self.highest + 1, self.highest + count + 1)]
        self.open.update(ids)
        self.highest = ids[-1]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, max_size=3, unique=True))
        foretold = self.pending.settled_with(ids)
        self.pending.complete(ids)
        assert self.pending.settled == foretold
        self.open.difference_update(ids)

    @rule(data=st.data())
    def complete_something_else(self, data: st.DataObject) -> None:
        closed = data.draw(st.integers(0, self.highest + 3).filter(lambda each: each not in self.open))
        with pytest.raises(StreamError):
            self.pending.complete([closed])

    def bound(self) -> int:
        return self.highest

    def requests(self) -> int:
        return 0

    @invariant()
    def settled_is_the_largest_id_with_nothing_unfinished_below(self) -> None:
        settled = self.pending.settled
        below = range(self.bound() + 1)
        assert settled == max(each for each in below if not any(other <= each for other in self.open))
        assert settled >= self.reported
        self.reported = settled
        assert self.pending.highest == self.highest
        assert self.pending.open_count == len(self.open) + self.requests()
        assert self.pending.oldest() == min(self.open, default=None)


class SharedSequence(LocalCounter):
    """IDs of a shared sequence, by requests that overtake each other, fail or are cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: list[tuple[int, list[int] | None]] = []  # a floor, and the IDs allocated for it
        self.sequence = 10

    def reserve(self, count: int) -> None:
        """Do nothing: a shared sequence has no own counter."""

    def requests(self) -> int:
        return len(self.asking)

    @rule()
    def ask(self) -> None:
        self.asking.append((self.pending.expect(), None))
        assert self.asking[-1][0] == self.highest

    @rule(skipped=st.integers(1, 3))
    def others_draw(self, skipped: int) -> None:
        self.sequence += skipped

    @rule(data=st.data())
    def others_are_noted(self, data: st.DataObject) -> None:
        """Note any allocated ID: IDs of this process that have not arrived may be smaller."""
        seen = data.draw(st.integers(2, self.sequence))
        self.pending.note(seen)
        self.highest = max(self.highest, seen)

    @precondition(lambda self: any(ids is None for _, ids in self.asking))
    @rule(data=st.data(), count=st.integers(1, 3))
    def the_sequence_hands_out(self, data: st.DataObject, count: int) -> None:
        waiting = [place for place, (_, ids) in enumerate(self.asking) if ids is None]
        place = data.draw(st.sampled_from(waiting))
        ids = range(self.sequence + 1, self.sequence + count + 1)
        self.sequence += count
        self.asking[place] = (self.asking[place][0], data.draw(st.permutations(ids)))

    @precondition(lambda self: any(ids is not None for _, ids in self.asking))
    @rule(data=st.data())
    def ids_arrive(self, data: st.DataObject) -> None:
        arrived = [place for place, (_, ids) in enumerate(self.asking) if ids is not None]
        floor, ids = self.asking.pop(data.draw(st.sampled_from(arrived)))
        assert ids is not None
        self.pending.open(floor, ids)
        self.open.update(ids)
        self.highest = max(self.highest, *ids)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def a_request_fails_or_is_cancelled(self, data: st.DataObject) -> None:
        """Abandon a request, before or after its IDs were allocated, which then are lost."""
        floor, _ = self.asking.pop(data.draw(st.integers(0, len(self.asking) - 1)))
        self.pending.abandon(floor)

    @precondition(lambda self: self.asking and self.highest > 1)
    @rule(data=st.data())
    def the_sequence_goes_back(self, data: st.DataObject) -> None:
        floor = data.draw(st.sampled_from([floor for floor, _ in self.asking]))
        with pytest.raises(SequenceRegressedError):
            self.pending.open(floor, [data.draw(st.integers(1, floor))])

    def bound(self) -> int:
        return min([self.highest, *(floor for floor, _ in self.asking)])

    @invariant()
    def nothing_that_was_handed_out_is_passed(self) -> None:
        """Check I5, for IDs that have arrived and for those that have not."""
        handed_out = {each for _, ids in self.asking for each in ids or ()}
        assert all(each > self.pending.settled for each in handed_out | self.open)


TestLocalCounter = LocalCounter.TestCase
TestSharedSequence = SharedSequence.TestCase
