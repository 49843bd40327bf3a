"""Many seeds, in several processes; the first one that fails ends all."""

from __future__ import annotations

import gc
import multiprocessing
import time
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple

from twisted.logger import globalLogBeginner

from replication.bench.simulation.run import make_plan, run, shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.simulation.run import Plan

AT_ONCE: Final = 100  # seeds that a process runs before it reports


class Totals(NamedTuple):
    """What was run."""

    seeds: int = 0
    steps: int = 0
    facts: int = 0
    simulated: float = 0.0  # seconds
    cpu: float = 0.0  # seconds

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        """Return the sum of each."""
        return Totals._make(one + two for one, two in zip(self, other, strict=True))

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{self.seeds:,} seeds, {self.steps:,} steps, {self.facts:,} facts, {self.simulated:,.0f} simulated s, "
            f"{self.seeds / max(self.cpu, 1e-3):,.0f} seeds per CPU second"
        )


class Failed(NamedTuple):
    """A seed that failed, and its plan with as few steps as possible."""

    seed: int
    failure: str
    steps: int
    shortest: Plan


def run_some(seeds: range, world: str = "") -> tuple[Totals, Failed | None]:
    """Run seeds, up to the first that fails."""
    totals, began = Totals(), time.process_time()
    with _without_collection():
        for seed in seeds:
            plan = make_plan(seed, world)
            outcome = run(plan)
            totals += Totals(1, len(plan.steps), outcome.facts, outcome.seconds)
            if outcome.failure:
                break
            gc.collect(0)  # the objects of this run, while they are in the processor's cache
    failed = Failed(seed, outcome.failure, len(plan.steps), shrink(plan)) if outcome.failure else None
    return totals._replace(cpu=time.process_time() - began), failed


@contextmanager
def _without_collection() -> Iterator[None]:
    """Turn off the automatic collection of garbage: ``run_some`` collects between runs, when all is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)  # what a coroutine of a killed process kept until it was collected itself
        if was_enabled:
            gc.enable()


def run_seeds(seeds: range, jobs: int, world: str = "") -> Iterator[tuple[Totals, Failed | None]]:
    """Run seeds in ``jobs`` processes; yields the totals so far, and the first failure, which is the last result."""
    parts = [seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)]
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(parts)), _begin) as pool:
        totals = Totals()
        for some, failed in pool.imap(_run_part, zip(parts, repeat(world), strict=False)):
            totals += some
            yield totals, failed
            if failed is not None:
                return


def _begin() -> None:
    """Prepare a process: it logs nothing, because its faults are intended."""
    globalLogBeginner.beginLoggingTo([], redirectStandardIO=False)
    gc.freeze()


def _run_part(part: tuple[range, str]) -> tuple[Totals, Failed | None]:
    return run_some(*part)
