"""``replication bench``: what this machine carries, measured through the doors that every user has.

A file per scenario, each with ``measure(effort)``, which yields a :class:`Series` per figure.  Sockets, processes and
databases are real; databases live in a temporary directory, so ``TMPDIR`` says which disk is measured.
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn

import attrs

from replication.bench.machine import describe_machine
from replication.bench.series import Effort, Result, spell_result
from replication.replay.job import has_spark

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Each is a module of this package, imported when it is asked for.
SCENARIOS: Final[Mapping[str, str]] = {
    "ids": "reserve and complete stream IDs",
    "encode": "facts to lines",
    "decode": "bytes to the application's function, rows decoded",
    "fanout": "settled facts to 1, 10 and 100 connections",
    "latency": "complete to applied by a worker in another process",
    "sql": "plain SQL of others to applied, and a master at rest over their tables",
    "append": "durable facts, over Python and over HTTP",
    "catchup": "a master's store to a fresh worker's function",
    "replay": "a table to segments on Spark, against a plain scan (with the extra spark)",
    "rooms": "events of rooms persisted, and read",
    "idle": "what costs while nothing happens, and while a peer does not read",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    parser = _Parser(
        prog="replication bench",
        usage="replication bench [--json] [--rounds N] [--quick | --times N] [SCENARIO …]",
        description="scenarios:\n" + "\n".join(f"  {name:8} {meaning}" for name, meaning in SCENARIOS.items()),
        epilog="Without a SCENARIO all are measured, which takes some minutes.  A value is the median of its rounds, "
        "its spread (max - min) / median.\nTMPDIR says which disk databases are written to.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measure everything N times [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it works, not how fast")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="do N times as much in a round [%(default)s]")
    found = parser.parse_args(arguments)
    for option in ("rounds", "times"):
        if getattr(found, option) < 1:
            parser.error(f"--{option}: {getattr(found, option)} is not 1 or more")
    for name in found.scenarios:
        if name not in SCENARIOS:
            parser.error(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    effort = Effort(found.rounds, quick=found.quick, times=found.times)
    machine = describe_machine()
    results = run(found.scenarios or [each for each in SCENARIOS if each != "replay" or has_spark()], effort)
    if found.json:
        print(json.dumps({"machine": machine, "results": [attrs.asdict(each) for each in results]}, indent=2))
        return 0
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for result in results:
        print(spell_result(result), flush=True)
    return 0


def run(scenarios: Sequence[str], effort: Effort) -> Iterator[Result]:
    """Yield the results of ``scenarios`` one by one, as they are measured."""
    for name in dict.fromkeys(scenarios):
        for series in import_module(f"{__name__}.{name}").measure(effort):
            yield series.result(name)
