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

from tests.postgres import find_binaries
from tests.replay.sessions import need_spark
from tests.system.daemons import CHECKOUT, until
from tests.system.terminals import PATIENCE, Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

README = CHECKOUT / "README.md"
BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)```\n", re.DOTALL)
# Commands that the page leaves running.
GO_ON = ("twistd -n --pidfile=", "replication tail", "python shop.py", "python live.py", "python desk.py north")


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
        for port in (9092, 9093, 9192, 9291, 9292):
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


@pytest.fixture
def spark_runs() -> None:
    """Skip a test, before it waits for ports, where Spark cannot run."""
    need_spark()


def part(first: str, last: str) -> str:
    """Return the page from one heading to another."""
    text = README.read_text()
    return text[text.index(f"## {first}\n") : text.index(f"## {last}\n")]


def test_every_block_of_the_tour_does_what_it_shows(tmp_path: Path, default_ports: None) -> None:
    first = re.search(r"venv/bin/(twistd .*)", README.read_text())
    assert first is not None
    terminals = [Terminal(first[1], tmp_path)]
    try:
        until(lambda: any("HTTP is served at" in line for line in terminals[0].lines), "the master serves")
        perform(part("A tour", "On PostgreSQL"), tmp_path, terminals, followers=3)
    finally:
        for each in reversed(terminals):
            each.close()


def test_every_block_about_postgresql_does_what_it_shows(
    tmp_path: Path, default_ports: None, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server of the tests' own, which the reader's environment leads to."""
    binaries = find_binaries()
    assert binaries is not None
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    for name, value in (("PGHOST", "127.0.0.1"), ("PGPORT", str(postgres.port)), ("PGUSER", "postgres")):
        monkeypatch.setenv(name, value)
    terminals: list[Terminal] = []
    try:
        page = part("On PostgreSQL", "History on Spark").replace("sleep 2;", "sleep 9;")  # for a machine that is busy
        perform(page, tmp_path, terminals, followers=1)
    finally:
        for each in reversed(terminals):
            each.close()
        postgres.sql("DROP DATABASE IF EXISTS shop WITH (FORCE)")


def test_every_block_about_spark_does_what_it_shows(
    tmp_path: Path, spark_runs: None, default_ports: None, request: pytest.FixtureRequest
) -> None:
    """With fewer facts, unless ``--full`` is given."""
    page = part("History on Spark", "What is guaranteed")
    if not request.config.getoption("--full"):
        page = re.sub(r"\b\d{5,7}\b", fewer, page)
    terminals: list[Terminal] = []
    try:
        perform(page, tmp_path, terminals, followers=0)
    finally:
        for each in reversed(terminals):
            each.close()


def fewer(number: re.Match[str]) -> str:
    """Return a number of facts, or an ID, where there are 5,000 and then 500 instead of a million and 50,000."""
    thousands, rest = divmod(int(number[0]), 10_000)
    return str({100: 5_000, 105: 5_500, 5: 500}[thousands] + rest)


def perform(page: str, folder: Path, terminals: list[Terminal], followers: int) -> None:
    """Do what a part of the page says, whose master has so many ``followers`` before anything is appended."""
    for block in BLOCK.finditer(page):
        body = block["body"]
        if block["file"]:
            (folder / block["file"]).write_text(body)
        elif block["language"] == "text":
            # What the last tail has said by now.
            shown = body.rstrip("\n").split("\n")
            until(partial(is_said, shown, terminals), f"somebody says {shown}", PATIENCE)
        elif block["language"] != "sh":  # which is for a cluster, and run by tests/system/test_cluster.py
            assert block["language"] == "console", f"who runs a block of {block['language']}?"
            for command, shown in commands_of(body):
                if "replication append" in command or "INSERT INTO" in command:
                    until(partial(settled, folder, followers), "tail and workers are connected")
                run(command, shown, folder, terminals)


def run(command: str, shown: list[str], folder: Path, terminals: list[Terminal]) -> None:
    """Type one command; hold what it says to what the page shows."""
    if command.startswith(GO_ON) and "||" not in command:
        terminal = Terminal(command, folder)
        terminals.append(terminal)
        if shown:
            until(lambda: matches(shown, terminal.lines), f"{command} says {shown}, not {terminal.lines}", PATIENCE)
        elif "twistd" in command:
            until(lambda: any("starting up" in line for line in terminal.lines), f"{command} starts")
        return
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
    """Whether one of the terminals says just that, but for what a tail says while it waits for a writer."""
    return any(
        [line for line in each.lines if not line.startswith("replication tail: ")] == shown for each in terminals
    )


def settled(folder: Path, followers: int) -> bool:
    """Whether the master serves HTTP, and has so many followers: one says who it is and what it wants in one write."""
    terminal = Terminal("curl -s http://127.0.0.1:9093/v1/connections", folder)
    return terminal.finish() == 0 and len(re.findall(r'"name":"[^"]', "".join(terminal.lines))) >= followers


def test_this_machine_has_what_the_page_asks_for() -> None:
    assert shutil.which("curl"), "the tour uses curl: install it, as in `apt-get install curl`"
