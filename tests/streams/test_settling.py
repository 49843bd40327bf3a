"""Facts that wait for smaller IDs."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.errors import StreamError
from replication.streams.facts import Fact, fact_bytes
from replication.streams.pending import PendingIds
from replication.streams.settling import Batch, Settling
from replication.wire.grammar import Token


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts or (f"[{token}]",))


def test_facts_in_order_are_released_at_once_and_as_they_are() -> None:
    settling = Settling(Token(1))
    two, three = fact(2), fact(3, "[1]", "[2]")
    settling.add([two, three])
    batch = settling.release(Token(3))
    assert batch == Batch([two, three], after=Token(1), upto=Token(3))
    assert batch.facts[0] is two
    assert settling.announced == 3


def test_nothing_is_released_twice() -> None:
    settling = Settling(Token(1))
    settling.add([fact(2)])
    assert settling.release(Token(2)) is not None
    assert settling.release(Token(2)) is None


def test_a_fact_above_an_open_id_waits() -> None:
    settling = Settling(Token(1))
    settling.add([fact(3)])
    assert settling.release(Token(1)) is None
    settling.add([fact(2)])
    assert settling.release(Token(3)) == Batch([fact(2), fact(3)], Token(1), Token(3))


def test_only_what_is_settled_is_released() -> None:
    settling = Settling(Token(1))
    settling.add([fact(2), fact(4)])
    assert settling.release(Token(2)) == Batch([fact(2)], Token(1), Token(2))
    assert settling.release(Token(5)) == Batch([fact(4)], Token(2), Token(5))


def test_ids_that_were_rolled_back_are_settled_without_facts() -> None:
    assert Settling(Token(1)).release(Token(4)) == Batch([], Token(1), Token(4))


def test_an_empty_addition_is_harmless() -> None:
    settling = Settling(Token(1))
    settling.add([])
    assert settling.release(Token(1)) is None


@pytest.mark.parametrize("late", [5, 4])
def test_a_fact_that_was_announced_past_is_an_error(late: int) -> None:
    """ES#19795: such a fact would be covered by a bare POSITION, and nobody would ever read it."""
    settling = Settling(Token(5))
    with pytest.raises(StreamError, match=f"fact {late} comes late"):
        settling.add([fact(6), fact(late)])


def test_texts_that_take_too_much_memory_are_left_to_the_store() -> None:
    settling = Settling(Token(1), max_bytes=1000)
    settling.add([fact(3, "x" * 900)])
    assert settling.release(Token(1)) is None
    settling.add([fact(4)])
    assert settling.release(Token(2)) == Batch((), Token(1), Token(2), spilled=True)
    settling.add([fact(6)])
    assert settling.release(Token(4)) == Batch((), Token(2), Token(4), spilled=True)
    assert settling.release(Token(6)) == Batch([fact(6)], Token(4), Token(6))


def test_a_large_transaction_that_need_not_wait_is_not_spilled() -> None:
    settling = Settling(Token(1), max_bytes=1000)
    large = [fact(2, "x" * 5000), fact(3)]
    settling.add(large)
    assert settling.release(Token(3)) == Batch(large, Token(1), Token(3))
    settling.add([fact(5, "x" * 5000), fact(4)])
    assert settling.release(Token(5)) == Batch([fact(4), fact(5, "x" * 5000)], Token(3), Token(5))


def test_what_is_released_is_whole_although_what_waits_is_spilled_in_the_same_moment() -> None:
    settling = Settling(Token(1), max_bytes=1000)
    settling.add([fact(4, "x" * 5000), fact(2)])
    assert settling.release(Token(2)) == Batch([fact(2)], Token(1), Token(2))
    assert settling.release(Token(4)) == Batch((), Token(2), Token(4), spilled=True)


def test_a_second_spill_below_the_first_does_not_hide_it() -> None:
    settling = Settling(Token(1), max_bytes=1000)
    settling.add([fact(9, "x" * 900)])
    settling.release(Token(1))
    settling.add([fact(5, "x" * 900)])
    settling.release(Token(1))
    assert settling.release(Token(6)) == Batch((), Token(1), Token(6), spilled=True)
    assert settling.release(Token(9)) == Batch((), Token(6), Token(9), spilled=True)


class Writer(RuleBasedStateMachine):
    """Facts that are committed and rolled back in any order reach followers in order, each once, or from the store."""

    max_bytes = 600

    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingIds(1)
        self.settling = Settling(Token(1), self.max_bytes)
        self.open: list[int] = []
        self.store: dict[int, Fact] = {}
        self.told: list[Fact] = []

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        self.open.extend(self.pending.reserve(count))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), committed=st.booleans(), width=st.integers(0, 100))
    def complete(self, data: st.DataObject, committed: bool, width: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.open), min_size=1, max_size=3, unique=True))
        facts = [fact(each, "x" * width) for each in ids] if committed else []
        self.store.update({each.token: each for each in facts})
        self.pending.complete(ids)
        self.open = [each for each in self.open if each not in ids]
        self.settling.add(facts)
        after = self.settling.announced
        batch = self.settling.release(Token(self.pending.settled))
        if batch is None:
            assert self.pending.settled == after
            return
        assert (batch.after, batch.upto) == (after, self.pending.settled)
        stored = [each for _, each in sorted(self.store.items()) if batch.after < each.token <= batch.upto]
        assert list(batch.facts) == ([] if batch.spilled else stored)
        self.told += stored if batch.spilled else batch.facts

    @invariant()
    def followers_have_all_that_is_settled_in_order(self) -> None:
        settled = self.pending.settled
        assert self.settling.announced == settled
        assert self.told == [each for _, each in sorted(self.store.items()) if each.token <= settled]

    @invariant()
    def memory_is_bounded(self) -> None:
        """Hold I9."""
        assert fact_bytes(self.settling._waiting) == self.settling._bytes <= self.max_bytes
        assert not self.settling._fresh


TestWriter = Writer.TestCase
