"""The send buffer: limited, in order, and emptied in pieces that suit one system call."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from replication.session.send_buffer import JOINED_BYTES, SendBuffer

chunks = st.lists(
    st.tuples(st.sampled_from([0, 1, 84, 20_000, 40_000, JOINED_BYTES - 1, JOINED_BYTES, 100_000]), st.integers(1, 9)),
    max_size=12,
)


def _drain(buffer: SendBuffer) -> list[bytes]:
    popped = []
    while (piece := buffer.pop()) is not None:
        popped.append(piece)
    return popped


@given(chunks)
def test_what_was_pushed_comes_out_in_order_and_nothing_else(sizes: list[tuple[int, int]]) -> None:
    buffer = SendBuffer(10_000_000, 1000)
    pushed = [(bytes([number]) * size, lines) for number, (size, lines) in enumerate(sizes)]
    for chunk, lines in pushed:
        assert buffer.push(chunk, lines)
    assert buffer.queued_bytes == sum(len(chunk) for chunk, _ in pushed)
    assert buffer.queued_lines == sum(lines for _, lines in pushed)
    popped = _drain(buffer)
    assert b"".join(popped) == b"".join(chunk for chunk, _ in pushed)
    assert (buffer.queued_bytes, buffer.queued_lines) == (0, 0)
    whole = {chunk for chunk, _ in pushed}
    assert all(len(piece) <= JOINED_BYTES or piece in whole for piece in popped)


@given(st.lists(st.none() | st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=30))
def test_neither_bound_is_ever_passed_and_a_refused_chunk_leaves_no_trace(steps: list[tuple[int, int] | None]) -> None:
    """None pops, a pair pushes."""
    buffer = SendBuffer(100, 10)
    waiting: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            buffer.pop()
            waiting.clear()  # all of it is small: one pop takes everything
        else:
            size, lines = step
            fits = sum(each[0] for each in waiting) + size <= 100 and sum(each[1] for each in waiting) + lines <= 10
            assert buffer.push(b"x" * size, lines) is fits
            if fits:
                waiting.append(step)
        assert buffer.queued_bytes == sum(size for size, _ in waiting) <= 100
        assert buffer.queued_lines == sum(lines for _, lines in waiting) <= 10


def test_small_chunks_are_joined_and_a_large_one_is_given_as_it_is() -> None:
    buffer = SendBuffer(10_000_000, 1000)
    large = b"L" * 100_000
    for chunk in (b"a\n", b"b\n", large, b"c\n", b"d\n"):
        buffer.push(chunk, 1)
    assert buffer.pop() == b"a\nb\n"
    assert buffer.queued_lines == 3
    assert buffer.pop() is large
    assert buffer.pop() == b"c\nd\n"
    assert buffer.pop() is None


def test_as_many_chunks_are_joined_as_fit_and_the_rest_remains_counted() -> None:
    buffer = SendBuffer(10_000_000, 1000)
    for size in (JOINED_BYTES - 4, 4, 3, JOINED_BYTES - 3, 1, 7):
        buffer.push(b"x" * size, 2)
    popped = []
    while (piece := buffer.pop()) is not None:
        popped.append((len(piece), buffer.queued_bytes, buffer.queued_lines))
    assert popped == [(JOINED_BYTES, JOINED_BYTES + 8, 8), (JOINED_BYTES, 8, 4), (8, 0, 0)]


def test_chunks_are_shared_and_not_copied() -> None:
    """A hundred slow peers of one stream share one object."""
    chunk = b"RDATA caches master 5 []\n" * 10
    buffers = [SendBuffer(1000, 100) for _ in range(100)]
    before = sys.getrefcount(chunk)
    assert all(buffer.push(chunk, 10) for buffer in buffers)
    assert sys.getrefcount(chunk) == before + 100
    assert all(buffer.pop() is chunk for buffer in buffers)


def test_both_bounds_are_inclusive() -> None:
    assert SendBuffer(4, 1).push(b"abc\n", 1)
    assert not SendBuffer(3, 1).push(b"abc\n", 1)
    assert not SendBuffer(4, 1).push(b"a\nb\n", 2)


def test_cleared_means_empty_and_ready_again() -> None:
    buffer = SendBuffer(4, 1)
    buffer.push(b"abc\n", 1)
    buffer.clear()
    assert buffer.pop() is None
    assert (buffer.queued_bytes, buffer.queued_lines) == (0, 0)
    assert buffer.push(b"abc\n", 1)
