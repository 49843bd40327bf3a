"""IDs that finish in any order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.errors import SequenceRegressedError, StreamError
from replication.streams.pending import PendingIds


def test_the_example_of_the_streams_document() -> None:
    """Protocol F1: start 1; 2 and 3; complete 3, then 2; 4, 5, 6; complete 5, 4, 6."""
    ids = PendingIds(1)
    assert list(ids.reserve(2)) == [2, 3]
    assert ids.settled == 1
    ids.complete([3])
    assert ids.settled == 1
    ids.complete([2])
    assert ids.settled == 3
    assert list(ids.reserve(3)) == [4, 5, 6]
    for done, settled in ((5, 3), (4, 5), (6, 6)):
        ids.complete([done])
        assert ids.settled == settled


def test_the_first_id_of_an_empty_stream_is_2() -> None:
    assert list(PendingIds(1).reserve()) == [2]


def test_a_request_may_come_back_with_nothing() -> None:
    ids = PendingIds(1)
    ids.open(ids.expect(), [])
    assert (ids.settled, ids.open_count) == (1, 0)


def test_the_oldest_open_id_is_known() -> None:
    ids = PendingIds(1)
    assert ids.oldest() is None
    ids.reserve(3)
    ids.complete([2, 3])
    assert (ids.oldest(), ids.open_count) == (4, 1)


@pytest.mark.parametrize("wrong", [[3], [2, 2], [2, 3], [0]])
def test_completing_what_is_not_open_is_an_error_and_changes_nothing(wrong: list[int]) -> None:
    ids = PendingIds(1)
    ids.reserve()
    with pytest.raises(StreamError, match="not all open"):
        ids.complete(wrong)


def test_trap_36_a_position_never_passes_an_id_that_the_sequence_is_about_to_hand_out() -> None:
    ids = PendingIds(10)
    floor = ids.expect()
    other = ids.expect()
    ids.open(other, [15])
    ids.complete([15])
    assert ids.settled == 10  # 11 may still be on its way to the first request
    ids.open(floor, [11])
    assert ids.settled == 10
    ids.complete([11])
    assert ids.settled == 15


def test_a_request_that_fails_gives_its_place_back() -> None:
    ids = PendingIds(10)
    floor = ids.expect()
    ids.open(ids.expect(), [12])
    ids.complete([12])
    ids.abandon(floor)
    assert ids.settled == 12
    with pytest.raises(StreamError, match="no request"):
        ids.abandon(floor)


@pytest.mark.parametrize("again", [[10], [9], [12], [13, 13]])
def test_trap_41_a_sequence_that_repeats_itself_is_refused(again: list[int]) -> None:
    ids = PendingIds(10)
    ids.open(ids.expect(), [12])
    with pytest.raises(SequenceRegressedError, match="set it forward"):
        ids.open(ids.expect(), again)


class AnyOrder(RuleBasedStateMachine):
    """Against a model that looks at every ID there ever was."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = PendingIds(1)
        self.open: set[int] = set()
        self.seen = 1  # the largest ID that was opened
        self.next = 2  # what the shared sequence hands out next
        self.asked: list[tuple[int, list[int]]] = []  # floors, and what the sequence will answer
        self.last = 1

    @precondition(lambda self: not self.asked and self.next == self.seen + 1)
    @rule(count=st.integers(1, 4))
    def reserve(self, count: int) -> None:
        new = list(self.ids.reserve(count))
        assert new == list(range(self.seen + 1, self.seen + 1 + count))
        self.open.update(new)
        self.seen = new[-1]
        self.next = self.seen + 1

    @rule(count=st.integers(1, 3), others=st.integers(0, 2))
    def ask(self, count: int, others: int) -> None:
        floor = self.ids.expect()
        self.next += others  # another process draws from the sequence, too
        self.asked.append((floor, list(range(self.next, self.next + count))))
        self.next += count

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 9), fails=st.booleans())
    def answer(self, which: int, *, fails: bool) -> None:
        floor, new = self.asked.pop(which % len(self.asked))
        if fails:
            self.ids.abandon(floor)
            return
        self.ids.open(floor, new)
        self.open.update(new)
        self.seen = max(self.seen, *new)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        done = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, max_size=4, unique=True))
        self.ids.complete(done)
        self.open.difference_update(done)

    @invariant()
    def settled_is_what_the_definition_says(self) -> None:
        floors = [floor for floor, _ in self.asked]
        assert self.ids.settled == min([self.seen, *floors, *(each - 1 for each in self.open)])
        assert self.ids.settled >= self.last
        assert self.ids.open_count == len(self.open)
        assert self.ids.oldest() == min(self.open, default=None)
        self.last = self.ids.settled


TestAnyOrder = AnyOrder.TestCase
