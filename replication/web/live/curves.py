"""Samples of the last ten minutes, and the curves drawn from them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MINUTES: Final = 10
MAX_CURVES: Final = 1_000  # pairs of a stream and a writer
REDRAW: Final = 10.0  # seconds; two pixels
_SAMPLES: Final = 300  # of one pair
_POINTS: Final = 60  # of one curve, at most
_FEW: Final = 5  # samples, of which each is a visible part of the curve
_RECENT: Final = 10.0  # seconds over which the present rate is taken
_WIDTH, _HEIGHT = 120, 24  # pixels
_CELLS: Final = 20  # characters of a curve on a terminal
_BLOCKS: Final = "▁▂▃▄▅▆▇█"


class Sample(NamedTuple):
    """A position and a lag, at a time in seconds of any clock."""

    at: float
    position: int
    lag: int


class Curves:
    """The samples of each pair of a stream and a writer; those of pairs beyond MAX_CURVES are not kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], deque[Sample]] = {}
        self._drawn: dict[tuple[str, str], tuple[float, str]] = {}  # with the time of the newest sample in it

    def add(self, samples: Mapping[tuple[str, str], Sample]) -> None:
        """Keep a sample of each pair, and forget the pairs without one."""
        for gone in self._kept.keys() - samples.keys():
            del self._kept[gone]
            self._drawn.pop(gone, None)
        for pair, sample in samples.items():
            if pair in self._kept or len(self._kept) < MAX_CURVES:
                kept = self._kept.setdefault(pair, deque(maxlen=_SAMPLES))
                while kept and sample.at - kept[0].at > MINUTES * 60:
                    kept.popleft()
                kept.append(sample)

    def of(self, pair: tuple[str, str]) -> Sequence[Sample]:
        """Return the samples of a pair, the oldest first."""
        return [*self._kept.get(pair, ())]

    def drawn(self, pair: tuple[str, str]) -> str:
        """Return the curve of a pair; it is drawn again after each sample at first, then every REDRAW seconds."""
        samples = self.of(pair)
        at, svg = self._drawn.get(pair, (0.0, ""))
        if samples and (len(samples) <= _FEW or samples[-1].at - at >= REDRAW):
            svg = draw(samples)
            self._drawn[pair] = samples[-1].at, svg
        return svg

    def published(self, pair: tuple[str, str], at: float) -> int | None:
        """Return what was published at a time; None if the samples begin later."""
        return next((each.position + each.lag for each in reversed(self._kept.get(pair, ())) if each.at <= at), None)


def rate(samples: Sequence[Sample]) -> float | None:
    """Return the present IDs a second; None without two samples.  It is 0 while a position goes back."""
    if len(samples) < 2:  # noqa: PLR2004
        return None
    newest = samples[-1]
    first = next(each for each in samples if newest.at - each.at <= _RECENT)
    if first is newest:
        first = samples[-2]
    return max(0.0, (newest.position - first.position) / max(newest.at - first.at, 0.001))


def draw(samples: Sequence[Sample]) -> str:
    """Return an SVG of the IDs a second, and of the lag as a second line; empty without three samples."""
    if len(samples) < 3:  # noqa: PLR2004
        return ""
    ends = _ends(samples, -(-len(samples) // _POINTS))
    rates = _rates(samples, ends)
    lags = [float(max(each.lag for each in samples[first + 1 : last + 1])) for first, last in pairwise(ends)]
    end = samples[-1].at
    times = [1 - min(1.0, (end - samples[last].at) / (MINUTES * 60)) for last in ends[1:]]
    lines = f'<polyline class="rate" points="{_points(times, rates)}"/>'
    if max(lags) > 0:
        lines += f'<polyline class="lag" points="{_points(times, lags)}"/>'
    highest = f"the last ten minutes: at most {max(rates):,.0f} IDs/s, lag at most {max(lags):,.0f}"
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<svg class="curve" role="img" aria-label="{highest}" {size}><title>{highest}</title>{lines}</svg>'


def draw_text(samples: Sequence[Sample]) -> str:
    """Return the IDs a second as one character for each 30 s, for a terminal; empty before that."""
    rates = _rates(samples, _ends(samples, _SAMPLES // _CELLS))
    most = max(rates, default=0.0) or 1.0
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * each / most)] for each in rates)


def _ends(samples: Sequence[Sample], step: int) -> list[int]:
    """Return the index of each sample that ends a part of ``step`` samples; the newest is the last of them."""
    return [*range(len(samples) - 1, -1, -step)][::-1]


def _rates(samples: Sequence[Sample], ends: Sequence[int]) -> list[float]:
    """Return the IDs a second between each two of ``ends``."""
    pairs = [(samples[first], samples[last]) for first, last in pairwise(ends)]
    return [max(0.0, (new.position - old.position) / max(new.at - old.at, 0.001)) for old, new in pairs]


def _points(times: Iterable[float], values: Sequence[float]) -> str:
    most = max(values) or 1.0
    return " ".join(
        f"{_WIDTH * time:.0f},{_HEIGHT - 1 - (_HEIGHT - 2) * value / most:.1f}"
        for time, value in zip(times, values, strict=True)
    )
