"""A stand-in for systemd: the socket to which a service sends its state."""

from __future__ import annotations

import socket
import time

from tests.system.daemons import until


class NotifySocket:
    """The socket of ``$NOTIFY_SOCKET``: a path, or ``@`` and an abstract name.  ``all`` has what was received."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.all: list[str] = []
        self._latest = time.monotonic()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)

    def receive(self) -> list[str]:
        """Return all datagrams since the beginning, or since ``wait_for`` returned one of them."""
        try:
            while True:
                self.all.append(self._socket.recv(65536).decode())
                self._latest = time.monotonic()
        except BlockingIOError:
            return self.all

    def received(self) -> list[str]:
        """Return the datagrams since the last call."""
        found = self.receive()
        self.all = []
        return found

    def wait_for(self, text: str) -> str:
        """Wait for a datagram with ``text`` that was not returned before, and return it."""
        found: list[str] = until(lambda: [each for each in self.receive() if text in each], f"systemd has {text}")
        return found[-1]

    @property
    def silence(self) -> float:
        """Seconds since the last datagram."""
        self.receive()
        return time.monotonic() - self._latest

    def close(self) -> None:
        """Close the socket; its path stays."""
        self._socket.close()
