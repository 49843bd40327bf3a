"""What a user looks at: who reaches the live page, and ``tail`` and ``status --watch`` on a terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import ssl
import struct
import subprocess
import sys
import termios
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.certificates import Authority
from tests.system.daemons import LOCAL, PATIENCE, Daemon, append, environment, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.certificates import Identity

ORDER = Fact(Token(0), ('["o1","paid"]',))
STYLE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


def status_of(url: str, context: ssl.SSLContext | None = None) -> int:
    """Return the status of an answer."""
    try:
        with urlopen(url, timeout=PATIENCE, context=context) as answer:
            return int(answer.status)
    except HTTPError as error:
        with closing(error):
            return error.code


def test_the_option_of_the_file_turns_the_page_off_and_the_api_stays(tmp_path: Path) -> None:
    (tmp_path / "master.toml").write_text('stream = ["orders"]\nlive_page = false\n')
    with Daemon(tmp_path, "master", "--config=master.toml", *LOCAL) as master:
        http = f"http://{master.address('HTTP')}"
        paths = ("/", "/live/events", "/live/live.js", "/live/live.css")
        assert [status_of(f"{http}{path}") for path in paths] == [404] * 4
        assert status_of(f"{http}/v1/streams/orders") == 200


def test_where_clients_show_certificates_so_does_the_browser_and_it_needs_no_password(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, anna, stranger = (
        authority.issue("server", "127.0.0.1"),
        authority.issue("anna", "anna"),
        Authority(tmp_path, "another").issue("stranger", "anna"),
    )
    (tmp_path / "master.toml").write_text(f"""
        stream = ["orders", "hidden"]
        listen = ["{server.listen()}"]
        http = "{server.listen()}"
        [tls]
        client_ca = "{authority.certificate}"
        [access.anna]
        certificates = ["anna"]
        read = ["orders"]
    """)

    def shows(identity: Identity | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        if identity is not None:
            context.load_cert_chain(*identity.files)
        return context

    with Daemon(tmp_path, "master", "--config=master.toml") as master:
        page = f"https://{master.address('HTTP')}/"
        with urlopen(page, timeout=PATIENCE, context=shows(anna)) as answer:
            html = answer.read().decode()
        assert ">orders<" in html
        assert "hidden<" not in html, "the certificate gives the right to read one stream"
        with urlopen(f"{page}live/events", timeout=PATIENCE, context=shows(anna)) as events:
            assert events.headers["Content-Type"] == "text/event-stream"
            assert events.readline().startswith(b"retry: ")
        for refused in (None, stranger):
            with pytest.raises(OSError, match=r"alert|EOF|reset|closed"):
                status_of(page, shows(refused))


class Screen:
    """A terminal with a command in it."""

    def __init__(self, controller: int, device: int) -> None:
        self._controller, self._device = controller, device

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self._controller, key.encode())

    def resize(self, columns: int) -> None:
        """Give the terminal 24 lines of so many characters."""
        fcntl.ioctl(self._device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read_until(self, wanted: str) -> str:
        """Read until that was written since the last call, and return all that was."""
        read, deadline = "", time.monotonic() + PATIENCE
        while wanted not in STYLE.sub("", read):
            assert time.monotonic() < deadline, f"{wanted!r} is not in {read!r}"
            if select.select([self._controller], [], [], 1.0)[0]:
                read += os.read(self._controller, 65_536).decode(errors="replace")
        return read


@contextmanager
def terminal(*command: str) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    """Run ``replication …`` in a terminal."""
    controller, device = os.openpty()
    screen = Screen(controller, device)
    screen.resize(160)
    variables = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "replication.cli.main", *command],
        env=variables | {"TERM": "xterm"},
        stdin=device,
        stdout=device,
        stderr=device,
    )
    try:
        yield screen, process
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(device)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "master.toml").write_text('[[streams]]\nname = "orders"\nrow = ["order_id", "state"]\n')
    with Daemon(tmp_path, "master", "--config=master.toml", *LOCAL) as daemon:
        append(daemon.address("HTTP"), "orders", [ORDER])
        yield daemon


def test_tail_has_colours_and_fields_on_a_terminal_and_is_plain_on_a_pipe(master: Daemon, tmp_path: Path) -> None:
    command = ["tail", f"tcp:{master.address('the wire')}", "--from", "beginning"]
    command += ["--http", f"http://{master.address('HTTP')}"]
    with terminal(*command) as (screen, _):
        screen.read_until("orders 2 master ")
        append(master.address("HTTP"), "orders", [ORDER])
        line = screen.read_until('state="')
        assert "\x1b[2morder_id\x1b[0m=" in line
        assert "\x1b[36morders\x1b[0m \x1b[1m3\x1b[0m" in line
    with (tmp_path / "printed").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "replication.cli.main", *command], env=environment(), stdout=out
        )
        until(lambda: (tmp_path / "printed").read_bytes().count(b"\n") == 2, "both facts are printed")
        process.kill()
        process.wait()
    printed = (tmp_path / "printed").read_text().splitlines()
    assert [line.rpartition(" [")[0] for line in printed] == ["RDATA orders master 2", "RDATA orders master 3"]


def test_a_terminal_that_watches_is_sorted_and_resized_and_left_by_a_key(master: Daemon) -> None:
    with terminal("status", "--watch", "--http", f"http://{master.address('HTTP')}") as (screen, process):
        shown = screen.read_until("Connections")
        plain = STYLE.sub("", shown)
        assert "master master of localhost: ready" in plain
        assert re.search(r"stream +writer +state +position +lag +IDs/s +10 min +open +oldest open", plain)
        assert "\x1b[32mwriting" in shown
        screen.resize(70)

        def narrow() -> str:
            drawn = STYLE.sub("", screen.read_until("Connections"))
            return "" if "oldest open" in drawn else drawn

        assert re.search(r"stream +writer +state +position +lag +IDs/s", until(narrow, "columns are left out"))
        screen.press("n")
        screen.read_until("by name")
        screen.press("q")
        assert process.wait(PATIENCE) == 0
