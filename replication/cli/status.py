"""``replication status``: streams, writers, positions, lag and connections of one process (docs/command-line.md)."""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import attrs
from rich.console import Group
from rich.live import Live

from replication.cli.keys import pressed_keys
from replication.cli.parser import Parser
from replication.cli.tables import FittingTable, make_console, plain
from replication.web.blocking_client import HttpError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

    from replication.web.blocking_client import HttpClient

PERIOD: Final = 1.0  # seconds between two requests of --watch
REDRAW: Final = 0.25  # seconds between two drawings of a terminal, whose size may change
ORDERS: Final = {"a": "attention", "n": "name", "l": "lag"}  # by key
STEPS: Final = {"up": -1, "down": 1, "page up": -20, "page down": 20}  # streams, by key
URGENT: Final = ("stopped", "not connected", "catching up", "opening", "waiting for others")  # the order of --watch
BRIEF: Final = 1_000  # IDs; a worker of a Synapse catches up for a moment at each fact of several rows
STYLES: Final = {  # on a terminal
    **dict.fromkeys(("stopped", "not connected"), "bold red"),
    **dict.fromkeys(("catching up", "opening", "waiting for others"), "yellow"),
    **dict.fromkeys(("live", "writing"), "green"),
}
_NO_WRITER: Final = {"instance": "-", "position": "-", "lag": "-", "state": "-", "error": None}


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication status",
        description="Show streams, writers, positions, lag and connections of a master or worker.",
        epilog="example, in a script: replication status --check > /dev/null && deploy",
    )
    parser.add_http_options()
    parser.add_argument("--watch", action="store_true", help="print again every second; on a terminal, until the key q")
    parser.add_argument("--json", action="store_true", help="one JSON object: {streams, connections, …}")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with status 1 if the database cannot be written, a stream is stopped or a writer is not connected",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the status, once or every second."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.watch and found.check:
        parser.error("--check and --watch: give one of them")
    render = as_json if found.json else as_tables
    console = make_console()
    with closing(parser.open_client(found)) as client:
        if not found.watch:
            status = fetch(client)
            console.print(render(status), soft_wrap=found.json or not console.is_terminal)
            if found.check and status["not_ready"]:
                raise HttpError(f"{client.url} is not ready: {status['not_ready']}")
            return 0
        with suppress(KeyboardInterrupt):
            watch(client, render, console)
        return 0


def fetch(client: HttpClient) -> dict[str, Any]:
    """Return the answers of ``/health``, ``/v1/streams`` and ``/v1/connections`` in one dict.

    ``not_ready`` is why ``/health/ready`` answers 503, or None.
    """
    paths = "/health", "/v1/streams", "/v1/connections"
    status = {key: value for path in paths for key, value in client.call("GET", path).items()}
    status["not_ready"] = None
    try:
        client.call("GET", "/health/ready")
    except HttpError as error:
        status["not_ready"] = error.detail or str(error)
    return status


def watch(client: HttpClient, render: Callable[[dict[str, Any]], RenderableType], console: Console) -> None:
    """Print the status every second, also while the daemon does not answer; until interrupted, or by the key q.

    A terminal is redrawn in place, and takes the keys of ``View``.
    """
    if not console.is_terminal:
        while True:
            try:
                console.print(render(attention_first(fetch(client))), soft_wrap=True)
            except UnavailableError as error:
                console.print(plain(str(error)), soft_wrap=True)
            time.sleep(PERIOD)
    view = View()
    with pressed_keys() as keys, Live(console=console, auto_refresh=False, screen=keys is not None) as live:
        status: dict[str, Any] | None = None
        due = 0.0
        while not view.ended:
            if keys is None or (time.monotonic() >= due and not (view.paused and status)):
                due = time.monotonic() + PERIOD
                try:
                    status = fetch(client)
                except UnavailableError as error:
                    status = None
                    live.update(plain(str(error)), refresh=True)
            if status is not None:
                shown = render(view.arrange(status))
                live.update(Group(shown, plain(view.legend(status))) if keys else shown, refresh=True)
            if keys is None:
                time.sleep(PERIOD)
            else:  # the width may change at any time
                view.press(keys.read(min(REDRAW, max(0.0, due - time.monotonic()))))


