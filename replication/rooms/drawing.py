"""A room's graph as a picture: Graphviz text, or SVG with one row per event, newest at the top."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any, Final

import msgspec

from replication.errors import escape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

ROW: Final = 22  # pixels
COLUMN: Final = 18
LEFT: Final = 66  # x of the first column
TEXT: Final = 420  # width of the labels
TOP: Final = 58
SHORT: Final = 12  # characters of an event's ID that are shown


class EventMark(msgspec.Struct, frozen=True):
    """A drawn event; the kind ``missing`` stands for a backward extremity, which is not stored."""

    event_id: str
    label: str
    depth: int
    order: int
    prev_event_ids: tuple[str, ...]
    kind: str = "plain"  # of KINDS
    is_state: bool = False


# For each kind: fill, outline, name in the legend.
KINDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "plain": ("#5b7083", "#34495e", "event"),
    "state": ("#2471a3", "#154360", "state event"),
    "outlier": ("#ffffff", "#7f8c8d", "outlier"),
    "soft_failed": ("#f5b041", "#9c640c", "soft-failed"),
    "rejected": ("#e6b0aa", "#a93226", "rejected"),
    "missing": ("#ffffff", "#a93226", "missing (backward extremity)"),
}
FORWARD: Final = ("#28b463", "forward extremity")
COLUMN_COLOURS: Final = ("#34495e", "#2471a3", "#8e44ad", "#117864", "#b9770e", "#a93226")


def mark_of(event: Mapping[str, Any]) -> EventMark:
    """Return the mark that draws an event, in the form of ``GET /v1/rooms/ROOM/events/EVENT``."""
    key = f" {event['state_key']}" if event["state_key"] else ""
    is_state = event["state_key"] is not None
    flags = [each for each in ("rejected", "soft_failed", "outlier") if event[each]]
    return EventMark(
        event_id=event["event_id"],
        label=f"{event['type']}{key}",
        depth=event["depth"],
        order=event["stream_ordering"],
        prev_event_ids=tuple(event["prev_event_ids"]),
        kind=(*flags, "state" if is_state else "plain")[0],
        is_state=is_state,
    )


def with_missing(marks: Iterable[EventMark], backward: Collection[str]) -> list[EventMark]:
    """Return the marks, newest first, with a mark for each backward extremity that they name."""
    known = {mark.event_id: mark for mark in marks}
    above: dict[str, int] = {}
    for mark in known.values():
        for prev in mark.prev_event_ids:
            if prev in backward and prev not in known:
                above[prev] = min(above.get(prev, mark.depth), mark.depth)
    gaps = [EventMark(each, "not here", max(depth - 1, 0), 0, (), "missing") for each, depth in above.items()]
    return sorted([*known.values(), *gaps], key=lambda it: (it.depth, it.order, it.event_id), reverse=True)


def encode_dot(room_id: str, marks: Sequence[EventMark], forward: Collection[str]) -> str:
    """Return Graphviz text; events of equal depth share a rank."""
    lines = [
        f"digraph {_quote(room_id)} {{",
        '  rankdir="BT"; node [style="filled", fontname="sans-serif", fontsize=10];',
    ]
    shown = {mark.event_id for mark in marks}
    for mark in marks:
        fill, line, _ = KINDS[mark.kind]
        style = "filled,dashed" if mark.kind in ("outlier", "missing") else "filled"
        shape = "box" if mark.is_state else "ellipse"
        rim = f'color="{FORWARD[0]}", penwidth=3' if mark.event_id in forward else f'color="{line}"'
        label = f"{mark.depth}  {mark.label}\\n{_short(mark.event_id)}"
        ink = "white" if mark.kind in ("plain", "state") else "black"
        lines.append(
            f"  {_quote(mark.event_id)} [label={_quote(label, keep_breaks=True)}, shape={shape}, "
            f'style="{style}", fillcolor="{fill}", fontcolor="{ink}", {rim}];'
        )
    by_depth: dict[int, list[str]] = {}
    for mark in marks:
        by_depth.setdefault(mark.depth, []).append(_quote(mark.event_id))
    lines += [f"  {{ rank=same; {'; '.join(some)}; }}" for some in by_depth.values() if len(some) > 1]
    for mark in marks:
        style = ' [style="dashed"]' if mark.kind == "outlier" else ""
        lines += [
            f"  {_quote(prev)} -> {_quote(mark.event_id)}{style};" for prev in mark.prev_event_ids if prev in shown
        ]
    return "\n".join([*lines, "}", ""])


def encode_svg(room_id: str, marks: Sequence[EventMark], forward: Collection[str]) -> str:
    """Return an SVG of ``marks``, newest first, with a column for each branch."""
    columns = _columns(marks)
    rows = {mark.event_id: row for row, mark in enumerate(marks)}
    width = LEFT + COLUMN * (max(columns.values(), default=0) + 2) + TEXT
    height = TOP + ROW * (len(marks) + 1)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 960)}" height="{height}" '
            f'font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14">{_markup(room_id)}</text>',
        *_legend(),
        *_bands(marks, max(width, 960)),
    ]
    for mark in marks:
        here = columns[mark.event_id], rows[mark.event_id]
        parts += [_edge(mark, *here, columns[prev], rows[prev]) for prev in mark.prev_event_ids if prev in rows]
    text_x = LEFT + COLUMN * (max(columns.values(), default=0) + 1)
    for row, mark in enumerate(marks):
        y = _y(row)
        colour = "#999999" if mark.kind in ("outlier", "missing") else "#1b2631"
        short = f'<tspan fill="#99a3a4" font-family="monospace">{_markup(_short(mark.event_id))}</tspan>'
        place, is_forward = _x(columns[mark.event_id]), mark.event_id in forward
        parts += _node(mark.kind, place, y, is_state=mark.is_state, is_forward=is_forward)
        parts += [f'<text x="{text_x}" y="{y + 4}" fill="{colour}">{_markup(mark.label)} {short}</text>']
    return "\n".join([*parts, "</svg>", ""])


def _columns(marks: Sequence[EventMark]) -> dict[str, int]:
    """Return each event's column: that of its branch, which goes on to the first of its ``prev_events``."""
    columns: dict[str, int] = {}
    expected: list[str | None] = []  # for each column, the next event below
    shown = {mark.event_id for mark in marks}
    for mark in marks:
        mine = [column for column, wanted in enumerate(expected) if wanted == mark.event_id]
        column = mine[0] if mine else _free(expected)
        columns[mark.event_id] = column
        for each in mine:
            expected[each] = None
        for place, prev in enumerate([each for each in mark.prev_event_ids if each in shown]):
            if prev in expected or prev in columns:
                continue
            expected[column if place == 0 and expected[column] is None else _free(expected)] = prev
    return columns


