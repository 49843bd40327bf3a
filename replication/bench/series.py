"""What was measured, over its rounds, and what is said of it."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Final, Self

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MILLISECOND: Final = 1e-3
_KIB: Final = 1024
_FEW: Final = 10  # of which the tenths matter, too


@attrs.frozen
class Effort:
    """How much to do: how many rounds, and whether of the quick size or of so many ``times`` the full one."""

    rounds: int
    quick: bool = attrs.field(kw_only=True)
    times: int = 1

    def size(self, full: int, quick: int) -> int:
        """Return how much one round does."""
        return quick if self.quick else full * self.times


@attrs.frozen
class Result:
    """One line of the report; ``spread`` is (max - min) / median over the rounds."""

    scenario: str
    variant: str
    metric: str
    value: float
    unit: str
    rounds: int
    spread: float


@attrs.frozen
class Series:
    """One figure, as often as it was measured."""

    variant: str
    metric: str
    unit: str
    values: Sequence[float]

    def result(self, scenario: str) -> Result:
        """Return its median and spread."""
        middle = median(self.values)
        spread = (max(self.values) - min(self.values)) / middle if middle else 0.0
        return Result(scenario, self.variant, self.metric, middle, self.unit, len(self.values), spread)


@attrs.frozen
class Lap:
    """So many things were done in so many seconds, of the clock on the wall and of this process's CPU."""

    count: int
    wall: float
    cpu: float


@attrs.frozen
class Stopwatch:
    """Both clocks as they stood at the start."""

    wall: float
    cpu: float

    @classmethod
    def start(cls) -> Self:
        """Start both."""
        return cls(time.monotonic(), time.process_time())

    def lap(self, count: int) -> Lap:
        """Return what they say, for ``count`` things done."""
        return Lap(count, time.monotonic() - self.wall, time.process_time() - self.cpu)


def rates(variant: str, things: str, laps: Sequence[Lap]) -> Iterator[Series]:
    """Yield ``things`` per second, and per second of CPU of the process that was measured.

    The second is what the first would be with a core to itself, if all of the work is the processor's.
    """
    unit = f"{things}/s"
    yield Series(variant, things, unit, [lap.count / lap.wall for lap in laps])
    yield Series(variant, f"{things} per CPU second", unit, [lap.count / lap.cpu for lap in laps])


def spell_result(result: Result) -> str:
    """Return a line of the table."""
    figure = f"{_spell_value(result.value, result.unit):>20}"
    return f"{result.scenario:8} {result.variant:40} {result.metric:28} {figure}   spread {result.spread:.0%}"


def _spell_value(value: float, unit: str) -> str:
    match unit:
        case "s":
            return f"{value / _MILLISECOND:,.3f} ms"
        case "bytes":
            return f"{value / _KIB:,.1f} KiB"
        case "cores":
            return f"{value:.3%} of a core"
    return f"{value:,.{0 if value >= _FEW else 1}f} {unit}"
