"""What ``replication status`` shows."""

from __future__ import annotations

import io
import json
import signal
import time
from typing import Any

import pytest
from rich.console import Console

from replication.cli import status
from replication.cli.parser import Parser
from replication.web.blocking_client import HttpError, UnavailableError

SEEN: dict[str, Any] = {
    "role": "worker",
    "instance_name": "worker1",
    "server_name": "example.com",
    "status": "ok",
    "streams": [
        {
            "name": "orders[red]",
            "writers": [
                {"instance": "master", "position": 7, "lag": 12, "state": "stopped", "error": "the disk is full [bold]"}
            ],
            "open": 2,
            "oldest_open": {"id": 4, "age": 3.2},
        },
        {"name": "quiet", "writers": [], "open": 0, "oldest_open": None},
    ],
    "not_ready": None,
    "url": "http://h",
    "connections": [
        {
            "name": "",
            "address": "127.0.0.1:5",
            "since": 1700000000.0,
            "lines_out": 3,
            "bytes_out": 100_000,
            "queued_bytes": 9,
            "last_command": "REPLICATE",
        }
    ],
}


class FakeApi:
    """Answers with parts of SEEN, or fails with ``errors``; after the last of them the user presses Ctrl-C."""

    def __init__(self, *errors: HttpError | None, not_ready: str = "") -> None:
        self.errors = list(errors)
        self.not_ready = not_ready

        self.url = "http://h"

    def close(self) -> None:
        self.closed = True

    def call(self, method: str, path: str) -> dict[str, Any]:
        assert method == "GET"
        if path == "/health/ready":
            if self.not_ready:
                raise UnavailableError(f"http://h answers 503: {self.not_ready}", detail=self.not_ready)
            return {"status": "ready"}
        if path == "/health":
            if not self.errors:
                raise KeyboardInterrupt
            error = self.errors.pop(0)
            if error is not None:
                raise error
            return {key: SEEN[key] for key in ("role", "instance_name", "server_name", "status")}
        return {path.removeprefix("/v1/"): SEEN[path.removeprefix("/v1/")]}


def run(monkeypatch: pytest.MonkeyPatch, api: FakeApi, *arguments: str) -> int:
    monkeypatch.setattr(Parser, "open_client", lambda *_: api)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return status.main(arguments)


def test_a_pipe_gets_plain_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(monkeypatch, FakeApi(None)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["worker", "worker1", "of", "example.com:", "ok"],
        ["STREAM", "WRITER", "POSITION", "LAG", "STATE", "OPEN", "OLDEST", "OPEN"],
        ["orders[red]", "master", "7", "12", "stopped", "2", "4", "for", "3", "s"],
        ["quiet", "-", "-", "-", "-", "0", "-"],
        ["orders[red]", "of", "master:", "the", "disk", "is", "full", "[bold]"],
        ["CONNECTION", "ADDRESS", "SINCE", "LINES", "OUT", "BYTES", "OUT", "QUEUED", "LAST"],
        ["-", "127.0.0.1:5", "2023-11-14", "22:13:20Z", "3", "100000", "9", "REPLICATE"],
    ]


def test_the_heading_has_the_reason_why_a_process_is_not_ready() -> None:
    assert str(status.as_tables(SEEN).renderables[0]) == "worker worker1 of example.com: ok"
    waiting = {**SEEN, "not_ready": "no connection to the writer at tcp:h:1"}
    assert str(status.as_tables(waiting).renderables[0]).endswith(": no connection to the writer at tcp:h:1")


def test_two_processes_of_one_name_are_reported_below_the_streams() -> None:
    twins = [{**SEEN["connections"][0], "name": "twin", "shares_name": True} for _ in range(2)]
    *_, note, _ = status.as_tables({**SEEN, "connections": twins}).renderables
    assert str(note) == "two processes have the instance name 'twin': give each its own"


@pytest.mark.parametrize(
    ("number", "facts", "were"), [(1, "1 fact is", "1 fact was"), (2, "2 facts are", "2 facts were")]
)
def test_facts_are_counted_below_the_streams(number: int, facts: str, were: str) -> None:
    writer = {**SEEN["streams"][0]["writers"][0], "skipped": number, "lost_and_found": number, "error": None}
    tables = status.as_tables({**SEEN, "streams": [{**SEEN["streams"][0], "writers": [writer]}]}).renderables
    where = "orders[red] of master: "
    assert [str(each) for each in tables if str(each).startswith(where)] == [
        f"{where}{were} lost on the way here, and found in the database",
        f"{where}{facts} left out; `replication skipped` lists them",
    ]