def _free(expected: list[str | None]) -> int:
    if None in expected:
        return expected.index(None)
    expected.append(None)
    return len(expected) - 1


def _x(column: int) -> int:
    return LEFT + COLUMN * column


def _y(row: int) -> int:
    return TOP + ROW * row + ROW // 2


def _legend() -> Iterator[str]:
    x = 18
    for kind, (_, _, name) in KINDS.items():
        yield from _node(kind, x, 40, is_state=kind == "state", is_forward=False)
        yield f'<text x="{x + 11}" y="44">{name}</text>'
        x += 30 + 7 * len(name)
    yield from _node("plain", x, 40, is_state=False, is_forward=True)
    yield f'<text x="{x + 13}" y="44">{FORWARD[1]}</text>'


def _bands(marks: Sequence[EventMark], width: int) -> Iterator[str]:
    """Yield the numbers of the depths, and a shade for every other depth."""
    shaded, last = False, None
    for row, mark in enumerate(marks):
        if mark.depth != last:
            shaded, last = not shaded, mark.depth
            yield f'<text x="44" y="{_y(row) + 4}" fill="#7f8c8d" text-anchor="end">{mark.depth}</text>'
        if shaded:
            y = TOP + ROW * row
            yield f'<rect x="0" y="{y}" width="{width}" height="{ROW}" fill="#000000" opacity="0.03"/>'


def _edge(mark: EventMark, column: int, row: int, low_column: int, low_row: int) -> str:
    x, y, low_x, low_y = _x(column), _y(row), _x(low_column), _y(low_row)
    colour = COLUMN_COLOURS[low_column % len(COLUMN_COLOURS)]
    dashes = ' stroke-dasharray="3 3" opacity="0.5"' if mark.kind == "outlier" else ""
    if column == low_column:
        path = f"M{x} {y} V{low_y}"
    else:  # change the column at once: it is free from here downwards
        middle = y + ROW // 2
        path = f"M{x} {y} C{x} {middle} {low_x} {middle} {low_x} {min(y + ROW, low_y)} V{low_y}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'


def _node(kind: str, x: int, y: int, *, is_state: bool, is_forward: bool) -> Iterator[str]:
    fill, line, _ = KINDS[kind]
    dashes = ' stroke-dasharray="2 2"' if kind in ("outlier", "missing") else ""
    style = f'fill="{fill}" stroke="{line}" stroke-width="1.5"{dashes}'
    if is_forward:
        yield f'<circle cx="{x}" cy="{y}" r="8.5" fill="none" stroke="{FORWARD[0]}" stroke-width="2.5"/>'
    if kind == "missing":
        yield f'<path d="M{x} {y - 6} L{x + 6} {y} L{x} {y + 6} L{x - 6} {y} Z" {style}/>'
    elif is_state:
        yield f'<rect x="{x - 5}" y="{y - 5}" width="10" height="10" {style}/>'
    else:
        yield f'<circle cx="{x}" cy="{y}" r="5" {style}/>'
    if kind == "rejected":
        cross = f"M{x - 4} {y - 4} L{x + 4} {y + 4} M{x - 4} {y + 4} L{x + 4} {y - 4}"
        yield f'<path d="{cross}" stroke="{line}" stroke-width="1.5"/>'


def _short(event_id: str) -> str:
    return event_id if len(event_id) <= SHORT else f"{event_id[:SHORT]}…"


def _markup(text: str) -> str:
    """Return ``text`` for SVG, which may not have control characters."""
    return html.escape(escape(text))


def _quote(text: str, *, keep_breaks: bool = False) -> str:
    text = escape(text).replace("\\", "\\\\").replace('"', '\\"')
    if keep_breaks:
        text = text.replace("\\\\n", "\\n")
    return f'"{text}"'
