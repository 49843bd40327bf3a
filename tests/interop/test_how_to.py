"""The blocks of the how-tos about Synapse, run with a real one."""

from __future__ import annotations

import json
import socket
import sqlite3
from contextlib import closing, suppress
from itertools import count
from typing import TYPE_CHECKING

from tests.docs.page_runner import commands_of, default_ports, matches
from tests.docs.pages import blocks, page, section
from tests.interop.synapse import Client, configuration, quoted
from tests.interop.test_our_master import DEFINITIONS
from tests.system.daemons import CHECKOUT, until
from tests.system.terminals import Terminal

__all__ = ["default_ports"]  # a fixture

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAIN, WORKER = 8008, 8083  # where the page has clients served
READY = {  # what a command that goes on is started for
    "synapse.app.homeserver": lambda _: listens(MAIN) and listens(9092),
    "synapse.app.generic_worker": lambda _: listens(WORKER),
    "replication worker": lambda terminal: any("following alpha.test" in line for line in terminal.lines),
    "replication master": lambda terminal: any("HTTP is served" in line for line in terminal.lines),
    "replication tail": lambda _: True,
}


def listens(port: int) -> bool:
    """Return whether a port accepts connections."""
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


class PageRunner:
    """The blocks of a page and their terminals; ``real`` maps names of the page to those of this test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.real: dict[str, str] = {}
        self.terminals: list[Terminal] = []

    def follow(self, text: str, event: Callable[[], object]) -> None:
        """Run the blocks of a part of a page; call ``event`` before the expected output."""
        for block in blocks(text):
            if block.file is not None:
                (self.folder / block.file).write_text(block.body)
            elif block.language == "text":
                event()
                self.receive("replication tail", block.body.rstrip("\n").split("\n"))
            elif block.language == "console":
                for command, shown in commands_of(block.body):
                    self.type(command, shown)

    def type(self, command: str, shown: list[str]) -> None:
        """Run a command; wait until a server listens."""
        for name, actual in self.real.items():
            command = command.replace(name, actual)
        terminal = Terminal(command, self.folder)
        self.terminals.append(terminal)
        ready = next((ready for part, ready in READY.items() if part in command), None)
        if ready is None:
            assert (terminal.finish(), terminal.lines) == (0, shown), command
        else:
            until(lambda: ready(terminal), f"{command}: {terminal.lines[-20:]}")

    def terminal(self, part: str) -> Terminal:
        """Return the last terminal with this command."""
        return [each for each in self.terminals if part in each.command][-1]

    def receive(self, part: str, shown: list[str]) -> None:
        """Wait until a command has printed what the page shows."""
        lines = self.terminal(part).lines
        until(lambda: matches(shown, lines), f"{part} prints {shown}")

    def close(self) -> None:
        """Close all terminals, the last one first."""
        for each in reversed(self.terminals):
            each.close()


def test_every_block_about_synapse_runs_as_shown(
    synapse_python: Path, release: str, tmp_path: Path, database: str, default_ports: None
) -> None:
    (tmp_path / "homeserver.yaml").write_text(json.dumps(configuration(tmp_path, database)))
    (tmp_path / "synapse-env").symlink_to(synapse_python.parent.parent)
    (tmp_path / "conf").mkdir()
    sample = (
        (CHECKOUT / "conf/synapse.toml").read_text().replace('["replication.synapse"]', f'["{DEFINITIONS[release]}"]')
    )
    (tmp_path / "conf/synapse.toml").write_text(sample)
    runner = PageRunner(tmp_path)
    runner.real["postgresql://synapse@localhost/synapse"] = database
    anna = Client(MAIN)

    def type_in_a_room() -> None:
        anna.register("anna")
        room = runner.real["!room:alpha.test"] = anna.post("/createRoom", {})["room_id"]
        log = runner.terminal("synapse.app.homeserver").lines
        until(lambda: any("Renamed to 'tail-" in line for line in log), "the tail is connected")
        anna.put(f"/rooms/{quoted(room)}/typing/{quoted(anna.user_id)}", {"typing": True, "timeout": 30_000})

    try:
        runner.follow(page("how-to/follow-a-synapse.md"), type_in_a_room)
        room = runner.real["!room:alpha.test"]
        event_id = anna.send_message(room, "read this")
        anna.post(f"/rooms/{quoted(room)}/receipt/m.read/{quoted(event_id)}", {})
        runner.receive("--app receipts", ["...", f"...@anna:alpha.test has read {event_id}"])
        with closing(sqlite3.connect(tmp_path / "replication-worker1.db")) as copy:
            until(lambda: event_id in str(copy.execute("SELECT row FROM stream_events").fetchall()), "the copy has it")

        runner.terminal("synapse.app.homeserver").close()
        for heading in ("Start the master", "Connect a worker of Synapse", "Append facts"):
            runner.follow(section(page("how-to/be-synapse-main-process.md"), f"## {heading}"), lambda: None)
        there = anna.at(WORKER)
        # each time another question: the same one would get the same answer for two minutes
        answers = (there.get("/sync", timeout=number)["rooms"]["join"][room]["ephemeral"] for number in count(1))
        until(lambda: anna.user_id in str(next(answers)), "a user who syncs there sees her typing")
    finally:
        runner.close()
