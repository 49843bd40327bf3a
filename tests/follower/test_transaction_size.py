"""A slow function receives fewer facts in one transaction."""

from __future__ import annotations

import pytest
from twisted.internet.task import Clock

from replication.follower.transaction_size import FIRST, MOST, TransactionSize
from replication.streams.cursor import Apply
from replication.wire.grammar import Token
from tests.follower.cases import fact


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def size(clock: Clock) -> TransactionSize:
    return TransactionSize(clock)


def call(size: TransactionSize, clock: Clock, seconds_each: float, there: int = 100_000) -> int:
    """Call a function with as many facts as it may receive; return their number."""
    count = min(size.facts, there)
    with size.timing(count):
        clock.advance(count * seconds_each)
    return count


def test_a_fast_function_soon_receives_all(size: TransactionSize, clock: Clock) -> None:
    assert [call(size, clock, 0.00001) for _ in range(9)] == [FIRST * 2**power for power in range(7)] + [MOST] * 2


def test_a_slow_function_receives_what_it_takes_in_a_second(size: TransactionSize, clock: Clock) -> None:
    assert [call(size, clock, 0.003) for _ in range(4)] == [100, 200, 200, 200]
    assert [call(size, clock, 0.1) for _ in range(3)] == [200, 10, 10]
    assert [call(size, clock, 5.0) for _ in range(3)] == [10, 1, 1]
    assert [call(size, clock, 0.003) for _ in range(3)] == [1, 2, 4]


def test_few_facts_do_not_show_that_a_function_takes_more(size: TransactionSize, clock: Clock) -> None:
    assert [call(size, clock, 0.0, there=3) for _ in range(5)] == [3] * 5
    assert size.facts == FIRST


def test_a_function_that_raises_is_timed_too(size: TransactionSize, clock: Clock) -> None:
    with pytest.raises(ValueError, match="slow"), size.timing(100):
        clock.advance(10.0)
        raise ValueError("slow")
    assert size.facts == 10


def test_a_step_is_cut_after_a_fact(size: TransactionSize) -> None:
    facts = [fact(token) for token in range(2, 302)]
    step = size.cut(Apply(facts, Token(1), Token(400)))
    assert (len(step.facts), step.after, step.upto) == (FIRST, 1, facts[FIRST - 1].token)
    whole = Apply(facts[:FIRST], Token(1), Token(400))
    assert size.cut(whole) == whole
