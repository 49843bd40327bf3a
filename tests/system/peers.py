"""The other end of a real socket, driven by hand."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Self

from tests.system.daemons import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Mapping


class Peer:
    """A connection, as ``nc`` would have it."""

    def __init__(self, address: str | socket.socket) -> None:
        if isinstance(address, socket.socket):
            self.socket = address
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(PATIENCE)
        self.lines: list[str] = []  # all that was read
        self._rest = b""

    def say(self, data: bytes) -> None:
        """Send, as far as the other end lets us."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has hung up in the middle: what it said before that is what a test looks at

    def read_until(self, start: str) -> str:
        """Read lines up to one that begins so, and return it."""
        seen = 0
        while True:
            for line in self.lines[seen:]:
                if line.startswith(start):
                    return line
            seen = len(self.lines)
            if not self._read():
                raise AssertionError(f"the connection ended without {start!r}: {self.lines[-3:]}")

    def read_to_the_end(self) -> list[str]:
        """Read until the other end has closed, and return every line."""
        while self._read():
            pass
        return self.lines

    def read_what_is_there(self) -> None:
        """Read without waiting."""
        self.socket.settimeout(0.0)
        try:
            while self._read():
                pass
        except BlockingIOError:
            return
        finally:
            self.socket.settimeout(PATIENCE)

    def close(self, *, reset: bool = False) -> None:
        """Close, or tear the connection down with a RST."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _read(self) -> bool:
        try:
            data = self.socket.recv(2**20)
        except ConnectionResetError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(data)


def listen() -> socket.socket:
    """Listen on a free port: a writer, or whatever a test makes of it."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(PATIENCE)
    return server


def ask(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, method: str | None = None
) -> Any:
    """Return the status and the JSON (or text) of an answer over HTTP."""
    request = urllib.request.Request(url, body, dict(headers or {}), method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, _read_body(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _read_body(error)


def _read_body(answer: Any) -> Any:
    text = answer.read().decode()
    return json.loads(text) if answer.headers["content-type"] == "application/json" else text
