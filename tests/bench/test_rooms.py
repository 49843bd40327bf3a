"""The scenario works; how fast it is, is not for a test to say."""

from __future__ import annotations

from replication.bench.rooms import measure
from replication.bench.series import Effort


def test_every_figure_is_measured() -> None:
    series = list(measure(Effort(1, quick=True)))
    assert len(series) == 10
    assert all(value > 0 for each in series for value in each.values)
