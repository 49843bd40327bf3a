"""The processes of scenarios are forked by one that has imported what they import, which saves most of their start."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest

from replication.bench import processes

FORK_SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the server before a test has another folder for temporary files: the path of its socket must be short."""
    stores = [f"replication.storage.{each}.store" for each in ("sqlite", "postgres")]  # imported at first use
    FORK_SERVER.set_forkserver_preload(["replication.bench.append", *stores])
    forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch, fork_server: None) -> None:
    monkeypatch.setattr(processes, "_SPAWN", FORK_SERVER)
