"""A real Synapse: its processes on a real PostgreSQL, and its client API.

Only configuration, HTTP and the two commands ``python -m synapse.app.…`` are used: nothing of it is imported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from itertools import count
from typing import TYPE_CHECKING, Any, Self

from replication.bench.cluster import free_ports
from tests.system.daemons import PATIENCE, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SERVER_NAME = "alpha.test"
SECRET = "the-replication-secret"
_TRANSACTIONS = count(1)


class Process:
    """One process of a Synapse, with a folder for its configuration and its log."""

    client_port: int

    def __init__(
        self, python: Path, app: str, folder: Path, ports: Sequence[int], configuration: dict[str, object]
    ) -> None:
        self.folder = folder
        self._ports = ports
        self._command = [str(python), "-m", f"synapse.app.{app}", "--config-path", f"{folder}/homeserver.yaml"]
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "homeserver.yaml").write_text(json.dumps(configuration))  # JSON is YAML

    @property
    def log(self) -> str:
        """The log of all its starts."""
        return (self.folder / "log").read_text()

    @property
    def running(self) -> bool:
        """Whether it was started, and neither killed nor stopped."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process's ID."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start it, and wait until it listens on all its ports."""
        self.begin()
        self.wait()
        return self

    def begin(self) -> None:
        """Start it."""
        with (self.folder / "log").open("ab") as log:
            env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
            self._process = subprocess.Popen(
                self._command, cwd=self.folder, env=env, stdout=log, stderr=subprocess.STDOUT
            )

    def wait(self) -> None:
        """Wait until it listens on all its ports."""
        until(self._serves, f"{self.folder.name} listens")

    def kill(self) -> None:
        """Send SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, and wait for its end."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None

    def _serves(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.folder.name} ended with {self._process.returncode}: {self.log[-3000:]}")
        try:
            for port in self._ports:
                socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class Main(Process):
    """A main process."""

    def __init__(self, python: Path, folder: Path, database: str) -> None:
        self.client_port, self.wire_port, self.http_port = ports = free_ports(3)
        self.database = database.rpartition("/")[2]
        self.wire = f"127.0.0.1:{self.wire_port}"
        listeners = [
            listener(self.client_port, "client", "metrics"),
            listener(self.http_port, "replication"),
            {"port": self.wire_port, "bind_addresses": ["127.0.0.1"], "type": "replication"},
        ]
        super().__init__(python, "homeserver", folder, ports, configuration(folder, database, listeners=listeners))

    def received(self, word: str) -> int:
        """Return how often followers have sent a command."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.client_port}/_synapse/metrics", timeout=PATIENCE) as page:
            text = page.read().decode()
        line = rf'synapse_replication_tcp_protocol_inbound_commands{{command="{word}",name="[^"]*"}} ([\d.]+)'
        return int(sum(map(float, re.findall(line, text))))


class GenericWorker(Process):
    """A worker for clients, which follows the main process at those ports."""

    def __init__(
        self, python: Path, folder: Path, database: str, *, wire: int, http: int, secret: str = SECRET
    ) -> None:
        (self.client_port,) = ports = free_ports(1)
        more = {
            "worker_app": "synapse.app.generic_worker",
            "worker_name": "generic_worker1",
            "worker_replication_secret": secret,
            "worker_replication_host": "127.0.0.1",
            "worker_replication_port": wire,
            "worker_replication_http_port": http,
            "worker_listeners": [listener(self.client_port, "client")],
            "worker_log_config": f"{folder}/log.yaml",
        }
        super().__init__(python, "generic_worker", folder, ports, configuration(folder, database, **more))


class FederationSender(Process):
    """A federation sender."""

    def __init__(self, python: Path, folder: Path, database: str, *, wire: int, http: int) -> None:
        more = {
            "worker_app": "synapse.app.federation_sender",
            "worker_name": "federation_sender1",
            "worker_replication_host": "127.0.0.1",
            "worker_replication_port": wire,
            "worker_replication_http_port": http,
            "worker_log_config": f"{folder}/log.yaml",
            "send_federation": False,  # only such a worker does
        }
        super().__init__(python, "federation_sender", folder, [], configuration(folder, database, **more))


class MatrixError(Exception):
    """An error answer of Synapse, with its status and content."""

    def __init__(self, asked: str, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{asked}: {status} {body}")
        self.status, self.body = status, body


class Client:
    """A user at one of the processes."""

    def __init__(self, port: int, token: str = "") -> None:
        self.port = port
        self.token = token
        self.user_id = self.password = ""

    def register(self, name: str) -> Self:
        """Register the user."""
        self.password = f"secret of {name}"
        body = {"username": name, "password": self.password, "auth": {"type": "m.login.dummy"}}
        answer = self.post("/register", body)
        self.token, self.user_id = answer["access_token"], answer["user_id"]
        return self

    def at(self, port: int) -> Client:
        """The same user at another process."""
        other = Client(port, self.token)
        other.user_id, other.password = self.user_id, self.password
        return other

    def get(self, path: str, **query: object) -> Any:
        """Send GET to the client API."""
        return self._ask("GET", f"{path}?{urllib.parse.urlencode(query)}", None)

    def post(self, path: str, body: object) -> Any:
        """Send POST to the client API."""
        return self._ask("POST", path, body)

    def put(self, path: str, body: object) -> Any:
        """Send PUT to the client API."""
        return self._ask("PUT", path, body)

    def confirm(self, path: str, body: dict[str, object], auth: dict[str, object]) -> Any:
        """Send POST with user-interactive authentication: the first answer has the session for the second request."""
        try:
            return self.post(path, body)
        except MatrixError as refused:
            return self.post(
                path, {**body, "auth": {**auth, "password": self.password, "session": refused.body["session"]}}
            )

    def send_message(self, room: str, text: str) -> str:
        """Send a message, and return its event ID."""
        body = {"msgtype": "m.text", "body": text}
        path = f"/rooms/{quoted(room)}/send/m.room.message/{next(_TRANSACTIONS)}"
        return str(self.put(path, body)["event_id"])

    def _ask(self, method: str, path: str, body: object) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/_matrix/client/unstable{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.token}"} if self.token else {},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                refused = MatrixError(f"{method} {path}", error.code, json.load(error))
            raise refused from None


def quoted(name: str) -> str:
    """Return a Matrix ID, quoted for a path."""
    return urllib.parse.quote(name, safe="")


def listener(port: int, *names: str) -> dict[str, object]:
    resources = [{"names": list(names), "compress": False}]
    return {"port": port, "bind_addresses": ["127.0.0.1"], "type": "http", "resources": resources}


def configuration(folder: Path, database: str, **more: object) -> dict[str, object]:
    """Write the configuration of the log, and return that of a process without its listeners."""
    folder.mkdir(exist_ok=True)
    (folder / "log.yaml").write_text(json.dumps(_logging()))
    plenty = {"per_second": 10_000, "burst_count": 10_000}
    _, _, place = database.rpartition("@")
    address, _, name = place.partition("/")
    host, _, port = address.partition(":")
    arguments = {"user": "postgres", "host": host, "port": int(port), "database": name, "cp_min": 2, "cp_max": 5}
    return {
        "server_name": SERVER_NAME,
        "pid_file": f"{folder}/pid",
        "log_config": f"{folder}/log.yaml",
        "signing_key": f"ed25519 a_1 {'A' * 43}",
        "media_store_path": f"{folder}/media",
        "database": {"name": "psycopg2", "args": arguments},
        "worker_replication_secret": SECRET,
        "macaroon_secret_key": "of all macaroons",
        "form_secret": "of all forms",
        "enable_registration": True,
        "enable_registration_without_verification": True,
        "enable_group_creation": True,
        "enable_metrics": True,
        "bcrypt_rounds": 4,  # quick
        "report_stats": False,
        "trusted_key_servers": [],
        "suppress_key_server_warning": True,
        "federation_domain_whitelist": [],
        "rc_message": plenty,
        "rc_registration": plenty,
        "rc_login": {"address": plenty, "account": plenty, "failed_attempts": plenty},
        "rc_joins": {"local": plenty, "remote": plenty},
        "rc_invites": {"per_room": plenty, "per_user": plenty},
        **more,
    }


def _logging() -> dict[str, object]:
    line = "%(asctime)s %(name)s %(lineno)d %(levelname)s %(request)s %(message)s"
    return {
        "version": 1,
        "formatters": {"line": {"format": line}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stdout"}},
        "loggers": {"synapse.replication": {"level": "DEBUG"}},
        "root": {"level": "INFO", "handlers": ["out"]},
        "disable_existing_loggers": False,
    }
