"""Mutation testing with mutmut: it changes the code in many small ways, and lists the changes that no test notices.

Each package is changed by itself, and only the tests in the package's own folder run.  `tox -e mutants` runs this:

    tox -e mutants                                         every mutant of every package, which takes many hours
    tox -e mutants -- streams session                      every mutant of two packages
    tox -e mutants -- --sample 100 --seed 1 streams        100 mutants of a package, the same ones each time
    tox -e mutants -- --again streams                      those that survived the last run, with new tests

The mutants and the results stay in build/mutants/PACKAGE.  There, `mutmut browse` shows them.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

CHECKOUT: Final = Path(__file__).parent.parent
# mutmut ends the tests of a mutant after a time by the clock, too: where the machine has other work, it would count
# mutants as killed that no test fails on.  Here, only their CPU time is limited, and the time of each single test.
MUTMUT: Final = """\
from mutmut.workers import isolation
isolation.register_timeout = lambda *_, **__: None
from mutmut.__main__ import cli
cli()
"""
PACKAGES: Final = ["wire", "session", "streams", "writer", "follower", "segments", "rooms"]
LINKS: Final = ["replication", "tests", "tox.ini"]
CONFIG: Final = """\
[mutmut]
source_paths = replication
only_mutate = replication/{package}/*
pytest_add_cli_args =
    --hypothesis-profile=mutants
    --no-cov
    --timeout=600
    -p
    no:cacheprovider
pytest_add_cli_args_test_selection =
    tests/{package}
also_copy =
    tox.ini
timeout_constant = 2.0
timeout_multiplier = 2.0
"""
ENVIRONMENT: Final = {**os.environ, "TESTS_WITHOUT_POSTGRES": "1"}
KILLED: Final = {"killed", "timeout", "segfault"}
NOT_RUN: Final = {"not checked", "skipped"}


def main() -> None:
    """Test the mutants of the named packages, and print the survivors and the score of each."""
    parser = argparse.ArgumentParser(prog="tox -e mutants --", description="Mutation testing, package by package.")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--sample", type=int, help="test so many mutants of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--again", action="store_true", help="test the survivors of the last run only")
    parser.add_argument("--processes", type=int, default=1, help="how many mutants to test at a time (default: 1)")
    options = parser.parse_args()
    for package in options.packages:
        folder = prepare(package)
        names: list[str] = []
        if options.sample is not None:
            # A run for no mutant makes all of them, and measures which tests reach which; then it fails.
            run(folder, "run", "no such mutant", check=False)
            known = sorted(results(folder))
            names = random.Random(options.seed).sample(known, min(options.sample, len(known)))  # noqa: S311
        elif options.again:
            names = survivors(results(folder))
        if names or not options.again:
            run(folder, "run", "--max-children", str(options.processes), *names)
        everything = results(folder)
        report(package, folder, everything if options.sample is None else {name: everything[name] for name in names})


def prepare(package: str) -> Path:
    """Return the folder of a package: mutmut reads its configuration where it runs, and keeps everything there."""
    folder = CHECKOUT / "build" / "mutants" / package
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(CHECKOUT / name)
    (folder / "setup.cfg").write_text(CONFIG.format(package=package))
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)  # which of the former tests reach what
    return folder


def run(folder: Path, *arguments: str, check: bool = True) -> None:
    """Run mutmut; its progress goes to a file, because it is a line for each turn of a wheel."""
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", MUTMUT, *arguments]
        subprocess.run(command, cwd=folder, check=check, stdout=log, stderr=log, env=ENVIRONMENT)  # noqa: S603


def output(folder: Path, *arguments: str) -> str:
    """Return what a command of mutmut prints."""
    command = [sys.executable, "-c", MUTMUT, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout  # noqa: S603


def results(folder: Path) -> dict[str, str]:
    """Return the status of each mutant; none before the first run."""
    lines = output(folder, "results", "--all", "true").splitlines()
    return dict(line.strip().rsplit(": ", 1) for line in lines if line.startswith("    "))


def survivors(statuses: dict[str, str]) -> list[str]:
    """Return the mutants that were tested and not killed."""
    return [name for name, status in statuses.items() if status not in KILLED | NOT_RUN]


def report(package: str, folder: Path, statuses: dict[str, str]) -> None:
    """Print each survivor as a diff, and the score: how many of the mutants that were tested are killed."""
    left = survivors(statuses)
    for name in left:
        print(output(folder, "show", name))
    tested = len([status for status in statuses.values() if status not in NOT_RUN])
    counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(statuses.values()).items()))
    print(
        f"{package}: {tested - len(left)} of {tested} killed, {1 - len(left) / max(tested, 1):.1%} ({counts})",
        flush=True,
    )


if __name__ == "__main__":
    main()
