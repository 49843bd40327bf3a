"""Many seeds."""

from __future__ import annotations

from unittest import mock

from replication.bench.simulation import seeds
from replication.bench.simulation.seeds import Totals, run_seeds, run_some
from replication.streams.cursor import Cursor


def test_two_processes_run_what_one_runs() -> None:
    alone, failed = run_some(range(1, 10))
    assert failed is None
    with mock.patch.object(seeds, "AT_ONCE", 4):
        *_, (totals, failed) = run_seeds(range(1, 10), jobs=2)
    assert failed is None
    assert totals[:3] == alone[:3]
    assert totals.seeds == 9
    assert str(totals).startswith("9 seeds, ")


def test_the_first_seed_that_fails_ends_all() -> None:
    with mock.patch.object(Cursor, "step", lambda self: None):
        totals, failed = run_some(range(1, 201), "copy")
    assert failed is not None
    assert totals.seeds == failed.seed < 20
    assert [name for name, *_ in failed.shortest.steps] == ["heal"]


def test_totals_are_added() -> None:
    assert Totals(1, 2, 3, 4.0, 5.0) + Totals(1, 1, 1, 1.0, 1.0) == Totals(2, 3, 4, 5.0, 6.0)
