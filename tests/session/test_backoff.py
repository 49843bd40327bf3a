"""The delays between attempts."""

from __future__ import annotations

from replication.session.backoff import Backoff


def test_delays_grow_by_the_factor_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 2.0, factor=3)
    assert [round(backoff.next(), 6) for _ in range(5)] == [0.1, 0.3, 0.9, 2.0, 2.0]


def test_reset_begins_with_the_first_delay_again() -> None:
    backoff = Backoff(1.0)
    assert [backoff.next(), backoff.next()] == [1.0, 2.0]
    backoff.reset()
    assert backoff.next() == 1.0
