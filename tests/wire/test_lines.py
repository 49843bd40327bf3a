"""Bytes to lines, in reads of any size; at most one line is kept."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.wire.lines import LineBuffer
from tests.strategies import cuts


def _feed(reads: list[bytes], limit: int) -> tuple[list[bytes], bool]:
    buffer = LineBuffer(limit)
    blocks = [buffer.feed(read) for read in reads]
    assert all(block == b"" or block.endswith(b"\n") for block in blocks)
    return b"".join(blocks).split(b"\n")[:-1], buffer.overflowed


def _expect(data: bytes, limit: int) -> tuple[list[bytes], bool]:
    """The same, in the simplest way."""
    *lines, rest = data.split(b"\n")
    for number, line in enumerate(lines):
        if len(line) > limit:
            return lines[:number], True
    return lines, len(rest) > limit


@given(st.data(), st.lists(st.binary(max_size=9) | st.sampled_from([b"", b"\n", b"\n\n", b"x" * 7])), st.integers(1, 8))
def test_lines_are_the_same_however_the_bytes_are_cut(data: st.DataObject, parts: list[bytes], limit: int) -> None:
    whole = b"".join(parts)
    expected = _expect(whole, limit)
    assert _feed([whole], limit) == expected
    assert _feed([whole[at : at + 1] for at in range(len(whole))], limit) == expected
    assert _feed(data.draw(cuts(whole)), limit) == expected


@pytest.mark.parametrize(
    "reads", [[b"a\n", b"12345\n"], [b"a\n12345\n"], [b"a\n12345"], [b"a\n1234", b"5"], [b"a\n1234", b"5\nb\n"]]
)
def test_one_byte_over_the_limit_overflows_with_or_without_the_lf(reads: list[bytes]) -> None:
    assert _feed(reads, 4) == ([b"a"], True)


@pytest.mark.parametrize("reads", [[b"1234\n"], [b"1234", b"\n"], [b"123", b"4\n"]])
def test_a_line_of_exactly_the_limit_is_returned(reads: list[bytes]) -> None:
    assert _feed(reads, 4) == ([b"1234"], False)


def test_nothing_is_read_after_an_overflow() -> None:
    assert _feed([b"12345", b"\n", b"a\n"], 4) == ([], True)


def test_the_limit_counts_bytes() -> None:
    assert _feed(["éé\n".encode()], 4) == (["éé".encode()], False)
    assert _feed(["ééé\n".encode()], 4) == ([], True)


def test_a_read_of_whole_lines_is_returned_without_a_copy() -> None:
    read = b"PING 1\nPING 2\n"
    assert LineBuffer(100).feed(read) is read


def test_at_most_the_limit_is_kept() -> None:
    """A peer that never sends an LF costs the memory of one line; later reads cost none."""
    limit = 100_000
    buffer = LineBuffer(limit)
    read = b"x" * 30_000
    huge = b"x" * 1_000_000
    tracemalloc.start()
    try:
        for _ in range(3):
            buffer.feed(read)
        held, _ = tracemalloc.get_traced_memory()
        assert held < limit * 1.2 + 2000
        tracemalloc.reset_peak()
        buffer.feed(huge)
        held, peak = tracemalloc.get_traced_memory()
        assert buffer.overflowed
        assert peak < limit * 1.2 + 2000
        assert held < 2000
    finally:
        tracemalloc.stop()


def test_a_long_line_in_single_bytes_takes_time_in_proportion() -> None:
    """If each byte copied or searched the line, this would take minutes."""
    buffer = LineBuffer(16 * 1024 * 1024)
    size = 200_000
    assert not any(buffer.feed(b"x") for _ in range(size))
    assert buffer.feed(b"\n") == b"x" * size + b"\n"
    assert not buffer.overflowed
