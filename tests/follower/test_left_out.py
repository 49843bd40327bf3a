"""Ranges that a copy leaves out: the mark that is stored with a step, and when a range is dropped."""

from __future__ import annotations

from replication.follower.left_out import LeftOutRanges
from replication.streams.cursor import Apply, CatchUp, Reset
from replication.wire.grammar import InstanceName, Token

ONE, TWO = InstanceName("one"), InstanceName("two")


def fetch(after: int, upto: int, resets: int = 0) -> CatchUp:
    return CatchUp(Token(after), Token(upto), resets=resets)


def apply(after: int, upto: int, resets: int = 0) -> Apply:
    return Apply((), Token(after), Token(upto), resets=resets)


def test_a_step_that_passes_the_begin_of_a_range_stores_the_end_of_the_last_one() -> None:
    ranges = LeftOutRanges()
    assert ranges.mark(ONE, apply(0, 9)) is None
    ranges.add(ONE, fetch(2, 9), Token(4))
    ranges.add(ONE, fetch(6, 9), Token(8))
    assert ranges.mark(ONE, apply(0, 2)) is None
    assert ranges.mark(ONE, apply(0, 3)) == 4
    assert ranges.mark(ONE, apply(0, 7)) == 8
    assert ranges.mark(TWO, apply(0, 7)) is None


def test_a_range_is_dropped_once_the_position_is_above_its_begin() -> None:
    ranges = LeftOutRanges()
    ranges.add(ONE, fetch(2, 9), Token(4))
    ranges.add(TWO, fetch(2, 9), Token(4))
    ranges.applied(ONE, apply(0, 2), Token(2))
    assert ranges.mark(ONE, apply(2, 4)) == 4
    ranges.applied(ONE, apply(2, 4), Token(4))
    assert ranges.mark(ONE, apply(2, 4)) is None
    assert ranges.mark(TWO, apply(2, 4)) == 4


def test_after_a_reset_a_range_of_the_lost_history_is_neither_stored_nor_kept() -> None:
    ranges = LeftOutRanges()
    ranges.add(ONE, fetch(5, 9), Token(8))
    assert ranges.mark(ONE, apply(5, 9, resets=1)) is None
    ranges.applied(ONE, Reset(Token(5), Token(3), resets=1), Token(3))
    assert ranges.mark(ONE, apply(5, 9)) is None
    ranges.add(ONE, fetch(3, 9, resets=1), Token(6))
    assert ranges.mark(ONE, apply(3, 9, resets=1)) == 6
