"""``replication rooms``: tables, pictures, and errors."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from xml.etree import ElementTree as ET

import pytest

from replication.cli import rooms
from replication.cli.main import main
from replication.storage.sqlite.connection import SqliteConnection
from replication.storage.tables.blocking_rooms import read_rooms
from tests.contract.rooms import ROOM, event
from tests.rooms.recorded import Keeper

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = tmp_path / "rooms.db"
    connection = SqliteConnection(str(path), read_only=False, busy_timeout=1)
    connection.open()
    keeper = Keeper(statements=connection.session)
    keeper.take(ROOM, [event("root", state_key=""), event("one", "root"), event("two", "root")])
    keeper.take(ROOM, [event("far", "gone", depth=9, state_before=["root"]), event("<out>", "one", outlier=True)])
    connection.close()
    return f"sqlite:///{path}"


def test_a_room_is_shown_from_its_database(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", ROOM, "--database", url]) == 0
    output = capsys.readouterr().out
    assert "forward extremities: far, one, two" in output
    assert "backward extremities: gone" in output
    assert "gap: gone is missing below depth 9" in output
    assert "note" in output.splitlines()[-1]


def test_the_same_over_http_and_as_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", ROOM, "--database", url, "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert main(["rooms", ROOM, "--database", url, "--dot"]) == 0
    drawn = capsys.readouterr().out
    _, events = read_rooms(url, lambda found: rooms._from_database(found, ROOM, 100))

    def request(self: object, method: str, path: str, *more: Any) -> bytes:
        assert (method, path.partition("/events?")[0]) == ("GET", "/v1/rooms/%21r%3Afar.test")
        return json.dumps({"events": events} if "/events?" in path else view).encode()

    with patch("replication.web.blocking_client.HttpClient.request", request):
        assert main(["rooms", ROOM, "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == view
        assert main(["rooms", ROOM, "--dot"]) == 0
    assert capsys.readouterr().out == drawn


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


def test_a_database_without_rooms_is_an_error_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    connection = SqliteConnection(str(tmp_path / "orders.db"), read_only=False, busy_timeout=1)
    connection.open()
    connection.close()
    with closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        for table in ("room_summaries", "room_events"):
            database.execute(f"DROP TABLE IF EXISTS {table}")
    assert main(["rooms", ROOM, "--database", f"sqlite:///{tmp_path}/orders.db"]) == 1
    assert "no rooms are kept in this database; start its master with --rooms" in capsys.readouterr().err


def test_a_room_that_is_not_there_and_wrong_usage(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rooms", "!none", "--database", url]) == 1
    assert "no room '!none'" in capsys.readouterr().err
    for wrong in (["--limit", "0"], ["--http", "http://x:1"]):
        with pytest.raises(SystemExit) as ended:
            main(["rooms", ROOM, "--database", url, *wrong])
        assert ended.value.code == 2
