"""One run."""

from __future__ import annotations

from unittest import mock

import pytest

from replication.bench.simulation.run import WORLDS, Plan, make_plan, run, shrink
from replication.streams.cursor import Cursor


@pytest.mark.parametrize("world", WORLDS)
def test_a_seed_gives_a_plan_and_a_plan_gives_a_trace(world: str) -> None:
    for seed in (1, 2):
        plan = make_plan(seed, world)
        assert plan == make_plan(seed, world)
        assert plan.world == world
        first, again = run(plan), run(Plan.decode(plan.encode()))
        assert first.failure == ""
        assert (first.trace, first.facts, first.seconds) == (again.trace, again.facts, again.seconds)


def test_a_plan_that_fails_is_made_as_short_as_possible() -> None:
    needed = ["kill", 1, False, 0], ["heal", 1.0]

    def fails(plan: Plan) -> bool:
        return all(each in plan.steps for each in needed)

    plan = Plan(1, "copy", [["plug"], needed[0], ["plug"], ["plug"], ["plug"], needed[1], ["plug"]])
    assert shrink(plan, fails).steps == [*needed]


def test_the_failure_of_a_run_is_one_line() -> None:
    with mock.patch.object(Cursor, "step", lambda self: None):
        outcome = run(Plan(1, "copy", [["append", 0, [[1, 0]], True], ["heal", 1.0]]))
    assert outcome.failure.startswith("AssertionError: I10: after 45.0 s: ")
    assert "\n" not in outcome.failure
    assert "Traceback" in outcome.traceback
