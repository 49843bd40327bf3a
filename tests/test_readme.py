"""The README is true: its blocks run, in order, in an empty folder, with the output that they show."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.system.daemons import CHECKOUT, until
from tests.system.terminals import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

README = CHECKOUT / "README.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```\n", re.DOTALL)
GO_ON = ("twistd -n --pidfile=", "replication tail", "python shop.py")  # commands that the page leaves running


def matches(shown: list[str], said: list[str]) -> bool:
    """Whether what was said is what the page shows; ``...`` stands for anything, also for several lines."""
    pattern = "\n".join(re.escape(line) for line in shown).replace(re.escape("..."), r"(?:.|\n)*")
    return re.fullmatch(pattern, "\n".join(said)) is not None


def commands_of(body: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block, each with the lines shown after it."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.rstrip("\n").split("\n")
        count = 1  # a command goes on while a quote is open
        while "\n".join(lines[:count]).count('"') % 2:
            count += 1
        yield "\n".join(lines[:count]), lines[count:]


@pytest.fixture
def default_ports() -> Iterator[None]:
    """Hold the ports that the page uses: several test runs on one machine take turns."""
    with (Path(tempfile.gettempdir()) / "replication-readme.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for port in (9092, 9093, 9192):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    message = f"port {port} is in use: stop what listens there, and run this test again"
                    if os.environ.get("CI"):
                        pytest.fail(message)
                    pytest.skip(message)
        yield


@pytest.mark.timeout(300)
def test_every_block_of_the_tour_does_what_it_shows(tmp_path: Path, default_ports: None) -> None:
    text = README.read_text()
    first = re.search(r"venv/bin/(twistd .*)", text)
    assert first is not None
    terminals = [Terminal(first[1], tmp_path)]
    try:
        until(lambda: any("HTTP is served at" in line for line in terminals[0].lines), "the master serves")
        tour = text[text.index("## A tour") : text.index("## What is guaranteed")]
        for block in BLOCK.finditer(tour):
            body = block["body"]
            if block["file"]:
                (tmp_path / block["file"]).write_text(body)
            elif block["language"] == "text":
                # What the last tail has said by now.
                shown = body.rstrip("\n").split("\n")
                until(partial(is_said, shown, terminals), f"somebody says {shown}")
            else:
                assert block["language"] == "console", f"who runs a block of {block['language']}?"
                for command, shown in commands_of(body):
                    run(command, shown, tmp_path, terminals)
    finally:
        for each in reversed(terminals):
            each.close()


def run(command: str, shown: list[str], folder: Path, terminals: list[Terminal]) -> None:
    """Type one command; hold what it says to what the page shows."""
    if command.startswith(GO_ON) and "||" not in command:
        terminal = Terminal(command, folder)
        terminals.append(terminal)
        if shown:
            until(lambda: matches(shown, terminal.lines), f"{command} says {shown}, not {terminal.lines}")
        elif "twistd" in command:
            until(lambda: any("starting up" in line for line in terminal.lines), f"{command} starts")
        return
    if "replication append" in command:
        until(lambda: settled(folder), "tail and workers are connected")
    said: list[str] = []

    def says_it() -> bool:
        terminal = Terminal(command, folder)
        status = terminal.finish()
        said[:] = terminal.lines
        return status == 0 and matches(shown, said)

    if "sqlite3" in command:  # a reader is slower than these tests: a follower may have it a moment later
        until(says_it, f"{command} shows {shown}")
    else:
        assert says_it(), f"{command}\nshows {shown}\nsays  {said}"


def is_said(shown: list[str], terminals: list[Terminal]) -> bool:
    """Whether one of the terminals says just that."""
    return any(each.lines == shown for each in terminals)


def settled(folder: Path) -> bool:
    """Whether the master has the three followers of the page's first part."""
    terminal = Terminal("curl -s http://127.0.0.1:9093/v1/connections", folder)
    return terminal.finish() == 0 and "".join(terminal.lines).count('"last_command":"REPLICATE"') >= 3


def test_this_machine_has_what_the_page_asks_for() -> None:
    assert shutil.which("curl"), "the tour uses curl: install it, as in `apt-get install curl`"
