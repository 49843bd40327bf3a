"""The reorder buffer: facts that wait for smaller IDs."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.errors import StreamError
from replication.streams.facts import Fact, fact_bytes
from replication.streams.pending import PendingIds
from replication.streams.reorder_buffer import Batch, ReorderBuffer
from replication.wire.grammar import Token


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts or (f"[{token}]",))


def test_facts_in_order_are_released_at_once_without_a_copy() -> None:
    settling = ReorderBuffer(Token(1))
    two, three = fact(2), fact(3, "[1]", "[2]")
    settling.add([two, three])
    batch = settling.release(Token(3))
    assert batch == Batch([two, three], after=Token(1), upto=Token(3))
    assert batch.facts[0] is two
    assert settling.published == 3


def test_no_fact_is_released_twice() -> None:
    settling = ReorderBuffer(Token(1))
    settling.add([fact(2)])
    assert settling.release(Token(2)) is not None
    assert settling.release(Token(2)) is None


def test_facts_that_were_never_added_are_in_a_batch_that_is_spilled() -> None:
    settling = ReorderBuffer(Token(1))
    settling.add([fact(2)])
    settling.spill(Token(4))
    assert settling.release(Token(3)) == Batch((), after=Token(1), upto=Token(3), spilled=True)
    settling.spill(Token(2))
    settling.add([fact(5)])
    assert settling.release(Token(5)) == Batch((), after=Token(3), upto=Token(5), spilled=True)
    settling.add([fact(6)])
    assert settling.release(Token(6)) == Batch([fact(6)], after=Token(5), upto=Token(6))


def test_a_fact_above_an_open_id_waits() -> None:
    settling = ReorderBuffer(Token(1))
    settling.add([fact(3)])
    assert settling.release(Token(1)) is None
    settling.add([fact(2)])
    assert settling.release(Token(3)) == Batch([fact(2), fact(3)], Token(1), Token(3))


def test_only_settled_facts_are_released() -> None:
    settling = ReorderBuffer(Token(1))
    settling.add([fact(2), fact(4)])
    assert settling.release(Token(2)) == Batch([fact(2)], Token(1), Token(2))
    assert settling.release(Token(5)) == Batch([fact(4)], Token(2), Token(5))


def test_ids_that_were_rolled_back_are_settled_without_facts() -> None:
    assert ReorderBuffer(Token(1)).release(Token(4)) == Batch([], Token(1), Token(4))


def test_adding_no_facts_changes_nothing() -> None:
    settling = ReorderBuffer(Token(1))
    settling.add([])
    assert settling.release(Token(1)) is None


@pytest.mark.parametrize("late", [5, 4])
def test_a_fact_below_the_published_position_is_an_error(late: int) -> None:
    """ES#19795: a POSITION would cover such a fact, and no follower would ever fetch it."""
    settling = ReorderBuffer(Token(5))
    with pytest.raises(StreamError, match=f"fact {late} comes late"):
        settling.add([fact(6), fact(late)])


def test_facts_beyond_the_memory_limit_are_spilled() -> None:
    settling = ReorderBuffer(Token(1), max_bytes=1000)
    settling.add([fact(3, "x" * 900)])
    assert settling.release(Token(1)) is None
    settling.add([fact(4)])
    assert settling.release(Token(2)) == Batch((), Token(1), Token(2), spilled=True)
    settling.add([fact(6)])
    assert settling.release(Token(4)) == Batch((), Token(2), Token(4), spilled=True)
    assert settling.release(Token(6)) == Batch([fact(6)], Token(4), Token(6))


def test_a_large_transaction_that_does_not_wait_is_not_spilled() -> None:
    settling = ReorderBuffer(Token(1), max_bytes=1000)
    large = [fact(2, "x" * 5000), fact(3)]
    settling.add(large)
    assert settling.release(Token(3)) == Batch(large, Token(1), Token(3))
    settling.add([fact(5, "x" * 5000), fact(4)])
    assert settling.release(Token(5)) == Batch([fact(4), fact(5, "x" * 5000)], Token(3), Token(5))


