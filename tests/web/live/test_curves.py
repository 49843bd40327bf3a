"""Samples, rates and curves."""

from __future__ import annotations

from replication.web.live.curves import MAX_CURVES, Curves, Sample, draw, rate


def samples(*positions: int, every: float = 2.0) -> list[Sample]:
    return [Sample(every * number, position, 0) for number, position in enumerate(positions)]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    assert rate(samples(0, 1_000, 1_000, 1_000, 1_000, 1_000, 1_000, 1_020)) == 2.0
    assert rate(samples(7)) is None
    assert rate(samples(50, 10)) == 0.0
    assert rate(samples(0, 30, every=30.0)) == 1.0


def test_a_curve_has_a_line_for_the_rate_and_one_for_a_lag() -> None:
    assert draw(samples(1, 2)) == ""
    curve = draw(samples(0, 10, 10))
    assert curve.count("<polyline") == 1
    assert "at most 5 IDs/s, lag at most 0" in curve
    assert draw([*samples(0, 10), Sample(4.0, 10, 3)]).count("<polyline") == 2


def test_ten_minutes_of_a_limited_number_of_pairs_are_kept() -> None:
    curves = Curves()
    for number in range(400):
        curves.add({("orders", "master"): Sample(2.0 * number, number, 0)})
    kept = curves.of(("orders", "master"))
    assert kept[-1].position == 399
    assert kept[-1].at - kept[0].at <= 600
    curves.add({("orders", str(number)): Sample(0.0, 1, 0) for number in range(2 * MAX_CURVES)})
    assert curves.of(("orders", "master")) == []
    assert sum(bool(curves.of(("orders", str(number)))) for number in range(2 * MAX_CURVES)) == MAX_CURVES


def test_a_curve_of_ten_minutes_is_small_and_keeps_the_largest_lag() -> None:
    many = [Sample(2.0 * number, number, 7 if number == 133 else 0) for number in range(300)]
    curve = draw(many)
    assert len(curve) < 1_600
    assert "lag at most 7" in curve
    assert curve.count("<polyline") == 2


def test_a_curve_is_drawn_again_only_when_it_has_visibly_changed() -> None:
    curves, seen = Curves(), []
    for number in range(20):
        curves.add({("orders", "master"): Sample(2.0 * number, number * number, 0)})
        seen.append(curves.drawn(("orders", "master")))
    assert seen[0] == ""
    assert len(set(seen[2:5])) == 3
    assert 2 <= len(set(seen[5:])) <= 4
