"""Daemons of system tests: real processes, killed with SIGKILL, always cleaned up.

One with a command in ``before`` is started as a user starts it.  The others are forked (``fork_server.py``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self

from replication.bench.cluster import free_ports
from tests.system.forked import Forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from replication.streams.facts import Fact

CHECKOUT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds; only ever reached by a test that fails
LOCAL = ("--listen=tcp:0:interface=127.0.0.1", "--http=tcp:0:interface=127.0.0.1")  # a master's, on any free ports
_SERVED = re.compile(r"(the wire|HTTP) is served at (\S+)")


def environment() -> dict[str, str]:
    """Return an environment whose PATH has this Python's commands and whose modules are this checkout's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), "PYTHONUNBUFFERED": "1"}


def run_command(
    *command: str, folder: Path = CHECKOUT, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``twistd`` or ``replication`` in a forked process, and return what it has printed."""
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        status = Forked(command, folder, variables or environment(), output, errors).wait(PATIENCE)
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(command, status, output.read(), errors.read())


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE, *, pause: float = 1.0) -> Any:
    """Call ``condition`` until its result is true, and return that; fail with ``what`` after ``patience`` seconds.

    ``pause``: the longest time in seconds between two calls.
    """
    begin = time.monotonic()
    while not (answer := condition()):
        waited = time.monotonic() - begin
        if waited > patience:
            raise AssertionError(f"not within {patience:g} s: {what}")
        time.sleep(min(max(0.02, waited / 10), pause))  # a long wait need not cost the daemons much
    return answer


def get_json(url: str, path: str) -> Any:
    """Return the JSON answer of an HTTP API."""
    with urllib.request.urlopen(url + path, timeout=PATIENCE) as answer:
        return json.load(answer)


class Daemon:
    """``twistd -n replication ROLE …``; its log is a file beside its database."""

    def __init__(self, folder: Path, role: str, *options: str, name: str | None = None) -> None:
        self.folder = folder
        self.role = role
        self.options = options
        self.name = name or role
        self.environment = environment()
        self.before: Sequence[str] = ()  # a command that runs the rest of its command line
        self.descriptors: Sequence[int] = ()  # files that are open in it too
        self.starts = 0
        self._process: subprocess.Popen[bytes] | Forked | None = None

    @property
    def log(self) -> str:
        """The log of the running process."""
        return self.log_of(self.starts)

    def log_of(self, start: int) -> str:
        """The log of the process of a start, counted from 1."""
        return (self.folder / f"{self.name}-{start}.log").read_text()

    def start(self) -> Self:
        """Start it; use ``address`` or ``until`` to wait for it."""
        self.starts += 1
        with (self.folder / f"{self.name}-{self.starts}.log").open("wb") as log:
            command = [*self.before, "twistd", "-n", "--pidfile=", "replication", self.role, *self.options]
            if not self.before and self.environment["PYTHONPATH"] == str(CHECKOUT):
                self._process = Forked(command, self.folder, self.environment, log, log)
                return self
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                pass_fds=self.descriptors,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def address(self, what: str) -> str:
        """Wait until ``the wire`` or ``HTTP`` is served, and return its address."""

        def served() -> str | None:
            if self._process is not None and self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self._process.returncode}:\n{self.log}")
            return dict(_SERVED.findall(self.log)).get(what)

        address = until(served, f"{self.name} serves {what}")
        assert isinstance(address, str)
        return address

    @property
    def pid(self) -> int:
        """The process's ID."""
        assert self._process is not None
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was started and has ended."""
        process = self._process
        return self.starts > 0 and (process is None or process.poll() is not None)

    def wait(self) -> int:
        """Wait until it ends by itself, and return the exit status."""
        assert self._process is not None
        status = self._process.wait(PATIENCE)
        self._process = None
        return status

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(PATIENCE)
        self._process = None
        return status

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def fixed_ports(master: Daemon) -> Iterator[tuple[str, str]]:
    """Start a master on fixed ports and yield its addresses."""
    wire, http = free_ports(2)
    master.options += (f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{http}:interface=127.0.0.1")
    with master:
        yield master.address("the wire"), master.address("HTTP")


def append(http: str, stream: str, facts: Sequence[Fact], secret: str = "") -> list[int]:
    """Append facts in one call, and return their IDs."""
    body = "".join('{"rows":[' + ",".join(each.texts) + "]}\n" for each in facts).encode()
    url = f"http://{http}/v1/streams/{stream}/facts"
    request = urllib.request.Request(
        url, body, {"Content-Type": "application/x-ndjson", "Authorization": f"Bearer {secret}"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        ids: list[int] = json.load(answer)["ids"]
        return ids
