"""``replication status --watch`` on a terminal shows what the live page shows, in the same words."""

from __future__ import annotations

import io
import re
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from replication.cli import status, watch
from replication.cli.parser import Parser
from replication.cli.watch import View, as_page
from replication.streams.interfaces import StreamStatus, WriterStatus
from replication.web.blocking_client import HttpError, UnavailableError
from replication.wire.grammar import InstanceName, Token
from tests.cli.test_status import SEEN
from tests.web.served import ApiTestCase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STATES = (
    "stopped",
    "not connected",
    "catching up",
    "opening",
    "waiting for others",
    "live",
    "writing",
    "elsewhere",
    "former",
)
LONG_CURE = (
    "The function cannot take fact 8,000. Mend what it uses: it is called again by itself. "
    "Or mend its code, and start the worker again. If the fact itself is wrong: "
)


def drawn(seen: dict[str, Any], width: int = 300, view: View | None = None, **options: Any) -> str:
    """Return what a terminal of this width shows."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, **({"color_system": None} | options))
    with console.capture() as capture:
        console.print(as_page(seen, view or View()))
    return capture.get()


def cells_of(shown: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in shown.splitlines()]


class SameWordsTests(ApiTestCase):
    """The same process, asked by a browser and by ``replication status --watch``."""

    url = "http://127.0.0.1:9"

    def html(self) -> str:
        return self.get("/").body.decode()

    def terminal(self, view: View | None = None) -> list[list[str]]:
        return cells_of(drawn(status.fetch(self), view=view))  # type: ignore[arg-type]

    def call(self, method: str, path: str) -> dict[str, Any]:
        received = self.get(path)
        if received.code != 200:
            raise HttpError("answers 503", detail=received.json["detail"])
        return dict(received.json)

    def show(self, writers: Sequence[WriterStatus], **fields: Any) -> None:
        (orders, *_) = self.served.stream_statuses()
        shown: list[StreamStatus] = [replace(orders, writers=writers, **fields)]
        self.served.stream_statuses = lambda only=None: shown  # type: ignore[method-assign]

    def test_headings_and_captions(self) -> None:
        page, terminal = self.html(), self.terminal()
        captions = re.findall(r"<h2>(Streams|Connections|Needs attention)</h2>", page)
        self.assertEqual(len(captions), 3)
        for caption in captions:
            self.assertIn([caption], terminal)
        tables = re.findall(r"<thead>(.*?)</thead>", page)
        self.assertEqual(len(tables), 2)
        for heads in tables:
            self.assertIn(re.findall(r"<th[^>]*>(.*?)</th>", heads), terminal)

    def test_the_cells_of_a_row_in_every_state(self) -> None:
        """The curve is a picture there, and text here."""
        (orders, *_) = self.served.stream_statuses()
        for state in STATES:
            one = WriterStatus(
                *(InstanceName("master"), Token(2_000), Token(9_000), state),
                lost_and_found=1_001,
                skipped=1_002,
                source="its own HTTP",
            )
            self.show([one], open_count=1_234, oldest_open=(Token(2_001), 150.0))
            (row,) = re.findall(r"<tbody><tr>(.*?)</tr>", self.html().partition("<h2>Streams")[2])[:1]
            on_page = [re.sub(r"<[^>]+>", "", each) for each in re.findall(r"<td[^>]*>(.*?)</td>", row)]
            shown = [each for each in self.terminal() if each[0] == "orders"]
            self.assertEqual(shown, [[each for each in on_page if each]], state)
            self.assertTrue(on_page[2].startswith(state))
            self.assertIn("2,001 for 2 min", on_page)
        self.assertEqual(orders.definition.name, "orders")

    def test_whether_the_process_is_ready(self) -> None:
        self.show([])
        self.assertIn(">ready</span>", self.html())
        self.assertEqual(self.terminal()[0], ["master master of example.com: ready"])
        self.served.unreachable = ["tcp:h:1"]
        why = "not ready: no connection to the writer at tcp:h:1"
        self.assertIn(f">{why}</span>", self.html())
        self.assertEqual(self.terminal()[0], [f"master master of example.com: {why}"])

    def test_a_stopped_stream_and_its_cure(self) -> None:
        why = "applying orders of master after 7: no"
        for failed in (None, Token(8_000)):
            one = WriterStatus(InstanceName("master"), Token(7), Token(9), "stopped", why, failed=failed)
            self.show([one], notes=["mend it"])
            page = re.sub(r"<[^>]+>", "", self.html())
            text = " ".join(" ".join(line) for line in self.terminal())
            self.assertIn(f"- {why}. ", text)
            self.assertIn("- mend it", text)
            sentence = "It is tried again by itself." if failed is None else LONG_CURE
            self.assertIn(sentence, page)
            self.assertIn(sentence, text)
        self.assertIn("`replication skip orders master 8000 --http http://127.0.0.1:9`", text)

    def test_a_process_without_writers_and_connections(self) -> None:
        self.show([])
        self.served.peer_statuses = list  # type: ignore[method-assign]
        for sentence in ("No stream has a writer yet.", "No process is connected here."):
            self.assertIn(sentence, self.html())
            self.assertIn([sentence], self.terminal())


def test_the_rate_and_the_curve_come_from_the_samples_of_two_seconds() -> None:
    view, seen = View(), {**SEEN, "streams": [{**SEEN["streams"][0]}]}
    for second in range(61):
        position = second * 100 if second <= 30 else 3_000
        writer = {**SEEN["streams"][0]["writers"][0], "position": position, "lag": 0, "state": "live", "error": None}
        seen["streams"][0]["writers"] = [writer]
        view.sample(seen, float(second))
        if second == 20:
            assert cells_of(drawn(seen, view=view))[4][5] == "100.0"
    assert len(view.curves.of(("orders[red]", "master"))) == 31
    assert cells_of(drawn(seen, view=view))[4][3:7] == ["3,000", "0", "0.0", "█▁"]


def test_a_catch_up_has_what_is_done_and_when_it_ends() -> None:
    view, seen = View(), {**SEEN, "streams": [{**SEEN["streams"][0]}]}
    for second in (0, 2):
        writer = {"instance": "w", "position": 1_000 + second * 100, "announced": 4_800, "lag": 3_600 - second * 100}
        seen["streams"][0]["writers"] = [{**writer, "lag": 3_600, "state": "catching up", "error": None}]
        view.sample(seen, float(second))
    assert "  catching up: 25 %, 36 s left  " in drawn(seen, view=view)


@pytest.mark.parametrize("width", [55, 60, 80, 100, 160])
def test_a_narrow_terminal_leaves_out_the_least_important_columns(width: int) -> None:
    shown = drawn({**SEEN, "streams": SEEN["streams"][:1]}, width)
    heads = next(line for line in shown.splitlines() if line.startswith("stream "))
    row = next(line for line in shown.splitlines() if line.startswith("orders[red]  "))
    assert len(row.rstrip()) <= width
    for head, least in (("left out", 60), ("found late", 80), ("oldest open", 100), ("10 min", 100)):
        assert (head in heads) == (width >= least), head
    for always in ("stream", "writer", "state", "position", "lag"):
        assert always in heads


def test_a_state_has_a_colour_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mstopped" in drawn(SEEN, color_system="standard")
    assert "\x1b[32mready" in drawn(SEEN, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in drawn(SEEN, color_system="standard")


def test_what_a_name_or_an_error_has_is_shown_as_it_is() -> None:
    writer = {**SEEN["streams"][0]["writers"][0], "error": "\x1b[31m[bold]"}
    shown = drawn({**SEEN, "not_ready": "\x1b[32m", "streams": [{**SEEN["streams"][0], "writers": [writer]}]})
    assert "not ready: \\x1b[32m" in shown
    assert "orders[red] of master: \\x1b[31m[bold]" in shown
    assert "\x1b[3" not in shown


def test_a_daemon_of_an_earlier_version_has_fewer_fields() -> None:
    writer = {"instance": "w", "position": 5, "lag": 2, "state": "live", "error": None}
    seen = {**SEEN, "streams": [{"name": "s", "writers": [writer], "open": 0, "oldest_open": None}]}
    assert ["s", "w", "live", "5", "2", "-", "0", "-", "0", "0"] in cells_of(drawn(seen))


def test_keys_order_scroll_pause_and_quit() -> None:
    lags = {"one": 5, "two": 0, "three": 9}
    streams = [
        {**SEEN["streams"][1], "name": name, "writers": [{**SEEN["streams"][0]["writers"][0], "lag": lag}]}
        for name, lag in lags.items()
    ]
    view, seen = View(), {**SEEN, "streams": streams}

    def names() -> list[str]:
        return [each["name"] for each in view.arrange(seen)["streams"]]

    view.press("n")
    assert names() == ["one", "three", "two"]
    view.press("l")
    assert names() == ["three", "one", "two"]
    view.rows = 2
    assert names() == ["three", "one"]
    for _ in range(9):
        view.press("down")
        view.press("z")
    assert names() == ["two"]
    assert view.legend(seen).startswith("streams from 3 of 3, by lag")
    view.press("page up")
    assert names() == ["three", "one"]
    view.press("p")
    assert (view.paused, "p goes on" in view.legend(seen)) == (True, True)
    view.press("p")
    assert not view.paused
    view.press("q")
    assert view.ended


def test_a_stopped_stream_that_is_scrolled_away_still_needs_attention() -> None:
    view = View(first=1, order="name", rows=1)
    shown = drawn({**SEEN, "streams": [*SEEN["streams"], {**SEEN["streams"][1], "name": "z"}]}, view=view)
    assert "- orders[red] of master: the disk is full [bold]. " in shown
    assert not re.search(r"^orders\[red\]  ", shown, re.MULTILINE)


def test_many_troubles_leave_room_for_the_streams_where_keys_scroll() -> None:
    seen = {**SEEN, "streams": [{**SEEN["streams"][0], "name": f"s{number}"} for number in range(1_500)]}
    shown = drawn(seen, view=View(rows=12)).splitlines()
    place = shown.index("Needs attention")
    assert [line.partition(" of ")[0] for line in shown[place + 1 : place + 7]] == [
        *("- s0", "- s1", "- s2", "- s3", "- s4", "- 1,495 more")
    ]
    assert len([line for line in shown if "  stopped  " in line]) == 12
    assert "more" not in drawn({**seen, "streams": seen["streams"][:20]}, view=View())


def test_what_needs_attention_comes_first() -> None:
    def stream(name: str, *states: str, lag: int = 5_000) -> dict[str, Any]:
        return {"name": name, "writers": [{"state": each, "lag": lag} for each in states]}

    streams = [stream("b", "live"), stream("a"), stream("d", "live", "stopped"), stream("c", "catching up")]
    streams.append(stream("brief", "catching up", lag=3))  # as at a Synapse's facts of several rows
    ordered = watch.attention_first({**SEEN, "streams": streams})
    assert [each["name"] for each in ordered["streams"]] == ["d", "c", "a", "b", "brief"]


def answers(*given: dict[str, Any] | Exception) -> Any:
    """Return a function that returns or raises one after the other; then the user presses Ctrl-C."""
    left: Iterator[dict[str, Any] | Exception] = iter(given)

    def fetch() -> dict[str, Any]:
        answer = next(left, None)
        if answer is None:
            raise KeyboardInterrupt
        if isinstance(answer, Exception):
            raise answer
        return answer

    return fetch


def test_a_terminal_without_keys_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(watch, "pressed_keys", lambda: nullcontext(None))
    with pytest.raises(KeyboardInterrupt):
        watch.watch(answers(SEEN, UnavailableError("it is away"), SEEN), as_page, console)
    assert "\x1b[" in out.getvalue()
    assert "it is away" in out.getvalue()
    assert out.getvalue().count("oldest open") == 3  # two refreshes, and the last one stays


def test_a_terminal_with_keys_is_left_by_q(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = iter(["", "p", "", "q"])

    class FakeKeys:
        def read(self, seconds: float) -> str:
            assert seconds <= watch.REDRAW
            return next(pressed)

    out = io.StringIO()
    monkeypatch.setattr(watch, "pressed_keys", lambda: nullcontext(FakeKeys()))
    watch.watch(answers(SEEN), as_page, Console(file=out, force_terminal=True, width=120))
    assert "p pauses" in out.getvalue()
    assert "p goes on" in out.getvalue()
    assert "\x1b[?1049h" in out.getvalue()  # a screen of its own


@pytest.mark.parametrize(("option", "word"), [([], "oldest open"), (["--json"], '"oldest_open"')])
def test_status_watch_on_a_terminal_draws_the_page_or_json(
    monkeypatch: pytest.MonkeyPatch, option: list[str], word: str
) -> None:
    out = io.StringIO()
    fetched = answers(SEEN)
    monkeypatch.setattr(status, "fetch", lambda _: fetched())
    monkeypatch.setattr(status, "make_console", lambda: Console(file=out, force_terminal=True, width=160))
    monkeypatch.setattr(Parser, "open_client", lambda *_: io.StringIO())
    monkeypatch.setattr(watch, "pressed_keys", lambda: nullcontext(None))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert status.main(["--watch", *option]) == 0
    assert word in out.getvalue()
