"""A Synapse with workers, as an operator runs it today: several processes, one PostgreSQL, one Redis."""

from __future__ import annotations

import hashlib
import hmac
import json
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from replication.bench.cluster import free_ports
from tests.interop.synapse import SERVER_NAME, Client, Process, configuration, listener
from tests.redis import RedisServer
from tests.system.daemons import PATIENCE, until

if TYPE_CHECKING:
    from pathlib import Path

MAIN = "main"
WRITERS = {
    "events": ["persister1", "persister2"],
    "receipts": ["persister1", "persister2"],
    "device_lists": ["persister2", "writer1"],
    **{
        each: ["writer1"]
        for each in ("typing", "to_device", "account_data", "presence", "push_rules", "thread_subscriptions")
    },
}
NAMES = [MAIN, "persister1", "persister2", "writer1"]
ADDED = "added1"  # a worker without streams of its own, for clients: it writes caches
SHARED_SECRET = "for registration"
REDIS_PASSWORD = "secret"
# Our user may do nothing else; ACL LOG lists what was refused.
REDIS_USER = f"us on >{REDIS_PASSWORD} resetchannels &{SERVER_NAME} -@all +subscribe +publish +ping"


class SynapseProcess(Process):
    """The main process or a worker; each serves clients, and its replication HTTP."""

    def __init__(self, python: Path, name: str, folder: Path, shared: dict[str, Any], database: str) -> None:
        (self.client_port,) = free_ports(1)
        replication_port = shared["instance_map"][name]["port"] if name in shared["instance_map"] else None
        listeners = [listener(self.client_port, "client", "media")]
        if replication_port is not None:
            listeners.append(listener(replication_port, "replication"))
        more: dict[str, object] = {"listeners": listeners}
        if name != MAIN:
            more = {
                "worker_app": "synapse.app.generic_worker",
                "worker_name": name,
                "worker_listeners": listeners,
                "worker_log_config": f"{folder}/log.yaml",
            }
        every = configuration(folder, database, **shared, **more)
        app = "homeserver" if name == MAIN else "generic_worker"
        ports = [each["port"] for each in listeners]
        super().__init__(python, app, folder, ports, every)  # type: ignore[arg-type]
        quiet = json.loads((folder / "log.yaml").read_text())
        (folder / "log.yaml").write_text(json.dumps({**quiet, "loggers": {}}))


class Homeserver:
    """All processes of one Synapse, and its Redis."""

    def __init__(self, python: Path, folder: Path, database: str) -> None:
        self.redis = RedisServer("--user", *REDIS_USER.split())
        ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        shared = {
            "redis": {"enabled": True, "host": "127.0.0.1", "port": self.redis.port},
            "instance_map": {name: {"host": "127.0.0.1", "port": port} for name, port in ports.items()},
            "stream_writers": WRITERS,
            "registration_shared_secret": SHARED_SECRET,
            "include_profile_updates_in_sync": True,  # or nothing moves the stream profile_updates
            "media_store_path": str(folder / "media"),
        }
        self.processes = {
            name: SynapseProcess(python, name, folder / name, shared, database) for name in (*NAMES, ADDED)
        }
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start all processes but the added one; the main process creates the tables."""
        self._stack.enter_context(self.redis)
        started = [self._stack.enter_context(self.processes[MAIN])]
        for name in NAMES[1:]:
            self._stack.callback(self.processes[name].kill)
            self.processes[name].begin()
            started.append(self.processes[name])
        self._stack.callback(self.processes[ADDED].kill)
        for each in started:
            each.wait()
        self.wait_for_subscribers(len(started))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait_for_subscribers(self, number: int) -> None:
        """Wait until this number of processes, our workers included, are subscribed."""
        until(lambda: self.redis.subscribers(SERVER_NAME) == number, f"{number} processes are subscribed")

    def register(self, name: str, *, admin: bool = False) -> Client:
        """Register a user with the shared secret, at the main process."""
        client = Client(self.processes[MAIN].client_port)
        client.password = f"secret of {name}"
        place = f"http://127.0.0.1:{client.port}/_synapse/admin/v1/register"
        with urllib.request.urlopen(place, timeout=PATIENCE) as answer:
            nonce = json.load(answer)["nonce"]
        signed = "\0".join([nonce, name, client.password, "admin" if admin else "notadmin"])
        mac = hmac.new(SHARED_SECRET.encode(), signed.encode(), hashlib.sha1).hexdigest()
        body = {"nonce": nonce, "username": name, "password": client.password, "admin": admin, "mac": mac}
        with urllib.request.urlopen(place, json.dumps(body).encode(), timeout=PATIENCE) as answer:
            registered = json.load(answer)
        client.token, client.user_id = registered["access_token"], registered["user_id"]
        return client

    def publishers(self) -> list[str]:
        """Return the IDs of the connections on which Synapse's processes publish."""
        lines = self.redis.call("CLIENT", "LIST", "TYPE", "normal").decode().splitlines()
        clients = [dict(each.split("=", 1) for each in line.split(" ") if "=" in each) for line in lines]
        here = ("monitor", "client|list")  # the connections of these tests
        return [each["id"] for each in clients if each["user"] == "default" and each["cmd"] not in here]
