"""Run the blocks of a page: write its files, run its commands, and compare their output with the page.

A page's blocks run in order, in one folder. Each language has a meaning:

- any language after ``<!-- file: NAME -->``: the file is written;
- ``console``: each line after ``$`` is a command; the lines below it are its output, where ``...`` matches any text;
- ``text``: the output of one of the commands that still run, up to now;
- ``sh``: not run here, because it needs a cluster or an environment: ``test_shell_blocks.py`` names its test.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from tests.docs.pages import blocks
from tests.system.daemons import until
from tests.system.terminals import PATIENCE, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

PORTS = (8080, 8081, 9092, 9093, 9192, 9193, 9291, 9391)  # the ports that the pages use
# Commands that run until the test ends.
STAYS = re.compile(
    r"(SSL_CERT_FILE=\S+ )?twistd -n --pidfile=|replication tail|"
    r"python (shop|shop_tls|live|branch|orders_api|orders_states|send_event)\.py(?! south)"
)
READY = {  # the output of a command after which the next one may start
    "replication master": "HTTP is served at",
    "twistd -n --pidfile= -y": " is open",
    "replication worker": "starting up",
}
FOLLOWS = re.compile(r"replication (worker|tail)\b")
NOT_RUN = ("sh", "toml", "python", "sql", "yaml", "ini", "json", "mermaid", "nginx")


@pytest.fixture
def default_ports() -> Iterator[None]:
    """Hold the ports that the pages use: one test run of this machine has them at a time."""
    with (Path(tempfile.gettempdir()) / "replication-readme.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for port in PORTS:
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


def matches(shown: list[str], printed: list[str]) -> bool:
    """Whether the output is that of the page, where ``...`` matches any text, also several lines."""
    pattern = "\n".join(re.escape(line) for line in shown).replace(re.escape("..."), r"(?:.|\n)*")
    return re.fullmatch(pattern, "\n".join(printed)) is not None


def commands_of(body: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block, each with the lines shown after it."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        lines = part.rstrip("\n").split("\n")
        count = 1  # a command ends where no quote is open
        while "\n".join(lines[:count]).count('"') % 2:
            count += 1
        yield "\n".join(lines[:count]), lines[count:]


class PageRunner:
    """Runs the blocks of one page in an empty folder, and has the terminals that are still open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminals: list[Terminal] = []

    def __enter__(self) -> Self:
        # A test run that `timeout` ends must not leave daemons on these ports.
        self._on_sigterm = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for each in reversed(self.terminals):
            each.close()

    def run(self, text: str) -> None:
        """Run the blocks of a page, or of a part of it."""
        for block in blocks(text):
            if block.file is not None:
                (self.folder / block.file).write_text(block.body)
            elif block.language == "text":
                shown = block.body.rstrip("\n").split("\n")
                until(partial(self._is_shown, shown), f"a terminal prints {shown}", PATIENCE)
            elif block.language == "console":
                for command, shown in commands_of(block.body):
                    if ("replication append" in command and "https:" not in command) or "INSERT INTO" in command:
                        until(self._settled, "the master serves HTTP, and all followers are connected")
                    self.run_command(command, shown)
            else:
                assert block.language in NOT_RUN, f"what does a block of {block.language} mean?"

    def run_command(self, command: str, shown: list[str]) -> None:
        """Run one command, and compare its output with the page."""
        if STAYS.match(command) and "||" not in command:
            terminal = Terminal(command, self.folder)
            self.terminals.append(terminal)
            if shown:
                until(lambda: matches(shown, terminal.lines) or terminal.ended, f"{command} prints {shown}", PATIENCE)
                assert not terminal.ended, f"{command} has ended: {terminal.lines}"
            else:
                ready = next((line for part, line in READY.items() if part in command), "")
                until(lambda: any(ready in each for each in terminal.lines) or not ready or terminal.ended, command)
                assert not terminal.ended, f"{command} has ended: {terminal.lines}"
            return
        printed: list[str] = []

        def prints_it() -> bool:
            terminal = Terminal(command, self.folder)
            status = terminal.finish()
            printed[:] = terminal.lines
            return status == 0 and matches(shown, printed)

        if "sqlite3" in command or "trim_outbox" in command:  # a follower may have the rows, or report, a moment later
            until(prints_it, f"{command} shows {shown}")
        else:
            assert prints_it(), f"{command}\nshows  {shown}\nprints {printed}"

    def _is_shown(self, shown: list[str]) -> bool:
        """Whether this is the output of one of the terminals, without the lines that a waiting tail prints."""
        return any(
            matches(shown, [line for line in each.lines if not line.startswith("replication tail: ")])
            for each in self.terminals
        )

    def _settled(self) -> bool:
        """Whether the master serves HTTP, and all followers of this page are connected."""
        followers = sum(bool(FOLLOWS.search(each.command)) for each in self.terminals if not each.ended)
        terminal = Terminal("curl -s http://127.0.0.1:9093/v1/connections", self.folder)
        return terminal.finish() == 0 and len(re.findall(r'"name":"[^"]', "".join(terminal.lines))) >= followers
