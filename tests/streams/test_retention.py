"""Limits of what a stream keeps."""

from __future__ import annotations

import pytest

from replication.errors import ConfigError
from replication.streams.interfaces import FactSlice
from replication.streams.retention import KeptSlices, Retention
from replication.wire.grammar import Token


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("30d", Retention(age=30 * 86_400)),
        ("12h", Retention(age=43_200)),
        ("5 m", Retention(age=300)),
        ("90s", Retention(age=90)),
        ("1000000 rows", Retention(rows=1_000_000)),
        ("10 GiB", Retention(size=10 * 2**30)),
        ("3kB", Retention(size=3_000)),
        (" 30d , 10 MB,7 rows ", Retention(30 * 86_400, 7, 10_000_000)),
        ("all", None),
    ],
)
def test_a_text_has_limits_with_units(text: str, limits: Retention | None) -> None:
    assert Retention.parse(text) == limits


@pytest.mark.parametrize(
    "text", ["", "30", "d", "0d", "-1d", "1.5d", "30 days", "30D", "1d,", "1d 2 rows", "1h, 2d", "ALL"]
)
def test_another_text_is_refused_with_what_works(text: str) -> None:
    with pytest.raises(ConfigError, match="write 30d, 12h, 1000000 rows or 10 GiB"):
        Retention.parse(text)


def kept(*slices: tuple[int, int, int, float]) -> KeptSlices:
    found = KeptSlices()
    for upto, rows, size, seconds in slices:
        found.add(FactSlice(Token(upto), rows, size, seconds))
    return found


def test_an_age_deletes_the_slice_once_all_its_facts_are_older() -> None:
    slices = kept((5, 1, 1, 10.0), (9, 1, 1, 20.0))
    limits = Retention(age=60)
    assert slices.oldest_beyond(limits, 69.9) is None
    assert slices.oldest_beyond(limits, 70.0) == 5
    slices.remove()
    assert slices.oldest_beyond(limits, 79.9) is None
    assert slices.oldest_beyond(limits, 80.0) == 9


@pytest.mark.parametrize("limits", [Retention(rows=5), Retention(size=50)])
def test_as_much_as_the_limit_is_left(limits: Retention) -> None:
    slices = kept((5, 2, 20, 0.0), (9, 2, 20, 0.0), (12, 3, 30, 0.0))
    assert slices.oldest_beyond(limits, 0.0) == 5
    slices.remove()
    assert (slices.rows, slices.size) == (5, 50)
    assert slices.oldest_beyond(limits, 1e9) is None


def test_the_narrowest_limit_counts() -> None:
    slices = kept((5, 2, 20, 0.0), (9, 2, 20, 0.0))
    assert slices.oldest_beyond(Retention(age=10, rows=100), 10.0) == 5
    assert slices.oldest_beyond(Retention(age=10, rows=2), 0.0) == 5
    assert slices.oldest_beyond(Retention(age=10, rows=100), 9.0) is None
    assert kept().oldest_beyond(Retention(rows=1), 1.0) is None
