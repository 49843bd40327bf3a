"""What ``replication status`` shows."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from rich.console import Console

from replication.cli import status
from replication.cli.http import HttpError

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
    """Answers with parts of SEEN, or fails; after its last answer somebody presses Ctrl-C."""

    def __init__(self, *errors: HttpError | None) -> None:
        self.errors = list(errors)

    def close(self) -> None:
        self.closed = True

    def call(self, method: str, path: str) -> dict[str, Any]:
        assert method == "GET"
        if path == "/health":
            if not self.errors:
                raise KeyboardInterrupt
            error = self.errors.pop(0)
            if error is not None:
                raise error
            return {key: SEEN[key] for key in ("role", "instance_name", "server_name", "status")}
        return {path.removeprefix("/v1/"): SEEN[path.removeprefix("/v1/")]}


def run(monkeypatch: pytest.MonkeyPatch, api: FakeApi, *arguments: str) -> int:
    monkeypatch.setattr(status, "open_api", lambda *_: api)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return status.main(arguments)


def test_a_pipe_gets_plain_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(monkeypatch, FakeApi(None)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["worker", "worker1", "of", "example.com:", "orders[red]", "stopped"],
        ["STREAM", "WRITER", "POSITION", "LAG", "STATE", "OPEN", "OLDEST", "OPEN"],
        ["orders[red]", "master", "7", "12", "stopped", "2", "4", "for", "3", "s"],
        ["quiet", "-", "-", "-", "-", "0", "-"],
        ["orders[red]", "of", "master:", "the", "disk", "is", "full", "[bold]"],
        ["CONNECTION", "ADDRESS", "SINCE", "LINES", "OUT", "BYTES", "OUT", "QUEUED", "LAST"],
        ["-", "127.0.0.1:5", "2023-11-14", "22:13:20Z", "3", "100000", "9", "REPLICATE"],
    ]


def test_where_nothing_is_stopped_the_heading_is_what_health_says() -> None:
    fine = {**SEEN, "streams": SEEN["streams"][1:]}
    assert str(status.as_tables(fine).renderables[0]) == "worker worker1 of example.com: ok"


def test_json_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, FakeApi(None), "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == SEEN


def test_a_daemon_that_is_away_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HttpError, match="away"):
        run(monkeypatch, FakeApi(HttpError("away", passing=True)))


def test_watching_goes_on_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even while the daemon is away: that is when one watches."""
    assert run(monkeypatch, FakeApi(None, HttpError("it is away", passing=True), None), "--watch", "--json") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert json.loads(first) == json.loads(third) == SEEN
    assert second == "it is away"


def test_watching_what_will_never_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HttpError, match="secret"):
        run(monkeypatch, FakeApi(HttpError("the secret is wrong", passing=False)), "--watch")


def test_a_terminal_is_redrawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        status.watch(FakeApi(None, None), status.as_tables, console)  # type: ignore[arg-type]
    assert "\x1b[" in out.getvalue()
    assert out.getvalue().count("OLDEST OPEN") == 3  # two looks, and the last one stays
