"""``replication rooms``: what it prints, what it draws, and what it says of a room that is not there."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from xml.etree import ElementTree as ET

import pytest

from replication.cli.main import main
from replication.storage.connection import SqliteConnection, SqliteStatements
from tests.contract.rooms import ROOM, event
from tests.rooms.recorded import Keeper

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "rooms.db"
    connection = SqliteConnection(str(path), read_only=False, busy_timeout=1)
    connection.open()
    connection.close()
    database = sqlite3.connect(path, isolation_level=None)
    keeper = Keeper(statements=SqliteStatements(database))
    keeper.take(ROOM, [event("root", state_key=""), event("one", "root"), event("two", "root")])
    keeper.take(ROOM, [event("far", "gone", depth=9, state_before=["root"]), event("<out>", "one", outlier=True)])
    database.close()
    return f"sqlite:///{path}"


def test_a_room_is_shown_from_its_database(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", ROOM, "--database", url]) == 0
    said = capsys.readouterr().out
    assert "forward extremities: far, one, two" in said
    assert "backward extremities: gone" in said
    assert "gap: gone is missing below depth 9" in said
    assert "note" in said.splitlines()[-1]


def test_the_same_over_http_and_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", ROOM, "--database", url, "--json"]) == 0
    view = json.loads(capsys.readouterr().out)

    def call(self: object, method: str, path: str, *more: Any) -> Any:
        assert (method, path) == ("GET", "/v1/rooms/%21r%3Afar.test")
        return view

    with patch("replication.cli.http.HttpApi.call", call):
        assert main(["rooms", ROOM, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == view


def test_the_graph_is_drawn_to_files_or_to_a_pipe(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "room.svg"
    assert main(["rooms", ROOM, "--database", url, "--svg", str(svg), "--dot"]) == 0
    dot = capsys.readouterr().out
    assert dot.startswith(f'digraph "{ROOM}"')
    assert '"root" -> "one"' in dot
    assert "&lt;out&gt;" in svg.read_text()
    ET.parse(svg)
    assert main(["rooms", ROOM, "--database", url, "--dot", "--limit", "1"]) == 0
    assert '"one"' not in capsys.readouterr().out


def test_a_room_that_is_not_there_and_wrong_usage(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", "!none", "--database", url]) == 1
    assert "no room '!none'" in capsys.readouterr().err
    for wrong in (["--limit", "0"], ["--http", "http://x:1"]):
        with pytest.raises(SystemExit) as ended:
            main(["rooms", ROOM, "--database", url, *wrong])
        assert ended.value.code == 2
