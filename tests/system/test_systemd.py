"""Daemons as systemd runs them: what it receives, when it would restart one, and sockets that it opens.

``NotifySocket`` stands in for systemd, so the tests need none.  The units are those of ``conf/systemd``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.docs.pages import blocks
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, append, environment, until
from tests.system.notifications import NotifySocket

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNITS = CHECKOUT / "conf/systemd"
WATCHDOG = 0.4  # seconds
BLOCKING = """
import pathlib, time

def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        while pathlib.Path("block").exists():
            time.sleep(0.01)
        await txn.execute("CREATE TABLE IF NOT EXISTS applied (token INTEGER PRIMARY KEY)")
        for fact in facts:
            await txn.execute("INSERT INTO applied VALUES (?)", [fact.token])
"""
ORDER = Fact(Token(0), ('["o1","placed"]',))


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotifySocket]:
    with closing(NotifySocket(str(tmp_path / "notify"))) as notify:
        yield notify


def supervised(daemon: Daemon, systemd: NotifySocket) -> Daemon:
    """Return a daemon, not yet started, that systemd supervises with a watchdog."""
    daemon.environment |= {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": str(int(WATCHDOG * 1e6))}
    return daemon


@pytest.mark.parametrize("role", ["master", "worker"])
def test_ready_is_sent_once_a_writer_accepts_appends_and_then_signs_of_life_until_the_end(
    tmp_path: Path, systemd: NotifySocket, role: str
) -> None:
    """A worker that writes is ready before it is connected: see below."""
    (tmp_path / "writing.toml").write_text('writes = ["orders"]\nconnect = "tcp:127.0.0.1:1"\n')
    options = ["--stream=orders"] if role == "master" else ["--config=writing.toml"]
    with supervised(Daemon(tmp_path, role, *options, *LOCAL), systemd) as master:
        first = systemd.wait_for("READY=1")
        status = "ready" if role == "master" else "no connection to the writer at tcp:127.0.0.1:1"
        assert first.splitlines() == ["READY=1", f"STATUS={status}", "WATCHDOG=1"]
        assert systemd.all == [first], "nothing comes before it"
        assert append(master.address("HTTP"), "orders", [ORDER]) == [2]
        until(lambda: len([each for each in systemd.receive() if "WATCHDOG=1" in each]) > 5, "signs of life go on")
        assert master.terminate() == 0
    assert systemd.receive()[-1] == "STOPPING=1"
    assert systemd.receive().count("STOPPING=1") == 1


def test_a_start_that_waits_for_its_database_sends_its_status_only(tmp_path: Path, systemd: NotifySocket) -> None:
    path = tmp_path / "replication.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE mine (a)")
        other.execute("BEGIN IMMEDIATE")
        with supervised(Daemon(tmp_path, "master", f"--database=sqlite:///{path}", *LOCAL), systemd) as master:
            status = systemd.wait_for("STATUS=")
            assert status.startswith(f"STATUS=the start waits: database '{path}': database is locked")
            assert master.address("HTTP"), "sockets are open meanwhile"
            assert systemd.receive() == [status]
            other.execute("ROLLBACK")
            assert systemd.wait_for("READY=1").splitlines()[1] == "STATUS=ready"


def test_the_status_of_a_start_that_fails_is_its_error(tmp_path: Path, systemd: NotifySocket) -> None:
    (tmp_path / "replication.db").write_bytes(b"no database" * 999)
    with supervised(Daemon(tmp_path, "master", *LOCAL), systemd) as master:
        assert master.wait() == 1
        last = master.log.splitlines()[-1].removeprefix("replication: ")
    assert systemd.receive() == [f"STATUS={last}", "STOPPING=1"]


@pytest.mark.parametrize("more", [(), LOCAL], ids=["worker", "relay"])
def test_the_status_of_a_worker_names_the_writer_that_is_missing(
    tmp_path: Path, systemd: NotifySocket, more: Sequence[str]
) -> None:
    """It is ready before: a host must not wait at its start until another host has started."""
    with socket.create_server(("127.0.0.1", 0)) as refused:
        port = refused.getsockname()[1]
    with supervised(Daemon(tmp_path, "worker", f"--connect=tcp:127.0.0.1:{port}", *more), systemd) as worker:
        assert (
            systemd.wait_for("READY=1").splitlines()[1] == f"STATUS=no connection to the writer at tcp:127.0.0.1:{port}"
        )
        master = Daemon(tmp_path, "master", f"--listen=tcp:{port}:interface=127.0.0.1", LOCAL[1], "--stream=orders")
        with master:
            systemd.wait_for("STATUS=ready")
            master.kill()
            systemd.wait_for("STATUS=no connection")
        assert worker.terminate() == 0
    assert systemd.receive()[-1] == "STOPPING=1"


def test_a_blocked_worker_sends_no_sign_of_life_and_works_again_after_a_restart(
    tmp_path: Path, systemd: NotifySocket
) -> None:
    """systemd sends SIGABRT when the signs of life stop, and starts the process again."""
    (tmp_path / "blocking.py").write_text(BLOCKING)
    (tmp_path / "block").touch()
    with ExitStack() as stack:
        master = stack.enter_context(Daemon(tmp_path, "master", "--stream=orders", *LOCAL))
        wire, http = master.address("the wire"), master.address("HTTP")
        options = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--app=blocking")
        worker = stack.enter_context(supervised(Daemon(tmp_path, "worker", *options), systemd))
        systemd.wait_for("STATUS=ready")
        until(lambda: len(systemd.receive()) > 5, "signs of life come")
        append(http, "orders", [ORDER])
        until(lambda: systemd.silence > 3 * WATCHDOG, "signs of life stop")
        assert not worker.ended
        os.kill(worker.pid, signal.SIGABRT)
        assert worker.wait() == -signal.SIGABRT
        (tmp_path / "block").unlink()
        systemd.received()
        worker.start()
        systemd.wait_for("READY=1")
        until(lambda: tokens(tmp_path, "SELECT token FROM applied") == [2], "the fact is applied")


def tokens(folder: Path, sql: str) -> list[int]:
    """Return a column of the worker's database; nothing before its table is made."""
    with closing(sqlite3.connect(folder / "replication-worker1.db", timeout=30)) as database:
        try:
            return [each for (each,) in database.execute(sql)]
        except sqlite3.OperationalError:
            return []


