"""The README's part about a Synapse is true: its blocks run, in order, with a real one."""

from __future__ import annotations

import json
import socket
import sqlite3
from contextlib import closing, suppress
from itertools import count
from typing import TYPE_CHECKING

from tests.interop.synapse import Client, configuration, quoted
from tests.interop.test_our_master import DEFINITIONS
from tests.system.daemons import CHECKOUT, until
from tests.system.terminals import Terminal
from tests.test_readme import BLOCK, README, commands_of, default_ports, matches

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
    """Whether somebody takes connections there."""
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


class Tour:
    """The page's blocks, and the terminals in which they run; ``real`` has what is meant by what the page says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.real: dict[str, str] = {}
        self.terminals: list[Terminal] = []

    def follow(self, heading: str, event: Callable[[], object]) -> None:
        """Do what the page says below a heading; where it shows what was said in the end, there has been ``event``."""
        page = README.read_text()
        begin = page.index(f"### {heading}\n")
        for block in BLOCK.finditer(page[begin : page.index("\n##", begin + 1)]):
            if block["file"]:
                (self.folder / block["file"]).write_text(block["body"])
            elif block["language"] == "text":
                event()
                self.hear("replication tail", block["body"].rstrip("\n").split("\n"))
            else:
                for command, shown in commands_of(block["body"]):
                    self.type(command, shown)

    def type(self, command: str, shown: list[str]) -> None:
        """Type a command; one that goes on, until it does what it is for."""
        for said, meant in self.real.items():
            command = command.replace(said, meant)
        terminal = Terminal(command, self.folder)
        self.terminals.append(terminal)
        ready = next((ready for part, ready in READY.items() if part in command), None)
        if ready is None:
            assert (terminal.finish(), terminal.lines) == (0, shown), command
        else:
            until(lambda: ready(terminal), f"{command}: {terminal.lines[-20:]}")

    def terminal(self, part: str) -> Terminal:
        """Return the last terminal with such a command."""
        return [each for each in self.terminals if part in each.command][-1]

    def hear(self, part: str, shown: list[str]) -> None:
        """Wait until a command has said what the page shows."""
        lines = self.terminal(part).lines
        until(lambda: matches(shown, lines), f"{part} says {shown}")

    def close(self) -> None:
        """Close all terminals, the last first."""
        for each in reversed(self.terminals):
            each.close()


def test_every_block_about_a_synapse_does_what_it_shows(
    synapse_python: Path, release: str, tmp_path: Path, database: str, default_ports: None
) -> None:
    (tmp_path / "homeserver.yaml").write_text(json.dumps(configuration(tmp_path, database)))
    (tmp_path / "synapse-env").symlink_to(synapse_python.parent.parent)
    (tmp_path / "conf").mkdir()
    sample = (
        (CHECKOUT / "conf/synapse.toml").read_text().replace('["replication.synapse"]', f'["{DEFINITIONS[release]}"]')
    )
    (tmp_path / "conf/synapse.toml").write_text(sample)
    tour = Tour(tmp_path)
    tour.real["postgresql://synapse@localhost/synapse"] = database
    anna = Client(MAIN)

    def somebody_types() -> None:
        anna.register("anna")
        room = tour.real["!room:alpha.test"] = anna.post("/createRoom", {})["room_id"]
        log = tour.terminal("synapse.app.homeserver").lines
        until(lambda: any("Renamed to 'tail-" in line for line in log), "the tail is connected")
        anna.put(f"/rooms/{quoted(room)}/typing/{quoted(anna.user_id)}", {"typing": True, "timeout": 30_000})

    try:
        tour.follow("Follow its main process", somebody_types)
        room = tour.real["!room:alpha.test"]
        said = anna.say(room, "read this")
        anna.post(f"/rooms/{quoted(room)}/receipt/m.read/{quoted(said)}", {})
        tour.hear("--app readers", ["...", f"...@anna:alpha.test has read {said}"])
        with closing(sqlite3.connect(tmp_path / "replication-worker1.db")) as copy:
            until(lambda: said in str(copy.execute("SELECT row FROM stream_events").fetchall()), "the copy has it")

        tour.terminal("synapse.app.homeserver").close()
        tour.follow("Be its main process", lambda: None)
        there = anna.at(WORKER)
        # each time another question: the same one would get the same answer for two minutes
        answers = (there.get("/sync", timeout=number)["rooms"]["join"][room]["ephemeral"] for number in count(1))
        until(lambda: anna.user_id in str(next(answers)), "whoever syncs there sees her typing")
    finally:
        tour.close()
