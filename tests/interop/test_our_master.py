"""A real Synapse worker follows a master over the database of a recorded Synapse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from replication.bench.cluster import free_ports
from tests.interop.synapse import SECRET, Client, FederationSender, GenericWorker, Main, MatrixError
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import environment, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.postgres import PostgresServer

DEFINITIONS = {"1.47.1": "replication.synapse", "1.66.0": "replication.synapse.since_1_64"}
USER = "@auser0:alpha.test"
OTHER = "@auser1:alpha.test"
ROOM = "!lOTVmVuSzpPlWLFkEh:alpha.test"  # of version 1; both are in it
DEVICE = "INTEROP"
UPDATES = "/v1/streams/federation/updates?instance=master&from=0&upto={}"
TOKENS = {USER: "syt_of_auser0", OTHER: "syt_of_auser1"}


@pytest.fixture(scope="session")
def recorded(
    postgres: PostgresServer, synapse_python: Path, release: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The name of the recorded database; its users get new access tokens, because it has none."""
    with postgres.database() as name:
        url = restore_postgres(postgres, name)
        for number, (user, token) in enumerate(TOKENS.items()):
            sql = "INSERT INTO access_tokens (id, user_id, device_id, token) VALUES (%s, %s, %s, %s)"
            postgres.sql(sql, number, user, DEVICE, token, database=name)
            sql = "INSERT INTO devices (user_id, device_id, display_name, hidden) VALUES (%s, %s, '', false)"
            postgres.sql(sql, user, DEVICE, database=name)
        if release != "1.47.1":
            Main(synapse_python, tmp_path_factory.mktemp("upgrade"), url).start().stop()
        yield name


@pytest.fixture
def history(postgres: PostgresServer, recorded: str) -> Iterator[str]:
    """The URL of a copy of the recorded database."""
    postgres.sql(f"CREATE DATABASE history TEMPLATE {recorded}")
    yield postgres.url("history")
    postgres.sql("DROP DATABASE history WITH (FORCE)")


