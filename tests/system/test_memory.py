"""A process without memory ends, and after its restart no committed fact is missing anywhere."""

from __future__ import annotations

import json
import resource
import sqlite3
from contextlib import closing, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

from replication.logs import NO_MEMORY
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, until
from tests.system.test_kills import table

if TYPE_CHECKING:
    from collections.abc import Iterable

LEFT = 2**21  # bytes that a process may still request


def limit_memory(daemon: Daemon) -> None:
    """Let the requests of a running process for memory fail."""
    pages = int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[0])
    resource.prlimit(daemon.pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT, resource.RLIM_INFINITY))


def facts(sizes: Iterable[int]) -> list[Fact]:
    return [Fact(Token(0), (json.dumps(["o", "x" * size]),)) for size in sizes]


def test_a_master_and_its_worker_without_memory_end_and_lose_nothing(tmp_path: Path) -> None:
    master = Daemon(tmp_path, "master", "--stream=orders")
    with fixed_ports(master) as (wire, http):
        options = ("--stream=orders", f"--connect=tcp:{wire}", f"--catch-up=http://{http}", *LOCAL)
        with Daemon(tmp_path, "worker", *options) as worker:
            worker.address("HTTP")
            acknowledged = append(http, "orders", facts([10]))
            for ends in (worker, master):
                limit_memory(ends)
                for number in range(1_000):
                    if ends.ended:
                        break
                    with suppress(URLError, HTTPException, ConnectionError):
                        acknowledged += append(http, "orders", facts([10_000] * (number % 300)))
                assert NO_MEMORY.decode() in ends.log
                assert ends.wait() == 1
                ends.start()
                ends.address("HTTP")
            acknowledged += append(http, "orders", facts([10]))
            stored = table(tmp_path / "replication.db", "orders")
            until(lambda: table(tmp_path / "replication-worker1.db", "orders") == stored, "the copy is equal")
    with closing(sqlite3.connect(tmp_path / "replication.db")) as database:
        assert {*acknowledged} <= {token for (token,) in database.execute("SELECT stream_id FROM stream_orders")}
