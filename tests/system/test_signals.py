"""SIGTERM and SIGHUP to real processes: appends are finished, peers receive ERROR, logs are opened again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import threading
import urllib.error
from contextlib import ExitStack, closing
from http.client import HTTPException
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.system.daemons import PATIENCE, Daemon, environment, until
from tests.system.peers import Peer, ask, listen

if TYPE_CHECKING:
    from pathlib import Path

MASTER = ("--stream=orders", "--listen=tcp:0:interface=127.0.0.1", "--http=tcp:0:interface=127.0.0.1")
NDJSON = {"Content-Type": "application/x-ndjson"}


def stored(database: Path) -> list[int]:
    """Return the IDs of all facts."""
    with closing(sqlite3.connect(database)) as connection:
        return [token for (token,) in connection.execute("SELECT DISTINCT stream_id FROM stream_orders ORDER BY 1")]


def test_a_master_finishes_its_appends_after_sigterm(tmp_path: Path) -> None:
    """Every append is answered and durable, or refused; peers receive all published facts and the reason."""
    answered: list[int] = []
    refused: list[object] = []

    def append(http: str) -> None:
        body = b'{"rows":[["o","placed"]]}\n' * 20
        while not refused:
            try:
                status, answer = ask(f"http://{http}/v1/streams/orders/facts", body, NDJSON)
            except (urllib.error.URLError, HTTPException, ConnectionError) as error:
                refused.append(error)  # the socket is closed
            else:
                if status != 200:
                    refused.append(answer)
                    return
                answered.extend(answer["ids"])

    with ExitStack() as stack:
        master = stack.enter_context(Daemon(tmp_path, "master", *MASTER))
        peer = stack.enter_context(Peer(master.address("the wire")))
        peer.send(b"NAME nc\nREPLICATE\n")
        http = master.address("HTTP")
        threads = [threading.Thread(target=append, args=(http,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: len(answered) > 200, "appends are under way")
        assert master.terminate() == 0
        for thread in threads:
            thread.join(PATIENCE)
        output = peer.read_to_the_end()
    assert output[-1] == "ERROR server stopping"
    tokens = [int(line.split(" ")[3]) for line in output if line.startswith("RDATA orders")]
    assert tokens == sorted(set(tokens))
    kept = stored(tmp_path / "replication.db")
    assert set(answered) <= set(kept), "what was answered is durable"
    assert tokens == kept, "what is durable was announced before the end"
    assert "Traceback" not in master.log_of(1)


def test_a_worker_sends_an_error_line_after_sigterm(tmp_path: Path) -> None:
    with listen() as server, ExitStack() as stack:
        fake = f"--connect=tcp:127.0.0.1:{server.getsockname()[1]}"
        worker = stack.enter_context(Daemon(tmp_path, "worker", fake))
        peer = stack.enter_context(Peer(server.accept()[0]))
        peer.send(b"SERVER localhost\nPOSITION orders fake 1 1\nRDATA orders fake 2 []\n")
        database = tmp_path / "replication-worker1.db"
        until(lambda: database.exists() and "stream_orders" in tables(database) and stored(database) == [2], "applied")
        assert worker.terminate() == 0
        assert peer.read_to_the_end()[-1] == "ERROR server stopping"
    assert "Traceback" not in worker.log_of(1)


def tables(database: Path) -> set[str]:
    with closing(sqlite3.connect(database)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}


def test_a_worker_whose_writer_is_away_ends_at_once(tmp_path: Path) -> None:
    with Daemon(tmp_path, "worker", "--connect=tcp:127.0.0.1:1") as worker:
        until(lambda: "cannot connect to tcp:127.0.0.1:1" in worker.log, "it has tried")
        assert worker.terminate() == 0


def test_secrets_and_rights_are_read_again_and_no_connection_is_lost(tmp_path: Path) -> None:
    config, old, new = (tmp_path / name for name in ("master.toml", "old", "new"))

    def write(secret: Path, *more: str) -> None:
        for each in (old, new):
            each.write_text(f"the {each.name} secret")
            each.chmod(0o600)
        config.write_text("\n".join((f'secret_file = "{secret}"', *more)))

    def status(secret: str, method: str = "GET") -> int:
        path = "/v1/streams" if method == "GET" else "/v1/streams/orders/facts"
        body = None if method == "GET" else b'{"rows":[1]}'
        headers = {"Authorization": f"Bearer the {secret} secret", "Content-Type": "application/x-ndjson"}
        try:
            with urlopen(Request(f"http://{master.address('HTTP')}{path}", body, headers), timeout=PATIENCE) as answer:
                found: int = answer.status
                return found
        except HTTPError as error:
            return error.code

    write(old)
    with Daemon(tmp_path, "master", "--config=master.toml", *MASTER) as master:
        assert (status("old"), status("new")) == (200, 401)
        with Peer(master.address("the wire")) as peer:
            peer.read_until("SERVER")
            write(old, "[access.reader]", f'secret_file = "{new}"', 'read = ["*"]')
            os.kill(master.pid, signal.SIGHUP)
            until(lambda: status("new") == 200, "the second secret is accepted")
            assert (status("old", "POST"), status("new", "POST")) == (200, 403)
            write(new)
            os.kill(master.pid, signal.SIGHUP)
            until(lambda: status("old") == 401, "the first one is refused")
            assert status("new", "POST") == 200
            config.write_text("secret_file = 5")
            os.kill(master.pid, signal.SIGHUP)
            until(lambda: "secrets and rights stay as they were" in master.log, "the mistake is logged")
            config.write_text("")
            os.kill(master.pid, signal.SIGHUP)
            until(lambda: "no secret is configured any more" in master.log, "that needs a restart")
            assert (status("old"), status("new")) == (401, 200)
            peer.send(b"REPLICATE\n")
            peer.read_until("POSITION orders")


def test_a_log_that_was_moved_away_is_opened_again(tmp_path: Path) -> None:
    log, moved = tmp_path / "master.log", tmp_path / "master.log.1"
    command = ["twistd", "-n", "--pidfile=", f"--logfile={log}", "replication", "master", *MASTER]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL) as process:
        try:
            served = "the wire is served at "
            until(lambda: log.exists() and served in log.read_text(), "it is up")
            wire = log.read_text().split(served)[1].split()[0]
            log.rename(moved)
            os.kill(process.pid, signal.SIGHUP)
            until(log.exists, "the log is opened again")
            with Peer(wire) as peer:
                peer.send(b"FOO\n")
                peer.read_to_the_end()
            until(lambda: "unknown command: 'FOO'" in log.read_text(), "what happens now is in the new file")
            assert "FOO" not in moved.read_text()
            os.kill(process.pid, signal.SIGHUP)
            with Peer(wire) as peer:
                peer.read_until("SERVER")
        finally:
            process.terminate()
        assert process.wait(PATIENCE) == 0
