"""A peer on a real socket that a test controls."""

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
    """A connection, as with ``nc``."""

    def __init__(self, address: str | socket.socket) -> None:
        if isinstance(address, socket.socket):
            self.socket = address
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(PATIENCE)
        self.lines: list[str] = []  # all that was read
        self._rest = b""

    def send(self, data: bytes) -> None:
        """Send bytes; stop without an error if the other end closes."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # the test checks what it sent before it closed

    def read_until(self, start: str) -> str:
        """Read lines up to one with this beginning, and return it."""
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
        """Close the connection, or reset it."""
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
    """Listen on a free port, as a writer does."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(PATIENCE)
    return server


def ask(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, method: str | None = None
) -> Any:
    """Return the status and the JSON (or text) of an HTTP answer."""
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
