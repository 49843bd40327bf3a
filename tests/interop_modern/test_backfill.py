"""Our worker beside a homeserver that fetches the history of a room from another one: ``backfill`` over Redis."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from replication.bench.cluster import free_ports
from tests.certificates import Authority
from tests.interop.synapse import Client, Process, configuration, listener, quoted
from tests.interop_modern.copies import differences, in_copy, in_database, published
from tests.redis import Monitor
from tests.synapse.reading import READER, READER_SQL
from tests.system.daemons import CHECKOUT, Daemon, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop_modern.copies import Facts
    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

MESSAGES = 15  # of each room


class Federating(Process):
    """A homeserver of one process, which other ones reach at ``localhost`` and the port in its name."""

    def __init__(self, python: Path, folder: Path, database: str, **more: object) -> None:
        folder.mkdir()
        self.client_port, federation = ports = free_ports(2)
        self.server_name = f"localhost:{federation}"
        identity = Authority(folder).issue("server", "localhost")
        every: dict[str, Any] = configuration(folder, database, server_name=self.server_name, **more)
        every["listeners"] = [
            listener(self.client_port, "client"),
            {**listener(federation, "federation"), "tls": True},
        ]
        every |= {"tls_certificate_path": str(identity.certificate), "tls_private_key_path": str(identity.key)}
        every |= {
            "federation_verify_certificates": False,
            "ip_range_blacklist": [],
            "federation_ip_range_blacklist": [],
        }
        del every["federation_domain_whitelist"]
        super().__init__(python, "homeserver", folder, ports, every)


def test_backfilled_events_are_copied_also_those_that_redis_lost(
    synapse: Path, postgres: PostgresServer, redis: RedisServer, tmp_path: Path
) -> None:
    """The server name has a port here."""
    in_redis = {"enabled": True, "host": "127.0.0.1", "port": redis.port}
    with postgres.database() as near_database, postgres.database() as far_database:
        near = Federating(synapse, tmp_path / "near", postgres.url(near_database), redis=in_redis)
        far = Federating(synapse, tmp_path / "far", postgres.url(far_database))
        with near, far:
            postgres.sql(READER_SQL, database=near_database)
            try:
                url = postgres.url(near_database, READER)
                worker = Daemon(
                    tmp_path,
                    "worker",
                    f"--config={CHECKOUT}/conf/synapse-redis.toml",
                    f"--server-name={near.server_name}",
                    f"--connect={redis.url}",
                    f"--catch-up={url}",
                    f"--database=sqlite:///{tmp_path}/copy.db",
                )
                with worker:
                    _follow(worker, near, far, redis, lambda: in_database(postgres, near_database))
            finally:
                postgres.sql(f"DROP OWNED BY {READER}; DROP ROLE {READER}", database=near_database)


def _follow(
    worker: Daemon, near: Federating, far: Federating, redis: RedisServer, database: Callable[[], dict[str, Facts]]
) -> None:
    anna, bert = Client(near.client_port).register("anna"), Client(far.client_port).register("bert")

    def check(what: str) -> None:
        unlike: dict[str, list[tuple[int, Any, Any]]] = {}

        def equal() -> bool:
            nonlocal unlike
            time.sleep(0.3)
            copied, stored = in_copy(worker.folder / "copy.db"), database()
            for facts in (copied, stored):
                for _, rows in facts["events"].values():
                    for row in rows:
                        del row[1][8:]  # the flag outlier, which Synapse may clear later without a row
            unlike = differences(copied, stored)
            return not unlike

        try:
            until(equal, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; token, copy, database: {unlike}") from None

    def rooms(number: int) -> list[str]:
        made = [str(bert.post("/createRoom", {"preset": "public_chat"})["room_id"]) for _ in range(number)]
        for room in made:
            for each in range(MESSAGES):
                bert.send_message(room, f"message {each}")
        return made

    until(lambda: f"following {near.server_name}" in worker.log, "the worker follows")
    monitor = Monitor(redis)
    lost, seen = rooms(2)
    for room in (lost, seen):
        anna.post(f"/join/{quoted(room)}?server_name={quoted(far.server_name)}", {})
    check("the copy has the joins")
    redis.call("CLIENT", "PAUSE", "60000", "WRITE")  # it reads no PUBLISH
    _read_back(anna, lost)
    clients = redis.call("CLIENT", "LIST", "TYPE", "normal").decode().splitlines()
    for publisher in (each.split()[0].removeprefix("id=") for each in clients if "cmd=publish" in each):
        redis.call("CLIENT", "KILL", "ID", publisher)
    redis.call("CLIENT", "UNPAUSE")
    _read_back(anna, seen)
    check("the copy has all that was fetched")
    facts = database()
    assert len(facts["backfill"]) > MESSAGES
    assert len(facts["un_partial_stated_room"]) == 2
    messages = [words[2] for _, words in monitor.commands() if words[:2] == ["PUBLISH", near.server_name]]
    assert facts["backfill"].keys() > published(messages)["backfill"].keys()  # Redis has lost some


def _read_back(user: Client, room: str) -> None:
    """Read the messages of a room, up to its creation."""
    query: dict[str, object] = {"dir": "b", "limit": 50}
    types: list[str] = []
    while "m.room.create" not in types:
        page = user.get(f"/rooms/{quoted(room)}/messages", **query)
        types += [each["type"] for each in page["chunk"]]
        query["from"] = page.get("end", query.get("from", ""))