def test_json_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, FakeApi(None), "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == SEEN


def test_a_daemon_that_does_not_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HttpError, match="away"):
        run(monkeypatch, FakeApi(UnavailableError("away")))


def test_watching_goes_on_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while the daemon does not answer: that is when a user watches."""
    assert run(monkeypatch, FakeApi(None, UnavailableError("it is away"), None), "--watch", "--json") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(third) == SEEN
    assert second == "it is away"


def test_watching_on_a_terminal_that_cannot_redraw_prints_the_same_as_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"})
    monkeypatch.setattr(status, "make_console", lambda: terminal)
    assert run(monkeypatch, FakeApi(None, None), "--watch") == 0
    assert isinstance(terminal.file, io.StringIO)
    assert terminal.file.getvalue().count("CONNECTION") == 2


def test_sigterm_ends_watching_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("SIGTERM has not ended it")

    monkeypatch.setattr(status, "print_again", watch)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parser, "open_client", lambda *_: FakeApi(None))
        assert status.main(["--watch"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_watching_on_a_pipe_prints_the_same_table_with_what_needs_attention_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts read it."""
    first, second = SEEN["streams"]
    monkeypatch.setitem(SEEN, "streams", [second, first])
    assert run(monkeypatch, FakeApi(None, None), "--watch") == 0
    once = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("STREAM", "orders[red]  "))]
    assert [line.split()[0] for line in once] == ["STREAM", "orders[red]"] * 2


def test_a_process_whose_database_does_not_answer_shows_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, only the 503 was printed."""
    why = "the store has not answered for 5 s"
    known = {key: SEEN[key] for key in ("role", "instance_name", "server_name")}
    for check in ((), ("--check",)):
        away = UnavailableError(f"http://h answers 503: {why}", detail=why, fields={"detail": why, **known})
        if check:
            with pytest.raises(HttpError, match="http://h is not ready: the store has not answered"):
                run(monkeypatch, FakeApi(away, not_ready=why), *check)
        else:
            assert run(monkeypatch, FakeApi(away, not_ready=why)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"worker worker1 of example.com: {why}"
        assert lines[2].split()[:3] == ["orders[red]", "master", "7"]


@pytest.mark.parametrize("field", ["position", "announced", "lag"])
def test_an_id_that_no_daemon_has_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = {**SEEN["streams"][0]["writers"][0], field: 10**400}  # no curve can be drawn of it
    monkeypatch.setitem(SEEN, "streams", [{**SEEN["streams"][0], "writers": [writer]}])
    with pytest.raises(HttpError, match="answers other JSON than a replication daemon"):
        run(monkeypatch, FakeApi(None))


def test_watching_ends_with_a_permanent_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HttpError, match="secret"):
        run(monkeypatch, FakeApi(HttpError("the secret is wrong")), "--watch")


def test_check_fails_after_the_tables_if_the_process_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HttpError, match="orders of master is stopped"):
        run(monkeypatch, FakeApi(None, not_ready="orders of master is stopped"), "--check")
    assert "example.com: orders of master is stopped\n" in capsys.readouterr().out
    assert run(monkeypatch, FakeApi(None), "--check", "--json") == 0


def test_check_and_watch_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        status.main(["--check", "--watch"])
    assert stopped.value.code == 2


def shown(width: int) -> list[str]:
    """Return what a terminal of this width shows."""
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    with console.capture() as capture:
        console.print(status.as_tables(SEEN))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_on_a_narrow_terminal_columns_are_left_out_and_no_line_of_a_table_is_broken(width: int) -> None:
    lines = [line for line in shown(width) if not line.startswith(("worker", "orders[red] of"))]
    assert [line.split()[0] for line in lines if not line[0].isspace()] == [
        *("STREAM", "orders[red]", "quiet", "CONNECTION", "-")
    ]
    assert len(lines) == 5
    assert ("BYTES OUT" in lines[3]) == (width >= 80)
    assert "QUEUED" in lines[3]


def test_a_state_has_a_colour_on_a_terminal_unless_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        output = io.StringIO()
        Console(file=output, force_terminal=True, color_system="standard", width=120).print(status.as_tables(SEEN))
        return output.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31mstopped" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[1;31m" not in shown()
    assert "stopped" in shown()
