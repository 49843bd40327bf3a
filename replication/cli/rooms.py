"""``replication rooms``: print a room's extremities, depth, gaps and current state, or draw its graph."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import quote

from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.cli.tables import FittingTable, make_console, plain
from replication.errors import StoreError
from replication.rooms.drawing import encode_dot, encode_svg, mark_of, with_missing
from replication.storage.tables.blocking_rooms import read_rooms
from replication.web.address import DEFAULT_URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.storage.tables.room_queries import RoomReads
    from replication.web.blocking_client import HttpClient

LIMIT: Final = 100  # events, unless --limit is given


class _Gap(TypedDict):
    event_id: str
    depth: int


class _Room(TypedDict):
    room_id: str
    room_version: str | None
    min_depth: int | None
    forward_extremities: list[str]
    backward_extremities: list[str]
    gaps: list[_Gap]
    current_state: list[tuple[str, str, str]]


class _Event(TypedDict):
    event_id: str
    type: str
    state_key: str | None
    depth: int
    stream_ordering: int
    prev_event_ids: list[str]
    outlier: bool
    rejected: str | None
    soft_failed: bool


class _Events(TypedDict):
    events: list[_Event]


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication rooms",
        description="Show a room's extremities, depth, gaps and current state, or draw its graph.",
        epilog="example: replication rooms '!abc:example.com' --svg room.svg",
    )
    parser.add_argument("room", metavar="ROOM", help="the room's ID, as in '!abc:example.com'")
    parser.add_http_options()
    parser.add_argument("--database", metavar="URL", help="read the master's database instead of its HTTP API")
    for option, form in (("--dot", "for Graphviz"), ("--svg", "as SVG")):
        written = f"write the graph {form} to FILE; without FILE to standard output"
        parser.add_argument(option, metavar="FILE", nargs="?", const="-", help=written)
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help="draw the latest N events [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print or draw a room."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.limit < 1:
        parser.error(f"--limit: {found.limit} is not 1 or more")
    if found.database is not None and found.http != DEFAULT_URL:
        parser.error("--http and --database: give one of them")
    draws = found.dot is not None or found.svg is not None
    limit = found.limit if draws else 0
    if found.database is not None:
        try:
            view, events = read_rooms(found.database, lambda rooms: _from_database(rooms, found.room, limit))
        except StoreError as error:
            if "room_summaries" not in str(error):
                raise
            raise StoreError(f"{error}: no rooms are kept in this database; start its master with --rooms") from error
    else:
        with closing(parser.open_client(found)) as client:
            view, events = _from_http(client, found.room, limit)
    if draws:
        marks = with_missing(map(mark_of, events), view["backward_extremities"])
        for encode, target in ((encode_dot, found.dot), (encode_svg, found.svg)):
            if target is not None:
                _write(target, encode(found.room, marks, view["forward_extremities"]))
    elif found.json:
        write_line(json.dumps(view, separators=(",", ":")))
    else:
        show(view)
    return 0


def show(view: dict[str, Any]) -> None:
    """Print a room, in the form of ``GET /v1/rooms/ROOM``."""
    console = make_console()
    console.print(plain(f"{view['room_id']}, version {view['room_version'] or '-'}, depth from {view['min_depth']}"))
    console.print(plain(f"forward extremities: {', '.join(view['forward_extremities']) or 'none'}"))
    console.print(plain(f"backward extremities: {', '.join(view['backward_extremities']) or 'none'}"))
    for gap in view["gaps"]:
        console.print(plain(f"gap: {gap['event_id']} is missing below depth {gap['depth']}"))
    table = FittingTable("TYPE", "STATE KEY", "EVENT")
    for row in view["current_state"]:
        table.add(*row)
    console.print(table)


def _from_http(client: HttpClient, room: str, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    path = f"/v1/rooms/{quote(room, safe='')}"
    view = client.call("GET", path, form=_Room)
    if not limit:
        return view, []
    return view, client.call("GET", f"{path}/events?whole=true&limit={limit}", form=_Events)["events"]


def _from_database(rooms: RoomReads, room: str, limit: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    view = rooms.view(room)
    nodes = rooms.history(room, None, limit, backwards=True, whole=True) if limit else []
    gaps = rooms.gaps(room, LIMIT)
    return view.to_json(gaps), [node.to_json() for node in nodes]


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")
