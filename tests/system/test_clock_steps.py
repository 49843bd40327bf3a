"""Daemons whose wall clock is set back or forward while they run: timers go on, and idempotency keys hold."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from contextlib import closing
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest

from tests.system.daemons import CHECKOUT, LOCAL, PATIENCE, Daemon, fixed_ports, get_json, until
from tests.system.mapped import MAPPING
from tests.system.peers import ask

if TYPE_CHECKING:
    from pathlib import Path

HOURS = 3600
DAYS = 24 * HOURS
# Python imports this module when it starts, before it imports Twisted.
SITECUSTOMIZE = """
import time
from pathlib import Path

true_time = time.time
step = Path(__file__).with_name("step")
time.time = lambda: true_time() + float(step.read_text())
"""
KEEPALIVE = "ping_after = 0.5\ngive_up_after = 1.5\n"


class WallClock:
    """The wall clock of daemons: it differs from the real one by the seconds in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self.step(0)

    def step(self, seconds: int) -> None:
        """Set the clocks to the real time and ``seconds``."""
        new = self.folder / "new"
        new.write_text(str(seconds))
        new.rename(self.folder / "step")

    def of(self, daemon: Daemon) -> Daemon:
        """Give this clock to a daemon that has not started."""
        daemon.environment["PYTHONPATH"] = f"{self.folder}{os.pathsep}{CHECKOUT}"
        return daemon


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    """Return a clock that shows the real time."""
    return WallClock(tmp_path / "clock")


def test_timers_go_on_while_the_wall_clock_stands_two_hours_back(tmp_path: Path, clock: WallClock) -> None:
    """A poll, a keepalive and a retry each wait for a timer; all of them waited for two hours."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT)")

        def insert(token: int) -> None:
            with database:
                database.execute("INSERT INTO events VALUES (?, ?)", (token, f"event {token}"))

        def has_applied(token: int) -> bool:
            try:
                (writer,) = get_json(f"http://{here}", "/v1/streams/events")["writers"] or [{"position": 0}]
            except HTTPError as error:
                assert error.code == 404, error  # the worker has received no position yet
                return False
            return bool(writer["position"] == token)

        def readiness() -> tuple[int, str]:
            try:
                return 200, get_json(f"http://{here}", "/health/ready")["status"]
            except HTTPError as error:
                return error.code, json.load(error)["detail"]

        (tmp_path / "master.toml").write_text(f'database = "sqlite:///shop.db"\n{KEEPALIVE}{MAPPING}')
        (tmp_path / "worker.toml").write_text(KEEPALIVE)
        insert(2)
        master = clock.of(Daemon(tmp_path, "master", "--config=master.toml"))
        with fixed_ports(master) as (wire, http):
            local = ("--http=tcp:0:interface=127.0.0.1", f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
            with clock.of(Daemon(tmp_path, "worker", "--config=worker.toml", *local)) as worker:
                here = worker.address("HTTP")
                until(lambda: has_applied(2), "the first row is applied")

                clock.step(-2 * HOURS)
                insert(3)
                until(lambda: has_applied(3), "a row of plain SQL is announced")
                assert readiness() == (200, "ready")

                os.kill(master.pid, signal.SIGSTOP)
                missing = f"no connection to the writer at tcp:{wire}"
                until(lambda: readiness()[1].startswith(missing), "silence is noticed")
                insert(4)
                os.kill(master.pid, signal.SIGCONT)
                until(lambda: has_applied(4), "the worker has connected again")
                assert readiness() == (200, "ready")


def test_an_idempotency_key_outlives_two_days_that_did_not_pass(tmp_path: Path, clock: WallClock) -> None:
    master = clock.of(Daemon(tmp_path, "master", "--stream=orders", *LOCAL))

    def append(key: str) -> list[int]:
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        url = f"http://{master.address('HTTP')}/v1/streams/orders/facts"
        request = urllib.request.Request(url, b'{"rows": [["o1"]]}', headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            ids: list[int] = json.load(answer)["ids"]
            return ids

    with master:
        first = append("k1")
        clock.step(2 * DAYS)
        second = append("k2")
        clock.step(0)
        assert (append("k1"), append("k2")) == (first, second)
        clock.step(2 * DAYS)  # and while the process does not run
        master.kill()
        master.start()
        third = append("k3")
        clock.step(0)
        master.kill()
        master.start()
        assert [append(key) for key in ("k1", "k2", "k3")] == [first, second, third]


EMBEDDED = """
from twisted.internet import endpoints, reactor
from replication import Master, make_site

master = Master(database="sqlite://", streams=["orders"])
site = make_site(master.served, secret=None)
listening = endpoints.serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(site)
listening.addCallback(lambda port: print(port.getHost().port, flush=True))
reactor.callWhenRunning(master.start)
reactor.run()
"""


def test_while_timers_stand_still_probes_answer_503(clock: WallClock) -> None:
    """An application that does not call ``use_monotonic_clock``: every poll, ping and retry waits for an hour."""
    environment = {**os.environ, "PYTHONPATH": f"{clock.folder}{os.pathsep}{CHECKOUT}"}
    with subprocess.Popen([sys.executable, "-c", EMBEDDED], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            http = f"http://127.0.0.1:{int(process.stdout.readline())}"
            paths = ("live", "ready")
            assert [ask(f"{http}/health/{each}")[0] for each in paths] == [200, 200]
            clock.step(-HOURS)
            until(lambda: [ask(f"{http}/health/{each}")[0] for each in paths] == [503, 503], "timers stand still", 60)
            assert "timers have not run for" in ask(f"{http}/health/ready")[1]["detail"]
            clock.step(0)
            until(lambda: [ask(f"{http}/health/{each}")[0] for each in paths] == [200, 200], "they run again", 60)
        finally:
            process.kill()
