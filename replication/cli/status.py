"""``replication status``: streams, writers, positions, lag and connections of one process (docs/command-line.md).

Scripts read what it prints, so its words stay.  ``--watch`` on a terminal has those of the live page (``watch``).
"""

from __future__ import annotations

import json
import time
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, NotRequired, TypeAlias, TypedDict

import msgspec
from rich.console import Group

from replication.cli.output import interrupted_by_sigterm
from replication.cli.parser import Parser
from replication.cli.tables import FittingTable, make_console, plain
from replication.cli.watch import PERIOD, STYLES, as_page, attention_first, watch
from replication.web.blocking_client import HttpError, Moment, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, RenderableType
    from rich.text import Text

    from replication.web.blocking_client import HttpClient

Id: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # no curve can show a larger one

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
        with suppress(KeyboardInterrupt), interrupted_by_sigterm():  # so that the terminal gets its echo back
            if not console.is_terminal or console.is_dumb_terminal:
                print_again(client, render, console)
            drawn = (lambda status, view: as_json(view.arrange(status))) if found.json else as_page
            watch(lambda: fetch(client), drawn, console)
        return 0


class _Writer(TypedDict):
    """A writer; daemons of earlier versions lack the fields that are not required."""

    instance: str
    position: Id
    announced: NotRequired[Id]
    lag: Id
    state: str
    error: str | None
    lost_and_found: NotRequired[int]
    failed: NotRequired[int | None]
    gone: NotRequired[int]
    skipped: NotRequired[int]
    source: NotRequired[str | None]


class _Oldest(TypedDict):
    id: int
    age: float


class _Stream(TypedDict):
    name: str
    writers: list[_Writer]
    open: int
    oldest_open: _Oldest | None
    notes: NotRequired[list[str]]


class _Connection(TypedDict):
    name: str
    address: str
    since: Moment
    lines_out: int
    bytes_out: int
    queued_bytes: int
    last_command: str | None


class _Status(TypedDict):
    """What every daemon answers, and no other program."""

    status: str
    role: str
    server_name: str
    instance_name: str
    streams: list[_Stream]
    connections: list[_Connection]


def fetch(client: HttpClient) -> dict[str, Any]:
    """Return the answers of ``/health``, ``/v1/streams`` and ``/v1/connections`` in one dict.

    ``not_ready`` is why ``/health/ready`` answers 503, or None.  ``url`` is that of the process.  HttpError also if
    another program answers.
    """
    answers = [_health(client), *(client.call("GET", path) for path in ("/v1/streams", "/v1/connections"))]
    status = {key: value for each in answers if isinstance(each, dict) for key, value in each.items()}
    try:
        msgspec.convert(status, _Status)
    except (msgspec.ValidationError, UnicodeError) as error:  # UnicodeError: half a surrogate pair
        raise HttpError(f"{client.url} answers other JSON than a replication daemon: {error}") from error
    status["not_ready"], status["url"] = None, client.url
    try:
        client.call("GET", "/health/ready")
    except HttpError as error:
        status["not_ready"] = error.detail or str(error)
    return status


def _health(client: HttpClient) -> Any:
    """Return the answer of ``/health``, also if it is 503: the process may know the rest without its database."""
    try:
        return client.call("GET", "/health")
    except UnavailableError as error:
        identity = {key: error.fields.get(key) for key in ("role", "server_name", "instance_name")}
        if None in identity.values():  # an earlier version answers without them
            raise
        return {"status": error.detail, **identity}


def print_again(client: HttpClient, render: Callable[[dict[str, Any]], RenderableType], console: Console) -> NoReturn:
    """Print the status every second where there is no terminal, also while the daemon does not answer."""
    while True:
        try:
            console.print(render(attention_first(fetch(client))), soft_wrap=True)
        except UnavailableError as error:
            console.print(plain(str(error)), soft_wrap=True)
        time.sleep(PERIOD)


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
                facts = "1 fact was" if lost == 1 else f"{lost} facts were"
                what = f"{facts} lost on the way here, and found in the database"
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {what}"))
            if failed := writer.get("failed"):
                where = f"{stream['name']} {writer['instance']} {failed} --http {status['url']}"
                what = f"fact {failed} fails; `replication skip {where}` leaves it out"
                notes.append(plain(f"{stream['name']} of {writer['instance']}: {what}"))
            if gone := writer.get("gone"):
                notes.append(plain(f"{stream['name']} of {writer['instance']}: facts up to {gone} are deleted"))
            if skipped := writer.get("skipped"):
                facts = "1 fact is" if skipped == 1 else f"{skipped} facts are"
                what = f"{facts} left out; `replication skipped` lists them"
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