class Homeserver:
    """The main process ``homeserver.py``."""

    def __init__(self, folder: Path, database: str, release: str) -> None:
        self.wire, self.http = free_ports(2)
        self.database = database.rpartition("/")[2]
        self.folder = folder
        script = Path(__file__).with_name("homeserver.py")
        place = database, str(self.wire), str(self.http), SECRET
        self._command = [sys.executable, str(script), *place, DEFINITIONS[release]]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        """Start it, and wait until it accepts requests."""
        with (self.folder / "homeserver.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", (self.folder / "homeserver.log").read_text()
        return self

    def do(self, name: str, *arguments: object) -> Any:
        """Call one of its functions."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, *arguments]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "it has ended"}')
        assert "error" not in answer, f"{answer['error']}\n{(self.folder / 'homeserver.log').read_text()}"
        return answer["answer"]

    def get(self, path: str) -> Any:
        """Send GET to its HTTP API."""
        _, answer = ask(f"http://127.0.0.1:{self.http}{path}", headers={"Authorization": f"Bearer {SECRET}"})
        return answer

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.fixture
def homeserver(tmp_path: Path, history: str, release: str) -> Iterator[Homeserver]:
    """A main process over the recorded database."""
    with Homeserver(tmp_path, history, release) as process:
        yield process


@pytest.fixture
def worker(synapse_python: Path, tmp_path: Path, history: str, homeserver: Homeserver) -> Iterator[GenericWorker]:
    """A Synapse worker that follows it."""
    folder = tmp_path / "worker"
    with GenericWorker(synapse_python, folder, history, wire=homeserver.wire, http=homeserver.http) as process:
        yield process


def followed(worker: GenericWorker) -> dict[str, int]:
    """Return the worker's positions from its log, by stream; a stream in catch-up is left out."""
    places: dict[str, int] = {}
    pattern = r"Handling 'POSITION (\w+) \w+ \d+ (\d+)'|Caught up with stream '(\w+)' to (\d+)|rows for '(\w+)' between"
    for received, at, caught_up, upto, fetching in re.findall(pattern, worker.log):
        if fetching:
            places.pop(fetching, None)
        else:
            places[received or caught_up] = int(at or upto)
    return places


def user(worker: GenericWorker, name: str = USER) -> Client:
    """Return a user at the worker."""
    client = Client(worker.client_port, TOKENS[name])
    client.user_id = name
    return client


class Reader:
    """A user who syncs at the worker."""

    def __init__(self, worker: GenericWorker, name: str = USER) -> None:
        self.client = user(worker, name)
        self.first = self.sync(timeout=0)

    def sync(self, timeout: int = 30_000, **query: object) -> Any:
        """Return the answer of a sync request, which waits for news."""
        answer = self.client.get("/sync", timeout=timeout, **query)
        self.since = answer["next_batch"]
        return answer

    def next(self) -> Any:
        """Return the news since the last answer."""
        return self.sync(since=self.since)


def caught_up(homeserver: Homeserver, worker: GenericWorker) -> bool:
    """Return whether the worker has the master's position of every stream."""
    streams = homeserver.get("/v1/streams")["streams"]
    return followed(worker) == {each["name"]: each["positions"]["master"] for each in streams}


def figure(homeserver: Homeserver, name: str, labels: str = "") -> int:
    """Return a metric of the master, 0 if it does not exist."""
    found = re.search(rf"^replication_{name}{re.escape(labels)} (\d+)", homeserver.get("/metrics"), re.MULTILINE)
    return int(found[1]) if found else 0


def answers(homeserver: Homeserver, status: int) -> int:
    """Return how often Synapse requested missed facts with this status."""
    return figure(homeserver, "http_answers_total", f'{{call="synapse",status="{status}"}}')


def test_a_worker_catches_up_with_the_recorded_facts(
    postgres: PostgresServer, homeserver: Homeserver, worker: GenericWorker
) -> None:
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    assert followed(worker).items() >= {"events": 2753, "backfill": 466, "receipts": 278}.items()
    assert answers(homeserver, 200) >= 2  # what has no table
    joined = "SELECT room_id FROM local_current_membership WHERE user_id = %s AND membership = 'join'"
    rooms = {room for (room,) in postgres.sql(joined, USER, database=homeserver.database)}
    seen = Reader(worker).first["rooms"]["join"]
    assert seen.keys() == rooms
    assert all(room["timeline"]["events"] for room in seen.values())


def test_new_facts_reach_clients_of_synapse(homeserver: Homeserver, worker: GenericWorker) -> None:
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    reader = Reader(worker)
    event_id = homeserver.do("send_message", ROOM, "from the master")
    [event] = reader.next()["rooms"]["join"][ROOM]["timeline"]["events"]
    assert (event["event_id"], event["content"]["body"]) == (event_id, "from the master")
    homeserver.do("keep", USER, "org.example.colour", {"colour": "blue"})
    assert reader.next()["account_data"]["events"] == [{"type": "org.example.colour", "content": {"colour": "blue"}}]
    message = {"type": "org.example", "sender": OTHER, "content": {"n": 1}}
    homeserver.do("send_to_device", USER, DEVICE, message)
    assert reader.next()["to_device"]["events"] == [message]
    homeserver.do("type", ROOM, [OTHER])
    assert typing(reader.next()) == [OTHER]
    homeserver.do("be", OTHER, "online", "there")
    [presence] = reader.next()["presence"]["events"]
    assert (presence["sender"], presence["content"]["status_msg"]) == (OTHER, "there")


def test_an_invalidation_clears_a_cache_of_synapse(homeserver: Homeserver, worker: GenericWorker) -> None:
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    client = user(worker)
    assert client.get("/joined_rooms")["joined_rooms"]
    homeserver.do("forget", TOKENS[USER], False)
    homeserver.do("keep", USER, "org.example.later", {})
    until(lambda: followed(worker), "")
    assert client.get("/joined_rooms")["joined_rooms"]  # remembered
    homeserver.do("forget", TOKENS[USER], True)
    until(lambda: refused(client) == "M_UNKNOWN_TOKEN", "the worker has forgotten the token")


def test_synapse_fetches_missed_facts_over_http(homeserver: Homeserver, worker: GenericWorker) -> None:
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    worker.kill()
    homeserver.do("type", ROOM, [OTHER])
    event_id = homeserver.do("send_message", ROOM, "you missed this")
    before = answers(homeserver, 200)
    worker.start()
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    assert answers(homeserver, 200) > before
    seen = Reader(worker).first
    assert seen["rooms"]["join"][ROOM]["timeline"]["events"][-1]["event_id"] == event_id
    assert typing(seen) == [OTHER]


def test_synapse_with_a_wrong_secret_fetches_nothing(
    synapse_python: Path, tmp_path: Path, history: str, homeserver: Homeserver
) -> None:
    """Streams that Synapse reads from the database continue."""
    place = {"wire": homeserver.wire, "http": homeserver.http}
    with GenericWorker(synapse_python, tmp_path / "worker", history, secret="not-it", **place) as worker:
        until(lambda: answers(homeserver, 401) >= 2, "it was refused")
        until(lambda: followed(worker).get("events") == 2753, "it has caught up with events")
        assert "typing" not in followed(worker)
        assert answers(homeserver, 200) == 0


def test_synapse_follows_a_master_that_was_killed(homeserver: Homeserver, worker: GenericWorker) -> None:
    """Also typing, which is only in memory (docs/protocol/traps.md 29)."""
    until(lambda: caught_up(homeserver, worker), "the worker has the position of the master")
    reader = Reader(worker)
    homeserver.do("type", ROOM, [OTHER])
    assert typing(reader.next()) == [OTHER]
    homeserver.kill()
    homeserver.start()
    homeserver.do("type", ROOM, [])
    until(lambda: typing(reader.next()) == [], "typing has ended")
    event_id = homeserver.do("send_message", ROOM, "here again")
    until(lambda: event_id in str(reader.next()), "the worker has received it")


def test_the_master_receives_the_users_of_synapse(homeserver: Homeserver, worker: GenericWorker) -> None:
    """Users who sync, until ten seconds after their last request, and their IP addresses."""
    Reader(worker)
    until(lambda: [each["user_id"] for each in homeserver.get("/v1/users")["users"]] == [USER], "the user syncs")
    until(lambda: homeserver.get(f"/v1/users/{USER}")["seen"], "where the user was seen is written")
    [place] = homeserver.get(f"/v1/users/{USER}")["seen"]
    assert (place["ip"], place["device_id"]) == ("127.0.0.1", DEVICE)
    until(lambda: homeserver.get("/v1/users")["users"] == [], "no user syncs")


def test_a_federation_sender_acknowledges_facts_of_the_master(
    synapse_python: Path, tmp_path: Path, history: str, homeserver: Homeserver
) -> None:
    """The federation stream keeps a fact until the acknowledgement."""
    place = {"wire": homeserver.wire, "http": homeserver.http}
    token = homeserver.do("send", "beta.test")
    with FederationSender(synapse_python, tmp_path / "sender", history, **place):
        until(lambda: homeserver.get(UPDATES.format(token))["updates"] == [], "it is acknowledged")


def test_synapse_continues_as_main_process_where_the_master_stopped(
    synapse_python: Path, tmp_path: Path, history: str, homeserver: Homeserver
) -> None:
    """Synapse's own checks of sequences and positions accept what the master wrote."""
    event_id = homeserver.do("send_message", ROOM, "from the master")
    homeserver.do("keep", USER, "org.example.colour", {"colour": "blue"})
    homeserver.do("send_to_device", USER, DEVICE, {"type": "org.example", "sender": OTHER, "content": {}})
    homeserver.do("type", ROOM, [OTHER])
    homeserver.do("be", OTHER, "online", "there")
    homeserver.kill()
    with Main(synapse_python, tmp_path / "main", history) as main:
        client = Client(main.client_port, TOKENS[USER])
        later = client.send_message(ROOM, "from Synapse")
        timeline = client.get("/sync", timeout=0)["rooms"]["join"][ROOM]["timeline"]["events"]
        assert [event["event_id"] for event in timeline][-2:] == [event_id, later]
    homeserver.start()
    homeserver.do("send_message", ROOM, "from the master again")


def typing(answer: Any) -> list[str] | None:
    """Return who is typing in the room, None without news."""
    events = answer.get("rooms", {}).get("join", {}).get(ROOM, {}).get("ephemeral", {}).get("events", [])
    found = [event["content"]["user_ids"] for event in events if event["type"] == "m.typing"]
    return found[-1] if found else None


def refused(client: Client) -> str:
    """Return the error for an unknown access token, None if it is valid."""
    try:
        client.get("/joined_rooms")
    except MatrixError as error:
        return str(error.body["errcode"])
    return ""
