"""The command line and the daemon as a user has them: real processes, signals, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

import pytest

from replication.bench.cluster import free_ports
from tests.system.daemons import LOCAL, PATIENCE, Daemon, environment, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """What is entered here ends with the test, however that ends."""
    with ExitStack() as found:
        yield found


def replication(stack: ExitStack, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
    """Start ``replication …``; it is killed at the end if it still runs."""
    command = [sys.executable, "-m", "replication.cli.main", *arguments]
    process = stack.enter_context(subprocess.Popen(command, env=environment(), **streams))
    stack.callback(process.kill)
    return process


def make_master(folder: Path, wire: int, http: int) -> Daemon:
    """Return a master of the stream ``orders`` that is not started."""
    sockets = (f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{http}:interface=127.0.0.1")
    return Daemon(folder, "master", "--stream", "orders", *sockets)


def feed(sink: IO[bytes], rows: Sequence[bytes]) -> None:
    """Write rows for about three seconds, then close."""
    with sink:
        for start in range(0, len(rows), 20):
            sink.writelines(rows[start : start + 20])
            sink.flush()
            time.sleep(0.01)


def test_a_failed_start_opens_no_socket_and_logs_the_error_once_in_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "taken.db").mkdir()
    daemon = Daemon(tmp_path, "master", "--database=sqlite:///taken.db", *LOCAL)
    with daemon:
        until(lambda: daemon.ended, "the start fails")
        lines = daemon.log.splitlines()
    assert lines[-1].startswith("replication: database 'taken.db' cannot be claimed: [Errno 21] Is a directory")
    assert daemon.log.count("cannot be claimed") == 1
    assert "starting on" not in daemon.log
    assert "served at" not in daemon.log


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.terminate])
def test_rows_come_out_once_and_in_order_though_the_master_ends_while_they_go_in(
    tmp_path: Path, stack: ExitStack, end: Callable[[Daemon], object]
) -> None:
    wire, http = free_ports(2)
    master = stack.enter_context(make_master(tmp_path, wire, http))
    master.address("HTTP")
    printed, ids = tmp_path / "printed", tmp_path / "ids"
    with printed.open("wb") as out:
        follow = (
            "tail",
            f"tcp:127.0.0.1:{wire}",
            "--from",
            "beginning",
            "--http",
            f"http://127.0.0.1:{http}",
            "--json",
        )
        tail = replication(stack, *follow, stdout=out)
    with ids.open("wb") as out:
        append = replication(
            stack, "append", "orders", "--http", f"http://127.0.0.1:{http}", stdin=subprocess.PIPE, stdout=out
        )
    assert append.stdin is not None
    rows = [f"[{number}]\n".encode() for number in range(6000)]

    feeding = Thread(target=feed, args=(append.stdin, rows))
    feeding.start()
    until(lambda: len(ids.read_bytes()) > 500, "something is acknowledged")
    end(master)
    master.start()
    feeding.join()
    assert append.wait(PATIENCE) == 0
    until(lambda: len(printed.read_bytes().splitlines()) >= len(rows), "every row is printed")
    tail.send_signal(signal.SIGTERM)
    assert tail.wait(PATIENCE) == 0

    facts = [json.loads(line) for line in printed.read_bytes().splitlines()]
    assert [fact["row"] for fact in facts] == [[number] for number in range(6000)]
    assert [fact["token"] for fact in facts] == [int(line) for line in ids.read_bytes().splitlines()]


def test_tail_stops_when_the_reader_of_its_output_does(tmp_path: Path, stack: ExitStack) -> None:
    wire, http = free_ports(2)
    stack.enter_context(make_master(tmp_path, wire, http)).address("HTTP")
    reader, writer = os.pipe()
    tail = replication(stack, "tail", f"tcp:127.0.0.1:{wire}", stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    assert tail.communicate(timeout=PATIENCE)[1] == b""
    assert tail.returncode == 0


def test_a_port_in_use_is_one_line_and_status_1(tmp_path: Path, stack: ExitStack) -> None:
    wire, http = free_ports(2)
    stack.enter_context(make_master(tmp_path, wire, http)).address("HTTP")
    endpoint = f"tcp:{wire}:interface=127.0.0.1"
    command = [
        "twistd",
        "-n",
        "--pidfile=",
        "replication",
        "master",
        f"--listen={endpoint}",
        LOCAL[1],
        "--database=sqlite://",
    ]
    second = subprocess.run(
        command, cwd=tmp_path, env=environment(), timeout=PATIENCE, check=False, capture_output=True, text=True
    )
    assert second.returncode == 1
    cure = "if another master or worker runs there, stop it, or give another --listen"
    assert second.stderr == f"replication: cannot listen on {endpoint} (listen): Address already in use; {cure}\n"
    assert "Traceback" not in second.stdout


def test_sighup_does_not_end_the_process_and_sigterm_sends_an_error_line(tmp_path: Path, stack: ExitStack) -> None:
    wire, http = free_ports(2)
    master = stack.enter_context(make_master(tmp_path, wire, http))
    master.address("HTTP")
    os.kill(master.pid, signal.SIGHUP)
    until(lambda: "SIGHUP: opened 0 log files again" in master.log, "SIGHUP is noticed")
    with socket.create_connection(("127.0.0.1", wire), PATIENCE) as peer, peer.makefile("rb") as lines:
        assert lines.readline() == b"SERVER localhost\n"
        master.terminate()
        assert lines.readlines()[-1] == b"ERROR server stopping\n"
