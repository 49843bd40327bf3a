"""Scenarios start faster: a process that has imported what theirs import forks them, and initdb runs once."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest

from replication.bench import processes
from replication.bench.cluster import Cluster, find_binaries
from tests.postgres import copy_data_directory, data_directory

FORK_SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the server before a test has another folder for temporary files: the path of its socket must be short."""
    stores = [f"replication.storage.{each}.store" for each in ("sqlite", "postgres")]  # imported at first use
    FORK_SERVER.set_forkserver_preload(["replication.bench.append", *stores])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def copied_data() -> None:
    """Run initdb before a test has another folder for temporary files, which must be empty at its end."""
    if find_binaries():
        data_directory()


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch, fork_server: None, copied_data: None) -> None:
    monkeypatch.setattr(processes, "_SPAWN", FORK_SERVER)
    if find_binaries():
        monkeypatch.setattr(Cluster, "_create", copy_data_directory)
