"""What waits for a slow peer: bounded, in order, and handed out in pieces worth a system call."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from replication.session.outbox import JOINED_BYTES, Outbox

chunks = st.lists(
    st.tuples(st.sampled_from([0, 1, 84, 20_000, 40_000, JOINED_BYTES - 1, JOINED_BYTES, 100_000]), st.integers(1, 9)),
    max_size=12,
)


def _drain(outbox: Outbox) -> list[bytes]:
    popped = []
    while (piece := outbox.pop()) is not None:
        popped.append(piece)
    return popped


@given(chunks)
def test_what_was_pushed_comes_out_in_order_and_nothing_else(sizes: list[tuple[int, int]]) -> None:
    outbox = Outbox(10_000_000, 1000)
    pushed = [(bytes([number]) * size, lines) for number, (size, lines) in enumerate(sizes)]
    for chunk, lines in pushed:
        assert outbox.push(chunk, lines)
    assert outbox.queued_bytes == sum(len(chunk) for chunk, _ in pushed)
    assert outbox.queued_lines == sum(lines for _, lines in pushed)
    popped = _drain(outbox)
    assert b"".join(popped) == b"".join(chunk for chunk, _ in pushed)
    assert (outbox.queued_bytes, outbox.queued_lines) == (0, 0)
    whole = {chunk for chunk, _ in pushed}
    assert all(len(piece) <= JOINED_BYTES or piece in whole for piece in popped)


@given(st.lists(st.none() | st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=30))
def test_neither_bound_is_ever_passed_and_a_refused_chunk_leaves_no_trace(steps: list[tuple[int, int] | None]) -> None:
    """None pops, a pair pushes."""
    outbox = Outbox(100, 10)
    waiting: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            outbox.pop()
            waiting.clear()  # all of it is small: one pop takes everything
        else:
            size, lines = step
            fits = sum(each[0] for each in waiting) + size <= 100 and sum(each[1] for each in waiting) + lines <= 10
            assert outbox.push(b"x" * size, lines) is fits
            if fits:
                waiting.append(step)
        assert outbox.queued_bytes == sum(size for size, _ in waiting) <= 100
        assert outbox.queued_lines == sum(lines for _, lines in waiting) <= 10


def test_small_chunks_are_joined_and_a_large_one_is_given_as_it_is() -> None:
    outbox = Outbox(10_000_000, 1000)
    large = b"L" * 100_000
    for chunk in (b"a\n", b"b\n", large, b"c\n", b"d\n"):
        outbox.push(chunk, 1)
    assert outbox.pop() == b"a\nb\n"
    assert outbox.queued_lines == 3
    assert outbox.pop() is large
    assert outbox.pop() == b"c\nd\n"
    assert outbox.pop() is None


def test_chunks_are_shared_and_not_copied() -> None:
    """A hundred slow followers of one stream hold one object."""
    chunk = b"RDATA caches master 5 []\n" * 10
    outboxes = [Outbox(1000, 100) for _ in range(100)]
    before = sys.getrefcount(chunk)
    assert all(outbox.push(chunk, 10) for outbox in outboxes)
    assert sys.getrefcount(chunk) == before + 100
    assert all(outbox.pop() is chunk for outbox in outboxes)


def test_both_bounds_are_inclusive() -> None:
    assert Outbox(4, 1).push(b"abc\n", 1)
    assert not Outbox(3, 1).push(b"abc\n", 1)
    assert not Outbox(4, 1).push(b"a\nb\n", 2)


def test_cleared_means_empty_and_ready_again() -> None:
    outbox = Outbox(4, 1)
    outbox.push(b"abc\n", 1)
    outbox.clear()
    assert outbox.pop() is None
    assert (outbox.queued_bytes, outbox.queued_lines) == (0, 0)
    assert outbox.push(b"abc\n", 1)
