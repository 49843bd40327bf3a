"""``replication status``: streams, writers, positions, connections and lag, once or again and again."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from replication.cli.http import HttpApi, HttpError, add_http_options, open_api
from replication.cli.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

PERIOD: Final = 1.0  # seconds between two looks of --watch
_NOBODY: Final = {"instance": "-", "position": "-", "lag": "-", "state": "-", "error": None}


def main(arguments: Sequence[str]) -> int:
    """Show how things stand."""
    parser = Parser(prog="replication status", description="Show streams, writers, positions, lag and connections.")
    add_http_options(parser)
    parser.add_argument("--watch", action="store_true", help="show it again every second, until interrupted")
    parser.add_argument("--json", action="store_true", help="one JSON object: {streams, connections}")
    found = parser.parse_args(arguments)
    render = as_json if found.json else as_tables
    # A pipe gets no colours, and lines as long as they are.
    console = Console() if sys.stdout.isatty() else Console(force_terminal=False, color_system=None, width=100_000)
    with closing(open_api(parser, found)) as api:
        if not found.watch:
            console.print(render(look(api)), soft_wrap=found.json)
            return 0
        try:
            watch(api, render, console)
        except KeyboardInterrupt:
            return 0


def look(api: HttpApi) -> dict[str, Any]:
    """Return what the API says of itself, its streams and its connections."""
    return {**api.call("GET", "/health"), **api.call("GET", "/v1/streams"), **api.call("GET", "/v1/connections")}


def watch(api: HttpApi, render: Callable[[dict[str, Any]], RenderableType], console: Console) -> NoReturn:
    """Show it every second, on a terminal in one place.  A daemon that is away is waited for."""
    live = Live(console=console, auto_refresh=False)
    with live if console.is_terminal else nullcontext():
        while True:
            try:
                shown = render(look(api))
            except HttpError as error:
                if not error.passing:
                    raise
                shown = Text(str(error))
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown, soft_wrap=True)
            time.sleep(PERIOD)


def as_json(seen: dict[str, Any]) -> Text:
    """Return one line."""
    return Text(json.dumps(seen, separators=(",", ":")))


def as_tables(seen: dict[str, Any]) -> Group:
    """Return a heading, a table of streams by writer, what is to be said of them, and a table of connections."""
    stopped = [each["name"] for each in seen["streams"] if any(writer["error"] for writer in each["writers"])]
    how = f"{', '.join(stopped)} stopped" if stopped else seen["status"]
    heading = Text(f"{seen['role']} {seen['instance_name']} of {seen['server_name']}: {how}")
    streams = _table("STREAM", "WRITER", "#POSITION", "#LAG", "STATE", "#OPEN", "OLDEST OPEN")
    notes = []
    for stream in seen["streams"]:
        oldest = stream["oldest_open"]
        age = f"{oldest['id']} for {oldest['age']:.0f} s" if oldest else "-"
        for writer in stream["writers"] or [_NOBODY]:
            place = (stream["name"], writer["instance"], writer["position"], writer["lag"], writer["state"])
            _add(streams, *place, stream["open"], age)
            if writer["error"]:
                notes.append(Text(f"{stream['name']} of {writer['instance']}: {writer['error']}"))
        notes += [Text(each) for each in stream.get("notes", ())]
    peers = _table("CONNECTION", "ADDRESS", "SINCE", "#LINES OUT", "#BYTES OUT", "#QUEUED", "LAST")
    for peer in seen["connections"]:
        since = datetime.fromtimestamp(peer["since"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        figures = (peer["lines_out"], peer["bytes_out"], peer["queued_bytes"])
        _add(peers, peer["name"] or "-", peer["address"], since, *figures, peer["last_command"] or "-")
    return Group(heading, streams, *notes, peers)


def _table(*titles: str) -> Table:
    """Return a table without lines; a title with # in front is of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title.removeprefix("#"), justify="right" if title.startswith("#") else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object) -> None:
    table.add_row(*[Text(str(each)) for each in cells])
