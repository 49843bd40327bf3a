"""Histories in the offsets of a streaming query."""

from __future__ import annotations

import json

import pytest

from replication.errors import StreamError
from replication.spark.histories import (
    HISTORIES,
    KEPT,
    check_histories,
    check_unchanged,
    make_offset,
    positions_of,
)
from replication.streams.history import Epoch, raised_name
from replication.wire.grammar import Token


def epoch(name: str, settled: int, start: int) -> Epoch:
    return Epoch(name, Token(settled), Token(start))


A, B = epoch("a", 1, 1), epoch("b", 20, 30)


def test_an_offset_has_positions_and_histories_in_the_order_of_their_names() -> None:
    start = json.loads(json.dumps(make_offset({"w": 7}, {}, {"w": [A], "none": ()})))
    assert start == {HISTORIES: {"w": [["a", 1, 1]]}, "w": 7}
    assert positions_of(start) == {"w": 7}
    end = make_offset({"w": 9, "new": 4}, start, {"new": [B], "w": ()})
    assert json.dumps(end) == json.dumps({HISTORIES: {"new": [["b", 20, 30]], "w": [["a", 1, 1]]}, "new": 4, "w": 9})
    assert make_offset({"w": 7}, {}, {"w": ()}) == {"w": 7}


@pytest.mark.parametrize(("position", "raises"), [(1, False), (20, False), (30, False), (31, True)])
def test_only_a_query_that_has_read_beyond_a_restore_ends(position: int, raises: bool) -> None:
    """Up to the start of the new epoch, the rows are those of the backup."""
    start = make_offset({"w": position}, {}, {"w": [A]})
    check_histories("orders", start, {"w": [A]})
    check_histories("orders", start, {})
    if raises:
        with pytest.raises(StreamError, match="rows above 20 are lost"):
            check_histories("orders", start, {"w": [A, B]})
    else:
        check_histories("orders", start, {"w": [A, B]})


def test_a_query_ends_if_a_former_writer_lost_facts_and_another_process_has_raised_its_position() -> None:
    """The raised position is above the query's, and the process is another one: only the epoch shows the loss."""
    start = make_offset({"w": 21}, {}, {"w": [A]})
    kept, lost = epoch(raised_name(Token(21), "x.y"), 20, 50), epoch(raised_name(Token(20), "x.z"), 20, 50)
    check_histories("orders", start, {"w": [A, kept], "new": [B]})
    check_histories("orders", make_offset({"w": 50}, start, {"w": [A, lost]}), {"w": [A, lost]})
    check_unchanged("orders", "w", 21, [A], [A, kept])
    with pytest.raises(StreamError, match=r"w of orders was restored from a backup: its rows above 20 are lost"):
        check_histories("orders", start, {"w": [A, lost], "new": [B]})
    with pytest.raises(StreamError, match="database of w was restored from a backup while orders was read up to 21"):
        check_unchanged("orders", "w", 21, [A], [A, lost])


@pytest.mark.parametrize("theirs", [[A], [A, B], [A, B, epoch("c", 35, 40)]])
def test_a_copy_may_be_behind_the_query(theirs: list[Epoch]) -> None:
    """The query read the writer's HTTP before, and the copy has not followed the writer since; nothing is lost."""
    start = make_offset({"w": 40}, {}, {"w": [A, B]})
    check_histories("orders", start, {"w": theirs})
    end = make_offset({"w": 40}, start, {"w": theirs})
    check_histories("orders", end, {"w": [A, B, epoch("c", 35, 40)]})
    with pytest.raises(StreamError, match="rows above 20 are lost"):
        check_histories("orders", end, {"w": [A, epoch("d", 30, 30)]})


def test_a_copy_may_lag_by_many_starts_of_its_writer() -> None:
    """An error would end a query of which no row is lost, and the cure would read all rows again."""
    starts = [epoch(f"e{number}", number, number) for number in range(1, 2 * KEPT)]
    yesterday = {HISTORIES: {"w": [[*each] for each in starts[-3:]]}, "w": 1_000}  # an earlier version kept three
    start = make_offset({"w": 1_000}, yesterday, {"w": starts})
    for lag in (3, 4, 40, KEPT - 1):
        behind = starts[:-lag]
        check_histories("orders", start, {"w": behind})
        assert make_offset({"w": 1_000}, start, {"w": behind}) == start
        with pytest.raises(StreamError, match=f"rows above {starts[-lag].start} are lost"):
            check_histories("orders", start, {"w": [*behind, epoch("restored", 199, 199)]})
    with pytest.raises(StreamError, match=f"A copy that lags by {KEPT} starts of w gives the same error: let it catch"):
        check_histories("orders", start, {"w": starts[:-KEPT]})


def test_a_query_ends_if_its_writer_has_another_name_now() -> None:
    """Its rows would be read twice: a table without instance_column belongs to one writer."""
    start = make_offset({"w": 20}, {}, {"w": [A]})
    check_histories("orders", start, {"w": [A], "new": [B]})
    with pytest.raises(StreamError, match=r"w of orders was renamed to new: .* begin a new checkpoint"):
        check_histories("orders", start, {"new": [A, B]})


def test_an_empty_stream_has_nothing_to_lose() -> None:
    check_histories("orders", make_offset({"w": 1}, {}, {"w": [A]}), {"w": [B]})


@pytest.mark.parametrize(("upto", "raises"), [(20, False), (30, False), (31, True)])
def test_only_a_range_with_facts_that_a_restore_has_lost_ends_a_batch(upto: int, raises: bool) -> None:
    for now in ([A], [A, epoch("b", upto, upto)], ()):
        check_unchanged("orders", "w", upto, [A], now)
    check_unchanged("orders", "w", upto, (), [B])
    if raises:
        with pytest.raises(StreamError, match="database of w was restored from a backup while orders was read up to"):
            check_unchanged("orders", "w", upto, [A], [A, B])
    else:
        check_unchanged("orders", "w", upto, [A], [A, B])
