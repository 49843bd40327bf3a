"""Fuzzing: changes inputs at random, keeps those that reach new code, and stops at the first wrong outcome.

``tox -e fuzz`` runs each target for ten minutes; targets.py lists them, with what must hold:

    tox -e fuzz                                    all targets
    tox -e fuzz -- --seconds 60 wire http          two targets, one minute each
    tox -e fuzz -- --again build/fuzz/crash-wire-…  one input again, with the traceback

Inputs that reach new code stay in build/fuzz/TARGET, and the next run goes on from there.  A wrong outcome, an input
that takes more than SLOW seconds, or more memory than MEMORY, is written to build/fuzz/crash-TARGET-… and ends the
run of that target.  Copy the file to tests/data/fuzz/TARGET: tests/fuzz/test_kept.py then fails until it is repaired.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.fuzz.targets import KEPT, TARGETS, load

BUILD: Final = Path("build/fuzz")
LENGTH: Final = 8_192  # bytes of the longest input
SLOW: Final = 10  # seconds
MEMORY: Final = 1_024  # MiB


def main() -> int:
    """Run the targets one after the other; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="tox -e fuzz --", description="Fuzzing, target by target.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: 600)")
    parser.add_argument("--again", type=Path, help="run this input of a target once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if unknown := {*options.targets} - {*TARGETS}:
        parser.error(f"no target {min(unknown)!r}; the targets are {', '.join(TARGETS)}")
    if options.child:
        fuzz(options.targets[0], rest)
    if options.again is not None:
        (target,) = options.targets or [options.again.name.split("-")[1]]
        load(target)(options.again.read_bytes())
        return 0
    failed = [each for each in options.targets or TARGETS if not run(each, options.seconds)]
    print("failed: " + " ".join(failed) if failed else "no wrong outcome")  # noqa: T201
    return 1 if failed else 0


def fuzz(target: str, arguments: list[str]) -> None:
    """Fuzz one target in this process, which then ends."""
    import atheris

    with atheris.instrument_imports(include=["replication"]):
        check = load(target)
    atheris.Setup([sys.argv[0], *arguments], check)
    atheris.Fuzz()


def run(target: str, seconds: int) -> bool:
    """Fuzz one target in another process; print a line, and return whether no outcome was wrong."""
    found, log = BUILD / target, BUILD / f"{target}.log"
    found.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "tests.fuzz", "--child", target),
        *(f"-max_total_time={seconds}", f"-max_len={LENGTH}", f"-timeout={SLOW}", f"-rss_limit_mb={MEMORY}"),
        *(f"-artifact_prefix={BUILD}/crash-{target}-", "-print_final_stats=1"),
        *(str(found), str(KEPT / target)),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with log.open("w") as output:
        failed = subprocess.run(command, stdout=output, stderr=output, check=False).returncode != 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    text = log.read_text(errors="replace")
    stats = dict(re.findall(r"stat::(\w+): +(\d+)", text))
    covered = re.findall(r"cov: (\d+)", text)[-1:]
    print(  # noqa: T201
        f"{target}: {int(stats.get('number_of_executed_units', 0)):,} executions in {seconds} s ({used:.0f} s of CPU), "
        f"{int(*covered or [0]):,} branches, slowest {stats.get('slowest_unit_time_sec', '?')} s, "
        f"{stats.get('peak_rss_mb', '?')} MiB" + (f": FAILED, see {log}" if failed else ""),
        flush=True,
    )
    return not failed


if __name__ == "__main__":
    raise SystemExit(main())
