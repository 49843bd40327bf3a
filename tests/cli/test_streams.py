"""``replication streams``: what it prints, and how it ends."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replication.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

MAPPED = """
[[streams]]
name = "{name}"
table = "{name}"
id_column = "id"
row = ["name"]
"""


GATHERED = """
[[streams]]
name = "{name}"
row = ["name"]
[[streams.tables]]
table = "{name}"
id_column = "id"
row = ["name"]
"""


def configure(folder: Path, database: str, *names: str) -> str:
    path = folder / "master.toml"
    path.write_text(
        f'database = "{database}"\nstream = ["own"]\n' + "".join(MAPPED.format(name=each) for each in names)
    )
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    with closing(sqlite3.connect(tmp_path / "app.db")) as database:
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("CREATE TABLE slow (id INTEGER, name TEXT)")
    return f"sqlite:///{tmp_path}/app.db"


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    with postgres.database() as name:
        postgres.sql("CREATE TABLE events (id bigserial PRIMARY KEY, name text)", database=name)
        yield postgres.url(name)


def test_check_prints_what_is_wrong_with_each_mapping(
    tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, file, "events", "slow", "missing")
    assert main(["streams", "check", "--config", config]) == 1
    events, slow, missing = capsys.readouterr().out.splitlines()
    assert events == "events: ok"
    assert "has no index on 'id'" in slow
    assert missing.startswith("missing: ")
    assert "no such table" in missing
    assert main(["streams", "check", "--config", config, "--stream", "events", "--stream", "slow"]) == 0


@pytest.mark.parametrize("which", ["file", "database"])
def test_check_prints_what_is_wrong_with_a_joined_stream(
    tmp_path: Path, which: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, request.getfixturevalue(which))
    with Path(config).open("a", encoding="utf-8") as more:
        both = GATHERED.format(name="events") + GATHERED.format(name="nosuch")
        more.write(both.replace("[[streams]]", '[[streams]]\nsequence = "events_id_seq"'))
    assert main(["streams", "check", "--config", config]) == 1
    events, missing = capsys.readouterr().out.splitlines()
    assert events == "events: ok"
    assert missing.startswith("nosuch: stream 'nosuch' cannot be joined from table 'nosuch': ")


@pytest.mark.parametrize("what", ["check", "install"])
def test_a_configuration_without_mapped_streams(
    tmp_path: Path, file: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, file)
    assert main(["streams", what, "--config", config]) == 0
    assert capsys.readouterr().out == f"{config} maps no stream onto a table: there is nothing to {what}\n"


def test_the_trigger_is_installed_and_removed(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, "sqlite:///elsewhere.db", "events")
    for what, output in (
        ("check", "replication streams install"),
        ("install", "events: installed\n"),
        ("check", "events: ok\n"),
        ("remove", "events: removed\n"),
    ):
        assert main(["streams", what, "--config", config, "--database", database]) == 0
        assert output in capsys.readouterr().out


def test_ids_that_others_draw_are_not_shared_with_a_stream_that_has_no_table(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(tmp_path, database, "events")
    with Path(config).open("a", encoding="utf-8") as more:
        more.write('[[streams]]\nname = "tags"\nshares = "events"\n')
    assert main(["streams", "check", "--config", config]) == 1
    assert "events: streams 'events', 'tags' share their IDs" in capsys.readouterr().out


def test_what_cannot_be_meant(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = configure(tmp_path, file, "events")
    with pytest.raises(SystemExit) as ended:
        main(["streams", "check", "--config", config, "--stream", "own"])
    assert ended.value.code == 2
    assert "maps no stream of that name" in capsys.readouterr().err
    assert main(["streams", "install", "--config", config]) == 1
    assert "on SQLite there is nothing to install" in capsys.readouterr().err
