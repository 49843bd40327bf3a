"""Redis for tests: a real server that is killed at will (fixture ``redis``), and a fake one for a network in memory.

``sent`` has every command that either has received, so a test can check what this package publishes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from ast import literal_eval
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

import pytest
from hiredis import Reader
from twisted.internet.protocol import Factory, Protocol

from replication.bench.cluster import free_ports
from replication.net.redis_connection import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twisted.internet.interfaces import IAddress

HOW_TO_GET_IT = "Redis is missing: apt install redis-server (Debian, Ubuntu), brew install redis, or dnf install redis"
_WORDS = re.compile(r'"(?:[^"\\]|\\.)*"')  # of a line of MONITOR
PATIENCE = 30.0  # seconds; only ever reached by a test that fails


# ---- a fake server


class FakeRedisConnection(Protocol):
    """One client of a ``FakeRedis``."""

    server: FakeRedis
    transport: Any

    def connectionMade(self) -> None:
        self.channels: set[bytes] = set()
        self._reader = Reader()
        self._authenticated = not self.server.password

    def dataReceived(self, data: bytes) -> None:
        self._reader.feed(data)
        while (command := self._reader.gets()) is not False:
            self.server.sent.append(command)
            if not self.server.silent:
                self._answer(*command)

    def connectionLost(self, reason: Any = None) -> None:
        self.server.clients.remove(self)

    def reply(self, *words: bytes | int) -> None:
        self.transport.write(
            b"*%d\r\n" % len(words)
            + b"".join(b":%d\r\n" % w if isinstance(w, int) else b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
        )

    def _answer(self, name: bytes, *arguments: bytes) -> None:
        if name in self.server.errors:
            self.transport.write(b"-%s\r\n" % self.server.errors[name])
        elif name == b"AUTH":
            self._authenticated = arguments[-1] == self.server.password
            wrong = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
            self.transport.write(b"+OK\r\n" if self._authenticated else wrong)
        elif not self._authenticated:
            self.transport.write(b"-NOAUTH Authentication required.\r\n")
        elif name == b"SUBSCRIBE":
            self.channels.add(arguments[0])
            self.reply(b"subscribe", arguments[0], 1)
        elif name == b"PUBLISH":
            self.transport.write(b":%d\r\n" % self.server.publish(arguments[1].decode(), arguments[0]))
            self.server.published.append(arguments[1])
        elif name == b"PING":
            self.reply(b"pong", b"")


class FakeRedis(Factory):
    """A server that knows AUTH, SUBSCRIBE, PUBLISH and PING; ``errors`` are its answers to some commands, by name.

    While it is ``silent`` it answers nothing.  Every REPLICATE is answered with ``positions``.
    """

    def __init__(self, *positions: str) -> None:
        self.positions = positions
        self.password = b""
        self.silent = False
        self.errors: dict[bytes, bytes] = {}
        self.clients: list[FakeRedisConnection] = []
        self.sent: list[list[bytes]] = []
        self.published: list[bytes] = []
        self.connections = 0

    def buildProtocol(self, addr: IAddress | None) -> FakeRedisConnection:
        connection = FakeRedisConnection()
        connection.server = self
        self.clients.append(connection)
        self.connections += 1
        return connection

    def publish(self, message: str, channel: bytes = b"example.com") -> int:
        receivers = [each for each in self.clients if channel in each.channels]
        for each in receivers:
            each.reply(b"message", channel, message.encode())
            if message.startswith("REPLICATE"):
                for position in self.positions:
                    each.reply(b"message", channel, position.encode())
        return len(receivers)


# ---- a real server


class RedisServer:
    """A server on a port of its own, with its files in a temporary folder."""

    def __init__(self, *options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="redis-"))
        (self.port,) = free_ports(1)
        self.path = self.folder / "socket"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._monitor: socket.socket | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        files = ["--dir", str(self.folder), "--logfile", "log", "--save", "", "--unixsocket", str(self.path)]
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", *files, *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.call("PING")
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it and delete its files."""
        self.kill()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def call(self, *words: str | bytes) -> Any:
        """Send one command, and return the answer."""
        return self.calls([words])[0]

    def calls(self, commands: Sequence[Sequence[str | bytes]]) -> list[Any]:
        """Send commands on one connection, and return their answers."""
        encoded = [[each.encode() if isinstance(each, str) else each for each in words] for words in commands]
        reader = Reader()
        answers: list[Any] = []
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            connection.sendall(b"".join(encode(*words) for words in encoded))
            while len(answers) < len(commands):
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError
                reader.feed(data)
                while (answer := reader.gets()) is not False:
                    answers.append(answer)
        return answers

    def publish(self, *messages: str, channel: str = "example.com") -> None:
        """Publish messages in this order."""
        self.calls([("PUBLISH", channel, each) for each in messages])

    def subscribers(self, channel: str = "example.com") -> int:
        """Return the number of subscribers of a channel."""
        number: int = self.call("PUBSUB", "NUMSUB", channel)[1]
        return number

    def drop_subscribers(self) -> None:
        """Close all subscribed connections, as a restart of a proxy does."""
        self.call("CLIENT", "KILL", "TYPE", "pubsub")


class Monitor:
    """All commands that a server receives, as MONITOR lists them; ``commands`` has their words."""

    def __init__(self, server: RedisServer) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
        self._socket.sendall(b"MONITOR\r\n")
        self._data = bytearray()
        while b"+OK" not in self._data:
            self._data += self._socket.recv(65536)
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Read until the server ends."""
        with self._socket, suppress(OSError):
            while data := self._socket.recv(65536):
                self._data += data

    def lines(self) -> list[str]:
        """Return one line for each command so far: the words in quotes."""
        return [line.partition("] ")[2].strip() for line in self._data.decode().splitlines() if "] " in line]

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return the client's address and the words of each command so far."""
        commands = []
        for line in self._data.decode().splitlines():
            client, found, words = line.partition("] ")
            if found:
                texts = [literal_eval(f"b{each}").decode(errors="replace") for each in _WORDS.findall(words)]
                commands.append((client.rpartition(" ")[2], texts))
        return commands


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """Start a server; without the program the test is skipped, but on CI it fails."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI"):
            pytest.fail(HOW_TO_GET_IT)
        pytest.skip(HOW_TO_GET_IT)
    with RedisServer() as server:
        yield server