def test_a_release_is_complete_although_waiting_facts_are_spilled() -> None:
    settling = ReorderBuffer(Token(1), max_bytes=1000)
    settling.add([fact(4, "x" * 5000), fact(2)])
    assert settling.release(Token(2)) == Batch([fact(2)], Token(1), Token(2))
    assert settling.release(Token(4)) == Batch((), Token(2), Token(4), spilled=True)


def test_a_second_spill_below_the_first_keeps_both() -> None:
    settling = ReorderBuffer(Token(1), max_bytes=1000)
    settling.add([fact(9, "x" * 900)])
    settling.release(Token(1))
    settling.add([fact(5, "x" * 900)])
    settling.release(Token(1))
    assert settling.release(Token(6)) == Batch((), Token(1), Token(6), spilled=True)
    assert settling.release(Token(9)) == Batch((), Token(6), Token(9), spilled=True)


class Writer(RuleBasedStateMachine):
    """Facts that are committed in any order are released in order, once each, or spilled."""

    max_bytes = 600

    def __init__(self) -> None:
        super().__init__()
        self.pending = PendingIds(1)
        self.settling = ReorderBuffer(Token(1), self.max_bytes)
        self.open: list[int] = []
        self.store: dict[int, Fact] = {}
        self.released: list[Fact] = []

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
        after = self.settling.published
        batch = self.settling.release(Token(self.pending.settled))
        if batch is None:
            assert self.pending.settled == after
            return
        assert (batch.after, batch.upto) == (after, self.pending.settled)
        stored = [each for _, each in sorted(self.store.items()) if batch.after < each.token <= batch.upto]
        assert list(batch.facts) == ([] if batch.spilled else stored)
        self.released += stored if batch.spilled else batch.facts

    @invariant()
    def followers_have_all_that_is_settled_in_order(self) -> None:
        settled = self.pending.settled
        assert self.settling.published == settled
        assert self.released == [each for _, each in sorted(self.store.items()) if each.token <= settled]

    @invariant()
    def memory_is_bounded(self) -> None:
        """Check I9."""
        assert fact_bytes(self.settling._waiting) == self.settling._bytes <= self.max_bytes
        assert not self.settling._fresh


TestWriter = Writer.TestCase


@pytest.mark.parametrize("tokens", [[6], [5, 6], [4, 6]])
def test_a_fact_directly_above_the_settled_id_waits(tokens: list[int]) -> None:
    buffer = ReorderBuffer(Token(3))
    buffer.add([fact(token) for token in tokens])
    released = buffer.release(Token(5))
    assert released is not None
    assert [*released.facts] == [fact(token) for token in tokens if token <= 5]
    assert buffer.release(Token(6)) == Batch([fact(6)], Token(5), Token(6))


def test_facts_that_wait_may_take_exactly_the_memory_limit() -> None:
    size = fact_bytes([fact(5), fact(6)])
    for limit, spilled in ((size, False), (size - 1, True)):
        buffer = ReorderBuffer(Token(3), max_bytes=limit)
        buffer.add([fact(5), fact(6)])
        assert buffer.release(Token(3)) is None
        batch = buffer.release(Token(6))
        assert batch is not None
        assert (batch.spilled, len(batch.facts)) == (spilled, 0 if spilled else 2)


def test_without_spills_facts_beyond_the_limit_are_kept() -> None:
    first, second = fact(5), fact(6)
    buffer = ReorderBuffer(Token(3), max_bytes=fact_bytes([first, second]), spills=False)
    assert not buffer.has_room([first, second, fact(7)])
    for each in (first, second, fact(7)):
        assert buffer.has_room([each]) == (each.token < 7)
        buffer.add([each])
        assert buffer.release(Token(3)) is None
    assert buffer.release(Token(7)) == Batch([first, second, fact(7)], Token(3), Token(7))


@pytest.mark.parametrize("tokens", [[5], [4], [4, 5], [4, 6]])
def test_facts_that_settle_in_order_take_no_heap(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    monkeypatch.delattr(ReorderBuffer, "_sift")
    buffer = ReorderBuffer(Token(3))
    buffer.add([fact(token) for token in tokens])
    settled = Token(max(5, *tokens))
    assert buffer.release(settled) == Batch([fact(token) for token in tokens], Token(3), settled)
