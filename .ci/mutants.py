"""Mutation testing: the code is changed in many small ways, and the changes that no test notices are listed.

Each package is changed by itself, and only the tests in the package's own folder run.  `tox -e mutants` runs this:

    tox -e mutants                                         every mutant of every package, which takes many hours
    tox -e mutants -- streams session                      every mutant of two packages
    tox -e mutants -- --sample 100 --seed 1 streams        100 mutants of a package, the same ones each time
    tox -e mutants -- --again streams                      those that survived the last run, with new tests

mutmut makes the mutants.  All tests are collected once.  Each mutant then runs in a fork of that process, with the
tests that reach the changed function, those of its own module first: to start pytest for each mutant takes much longer.
The mutants and the results stay in build/mutants/PACKAGE.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from _pytest.main import pytest_runtestloop as run_tests
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.format_utils import mangled_name_from_mutant_name as function_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

CHECKOUT: Final = Path(__file__).parent.parent
PACKAGES: Final = ["wire", "session", "streams", "writer", "follower", "segments", "rooms"]
LINKS: Final = ["replication", "tests", "tox.ini"]
CONFIG: Final = """\
[mutmut]
source_paths = replication
only_mutate = replication/{package}/*
also_copy =
    tox.ini
"""
# What `mutmut run` does before it runs tests.
MAKE: Final = """\
from pathlib import Path
from mutmut import __main__ as mutmut
mutmut.set_mutant_under_test("mutant_generation")
Path("mutants").mkdir(exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants(1)
"""
PYTEST: Final = ["--all", "--rootdir=.", "--tb=native", "-x", "-q", "--no-cov", "--timeout=600", "-pno:cacheprovider"]
NO_MUTANT: Final = "none"
SURVIVED: Final = "survived"
STATUSES: Final = {0: SURVIVED, 1: "killed", -24: "timeout"}  # by exit code; 24 is SIGXCPU


def main() -> None:
    """Test the mutants of the named packages, and print the survivors and the score of each."""
    parser = argparse.ArgumentParser(prog="tox -e mutants --", description="Mutation testing, package by package.")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--sample", type=int, help="test so many mutants of each package, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: 1)")
    parser.add_argument("--again", action="store_true", help="test the survivors of the last run only")
    options = parser.parse_args()
    for package in options.packages:
        if not os.fork():  # each package has its own copy of all modules
            test(package, options)
            os._exit(0)
        if os.wait()[1]:
            sys.exit(f"{package}: its tests fail without a mutant; see build/mutants/{package}/log")


def test(package: str, options: argparse.Namespace) -> None:
    """Test the mutants of one package."""
    folder = CHECKOUT / "build" / "mutants" / package
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(CHECKOUT / name)
    (folder / "setup.cfg").write_text(CONFIG.format(package=package))
    with (folder / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", MAKE], cwd=folder, check=True, stdout=log, stderr=log)  # noqa: S603
    made = [json.loads(each.read_text()) for each in folder.glob(f"mutants/replication/{package}/**/*.meta")]
    names = sorted(name for each in made for name in each["exit_code_by_key"])
    results = folder / "results.json"
    if options.sample is not None:
        names = random.Random(options.seed).sample(names, min(options.sample, len(names)))  # noqa: S311
    elif options.again:
        before = json.loads(results.read_text())
        names = [name for name in names if before.get(name) == SURVIVED]
    os.chdir(folder / "mutants")
    os.environ["TESTS_WITHOUT_POSTGRES"] = "1"
    sys.path.insert(0, str(Path.cwd()))
    forks = Forks(names, folder / "log", results)
    pytest.main([*PYTEST, "--hypothesis-profile=mutants", f"tests/{package}"], plugins=[forks])


class Forks:
    """A plugin of pytest: it runs tests in forks, once without a mutant, and then for each mutant."""

    def __init__(self, names: Sequence[str], log: Path, results: Path) -> None:
        self._names = names
        self._results = results
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._screen = os.dup(1)
        os.dup2(self._log, 1)
        os.dup2(self._log, 2)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Test each mutant, print the survivors and the score, and end the process."""
        items = session.items
        gc.collect()
        gc.freeze()
        measured = Path("reached.json")
        if self._fork(session, "stats", items, 24 * 3600, lambda: Measure(measured)):
            os._exit(1)
        seconds, reached = json.loads(measured.read_text())
        tests_of = defaultdict(set)
        for test_id, functions in reached.items():
            for function in functions:
                tests_of[function].add(test_id)
        statuses: dict[str, str] = {}
        for number, name in enumerate(self._names, 1):
            some = [each for each in items if each.nodeid in tests_of[function_of(name)]]
            module = f"test_{name.split('.')[-2]}.py"
            some.sort(key=lambda item: (item.path.name != module, seconds[item.nodeid]))
            limit = 10 + round(5 * sum(seconds[each.nodeid] for each in some))
            if number == 1 and self._fork(session, NO_MUTANT, some, limit):
                os._exit(1)
            status = self._fork(session, name, some, limit)
            statuses[name] = STATUSES.get(status, "killed")
            self._results.write_text(json.dumps(statuses))
            if statuses[name] != "killed":
                self._print(f"{number} of {len(self._names)}: {statuses[name]}\n{show(name)}")
        noticed = sum(each != SURVIVED for each in statuses.values())
        counts = ", ".join(f"{count} {status}" for status, count in sorted(Counter(statuses.values()).items()))
        self._print(f"{noticed} of {len(statuses)} killed, {noticed / max(len(statuses), 1):.1%} ({counts})")
        os._exit(0)

    def _print(self, text: str) -> None:
        os.write(self._screen, f"{text}\n".encode())

    def _fork(
        self,
        session: pytest.Session,
        mutant: str,
        items: Sequence[pytest.Item],
        limit: int,
        plugin: Callable[[], object] = object,
    ) -> int:
        """Run tests in a fork, until one fails; returns its exit code.  ``limit`` is in seconds of CPU time."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            session.config.pluginmanager.register(plugin())
            set_mutant_under_test(mutant)
            session.items[:] = items
            run_tests(session)
            code = int(session.testsfailed > 0)
        finally:
            os._exit(code)


class Measure:
    """A plugin of pytest: it measures the CPU time of each test, and which functions it reaches."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}
        self._reached: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Measure a test."""
        functions = state()._stats  # noqa: SLF001
        functions.clear()
        began = time.process_time()
        result = yield
        self._seconds[item.nodeid] = time.process_time() - began
        self._reached[item.nodeid] = sorted(functions)
        self._file.write_text(json.dumps([self._seconds, self._reached]))
        return result


def show(name: str) -> str:
    """Return a mutant as a diff."""
    command = [sys.executable, "-m", "mutmut", "show", name]
    return subprocess.run(command, cwd="..", check=True, capture_output=True, text=True).stdout  # noqa: S603


if __name__ == "__main__":
    main()
