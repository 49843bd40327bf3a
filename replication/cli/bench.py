"""``replication bench``: measure this machine; ``replication.bench`` has the scenarios."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from replication.bench import BROKERS, COMPARED, SCENARIOS, compare, run, version_of
from replication.bench.plot import draw
from replication.bench.series import BenchOptions, describe_machine, encode_result
from replication.cli.parser import Parser
from replication.spark.job import has_spark

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_parser() -> Parser:
    """Return the parser of ``replication bench``."""
    parser = Parser(
        prog="replication bench",
        usage="replication bench [--json] [--rounds N] [--quick | --times N] [--against BROKER | --plot FILE] "
        "[SCENARIO …]",
        description="scenarios:\n" + "\n".join(f"  {name:8} {meaning}" for name, meaning in SCENARIOS.items()),
        epilog="Without a SCENARIO all are measured.  That takes long: scale stores 10,000,000 facts in a database.\n"
        "A value is the median of its rounds, its spread (max - min) / median.\nTMPDIR decides which disk is measured.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measure everything N times [%(default)s]")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a check that all works")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="do N times as much in a round [%(default)s]")
    parser.add_argument(
        "--against",
        choices=BROKERS,
        metavar="BROKER",
        help=f"measure {' and '.join(COMPARED)} beside a broker on this machine: {' or '.join(BROKERS)}",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw how the figures of scale grow, as SVG")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    found = parser.parse_intermixed_args(arguments)  # options may stand between scenarios
    for option in ("rounds", "times"):
        if getattr(found, option) < 1:
            parser.error(f"--{option}: {getattr(found, option)} is not 1 or more")
    for name in found.scenarios:
        if name not in SCENARIOS:
            parser.error(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
        if found.against and name not in COMPARED:
            parser.error(f"--against measures {' and '.join(COMPARED)}, not {name}")
    if found.plot and (found.against or "scale" not in (found.scenarios or SCENARIOS)):
        parser.error("--plot draws the figures of scale, which is not measured")
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table or one JSON object."""
    found = _parse(arguments)
    if found.plot:
        Path(found.plot).touch()  # fails now and not at the end
    options = BenchOptions(found.rounds, quick=found.quick, times=found.times)
    machine = describe_machine()
    if found.against:
        machine[found.against] = version_of(found.against)
        results = compare(found.scenarios or COMPARED, found.against, options)
    else:
        without = {"replay": not has_spark(), "redis": find_spec("hiredis") is None}
        results = run(found.scenarios or [each for each in SCENARIOS if not without.get(each)], options)
    measured = []
    if not found.json:
        print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for result in results:
        measured.append(result)
        if not found.json:
            print(encode_result(result), flush=True)
    if found.json:
        print(json.dumps({"machine": machine, "results": [each.as_dict() for each in measured]}, indent=2))
    if found.plot:
        Path(found.plot).write_text(draw(measured), encoding="utf-8")
    return 0
