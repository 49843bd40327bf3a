"""The server that a bench starts: it works, it leaves nothing, and where it cannot be, that is said."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from replication.bench import cluster
from replication.bench.children import BenchError
from replication.bench.cluster import Cluster, find_binaries
from tests.system.daemons import until

if TYPE_CHECKING:
    from tests.postgres import PostgresServer


def test_what_it_says_can_be_asked(postgres: PostgresServer) -> None:
    assert postgres.sql("SELECT %s::integer + 1", 2) == [(3,)]
    assert postgres.sql("CREATE TEMPORARY TABLE mine (a integer)") == []


@pytest.mark.usefixtures("postgres")
def test_nothing_is_left_of_it() -> None:
    with Cluster(fsync="off") as server:
        assert server.sql("SHOW fsync") == [("off",)]
        pid = int((server.folder / "data/postmaster.pid").read_text().split()[0])
    assert not server.folder.exists()
    until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), "it ends")


@pytest.mark.usefixtures("postgres")
def test_a_server_that_does_not_start_says_why_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(dir="/tmp") as name:  # others run beside us
        place = Path(name)
        place.chmod(0o755)
        monkeypatch.setattr(cluster, "_place", lambda _: place)
        with pytest.raises(BenchError, match="no_such_setting"):
            Cluster(no_such_setting="on")
        assert list(place.iterdir()) == []


def test_where_there_is_none_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_DEBIAN", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binaries() is None
    with pytest.raises(BenchError, match="apt-get install postgresql"):
        Cluster()
    (tmp_path / "initdb").touch(mode=0o755)
    assert find_binaries() == tmp_path


def test_only_root_becomes_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster._unprivileged() == {}
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert cluster._unprivileged()["user"] > 0

    def nobody(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(BenchError, match="no user postgres"):
        cluster._unprivileged()


def test_a_folder_that_others_may_not_enter_is_not_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    assert cluster._place({}) == home
    assert cluster._place({"user": 1}) == Path("/tmp")
