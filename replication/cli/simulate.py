"""``replication simulate``: run masters and workers with faults on a simulated network, disk and clock.

``replication.bench.simulation`` has the worlds, the steps and the invariants (docs/simulation.md).
"""

from __future__ import annotations

import argparse
import shlex
import time
from typing import TYPE_CHECKING, Final

from replication.bench.simulation.run import WORLDS, Plan, make_plan, run
from replication.bench.simulation.seeds import Totals, run_seeds
from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.bench.simulation.seeds import Failed

REPORT_EVERY: Final = 60.0  # seconds
LONGEST: Final = 200  # characters of a failure; --seed prints all


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication simulate",
        usage="replication simulate [--seeds N] [--from SEED] [--jobs N] [--world NAME] | --seed N | --plan JSON",
        description="Run masters and workers with faults, on a simulated network, disk and clock, and check the "
        "invariants after each step. The same seed gives the same run.",
        epilog=f"worlds: {', '.join(WORLDS)}\nThe first seed that fails ends the command, with status 1.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1_000, metavar="N", help="how many seeds to run [%(default)s]")
    parser.add_argument("--from", type=int, default=1, metavar="SEED", dest="first", help="the first one [%(default)s]")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes [%(default)s]")
    parser.add_argument("--world", choices=WORLDS, default="", metavar="NAME", help="only this world")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--seed", type=int, metavar="N", help="run one seed; print its steps and the lines on the wire")
    one.add_argument("--plan", metavar="JSON", help="run a plan, as a failure prints it")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one plan or many seeds."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if not __debug__:
        raise ConfigError("python -O removes the checks of the invariants: run it without -O")
    for option in ("seeds", "jobs"):
        if getattr(found, option) < 1:
            parser.error(f"--{option}: {getattr(found, option)} is not 1 or more")
    if found.plan is not None:
        try:
            plan = Plan.decode(found.plan)
        except (TypeError, ValueError) as error:
            parser.error(f"--plan: {error}: quote what a failure printed")
        return _run_one(plan)
    if found.seed is not None:
        return _run_one(make_plan(found.seed, found.world))
    return _run_many(range(found.first, found.first + found.seeds), found.jobs, found.world)


def _run_one(plan: Plan) -> int:
    outcome = run(plan)
    for line in outcome.trace:
        write_line(line)
    if not outcome.failure:
        write_line(f"no failure: {len(plan.steps)} steps, {outcome.facts} facts, {outcome.seconds:.1f} simulated s")
        return 0
    for line in outcome.traceback.splitlines():
        write_line(line)
    write_line(f"failure: {outcome.failure}")
    return 1


def _run_many(seeds: range, jobs: int, world: str) -> int:
    began = reported = time.monotonic()
    totals, failed = Totals(), None
    for totals, failed in run_seeds(seeds, jobs, world):  # noqa: B007 - the last ones are the result
        if time.monotonic() - reported >= REPORT_EVERY:
            reported = time.monotonic()
            write_line(f"after {reported - began:,.0f} s: {totals}")
    if failed is None:
        write_line(f"no failure in {time.monotonic() - began:,.1f} s: {totals}")
        return 0
    _report(failed, world)
    return 1


def _report(failed: Failed, world: str) -> None:
    only = f" --world {world}" if world else ""
    why = failed.failure if len(failed.failure) <= LONGEST else f"{failed.failure[: LONGEST - 1]}…"
    write_line(f"seed {failed.seed} fails: {why}")
    write_line(f"repeat it: replication simulate --seed {failed.seed}{only}")
    text = shlex.quote(failed.shortest.encode())
    write_line(f"{len(failed.shortest.steps)} of {failed.steps} steps fail too: replication simulate --plan {text}")
