"""Rooms in real processes: a master with rooms, a worker, the command ``rooms``, and kills."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import Request, urlopen

from replication.bench.cluster import free_ports
from tests.rooms.test_graph import STEPS
from tests.system.daemons import PATIENCE, Daemon, environment, get_json, until

if TYPE_CHECKING:
    from pathlib import Path

ROOM = "!s:remote.test"
PATH = f"/v1/rooms/{quote(ROOM, safe='')}"
SCENARIO = "fuzz:3"


def post(url: str, step: Any) -> Any:
    body = json.dumps({"backfilled": step["backfilled"], "events": step["events"]}).encode()
    with urlopen(Request(f"{url}{PATH}/events", body, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)


def copied(path: Path, stream: str) -> list[tuple[int, str]]:
    """Return a stream's rows by token; nothing if its table does not exist yet."""
    with closing(sqlite3.connect(path)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", [f"stream_{stream}"]).fetchall():
            return []
        rows = database.execute(f'SELECT abs(stream_id), "row" FROM "stream_{stream}" ORDER BY abs(stream_id), ord')
        return rows.fetchall()


def same(original: Path, copy: Path, stream: str) -> bool:
    """Return whether the copy is complete."""
    return copied(original, stream) == copied(copy, stream)


def test_a_worker_follows_every_step_of_rooms_despite_kills_of_the_master(tmp_path: Path) -> None:
    # a copy: other tests read the same steps
    steps = [deepcopy(step) for step in STEPS if step["scenario"] == SCENARIO and step["events"]]
    named = {event["event_id"]: event for step in steps for event in step["events"]}
    for event in (event for step in steps for event in step["events"]):
        if event["state_before"]:  # the recorder had these at hand, stored or not
            event["state_before"] = [[named[it]["type"], named[it]["state_key"], it] for it in event["state_before"]]
    with ExitStack() as stack:
        wire, http = free_ports(2)
        ports = (f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{http}:interface=127.0.0.1")
        master = stack.enter_context(Daemon(tmp_path, "master", "--rooms", "--server-name", "local.test", *ports))
        url = f"http://{master.address('HTTP')}"
        follow = ("--connect", f"tcp:127.0.0.1:{wire}", "--catch-up", url, "--server-name", "local.test")
        stack.enter_context(Daemon(tmp_path, "worker", *follow))
        for number, step in enumerate(steps):
            if number == len(steps) // 2:
                master.kill()
                master.start().address("HTTP")
            assert len(post(url, step)["ids"]) == len(step["events"])
        expected = steps[-1]["expected"]["rooms"][ROOM]
        view = get_json(url, PATH)
        assert set(view["forward_extremities"]) == set(expected["forward_extremities"])
        assert set(view["backward_extremities"]) == set(expected["backward_extremities"])
        assert sorted(map(tuple, view["current_state"])) == sorted(map(tuple, expected["current_state"]))
        original, copy = tmp_path / "replication.db", tmp_path / "replication-worker1.db"
        for stream in ("events", "backfill"):
            until(partial(same, original, copy, stream), f"{stream} is followed")
        command = [sys.executable, "-m", "replication.cli.main", "rooms", ROOM, "--json"]
        command += ["--database", f"sqlite:///{original}"]
        shown = subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=PATIENCE).stdout
        assert json.loads(shown) == view
