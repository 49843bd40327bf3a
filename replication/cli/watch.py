"""``replication status --watch`` on a terminal: the tables of the live page, with its words, redrawn in place."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import attrs
from rich.console import Group
from rich.live import Live
from rich.text import Text

from replication.cli.keys import pressed_keys
from replication.cli.tables import FittingTable, plain
from replication.streams.interfaces import WriterStatus
from replication.web.blocking_client import UnavailableError
from replication.web.live import words
from replication.web.live.curves import Curves, Sample, draw_text, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console, RenderableType

PERIOD: Final = 1.0  # seconds between two requests
SAMPLED: Final = 2.0  # seconds between two samples of a rate, as on the page
REDRAW: Final = 0.25  # seconds between two drawings of a terminal, whose size may change
ORDERS: Final = {"a": "attention", "n": "name", "l": "lag"}  # by key
STEPS: Final = {"up": -1, "down": 1, "page up": -20, "page down": 20}  # streams, by key
FEWEST: Final = 5  # streams on the smallest terminal, and troubles on any
STYLES: Final = {  # of a state
    **dict.fromkeys(("stopped", "not connected"), "bold red"),
    **dict.fromkeys(("catching up", "opening", "waiting for others"), "yellow"),
    **dict.fromkeys(("live", "writing"), "green"),
}
# The columns that a narrow terminal leaves out, the least important first.
OPTIONAL: Final = ("10 min", "oldest open", "open", "found late", "left out", "IDs/s")
OPTIONAL_OF_CONNECTIONS: Final = ("last command", "bytes out", "lines out", "since")


def watch(
    fetch: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any], View], RenderableType], console: Console
) -> None:
    """Show the status every second, also while the daemon does not answer; until interrupted, or by the key q."""
    view = View()
    with pressed_keys() as keys, Live(console=console, auto_refresh=False, screen=keys is not None) as live:
        status: dict[str, Any] | None = None
        due = 0.0
        while not view.ended:
            if keys is None or (time.monotonic() >= due and not (view.paused and status)):
                due = time.monotonic() + PERIOD
                try:
                    status = fetch()
                    view.sample(status, time.monotonic())
                except UnavailableError as error:
                    status = None
                    live.update(plain(str(error)), refresh=True)
            if status is not None:
                view.rows = max(FEWEST, console.height // 2) if keys else None
                shown = render(status, view)
                live.update(Group(plain(view.legend(status)), shown) if keys else shown, refresh=True)
            if keys is None:
                time.sleep(PERIOD)
            else:  # the width may change at any time
                view.press(keys.read(min(REDRAW, max(0.0, due - time.monotonic()))))


@attrs.define
class View:
    """What a user has chosen by keys: a(ttention), n(ame), l(ag), arrows, p(ause), q(uit); and the samples so far."""

    order: str = "attention"
    first: int = 0  # index of the first stream that is shown
    rows: int | None = None  # streams that are shown at once; None: all, as nothing scrolls
    paused: bool = False
    ended: bool = False
    curves: Curves = attrs.field(init=False, factory=Curves)
    _sampled_at: float | None = attrs.field(init=False, default=None)

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

    def sample(self, status: dict[str, Any], now: float) -> None:
        """Keep the positions of all writers, at most every two seconds; ``now`` is in seconds of any clock."""
        if self._sampled_at is None or now - self._sampled_at >= SAMPLED:
            self._sampled_at = now
            samples = {
                (stream["name"], writer["instance"]): Sample(now, writer["position"], writer["lag"])
                for stream in status["streams"]
                for writer in stream["writers"]
            }
            self.curves.add(samples)

    def arrange(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return the status with its streams in order, and only those that are shown."""
        if self.order == "attention":
            status = attention_first(status)
        else:
            by = _largest_lag if self.order == "lag" else _name
            status = {**status, "streams": sorted(status["streams"], key=by)}
        self.first = min(self.first, max(0, len(status["streams"]) - 1))
        return {**status, "streams": status["streams"][self.first :][: self.rows]}

    def legend(self, status: dict[str, Any]) -> str:
        """Return the line above the tables."""
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
    places = [words.urgency(writer["state"], writer["lag"]) for writer in stream["writers"]]
    return min(places, default=len(words.URGENT))


