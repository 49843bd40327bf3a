"""Mistakes on this machine, planted and found."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from replication.cli.main import main
from replication.storage.blocking import use_store
from tests.certificates import DAY, Authority

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from replication.streams.interfaces import IStreamStore
    from tests.postgres import PostgresServer


def empty_secret(folder: Path) -> str:
    (folder / "secret").touch(0o600)
    return 'secret_file = "secret"'


def open_secret(folder: Path) -> str:
    (folder / "secret").write_text("xyz")
    (folder / "secret").chmod(0o644)
    return 'secret_file = "secret"'


def missing_secret(_: Path) -> str:
    return 'secret_file = "secret"'


def missing_folder(_: Path) -> str:
    return 'database = "sqlite:///no/such/x.db"'


def newer_version(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE replication_schema (version INTEGER NOT NULL)")
        connection.execute("INSERT INTO replication_schema VALUES (99)")
        connection.commit()
    return 'database = "sqlite:///x.db"'


def no_database(folder: Path) -> str:
    (folder / "x.db").write_text("this is a text, and no database" * 100)
    return 'database = "sqlite:///x.db"'


def missing_table(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE replication_schema (version INTEGER NOT NULL)")
        connection.execute("INSERT INTO replication_schema VALUES (1)")
        connection.commit()
    table = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["a"]'
    return f'database = "sqlite:///x.db"\n{table}'


def open_to_others(_: Path) -> str:
    return 'listen = "tcp:9092"'


def no_endpoint(_: Path) -> str:
    return 'http = "tpc:9093"'


def certificate(folder: Path, begins: int, ends: int) -> str:
    issued = Authority(folder).issue("server", "127.0.0.1", valid=(begins * DAY, ends * DAY))
    issued.key.chmod(0o600)
    return f'insecure = true\nlisten = "{issued.listen()}"'


def expired(folder: Path) -> str:
    return certificate(folder, -2, -1)


def too_early(folder: Path) -> str:
    return certificate(folder, 1, 2)


def expires_soon(folder: Path) -> str:
    return certificate(folder, -1, 3)


def no_key(folder: Path) -> str:
    text = certificate(folder, -1, 100)
    (folder / "server.key").unlink(missing_ok=True)
    for each in folder.glob("*key*"):
        each.unlink()
    return text


def no_segments(folder: Path) -> str:
    (folder / "photos").mkdir()
    return 'catch_up = "photos"\nconnect = "unix:x"'


def foreign_manifest(folder: Path) -> str:
    (folder / "app").mkdir()
    (folder / "app/manifest.json").write_text('{"name": "another program"}')
    return 'catch_up = "app"\nconnect = "unix:x"'


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (empty_secret, "the secret file secret is empty"),
        (open_secret, "other users may read this secret (mode 644); cure: chmod 600 secret"),
        (missing_secret, "cannot read the secret file secret"),
        (missing_folder, "there is no such folder, so the database cannot be made; cure: mkdir -p"),
        (newer_version, "its tables have version 99"),
        (no_database, "file is not a database"),
        (missing_table, "stream events: "),
        (open_to_others, "it is open to other hosts"),
        (no_endpoint, "cannot listen on"),
        (expired, "the certificate has expired on"),
        (too_early, "the certificate is not valid before"),
        (expires_soon, "the certificate expires on"),
        (no_key, "cannot read"),
        (no_segments, "it has no manifest.json, so it is no folder of segments"),
        (foreign_manifest, "not a manifest of segments"),
    ],
)
def test_a_mistake_is_found(
    plant: Callable[[Path], str],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(plant(tmp_path) + "\n")
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(found in each for each in lines), lines
    assert len(lines) == 1, lines
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before, "it only reads"


def test_a_disk_without_space_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text('stream = ["orders"]\n')
    assert main(["doctor", "--config", "x.toml", "--min-free", str(10**9)]) == 1
    assert "MiB are free on this disk, less than 1000000000 MiB" in capsys.readouterr().out


def test_a_database_of_postgresql_is_checked_and_a_server_that_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], postgres: PostgresServer
) -> None:
    file = tmp_path / "x.toml"
    with postgres.database() as name:
        stream = '[[streams]]\nname = "events"\ntable = "events"\nid_column = "id"\nrow = ["a"]\n'
        file.write_text(f'database = "{postgres.url(name)}"\n{stream}')
        use_store(postgres.url(name), do_nothing, read_only=False)
        postgres.sql("CREATE TABLE events (id bigserial, a text)", database=name)
        main(["doctor", "--config", str(file)])
        assert "has no index on" in capsys.readouterr().out
        postgres.sql("ALTER TABLE events DROP COLUMN a", database=name)
        assert main(["doctor", "--config", str(file)]) == 1
        assert "it has no column" in capsys.readouterr().out
    file.write_text('database = "postgresql://nobody@127.0.0.1:1/none"\n')
    assert main(["doctor", "--config", str(file)]) == 1
    assert "127.0.0.1" in capsys.readouterr().out


async def do_nothing(_: IStreamStore) -> None:
    """Open the database, which makes its tables."""
