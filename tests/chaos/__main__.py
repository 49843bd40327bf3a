"""Chaos on real parts: random faults, real processes, and at the end the totals.

    tox -e chaos                               an hour
    tox -e chaos -- --minutes 10 --jobs 2      ten minutes, two scenes at a time
    tox -e chaos -- --seed 7 --round 3         the scene and the faults of one round again

A round lasts five minutes at most.  Its seed decides what its scene has, and which faults come in which order; the
moments are those of the machine.  Exit status 1: something was lost, twice, or different; its folder is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs

from tests.chaos import needs
from tests.chaos.comparison import Findings
from tests.chaos.rounds import Round, Totals, draw_plan
from tests.chaos.scene import SERVERS

ROUND: Final = 300.0  # seconds
BOUND: Final = 3_600.0  # seconds more, in which a round must have ended
CLEANING: Final = 120  # seconds
SPARK_EVERY: Final = 3  # rounds: a start of Spark takes the time of many faults
RESULT: Final = "result.json"


def main() -> int:
    """Run rounds until the time is over; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="tox -e chaos --", description="Chaos on real parts.")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long rounds begin (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the rounds (default: the time)")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time (default: 1)")
    parser.add_argument("--round", type=int, default=None, help="run this round only")
    parser.add_argument("--folder", type=Path, default=None, help="where the folders of rounds are made")
    parser.add_argument("--child", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=ROUND, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is left to do is done
    if options.child is not None:
        return run_round(options.child, options.seed, options.round, options.seconds)
    missing = needs.missing()
    for name, why in missing.items():
        show(f"without {name}: {why}")
    if missing and os.environ.get("CI"):
        return 1
    seed = int(time.time()) if options.seed is None else options.seed
    show(f"seed {seed}")
    begin = time.monotonic()
    rounds = Rounds(seed, options)
    try:
        rounds.run(begin + 60 * options.minutes)
    except (KeyboardInterrupt, SystemExit):
        show("interrupted; rounds that had not ended do not count")
    show(report(rounds.totals, time.monotonic() - begin))
    for each in rounds.kept:
        show(f"failed: repeat it with --seed {seed} --round {each.name}; its folder is kept: {each}")
    return 0 if rounds.totals.good and rounds.totals.turns else 1


class Rounds:
    """Runs rounds, each in a process of its own, so that nothing of one is left for the next."""

    def __init__(self, seed: int, options: argparse.Namespace) -> None:
        self._seed, self._options = seed, options
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.folder))
        self._running: dict[subprocess.Popen[bytes], tuple[Path, float]] = {}
        self.totals, self.kept = (
            Totals(),
            list[Path](),
        )  # of rounds that have ended, and the folders of those that failed

    def run(self, end: float) -> None:
        """Begin rounds until ``end``, and wait for all of them."""
        number = 0 if self._options.round is None else self._options.round
        try:
            while (left := end - time.monotonic()) > 30 or self._running:
                if left > 30 and len(self._running) < self._options.jobs:
                    self._begin(number, min(self._options.seconds, left))
                    number += 1
                    end = 0.0 if self._options.round is not None else end
                self._collect()
                time.sleep(0.5)
        finally:
            for process, (folder, _) in self._running.items():
                _end(process, folder)
            if not self.kept:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, number: int, seconds: float) -> None:
        folder = self._folder / str(number)
        folder.mkdir()
        folder.chmod(0o755)
        command = [sys.executable, "-m", "tests.chaos", f"--child={folder}", f"--seed={self._seed}"]
        process = subprocess.Popen([*command, f"--round={number}", f"--seconds={seconds}"], start_new_session=True)
        self._running[process] = folder, time.monotonic() + seconds + BOUND

    def _collect(self) -> None:
        for process, (folder, bound) in [*self._running.items()]:
            if process.poll() is None and time.monotonic() < bound:
                continue
            late = process.poll() is None
            _end(process, folder)
            del self._running[process]
            totals = Totals(errors=[f"round {folder.name} has not ended in time" if late else "it has no result"])
            if (folder / RESULT).exists():
                totals = read_result(folder / RESULT)
            self.totals.add(totals)
            if totals.good:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                self.kept.append(folder)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End a round: with SIGTERM it cleans up; if it does not, this does."""
    process.terminate()
    try:
        process.wait(CLEANING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # daemons and programs are of its session
    for server in (folder / SERVERS).read_text().splitlines() if (folder / SERVERS).exists() else ():
        pid = Path(server, "data/postmaster.pid")
        with suppress(OSError):
            os.kill(int(pid.read_text().split()[0]), signal.SIGQUIT)
            shutil.rmtree(server, ignore_errors=True)
    if (folder / "disk").is_mount():
        subprocess.run(["umount", "--lazy", folder / "disk"], check=False)


def run_round(folder: Path, seed: int, number: int, seconds: float) -> int:
    """Run one round in this process, and write its totals."""
    missing = needs.missing()
    plan = draw_plan(f"{seed}:{number}", [*missing], number=number)
    show(f"round {number}: {plan}")
    began = time.monotonic()
    log = (folder / "faults.log").open("a")

    def note(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {text}", file=log, flush=True)

    totals = Round(plan, folder, [*missing], note).run(
        seconds, spark=needs.SPARK not in missing and number % SPARK_EVERY == 0
    )
    (folder / RESULT).write_text(json.dumps(attrs.asdict(totals)))
    words = "good" if totals.good else "FAILED"
    took = time.monotonic() - began
    kills = sum(totals.kills.values())
    show(f"round {number}: {words}, {kills} kills, {totals.turns} turns, {took:.0f} s")
    for each in [*totals.findings.examples, *totals.errors]:
        show(f"round {number}: {each}")
    return 0


def show(text: str) -> None:
    """Print a line of the report."""
    print(text, flush=True)  # noqa: T201


def read_result(path: Path) -> Totals:
    """Return the totals of a round."""
    found: dict[str, Any] = json.loads(path.read_text())
    totals = Totals()
    for name, value in found.items():
        kind = type(getattr(totals, name))
        setattr(totals, name, Findings(**value) if kind is Findings else kind(value))
    return totals


def report(totals: Totals, seconds: float) -> str:
    """Return the totals as text."""
    lines = [f"{number:7} {name}" for name, number in totals.faults.most_common()]
    lines += ["", *(f"{number:7} kills of {name}" for name, number in totals.kills.most_common()), ""]
    lines += [f"{number:7} times: {name}" for name, number in totals.exits.most_common()]
    found, minutes = totals.findings, seconds / 60
    lines += [
        "",
        f"{totals.turns} turns in {minutes:.1f} minutes, each with a comparison",
        f"all was equal after {totals.slowest:.1f} s at most, once the faults of a turn were over",
        f"{totals.appended} facts appended, {totals.acknowledged} acknowledged, {totals.rows_compared} rows compared",
        f"{totals.forgiven} acknowledged facts lost with a backup, a WAL or a failover, as they may",
        f"{totals.ways_out} starts with --accept-new-history, as the log asked",
        f"{sum(totals.faults.values())} faults, {sum(totals.kills.values())} kills",
        f"{found.lost} lost, {found.twice} twice, {found.diverged} diverged, {len(totals.errors)} errors",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