# ---- socket activation


PASS_SOCKETS = """
import fcntl, os, sys
count = int(sys.argv[1])
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 20) for each in sys.argv[2 : 2 + count]]
for place, each in enumerate(high, 3):
    os.dup2(each, place)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": ":".join(["x"] * count)}
os.execvp(sys.argv[2 + count], sys.argv[2 + count :])
"""
PAGE = (CHECKOUT / "docs/how-to/run-under-systemd.md").read_text(encoding="utf-8")


class Activated(Daemon):
    """A daemon with the configuration of the page, to which open sockets are passed, from file descriptor 3 on."""

    def __init__(
        self, folder: Path, *options: str, sockets: Sequence[socket.socket], role: str = "master", more: str = ""
    ) -> None:
        (block,) = (each for each in blocks(PAGE) if each.file is not None)
        (folder / "sockets.toml").write_text(more + block.body)
        super().__init__(folder, role, "--config=sockets.toml", *options, name="activated")
        self.descriptors = [each.fileno() for each in sockets]
        self.before = [sys.executable, "-c", PASS_SOCKETS, str(len(sockets)), *map(str, self.descriptors)]


@pytest.mark.parametrize("role", ["master", "worker"])
def test_sockets_of_systemd_lose_no_request_while_a_writer_is_replaced(tmp_path: Path, role: str) -> None:
    """A request that is sent while no writer runs waits in the socket, and the next one answers it."""
    body = b'{"rows":[["o1","placed"]]}'
    head = (
        "POST /v1/streams/orders/facts HTTP/1.0\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stored = "SELECT stream_id FROM stream_orders ORDER BY 1"
    with ExitStack() as stack:
        wire, http = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        address = f"127.0.0.1:{http.getsockname()[1]}"
        if role == "master":
            master = Activated(tmp_path, "--stream=orders", sockets=[wire, http])
        else:
            writes = 'instance_name = "writer"\nwrites = ["orders"]\nconnect = "tcp:127.0.0.1:1"\n'
            master = Activated(tmp_path, sockets=[wire, http], role="worker", more=writes)
        options = (f"--connect=tcp:127.0.0.1:{wire.getsockname()[1]}", f"--catch-up=http://{address}")
        worker = stack.enter_context(Daemon(tmp_path, "worker", *options))
        for last in (2, 3, 4):
            with socket.create_connection(http.getsockname(), timeout=120) as client:
                client.sendall(head.encode() + body)
                with master:
                    answer = b"".join(iter(lambda: client.recv(65536), b""))
                    assert answer.endswith(f'{{"ids":[{last}]}}'.encode()), answer
                    facts = [*range(2, last + 1)]
                    until(partial(lambda facts: tokens(tmp_path, stored) == facts, facts), "the worker has each fact")
                    assert master.terminate() == 0
        assert worker.terminate() == 0


def test_sockets_of_systemd_lose_no_follower_while_a_relay_is_replaced(tmp_path: Path) -> None:
    """A request that is sent while no relay runs waits, and the follower connects again and has each fact."""
    stored = "SELECT stream_id FROM stream_orders ORDER BY 1"
    with ExitStack() as stack:
        master = stack.enter_context(Daemon(tmp_path, "master", "--stream=orders", *LOCAL))
        wire, http = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        at_master = (f"--connect=tcp:{master.address('the wire')}", f"--catch-up=http://{master.address('HTTP')}")
        relay = Activated(tmp_path, "--instance-name=relay", *at_master, sockets=[wire, http], role="worker")
        options = (
            f"--connect=tcp:127.0.0.1:{wire.getsockname()[1]}",
            f"--catch-up=http://127.0.0.1:{http.getsockname()[1]}",
        )
        worker = stack.enter_context(Daemon(tmp_path, "worker", *options))
        for last in (2, 3, 4):
            append(master.address("HTTP"), "orders", [ORDER])
            with socket.create_connection(http.getsockname(), timeout=120) as client:
                client.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
                with relay:
                    assert client.recv(65536).startswith(b"HTTP/1.0 200")
                    facts = [*range(2, last + 1)]
                    until(partial(lambda facts: tokens(tmp_path, stored) == facts, facts), "the worker has each fact")
                    assert relay.terminate() == 0
        assert worker.terminate() == 0


def test_a_socket_of_systemd_that_other_hosts_reach_is_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        wire, http = (stack.enter_context(socket.create_server((host, 0))) for host in ("0.0.0.0", "127.0.0.1"))
        master = stack.enter_context(Activated(tmp_path, sockets=[wire, http]))
        assert master.wait() == 1
        assert "(listen): it is open to other hosts without TLS" in master.log.splitlines()[-1]


def test_without_a_socket_from_systemd_the_error_has_the_cure(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--listen=systemd:domain=INET:index=0") as master:
        assert master.wait() == 1
        assert master.log.splitlines()[-1] == (
            "replication: listen: cannot listen on 'systemd:domain=INET:index=0': systemd has passed no such socket: "
            "start the unit with `systemctl`, and its .socket unit too"
        )


# ---- units


def unit(name: str, folder: Path) -> str:
    """Return a unit with the paths of this machine: this Python's commands, and configurations in ``folder``."""
    text = (UNITS / name).read_text().replace("/opt/replication/bin", str(Path(sys.executable).parent))
    return text.replace("/etc/replication", str(folder))


@pytest.mark.parametrize(
    ("name", "sample"), [("replication-master.service", "master"), ("replication-worker@.service", "worker")]
)
def test_a_service_of_the_units_becomes_ready_and_ends(
    tmp_path: Path, systemd: NotifySocket, name: str, sample: str
) -> None:
    """What ``ExecStart`` has, with the samples of ``conf/``, and with the sockets on free ports."""
    text = unit(name, tmp_path).replace("%i", "worker1")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    configuration = tmp_path / f"{'master' if sample == 'master' else 'worker1'}.toml"
    shutil.copy(CHECKOUT / f"conf/{sample}.toml", configuration)
    seconds = re.findall(r"^WatchdogSec=(\d+)$", text, re.MULTILINE)
    assert seconds == ["30"]
    variables = {**environment(), "NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": f"{seconds[0]}000000"}
    local = LOCAL if sample == "master" else ()
    process = subprocess.Popen([*shlex.split(command), *local], cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    try:
        assert "WATCHDOG=1" in systemd.wait_for("READY=1")
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def test_the_units_are_valid(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is missing: on Debian, `apt-get install systemd`")
    for each in UNITS.iterdir():
        (tmp_path / each.name).write_text(unit(each.name, tmp_path))
    names = [each.name.replace("@.", "@worker1.") for each in sorted(UNITS.iterdir())]
    assert names
    checked = subprocess.run(
        [analyze, "verify", "--man=no", *names], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    about_units = [line for line in checked.stderr.splitlines() if "replication" in line]
    assert (checked.returncode, about_units) == (0, []), checked.stderr