def as_page(status: dict[str, Any], view: View) -> Group:
    """Return the state of the process, what needs attention, and the tables of streams and of connections."""
    process = f"{status['role']} {status['instance_name']} of {status['server_name']}: "
    why = status["not_ready"]
    state = Text(*(plain(words.not_ready(why)).plain, STYLES["stopped"]) if why else (words.READY, STYLES["live"]))
    parts: list[RenderableType] = [plain(process) + state]
    if troubles := _troubles(status):
        if view.rows is not None and (rest := len(troubles) - FEWEST) > 0:  # the streams are to be seen, too
            troubles[FEWEST:] = [f"{rest:,} more"]
        parts += ["", Text(words.ATTENTION, STYLES["stopped"]), *[plain(f"- {each}") for each in troubles]]
    parts += ["", Text(words.STREAMS, "bold"), _streams(view.arrange(status)["streams"], view.curves)]
    parts += ["", Text(words.CONNECTIONS, "bold"), _connections(status["connections"])]
    return Group(*parts)


def _streams(streams: list[dict[str, Any]], curves: Curves) -> RenderableType:
    rows: list[list[str]] = []
    styles: dict[str, str] = {}
    for stream in streams:
        opened = (oldest["id"], oldest["age"]) if (oldest := stream["oldest_open"]) else None
        for writer in map(_read_writer, stream["writers"]):
            samples = curves.of((stream["name"], writer.instance))
            cells = words.stream_cells(writer, stream["open"], opened, rate(samples))
            cells[0], cells[words.CURVE] = stream["name"], draw_text(samples)
            styles[cells[2]] = STYLES.get(writer.state, "")
            rows.append(cells)
    shown = FittingTable(*words.STREAM_HEADS, optional=OPTIONAL, styles=styles)
    for cells in rows:
        shown.add(*cells)
    return shown if rows else plain(words.NO_WRITER)


def _connections(peers: list[dict[str, Any]]) -> RenderableType:
    shown = FittingTable(*words.CONNECTION_HEADS, optional=OPTIONAL_OF_CONNECTIONS)
    for peer in sorted(peers, key=lambda each: (-each["queued_bytes"], each["name"], each["address"])):
        since = datetime.fromtimestamp(peer["since"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        sizes = [f"{peer[key]:,}" for key in ("lines_out", "bytes_out", "queued_bytes")]
        shown.add(peer["name"] or "-", peer["address"], since, *sizes, peer["last_command"] or "-")
    return shown if peers else plain(words.NO_CONNECTION)


def _troubles(status: dict[str, Any]) -> list[str]:
    """Return what stands still, why, and the cure."""
    found = []
    for stream in status["streams"]:
        for writer in stream["writers"]:
            if why := writer["error"]:
                who = f"{stream['name']} of {writer['instance']}"
                found.append(
                    f"{why if who in why else f'{who}: {why}'}. {_cure(stream['name'], writer, status['url'])}"
                )
        found += stream.get("notes", ())
    shared = {each["name"] for each in status["connections"] if each.get("shares_name")}
    return found + [words.shared_name(each) for each in sorted(shared)]


def _cure(stream: str, writer: Mapping[str, Any], url: str) -> str:
    if (failed := writer.get("failed")) is None:
        return words.TRIED_AGAIN
    skip = words.leave_out(f"`replication skip {stream} {writer['instance']} {failed} --http {url}`")
    return f"{words.mend(f'fact {failed:,}')} {skip}"


def _read_writer(seen: dict[str, Any]) -> WriterStatus:
    """Return the status that ``/v1/streams`` has as JSON; a daemon of an earlier version has fewer fields."""
    return WriterStatus(
        seen["instance"],
        seen["position"],
        seen.get("announced", seen["position"] + seen["lag"]),
        seen["state"],
        lost_and_found=seen.get("lost_and_found", 0),
        skipped=seen.get("skipped", 0),
        source=seen.get("source"),
    )
