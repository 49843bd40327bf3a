"""One round: a scene from a seed, faults in turns, and a comparison after each turn."""

from __future__ import annotations

import random
import re
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING

import attrs

from tests.chaos import databases, faults, needs
from tests.chaos.comparison import Findings, check
from tests.chaos.faults import Fault
from tests.chaos.scene import STREAMS, Plan, Scene
from tests.chaos.segments import check_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.chaos.databases import LosesFacts

# The last line of a traceback in a log: the error.
ERROR = re.compile(
    r"Traceback \(most recent call last\):\n(?:.*\n)*?\s*((?:\w+\.)*\w*(?:Error|Exception|Exit)\b.{0,120})"
)
QUICK = (faults.Kill, faults.KillSeveral, faults.KillAtStart, faults.KillAppender)


@attrs.define
class Totals:
    """What a round has done and found."""

    faults: Counter[str] = attrs.field(factory=Counter)
    kills: Counter[str] = attrs.field(factory=Counter)
    exits: Counter[str] = attrs.field(factory=Counter)
    turns: int = 0
    appended: int = 0  # facts
    acknowledged: int = 0
    forgiven: int = 0  # facts that a restored backup or a failover has lost
    rows_compared: int = 0
    ways_out: int = 0
    slowest: float = 0.0  # seconds until everything was equal
    findings: Findings = attrs.field(factory=Findings)
    errors: list[str] = attrs.field(factory=list)

    def add(self, other: Totals) -> None:
        """Add those of another round."""
        for each in ("faults", "kills", "exits", "turns", "appended", "acknowledged", "forgiven"):
            setattr(self, each, getattr(self, each) + getattr(other, each))
        self.rows_compared += other.rows_compared
        self.ways_out += other.ways_out
        self.slowest = max(self.slowest, other.slowest)
        self.errors += other.errors
        for each in ("lost", "twice", "diverged", "examples"):
            setattr(self.findings, each, getattr(self.findings, each) + getattr(other.findings, each))

    @property
    def good(self) -> bool:
        """Return whether everything held."""
        return not self.findings and not self.errors


def draw_plan(seed: str, missing: Sequence[str], *, number: int = 0) -> Plan:
    """Return what a seed decides; every second round has PostgreSQL, if it is there."""
    chance = random.Random(seed)
    postgres = needs.POSTGRES not in missing and number % 2 == 1
    return Plan(
        seed,
        needs.POSTGRES if postgres else "SQLite",
        tls=needs.TLS not in missing and chance.random() < 0.4,
        clocks=needs.FAKETIME not in missing and chance.random() < 0.5,
        standby=postgres and chance.random() < 0.7,
        small_disk=not postgres and needs.MOUNT not in missing and chance.random() < 0.6,
    )


class Round:
    """A round of some seconds in a folder."""

    def __init__(self, plan: Plan, folder: Path, missing: Sequence[str], show: Callable[[str], None]) -> None:
        self._plan, self._missing, self._show = plan, missing, show
        self._chance = random.Random(f"{plan.seed} faults")
        self.scene = Scene(plan, folder, self._chance)
        self.totals = Totals()

    def run(self, seconds: float, *, spark: bool) -> Totals:
        """Make faults until ``seconds`` have passed; compare after each turn."""
        scene, totals = self.scene, self.totals
        try:
            with scene:
                try:
                    self.begin()
                    end = time.monotonic() + seconds
                    while time.monotonic() < end and totals.good:
                        self.turn(*self._draw_turn())
                    if totals.good and needs.REPLAY not in self._missing:
                        self._segments(spark=spark)
                finally:
                    self._note()  # before the scene kills all that is left
        except Exception:  # noqa: BLE001 (of any part; the totals have it)
            totals.errors.append(f"seed {self._plan.seed}: {traceback.format_exc()}")
        return totals

    def begin(self) -> None:
        """Begin every stream, so that a backup has its first epoch; and empty the WALs, so that no cut goes behind."""
        for stream in STREAMS:
            self.scene.start_appending(stream)
        for stream in STREAMS:
            databases.appends_again(self.scene, stream)
        self._settle()
        databases.empty_wals(self.scene)

    def turn(self, drawn: Iterable[Fault], losing: LosesFacts | None = None) -> None:
        """Make faults one after the other, with up to three at once; then heal, settle and compare."""
        scene = self.scene
        for stream in STREAMS:
            scene.start_appending(stream)
        lasting: list[Fault] = []
        try:
            if losing is not None:
                losing.prepare(scene)
            for fault in drawn:
                same = [each for each in lasting if type(each) is type(fault)]
                for each in same or lasting[: len(lasting) - 2]:
                    lasting.remove(each)
                    each.heal(scene)
                if type(fault).heal is not Fault.heal:
                    lasting.append(fault)
                self._inject(fault)
                scene.act(self._chance.expovariate(1.5))
        finally:
            for fault in lasting:
                fault.heal(scene)
            scene.heal_proxies()
        if scene.servers:
            scene.until(lambda: databases.ask_server(scene, "SELECT 1"), "the server has recovered")
        if losing is not None:
            self._inject(losing)
            scene.act(self._chance.uniform(0, 2))
        self._settle()
        self.totals.turns += 1

    def _draw_turn(self) -> tuple[Iterable[Fault], LosesFacts | None]:
        losing = self._choose(databases.LOSSES)() if self._chance.random() < 0.3 else None
        assert losing is None or isinstance(losing, databases.LosesFacts)
        return (self._draw() for _ in range(self._chance.randrange(8, 16))), losing

    def _inject(self, fault: Fault) -> None:
        self.totals.faults[fault.name] += 1
        self._show(f"  {fault.name}")
        fault.inject(self.scene)

    def _draw(self) -> Fault:
        if self._chance.random() < 0.4:
            return self._choose(QUICK)()
        return self._choose((*faults.FAULTS, *databases.FAULTS))()

    def _choose(self, kinds: Sequence[type[Fault]]) -> type[Fault]:
        fits = [each for each in kinds if not {*each.needs} & {*self._missing} and each().fits(self.scene)]
        return self._chance.choices(fits, [each.weight for each in fits])[0]

    def _settle(self) -> None:
        scene, totals = self.scene, self.totals
        begin = time.monotonic()
        scene.stop_appending()
        histories = check(scene, totals.findings)
        scene.forget_way_out()
        took = time.monotonic() - begin
        totals.slowest = max(totals.slowest, took)
        totals.rows_compared += sum(len(each.rows) for each in histories.values()) * len(scene.followers)
        self._histories = histories
        self._show(f"  equal after {took:.1f} s: {sum(len(each.rows) for each in histories.values())} rows")

    def _segments(self, *, spark: bool) -> None:
        check_segments(self.scene, self._histories, self.totals.findings, "local[1]" if spark else "none")
        self.totals.faults["replay on Spark" if spark else "replay"] += 1

    def _note(self) -> None:
        scene, totals = self.scene, self.totals
        totals.kills, totals.exits, totals.ways_out = Counter(scene.kills), Counter(scene.exits), scene.ways_out
        for stream, history in getattr(self, "_histories", {}).items():
            appends = scene.ledger(stream)
            totals.appended += sum(len(each.facts) for each in appends.values())
            totals.acknowledged += sum(len(each.ids or ()) for each in appends.values())
            totals.forgiven += sum(len(appends[key].facts) for key in history.lost)
        for name, log in scene.logs().items():
            for error in ERROR.findall(log):
                totals.exits[f"traceback in the log of {name}: {error}"] += 1