@attrs.define
class View:
    """What a user of ``--watch`` has chosen by keys: a(ttention), n(ame), l(ag), arrows, p(ause), q(uit)."""

    order: str = "attention"
    first: int = 0  # index of the first stream that is shown
    paused: bool = False
    ended: bool = False

    def press(self, key: str) -> None:
        """Do what a key stands for; other keys do nothing."""
        if key in ORDERS:
            self.order, self.first = ORDERS[key], 0
        elif key in STEPS:
            self.first = max(0, self.first + STEPS[key])
        elif key == "p":
            self.paused = not self.paused
        elif key in ("q", "escape"):
            self.ended = True

    def arrange(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the status with its streams in order, from the first that is shown."""
        if self.order == "attention":
            status = attention_first(status)
        else:
            by = _largest_lag if self.order == "lag" else _name
            status = {**status, "streams": sorted(status["streams"], key=by)}
        self.first = min(self.first, max(0, len(status["streams"]) - 1))
        return {**status, "streams": status["streams"][self.first :]}

    def legend(self, status: dict[str, Any]) -> str:
        """Return the line below the tables."""
        where = f"streams from {self.first + 1} of {len(status['streams'])}, by {self.order}"
        pause = "p goes on" if self.paused else "p pauses"
        return f"{where} | a attention, n name, l lag | arrows scroll | {pause} | q quits"


def attention_first(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status with the streams first that are stopped, then those that have no connection or catch up."""
    return {**status, "streams": sorted(status["streams"], key=lambda stream: (_urgency(stream), stream["name"]))}


def _largest_lag(stream: dict[str, Any]) -> tuple[int, str]:
    return -max([writer["lag"] for writer in stream["writers"]], default=0), stream["name"]


def _name(stream: dict[str, Any]) -> str:
    name: str = stream["name"]
    return name


def _urgency(stream: dict[str, Any]) -> int:
    states = [
        writer["state"]
        for writer in stream["writers"]
        if writer["state"] != "catching up" or writer["lag"] > BRIEF  # a short catch-up moves no row
    ]
    return min([URGENT.index(each) for each in states if each in URGENT], default=len(URGENT))


def as_json(status: dict[str, Any]) -> Text:
    """Return one line of JSON."""
    return plain(json.dumps(status, separators=(",", ":")))


def as_tables(status: dict[str, Any]) -> Group:
    """Return a heading, a table of streams by writer, errors and warnings, and a table of connections."""
    summary = status["not_ready"] or status["status"]
    heading = plain(f"{status['role']} {status['instance_name']} of {status['server_name']}: {summary}")
    streams = FittingTable(
        *("STREAM", "WRITER", "#POSITION", "#LAG", "STATE", "#OPEN", "OLDEST OPEN"),
        optional=["OLDEST OPEN", "OPEN"],
        styles=STYLES,
    )
    notes = []
    for stream in status["streams"]:
        oldest = stream["oldest_open"]
        age = f"{oldest['id']} for {oldest['age']:.0f} s" if oldest else "-"
        for writer in stream["writers"] or [_NO_WRITER]:
            position = [writer[key] for key in ("instance", "position", "lag", "state")]
            streams.add(stream["name"], *position, stream["open"], age)
            if writer["error"]:
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {writer['error']}"))
            if lost := writer.get("lost_and_found"):
                what = f"{lost} facts were lost on the way here, and found in the database"
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {what}"))
            if failed := writer.get("failed"):
                where = f"{stream['name']} {writer['instance']} {failed}"
                what = f"fact {failed} fails; `replication skip {where}` leaves it out"
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {what}"))
            if gone := writer.get("gone"):
                notes.append(plain(f"{stream['name']} of {writer['instance']}: facts up to {gone} are deleted"))
            if skipped := writer.get("skipped"):
                what = f"{skipped} facts are left out; `replication skipped` lists them"
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {what}"))
        notes += [plain(each) for each in stream.get("notes", ())]
    peers = FittingTable(
        *("CONNECTION", "ADDRESS", "SINCE", "#LINES OUT", "#BYTES OUT", "#QUEUED", "LAST"),
        optional=["LAST", "BYTES OUT", "LINES OUT", "SINCE"],
    )
    for peer in status["connections"]:
        since = datetime.fromtimestamp(peer["since"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        sizes = [peer[key] for key in ("lines_out", "bytes_out", "queued_bytes")]
        peers.add(peer["name"] or "-", peer["address"], since, *sizes, peer["last_command"] or "-")
    shared = {each["name"] for each in status["connections"] if each.get("shares_name")}
    notes += [plain(f"two processes have the instance name {each!r}: give each its own") for each in sorted(shared)]
    return Group(heading, streams, *notes, peers)
