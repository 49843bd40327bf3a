"""Pictures of how figures grow: one SVG with a small chart for each, both axes logarithmic.

A chart has one line for each variant that was measured at these sizes, such as a database.  In the chart of a cost, a
dashed line shows growth in proportion to the size.
"""

from __future__ import annotations

from html import escape
from itertools import cycle
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final

import msgspec

from replication.bench.series import Size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.bench.series import Result

COLUMNS: Final = 3
WIDTH, HEIGHT = 400, 300  # of a chart
LEFT, RIGHT, TOP, BOTTOM = 70, 25, 60, 50  # the margins of its axes
FOOT: Final = 30  # below all charts
COLOURS: Final = "#1f5fa8", "#c8501e", "#2e7d32"
COSTS: Final = {"s": "s", "bytes": "B"}  # units of costs, which should not grow faster than the size; their symbols
_PREFIXES: Final = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T"}

Point = tuple[float, float]


def draw(results: Sequence[Result]) -> str:
    """Return an SVG of all results whose variant is a size."""
    charts: dict[tuple[str, str, str], dict[str, list[Point]]] = {}
    for each in results:
        if isinstance(each.variant, Size) and each.value > 0:
            lines = charts.setdefault((each.variant.things, each.metric, each.unit), {})
            lines.setdefault(each.variant.what, []).append((log10(each.variant.number), log10(each.value)))
    kinds = dict.fromkeys(what for lines in charts.values() for what in lines)
    colours = dict(zip(kinds, cycle(COLOURS), strict=False))
    width, foot = WIDTH * min(COLUMNS, len(charts)), HEIGHT * ceil(len(charts) / COLUMNS)
    size = f'width="{width}" height="{foot + FOOT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (of, lines) in enumerate(charts.items()):
        row, column = divmod(number, COLUMNS)
        parts += [f'<g transform="translate({column * WIDTH} {row * HEIGHT})">', *_chart(*of, lines, colours), "</g>"]
    parts.append(_text(LEFT, foot + 10, "dashed: in proportion to the size", 'fill="#666"'))
    return "\n".join([*parts, "</svg>\n"])


class _Axis(msgspec.Struct, frozen=True):
    """The decades from ``low`` to ``high``, drawn from ``start`` to ``end``."""

    low: int
    high: int
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        low = floor(min(values))
        return cls(low, max(ceil(max(values)), low + 1), start, end)

    def at(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def _chart(
    things: str, metric: str, unit: str, lines: Mapping[str, Sequence[Point]], colours: Mapping[str, str]
) -> Iterator[str]:
    points = [point for line in lines.values() for point in line]
    x = _Axis.over([across for across, _ in points], LEFT, WIDTH - RIGHT)
    y = _Axis.over([up for _, up in points], HEIGHT - BOTTOM, TOP)
    yield from _grid(x, y, COSTS.get(unit, ""))
    if unit in COSTS:
        across, up = min(points)
        length = min(x.high - across, y.high - up)
        ends = x.at(across), y.at(up), x.at(across + length), y.at(up + length)
        yield '<path d="M{} {}L{} {}" stroke="#999" stroke-dasharray="5 4"/>'.format(*ends)
    for number, (what, line) in enumerate(lines.items()):
        colour = colours[what]
        places = [(x.at(across), y.at(up)) for across, up in sorted(line)]
        path = "L".join(f"{across} {up}" for across, up in places)
        yield f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>'
        yield from (f'<circle cx="{across}" cy="{up}" r="3" fill="{colour}"/>' for across, up in places)
        yield _text(LEFT + 110 * number, 46, what, f'fill="{colour}"')
    title = metric if unit in COSTS else f"{metric} ({unit})"
    yield _text(LEFT, 26, title, 'font-size="15" font-weight="bold"')
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, things, 'text-anchor="middle"')


def _grid(x: _Axis, y: _Axis, symbol: str) -> Iterator[str]:
    """Yield a line and a text for each decade."""
    for decade in range(x.low, x.high + 1):
        place = x.at(decade)
        yield f'<path d="M{place} {y.start}V{y.end}" stroke="#ddd"/>'
        yield _text(place, y.start + 18, _decade(decade, ""), 'text-anchor="middle"')
    for decade in range(y.low, y.high + 1):
        place = y.at(decade)
        yield f'<path d="M{x.start} {place}H{x.end}" stroke="#ddd"/>'
        yield _text(x.start - 8, place + 4, _decade(decade, symbol), 'text-anchor="end"')


def _decade(exponent: int, symbol: str) -> str:
    """Return a power of ten, as in ``10 ms``."""
    thousands, rest = divmod(exponent, 3)
    return f"{10**rest} {_PREFIXES[thousands]}{symbol}".rstrip()


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
