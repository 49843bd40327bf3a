"""Brokers that the bench starts on this machine, and what their clients send: Redis and NATS, without storage.

Both deliver a message at most once, and only to clients that are subscribed when it is published.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from os import environ, sysconf
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from replication.bench.cluster import free_ports
from replication.bench.daemons import STREAM
from replication.bench.processes import PATIENCE, BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class BrokerKind(msgspec.Struct, frozen=True):
    """A broker's program, and what its clients send.

    Attributes:
        program: the name of the server's program.
        cure: how to install the program.
        options: the program's options, with a place for the port.
        hello: what a client sends first.
        subscribe: the line that subscribes to STREAM.
        publish: what publishes a text to STREAM, with places for the length and the text.
        answers: how many lines the server sends for one text.  For PING it sends one line more.

    """

    program: str
    cure: str
    options: Sequence[str]
    hello: bytes
    subscribe: bytes
    publish: bytes
    answers: int


_CHANNEL: Final = STREAM.encode()
# A subscriber that is behind stays connected: the bench bounds what is published, and no delivery may be missing.
KINDS: Final[Mapping[str, BrokerKind]] = {
    "redis": BrokerKind(
        "redis-server",
        "apt-get install redis-server, or put redis-server on the PATH",
        ["--port {port}", "--bind 127.0.0.1", "--save ''", "--client-output-buffer-limit pubsub 0 0 0"],
        b"",
        b"SUBSCRIBE %s\r\n" % _CHANNEL,
        b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%s\r\n" % (len(_CHANNEL), _CHANNEL) + b"$%d\r\n%s\r\n",
        answers=1,
    ),
    "nats": BrokerKind(
        "nats-server",
        "apt-get install nats-server, or put nats-server on the PATH",
        ["--port={port}", "--addr=127.0.0.1"],
        b'CONNECT {"verbose":false}\r\n',
        b"SUB %s 1\r\n" % _CHANNEL,
        b"PUB %s " % _CHANNEL + b"%d\r\n%s\r\n",
        answers=0,
    ),
}
_SYSTEM: Final = "/usr/sbin"  # where Debian has nats-server; not on the PATH of every user


def find_broker(name: str) -> str:
    """Return the path of a broker's program; BenchError with the cure if it is missing."""
    kind = KINDS[name]
    found = shutil.which(kind.program, path=f"{environ.get('PATH', '')}:{_SYSTEM}")
    if found is None:
        raise BenchError(f"{kind.program} is missing: {kind.cure}")
    return found


def version_of(name: str) -> str:
    """Return the version of a broker; BenchError as ``find_broker``."""
    done = subprocess.run([find_broker(name), "--version"], capture_output=True, text=True, check=True)  # noqa: S603 (constant arguments)
    found = re.search(r"v=?(\d[\d.]*)", done.stdout)
    return found[1] if found else done.stdout.strip()


class Broker:
    """A server on a free port of 127.0.0.1; BenchError if its program is missing, or does not start."""

    def __init__(self, name: str) -> None:
        program = find_broker(name)
        self.kind = KINDS[name]
        self._folder = Path(tempfile.mkdtemp(prefix="replication-bench-"))
        (self.port,) = free_ports(1)
        options = [each.format(port=self.port) for each in self.kind.options]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (constant arguments)
                [program, *options], cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        """Wait until the server takes connections."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                connect(self.kind, self.port).close()
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    text = (self._folder / "log").read_text(errors="replace")
                    self.__exit__()
                    raise BenchError(f"{self.kind.program} does not start\n{text}") from error
                time.sleep(0.01)
            else:
                return self

    def __exit__(self, *_: object) -> None:
        """Kill the server and delete its folder."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder)

    def cpu_time(self) -> float:
        """Return the CPU time of the server in seconds, of all its threads."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():
            raise BenchError("CPU time of another program is read from /proc, which only Linux has")
        user, system = stat.read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / sysconf("SC_CLK_TCK")


def connect(kind: BrokerKind, port: int, lines: bytes = b"") -> socket.socket:
    """Connect, send ``lines``, and wait until the server has done what they request."""
    client = socket.create_connection(("127.0.0.1", port), PATIENCE)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.sendall(kind.hello + lines + b"PING\r\n")
    received = b""
    while b"pong" not in received.lower() or not received.endswith(b"\n"):
        data = client.recv(65_536)
        if not data:
            raise ConnectionResetError(f"{kind.program} has closed the connection")
        received += data
    client.settimeout(None)
    return client
