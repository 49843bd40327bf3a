"""Processes of ``twistd`` and ``replication`` that a server forks, which has imported both: ``fork_server.py``."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SERVER = Path(__file__).with_name("fork_server.py")


@cache
def fork_server(python_path: str) -> socket.socket:
    """Start a server, which ends with this process; return the socket for requests."""
    requests, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"}
    with other_end:
        server = subprocess.Popen([sys.executable, str(SERVER)], stdin=other_end.fileno(), env=variables)
    atexit.register(server.wait)
    atexit.register(requests.close)  # before that
    return requests


class Forked:
    """A process: what ``Daemon`` needs of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], output: IO[Any], errors: IO[Any]
    ) -> None:
        status, write_end = os.pipe()
        request = {"command": command, "folder": str(folder), "environment": dict(environment)}
        try:
            server = fork_server(environment["PYTHONPATH"])
            socket.send_fds(server, [json.dumps(request).encode()], [output.fileno(), errors.fileno(), write_end])
        finally:
            os.close(write_end)
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None if it has not ended."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it ends, and return the exit status."""
        if (status := self._ended(timeout)) is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
        return status

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)
