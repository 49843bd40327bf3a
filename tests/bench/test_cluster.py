"""Tests of the measured databases, and of the temporary PostgreSQL server."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from replication.bench import cluster
from replication.bench.cluster import Cluster, database_kinds, find_binaries, free_ports
from replication.bench.processes import BenchError
from tests.system.daemons import until

if TYPE_CHECKING:
    from tests.postgres import PostgresServer


def test_sql_returns_the_rows(postgres: PostgresServer) -> None:
    assert postgres.sql("SELECT %s::integer + 1", 2) == [(3,)]
    assert postgres.sql("CREATE TEMPORARY TABLE mine (a integer)") == []


@pytest.mark.usefixtures("postgres")
def test_nothing_is_left_after_the_block() -> None:
    with Cluster(fsync="off") as server:
        assert server.sql("SHOW fsync") == [("off",)]
        pid = int((server.folder / "data/postmaster.pid").read_text().split()[0])
    assert not server.folder.exists()
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), "it ends")


@pytest.mark.usefixtures("postgres")
def test_a_failed_start_is_an_error_with_the_log_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as name:  # other tests use the default folder
        place = Path(name)
        place.chmod(0o755)
        monkeypatch.setattr(cluster, "_place", lambda _: place)
        with pytest.raises(BenchError, match="no_such_setting"):
            Cluster(no_such_setting="on")
        assert list(place.iterdir()) == []


def test_without_postgresql_the_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binaries() is None
    with pytest.raises(BenchError, match="apt-get install postgresql"):
        Cluster()
    (tmp_path / "initdb").touch(mode=0o755)
    assert find_binaries() == tmp_path


def test_only_root_starts_the_server_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster._unprivileged() == {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cluster._unprivileged()["user"] > 0

    def missing(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", missing)
    with pytest.raises(BenchError, match="no user postgres"):
        cluster._unprivileged()


def test_a_folder_that_other_users_cannot_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    assert cluster._place({}) == home
    assert cluster._place({"user": 1}) == Path("/tmp")


def test_each_kind_makes_empty_databases(postgres: PostgresServer) -> None:
    with database_kinds() as (sqlite, shared):
        assert (sqlite.name, shared.name) == ("SQLite", "PostgreSQL")
        urls = [kind.make() for kind in (sqlite, shared, sqlite, shared)]
        assert len(set(urls)) == 4
        folder = Path(urls[0].removeprefix("sqlite:///")).parent
        assert folder.exists()
        assert {url.partition(":")[0] for url in urls} == {"sqlite", "postgresql"}
    assert not folder.exists()


@pytest.mark.parametrize(
    ("missing", "cure"),
    [("find_binaries", "apt-get install postgresql"), ("find_spec", "'twisted-replication[postgres]'")],
)
def test_without_postgresql_the_reason_is_printed(
    missing: str, cure: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "find_binaries", lambda: Path("/here"))
    monkeypatch.setattr(cluster, missing, lambda *_: None)
    with database_kinds() as found:
        assert [each.name for each in found] == ["SQLite"]
    assert cure in capsys.readouterr().err


def test_two_processes_receive_different_ports() -> None:
    """A server is started seconds after its port was chosen: the other process must not take it meanwhile."""
    code = "from replication.bench.cluster import free_ports; print(*free_ports(200), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as other:
        assert other.stdout is not None
        other_ports = {int(each) for each in other.stdout.readline().split()}
        ports = free_ports(200)
        other.communicate("")
    assert len({*ports}) == len(other_ports) == 200
    assert not {*ports} & other_ports
