"""Two writers with one sequence, one of them killed repeatedly, and a worker with ``linear=True``."""

from __future__ import annotations

import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPException
from itertools import count, takewhile
from threading import Event
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import Daemon, fixed_ports, get_json, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.postgres import PostgresServer

APP = """
def register(worker):
    @worker.on("events", linear=True)
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (place INTEGER PRIMARY KEY, token INTEGER, writer TEXT)")
        await txn.executemany("INSERT INTO seen (token, writer) VALUES (?, ?)",
                              [(fact.token, txn.writer_of(fact)) for fact in facts])
"""


def seen(folder: Path) -> list[tuple[int, str]]:
    """Return the facts that the worker has applied, in their order."""
    try:
        with closing(
            sqlite3.connect(f"file:{folder}/replication-worker1.db?mode=ro", uri=True, timeout=30)
        ) as database:
            return database.execute("SELECT token, writer FROM seen ORDER BY place").fetchall()
    except sqlite3.OperationalError:  # there is no database yet, or no table in it
        return []


def has_seen(folder: Path, count: int) -> bool:
    """Return whether the worker has applied this number of facts."""
    return len(seen(folder)) >= count


def start_writer(stack: ExitStack, folder: Path, name: str, database: str) -> Daemon:
    """Start a master on fixed ports."""
    options = ("--stream=events", f"--instance-name={name}", f"--database={database}")
    writer = Daemon(folder, "master", *options, name=name)
    stack.enter_context(fixed_ports(writer))
    return writer


def append(http: str, numbers: Iterable[int]) -> None:
    """Append facts one by one, with retries; after an error a fact may be stored twice."""
    for number in numbers:
        body, kind = b'{"rows":[%d]}' % number, {"Content-Type": "application/json"}

        def done(body: bytes = body, kind: dict[str, str] = kind) -> bool:
            try:
                return bool(ask(f"{http}/v1/streams/events/facts", body, kind)[0] == 200)
            except (OSError, HTTPException):  # it was killed, and is not back yet
                return False

        until(done, "the append is done")


@pytest.mark.parametrize("relayed", [False, True])
def test_linear_order_of_two_writers_survives_kills(tmp_path: Path, postgres: PostgresServer, relayed: bool) -> None:
    (tmp_path / "ordered.py").write_text(APP)
    chance = random.Random(3)
    with ExitStack() as stack:
        database = postgres.url(stack.enter_context(postgres.database()))
        writers = [start_writer(stack, tmp_path, name, database) for name in ("a", "b")]
        https = [f"http://{each.address('HTTP')}" for each in writers]
        follow = [*(f"--connect=tcp:{each.address('the wire')}" for each in writers), f"--catch-up={database}"]
        processes = [*writers]
        if relayed:
            relay = Daemon(tmp_path, "worker", "--instance-name=relay", *follow, name="relay")
            wire, http = stack.enter_context(fixed_ports(relay))
            follow = [f"--connect=tcp:{wire}", f"--catch-up=http://{http}"]
            processes.append(relay)
        worker = stack.enter_context(Daemon(tmp_path, "worker", "--app=ordered", *follow))
        processes.append(worker)
        with ThreadPoolExecutor(4) as callers:
            ended = Event()
            appends = [
                callers.submit(append, https[number % 2], takewhile(lambda _: not ended.is_set(), count()))
                for number in range(4)
            ]
            for _ in range(5 if relayed else 3):
                want = len(seen(tmp_path)) + 20
                until(partial(has_seen, tmp_path, want), "more is handed over")
                victim = chance.choice(processes)
                victim.kill()
                victim.start()
            ended.set()
            for each in appends:
                each.result()
        sql = "SELECT stream_id, instance_name FROM stream_events ORDER BY stream_id"
        name = database.rpartition("/")[2]
        until(lambda: seen(tmp_path) == postgres.sql(sql, database=name), "all is handed over, in the order of the IDs")
        # Only one of them writes: the idle one publishes its position, so the order does not wait for it.
        append(https[0], range(3))
        until(lambda: seen(tmp_path) == postgres.sql(sql, database=name), "an idle writer holds nothing up")

        def all_polled() -> bool:  # the other writer reads the positions of this one from time to time
            since = get_json(https[1], "/v1/streams/events/updates?since=1&limit=10000")
            return [(token, writer) for token, writer, _ in since["updates"]] == seen(tmp_path)

        until(all_polled, "a program that polls receives the same")
