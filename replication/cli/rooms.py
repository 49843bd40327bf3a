"""``replication rooms``: a room's extremities, depth, gaps and current state; or its graph as a picture."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replication.cli.http import DEFAULT_URL, add_http_options, open_api
from replication.cli.parser import Parser
from replication.rooms.drawing import Mark, spell_dot, spell_svg, whole
from replication.storage.roomfiles import read_rooms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.cli.http import HttpApi
    from replication.storage.roomreads import RoomReads

DRAWN: Final = 100  # events, unless the caller says


def main(arguments: Sequence[str]) -> int:
    """Show a room."""
    parser = Parser(prog="replication rooms", description=__doc__)
    parser.add_argument("room", metavar="ROOM", help="its ID, as in '!abc:example.com'")
    add_http_options(parser)
    parser.add_argument("--database", metavar="URL", help="read the master's database itself, not its HTTP")
    parser.add_argument(
        "--dot", metavar="FILE", nargs="?", const="-", help="write the graph for Graphviz [to - : stdout]"
    )
    parser.add_argument(
        "--svg", metavar="FILE", nargs="?", const="-", help="write the graph as a picture [to - : stdout]"
    )
    parser.add_argument("--limit", type=int, default=DRAWN, metavar="N", help="draw the latest N events [%(default)s]")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    found = parser.parse_args(arguments)
    if found.limit < 1:
        parser.error(f"--limit: {found.limit} is not 1 or more")
    if found.database is not None and found.http != DEFAULT_URL:
        parser.error("--http and --database: give one of them")
    draws = found.dot is not None or found.svg is not None
    limit = found.limit if draws else 0
    if found.database is not None:
        view, events = read_rooms(found.database, lambda rooms: _from_database(rooms, found.room, limit))
    else:
        with closing(open_api(parser, found)) as api:
            view, events = _from_http(api, found.room, limit)
    if draws:
        marks = whole(map(mark_of, events), view["backward_extremities"])
        for spell, target in ((spell_dot, found.dot), (spell_svg, found.svg)):
            if target is not None:
                _write(target, spell(found.room, marks, view["forward_extremities"]))
    elif found.json:
        print(json.dumps(view, separators=(",", ":")))
    else:
        show(view)
    return 0


def mark_of(event: dict[str, Any]) -> Mark:
    """Return how an event is drawn."""
    key = f" {event['state_key']}" if event["state_key"] else ""
    is_state = event["state_key"] is not None
    flags = [each for each in ("rejected", "soft_failed", "outlier") if event[each]]
    return Mark(
        event_id=event["event_id"],
        label=f"{event['type']}{key}",
        depth=event["depth"],
        order=event["stream_ordering"],
        prev_event_ids=tuple(event["prev_event_ids"]),
        kind=(*flags, "state" if is_state else "plain")[0],
        is_state=is_state,
    )


def show(view: dict[str, Any]) -> None:
    """Print what a room is."""
    console = Console() if sys.stdout.isatty() else Console(force_terminal=False, color_system=None, width=100_000)
    console.print(Text(f"{view['room_id']}, version {view['room_version'] or '-'}, depth from {view['min_depth']}"))
    console.print(Text(f"forward extremities: {', '.join(view['forward_extremities']) or 'none'}"))
    console.print(Text(f"backward extremities: {', '.join(view['backward_extremities']) or 'none'}"))
    for gap in view["gaps"]:
        console.print(Text(f"gap: {gap['event_id']} is missing below depth {gap['depth']}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("TYPE", "STATE KEY", "EVENT"):
        table.add_column(title, overflow="fold")
    for row in view["current_state"]:
        table.add_row(*[Text(each) for each in row])
    console.print(table)


def _from_http(api: HttpApi, room: str, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    path = f"/v1/rooms/{quote(room, safe='')}"
    view = api.call("GET", path)
    events = api.call("GET", f"{path}/events?whole=true&limit={limit}")["events"] if limit else []
    return view, events


def _from_database(rooms: RoomReads, room: str, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    view = rooms.view(room)
    nodes = rooms.history(room, None, limit, backwards=True, whole=True) if limit else []
    gaps = rooms.gaps(room, DRAWN)
    return view.describe(gaps), [node.describe() for node in nodes]


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
