"""The scenario ``rooms`` at a tiny size; no time is asserted."""

from __future__ import annotations

from replication.bench.rooms import measure
from replication.bench.series import BenchOptions


def test_every_figure_is_measured() -> None:
    series = list(measure(BenchOptions(1, quick=True)))
    assert len(series) == 10
    assert all(value > 0 for each in series for value in each.values)
