"""Measured values over rounds, and their report: the machine, median and spread."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FEW: Final = 10  # values below it are printed with one decimal


@attrs.frozen
class BenchOptions:
    """How much to measure: the number of rounds, and the quick size or ``times`` the full size."""

    rounds: int
    quick: bool = attrs.field(kw_only=True)
    times: int = 1

    def size(self, full: int, quick: int) -> int:
        """Return the size of one round."""
        return quick if self.quick else full * self.times


class Size(msgspec.Struct, frozen=True):
    """A variant with a number of ``things``, such as streams; ``what`` is the rest of its name, such as a database."""

    number: int
    things: str
    what: str = ""

    def __str__(self) -> str:
        things = self.things.removesuffix("s") if self.number == 1 else self.things
        return f"{self.what}{self.what and ', '}{self.number:,} {things}"


class Result(msgspec.Struct, frozen=True):
    """One line of the report; ``spread`` is (max - min) / median over the rounds."""

    scenario: str
    variant: str | Size
    metric: str
    value: float
    unit: str
    rounds: int
    spread: float

    def as_dict(self) -> dict[str, str | float]:
        """Return the fields of ``--json``."""
        return {**msgspec.structs.asdict(self), "variant": str(self.variant)}


class Series(msgspec.Struct, frozen=True):
    """The values of one figure, one for each round."""

    variant: str | Size
    metric: str
    unit: str
    values: Sequence[float]

    def result(self, scenario: str) -> Result:
        """Return its median and spread."""
        middle = median(self.values)
        spread = (max(self.values) - min(self.values)) / middle if middle else 0.0
        return Result(scenario, self.variant, self.metric, middle, self.unit, len(self.values), spread)


class Sample(msgspec.Struct, frozen=True):
    """One round: ``count`` operations in ``wall`` seconds of time and ``cpu`` seconds of this process's CPU."""

    count: int
    wall: float
    cpu: float


@attrs.frozen
class Stopwatch:
    """The values of both clocks at the start."""

    wall: float = attrs.field(factory=time.monotonic)
    cpu: float = attrs.field(factory=time.process_time)

    def sample(self, count: int) -> Sample:
        """Return the time since the start, for ``count`` operations."""
        return Sample(count, time.monotonic() - self.wall, time.process_time() - self.cpu)


def rates(
    variant: str | Size, things: str, options: BenchOptions, measure: Callable[..., Sample], *arguments: object
) -> Iterator[Series]:
    """Measure in each round; yield ``things`` per second, and per CPU second of the measured process.

    If the work is limited by the CPU, the second is the rate on a machine with a free core.
    """
    samples = [measure(*arguments) for _ in range(options.rounds)]
    unit = f"{things}/s"
    yield Series(variant, things, unit, [sample.count / sample.wall for sample in samples])
    yield Series(variant, f"{things} per CPU second", unit, [sample.count / sample.cpu for sample in samples])


def encode_result(result: Result) -> str:
    """Return the line of a result in the table."""
    figure = f"{_encode_value(result.value, result.unit):>20}"
    return f"{result.scenario:8} {result.variant!s:40} {result.metric:28} {figure}   spread {result.spread:.0%}"


def _encode_value(value: float, unit: str) -> str:
    match unit:
        case "s":
            return f"{value * 1000:,.3f} ms"
        case "bytes":
            return f"{value / 1024:,.1f} KiB"
        case "cores":
            return f"{value:.3%} of a core"
        case "x":
            return f"{value:,.2f} x"
    return f"{value:,.{0 if value >= _FEW else 1}f} {unit}"


def describe_machine() -> dict[str, str | int | float]:
    """Return the versions and hardware that affect the figures; ``load`` is the load average of the last minute."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 2),
        "twisted": version("twisted"),
        "sqlite": sqlite3.sqlite_version,
    }


def _cpu() -> str:
    """Return the processor's name, on Linux from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:(.*)", info.read_text(encoding="utf-8"), re.MULTILINE) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
