"""What a peer or a row holds reaches no terminal and no log as a control character: real processes, real sockets."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

from tests.system.daemons import LOCAL, Daemon, environment, run_command, until
from tests.system.peers import Peer, ask, listen

if TYPE_CHECKING:
    from pathlib import Path

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
ODD = re.compile("[^\n\t -~à-ÿ…→]")  # printable letters of our own messages are accepted
APP = """
def register(worker):
    @worker.on("stock")
    async def apply(facts, txn):
        print("applying", facts[0].rows)
        print(facts[0].rows[0][0])
        raise ValueError(facts[0].rows[0][0])
"""


def odd(text: str) -> list[str]:
    """Return the lines with a control character for a terminal."""
    return [line for line in text.splitlines() if ODD.search(line)]


def run(*command: str) -> str:
    """Return all that a command prints."""
    done = run_command("replication", *command)
    return done.stdout + done.stderr


def test_names_and_errors_of_a_worker_are_escaped(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        wire, http = master.address("the wire"), f"http://{master.address('HTTP')}"
        with Peer(wire) as peer, Peer(wire) as second:
            hostile = ESC.encode()
            peer.send(b"NAME " + hostile + b"\nPING 1\nREPLICATE\nERROR " + hostile + b"\n")
            peer.read_until("POSITION caches")
            second.send(
                b"NAME " + hostile + b"\nPING 1\nREMOTE_SERVER_UP " + hostile + b"\nUSER_SYNC " + hostile + b"\n"
            )
            until(lambda: "sent ERROR" in master.log and "closing" in master.log, "both errors are logged")
            shown = run("status", "--http", http)
            assert r"\x1b" in shown
            assert odd(shown) == []
        assert odd(run("append", ESC, "1", "--http", http)) == []
        assert r"\x1b" in master.log
        assert odd(master.log) == []


def test_what_a_master_sends_and_a_function_raises_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(APP)
    with listen() as server:
        address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        with Daemon(tmp_path, "worker", f"--connect={address}", "--app=shown", LOCAL[1]) as worker:
            with Peer(server.accept()[0]) as peer:
                peer.send(b"SERVER localhost\nPOSITION stock fake 1 1\n")
                row = rb'["\u001b[2J"]'
                peer.send(b"RDATA stock fake 2 " + row + b"\n")
                until(lambda: "ValueError: " in worker.log, "the function fails")
                peer.send(b"ERROR " + ESC.encode() + b"\n")
                until(lambda: "owned" in worker.log, "the ERROR is logged")
                shown = run("status", "--http", f"http://{worker.address('HTTP')}")
                assert r"\x1b[2J" in shown
            with Peer(server.accept()[0]) as peer:
                peer.send(b"SERVER " + ESC.encode() + b"\n")
                until(lambda: worker.log.count("owned") > 1, "the wrong name is logged")
            assert "Traceback" in worker.log
            assert odd(worker.log) == []
            assert odd(shown) == []


def test_tail_prints_rows_as_equal_json_without_control_characters(tmp_path: Path) -> None:
    with listen() as server:
        address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        for form in ([], ["--json"], ["--typed"]):
            process = subprocess.Popen(
                ["replication", "tail", address, *form],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            with Peer(server.accept()[0]) as peer:
                peer.send(b"SERVER localhost\nPOSITION stock fake 1 1\n")
                peer.send('RDATA stock fake 2 ["\x9b31m\x7f é"]\n'.encode())
                assert process.stdout is not None
                line = process.stdout.readline()
                peer.send(b"ERROR " + ESC.encode() + b"\n")
                assert process.stderr is not None
                assert odd(process.stderr.readline()) == []
            process.kill()
            process.communicate()
            assert '["\\u009b31m\\u007f é"]' in line
            assert odd(line) == []


def test_a_room_is_drawn_and_shown_without_control_characters(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--rooms", *LOCAL) as master:
        http = f"http://{master.address('HTTP')}"
        event = {"event_id": f"${ESC}", "type": f"m.note{ESC}", "state_key": ESC, "prev_event_ids": []}
        body = json.dumps({"events": [event]}).encode()
        status, answer = ask(f"{http}/v1/rooms/!r:b/events", body, {"Content-Type": "application/json"})
        assert status == 200, answer
        for form in ([], ["--json"], ["--dot"], ["--svg"]):
            shown = run("rooms", "!r:b", *form, "--http", http)
            assert "owned" in shown, shown
            assert odd(shown) == [], form
