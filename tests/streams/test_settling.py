"""Facts that wait for smaller IDs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import StreamError
from replication.streams.facts import Fact
from replication.streams.settling import Batch, Settling
from replication.wire.grammar import Token


def fact(token: int, text: str = "[]") -> Fact:
    return Fact(Token(token), (text,))


def test_facts_in_order_are_released_at_once() -> None:
    settling = Settling(Token(1))
    settling.add([fact(2), fact(3)])
    assert settling.release(Token(3)) == Batch([fact(2), fact(3)], Token(1), Token(3))
    assert settling.announced == 3


def test_a_fact_waits_for_smaller_ids() -> None:
    settling = Settling(Token(1))
    settling.add([fact(3)])
    assert settling.release(Token(1)) is None
    settling.add([fact(2)])
    assert settling.release(Token(3)) == Batch([fact(2), fact(3)], Token(1), Token(3))


def test_ids_without_a_fact_are_released_too() -> None:
    settling = Settling(Token(1))
    assert settling.release(Token(4)) == Batch([], Token(1), Token(4))
    assert settling.release(Token(4)) is None


def test_what_comes_late_is_an_error() -> None:
    settling = Settling(Token(5))
    with pytest.raises(StreamError, match="comes late"):
        settling.add([fact(6), fact(5)])


def test_what_takes_too_much_memory_is_forgotten_and_said_to_be_in_the_store() -> None:
    settling = Settling(Token(1), max_bytes=1000)
    settling.add([fact(3, "x" * 2000)])
    assert settling.release(Token(1)) is None
    settling.add([fact(2)])
    assert settling.release(Token(2)) == Batch((), Token(1), Token(2), spilled=True)
    assert settling.release(Token(3)) == Batch((), Token(2), Token(3), spilled=True)
    settling.add([fact(4)])
    assert settling.release(Token(4)) == Batch([fact(4)], Token(3), Token(4))


@given(st.permutations(range(2, 12)), st.sets(st.integers(2, 11)), st.sampled_from([10**9, 900, 0]))
def test_every_fact_comes_out_once_in_order_or_is_said_to_be_in_the_store(
    order: list[int], rolled_back: set[int], max_bytes: int
) -> None:
    settling = Settling(Token(1), max_bytes)
    done: set[int] = {1}
    out: list[int] = []
    for token in order:
        if token not in rolled_back:
            settling.add([fact(token)])
        done.add(token)
        settled = next(each for each in range(1, 13) if each + 1 not in done)
        batch = settling.release(Token(settled))
        if batch is not None:
            assert batch.upto == settled
            missing = [each for each in range(batch.after + 1, settled + 1) if each not in rolled_back]
            assert batch.spilled or [each.token for each in batch.facts] == missing
            out += missing
    assert out == [each for each in range(2, 12) if each not in rolled_back]
