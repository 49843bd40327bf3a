"""Four processes write one stream in PostgreSQL, and three follow; the test kills each of them, and the server.

At the end, each fact is in every follower's copy once, under the acknowledged ID (I1 to I10, I12, I13). The test
appends 16,000 facts; ``pytest tests/system/test_writers.py --full`` appends 400,000.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sqlite3
import time
import urllib.request
from bisect import bisect_right
from contextlib import ExitStack, closing, suppress
from functools import partial
from http.client import HTTPException
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from replication.bench.cluster import free_ports
from tests.postgres import HOW_TO_GET_IT, PostgresServer, find_binaries
from tests.system.daemons import PATIENCE, Daemon, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WRITERS = ("w1", "w2", "w3", "w4")
TABLE = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"

# An application that checks what it applies. The primary key refuses a fact that a second transaction commits, and the
# trigger refuses a position that goes back. When a wait for a position ends, the facts are in the database (I12).
APP = '''
import sqlite3

def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (token INTEGER, ord INTEGER, writer TEXT, row TEXT, "
                          "PRIMARY KEY (token, ord))")
        await txn.execute("""CREATE TRIGGER IF NOT EXISTS forward BEFORE UPDATE ON stream_positions
                             WHEN new.stream_id < old.stream_id
                             BEGIN SELECT RAISE(ABORT, 'a position went back'); END""")
        await txn.executemany("INSERT INTO seen VALUES (?, ?, ?, ?)",
            [(fact.token, n, txn.writer, text) for fact in facts for n, text in enumerate(fact.texts)])
        waiting = worker.wait_for("orders", txn.writer, facts[-1].token, timeout=300)
        waiting.addCallbacks(lambda _: check(facts[-1].token), lambda failure: None)  # it was killed, or stopped

    def check(token):
        with open("waits.txt", "a") as notes:
            with sqlite3.connect("file:replication-seen.db?mode=ro", uri=True) as database:
                found = database.execute("SELECT count(*) FROM seen WHERE token = ?", [token]).fetchall()
            print("there" if found != [(0,)] else f"{token} is missing", file=notes)
'''


# An application that keeps IDs open for up to 0.2 s, in transactions with statements, and rolls some of them back.
RESERVING = """
import random
from twisted.internet import defer, reactor, task

def register(worker):
    def begin():
        if worker._master is not None and not worker._lifetime.ended:
            defer.Deferred.fromCoroutine(write()).addErrback(lambda failure: None)  # rolled back, or the server is down

    async def write():
        async with worker.stream("orders").reserve(random.randint(1, 3)) as facts:
            for fact in facts:
                await fact.write(["reserving", str(fact.token)])
            await facts[0].execute("SELECT pg_sleep(%s)", [random.uniform(0, 0.2)])
            if random.random() < 0.3:
                raise ValueError("rolled back")

    task.LoopingCall(begin).start(0.05, now=False)
"""


def facts_of(name: str, count: int) -> list[list[list[str]]]:
    """Return facts, each a list of rows: most have one, some two, a few none."""
    shapes = [1] * 20 + [2, 2, 0]
    return [[[f"{name}-{n}-{k}", "placed"] for k in range(shapes[n % len(shapes)])] for n in range(count)]


class Cluster:
    """Four writers and three followers, which are started again after each kill."""

    def __init__(self, stack: ExitStack, folder: Path, server: PostgresServer) -> None:
        self.folder, self.server = folder, server
        ports = free_ports(2 * len(WRITERS))
        self.ports = {name: (ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(WRITERS)}
        (folder / "account.py").write_text(APP)
        (folder / "reserving.py").write_text(RESERVING)
        self.writers = [self._writer(name) for name in WRITERS]
        self.followers = [self._follower("copy1"), self._follower("copy2"), self._follower("seen", "--app=account")]
        self._ending = Event()
        self._starting = Lock()
        for each in self.daemons:
            stack.enter_context(each)
        supervisor = Thread(target=self._restart_ended)
        stack.callback(supervisor.join)
        stack.callback(self._ending.set)
        supervisor.start()
        for each in self.writers:
            until(lambda each=each: "the wire is served" in each.log, f"{each.name} listens")  # type: ignore[misc]

    @property
    def daemons(self) -> list[Daemon]:
        """All daemons."""
        return [*self.writers, *self.followers]

    def kill(self, daemon: Daemon) -> None:
        """Send SIGKILL. The daemon is started again at once, as by a supervisor."""
        with self._starting:
            daemon.kill()

    def _restart_ended(self) -> None:
        """Start each daemon that has ended: killed, or because the server was down when it started."""
        while not self._ending.wait(0.1):
            with self._starting:
                for each in self.daemons:
                    if each.ended:
                        each.start()

    def _config(self, name: str, *lines: str) -> str:
        text = [f'instance_name = "{name}"', *lines, "[[streams]]", 'name = "orders"', f"writers = {[*WRITERS]}"]
        (self.folder / f"{name}.toml").write_text("\n".join(text))
        return f"--config={name}.toml"

    def _connections(self) -> list[str]:
        return [
            line
            for name, (wire, http) in self.ports.items()
            for line in (
                f"[writers.{name}]",
                f'connect = "tcp:127.0.0.1:{wire}"',
                f'http = "http://127.0.0.1:{http}"',
            )
        ]

    def _writer(self, name: str) -> Daemon:
        """Return a master; or, under the name w4, a worker that writes."""
        wire, http = (f'"tcp:{port}:interface=127.0.0.1"' for port in self.ports[name])
        own = [f'database = "{self.server.url()}"', f"listen = [{wire}]", f"http = {http}"]
        role = "worker" if name == "w4" else "master"
        if role == "worker":
            own += ['writes = ["orders"]', "copy = false"]
        config = self._config(name, *own)
        if role == "worker":
            path = self.folder / f"{name}.toml"
            path.write_text("\n".join([path.read_text(), *self._connections()]))
        return Daemon(self.folder, role, config, *(["--app=reserving"] if role == "worker" else []), name=name)

    def end_reservations(self) -> None:
        """Start w4 without the application, and wait until no transaction of the application is open."""
        w4 = self.writers[3]
        with self._starting:
            before = w4.starts
            w4.options = w4.options[:1]
            w4.kill()
        until(lambda: w4.starts > before, "w4 is started again")
        health = f"http://127.0.0.1:{self.ports['w4'][1]}/health"
        until(partial(is_well, health), "w4 is healthy")  # and has ended the sessions of its last process
        others = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' AND pid <> pg_backend_pid()"
        until(lambda: not self.server.sql(others), "no transaction is open")

    def _follower(self, name: str, *options: str) -> Daemon:
        (self.folder / f"{name}.toml").write_text("\n".join([f'instance_name = "{name}"', *self._connections()]))
        return Daemon(self.folder, "worker", f"--config={name}.toml", *options, name=name)

    def rows_of(self, follower: str, sql: str) -> list[tuple[Any, ...]]:
        """Read a follower's database."""
        path = self.folder / f"replication-{follower}.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(sql).fetchall()


def is_well(health: str) -> bool:
    """Whether this URL answers 200."""
    with suppress(OSError, HTTPException):
        return bool(ask(health)[0] == 200)
    return False


class Appender(Thread):
    """A client that appends 1, 10 or 100 facts a request, and repeats each request until it is acknowledged."""

    def __init__(self, port: int, facts: Sequence[Sequence[Sequence[str]]], seed: int) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self._url = f"http://127.0.0.1:{port}/v1/streams/orders/facts"
        self._facts = facts
        self._chance = random.Random(seed)

    def run(self) -> None:
        while len(self.tokens) < len(self._facts):
            size = self._chance.choice([1, 10, 100])
            some = self._facts[len(self.tokens) : len(self.tokens) + size]
            body = "".join(json.dumps({"rows": rows}) + "\n" for rows in some).encode()
            headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": uuid4().hex}
            self.tokens += until(partial(self._post, body, headers), "an append is acknowledged", patience=300.0)

    def _post(self, body: bytes, headers: dict[str, str]) -> list[int] | None:
        request = urllib.request.Request(self._url, body, headers)
        with suppress(OSError, HTTPException), urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return list(json.load(answer)["ids"])
        return None


class Observer(Thread):
    """A follower of one writer that stores the lines of each connection."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.connections: list[list[str]] = []
        self.ending = Event()
        self._port = port

    def run(self) -> None:
        while not self.ending.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
                self._receive(connection)
            self.ending.wait(0.1)

    def _receive(self, connection: socket.socket) -> None:
        connection.sendall(b"REPLICATE orders\n")
        connection.settimeout(0.5)
        data = bytearray()
        try:
            while not self.ending.is_set():
                with suppress(TimeoutError):
                    some = connection.recv(2**16)
                    if not some:
                        return
                    data += some
        finally:
            whole = data[: data.rfind(b"\n") + 1].decode()
            self.connections.append([line for line in whole.splitlines() if " orders " in line])


def check_connection(lines: Sequence[str], writer: str, rows: dict[int, list[str]]) -> int:
    """Compare the lines that a writer sent on one connection with its committed rows; return the number of facts."""
    tokens = sorted(rows)
    reached = None
    begun: list[str] = []
    facts = 0
    for line in lines:
        word, _, instance, rest = line.split(" ", 3)
        assert instance == writer
        if word == "POSITION":
            prev, new = map(int, rest.split())
            assert reached is None or reached <= prev <= new, f"I7: {line} after {reached}"
            between = tokens[bisect_right(tokens, prev) : bisect_right(tokens, new)]
            assert not between, f"I6: {line} passes {between}"
            reached = new
            continue
        place, text = rest.split(" ", 1)
        begun.append(text)
        if place == "batch":
            continue
        token = int(place)
        if reached is None:  # published before the first POSITION of this connection
            reached = token - 1
        assert token > reached, f"I7: {line} after {reached}"
        skipped = tokens[bisect_right(tokens, reached) : bisect_right(tokens, token - 1)]
        assert not skipped, f"I1: {line} after {reached} leaves out {skipped}"
        assert rows.get(token) == begun, f"I5, I4: {writer} sent {begun} of {token}, and committed {rows.get(token)}"
        reached, begun, facts = token, [], facts + 1
    return facts


def break_everything(cluster: Cluster, chance: random.Random, *, turns: int) -> None:
    """Kill the daemons and the server one after the other, in random order."""
    victims: list[Daemon | PostgresServer] = []
    for _ in range(turns):
        if not victims:
            victims = [*cluster.daemons, cluster.server, cluster.server]
            chance.shuffle(victims)
        victim = victims.pop()
        time.sleep(chance.uniform(0.1, 1.0))
        if isinstance(victim, Daemon):
            cluster.kill(victim)
        else:
            victim.stop("immediate")
            time.sleep(chance.uniform(0.0, 0.5))
            victim.start()


def test_four_writers_and_three_followers_through_every_kind_of_kill(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if find_binaries() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(HOW_TO_GET_IT)
    full = bool(request.config.getoption("--full"))
    count = 50_000 if full else 2_000  # facts of each appender; two appenders use one writer
    facts = {name + half: facts_of(name + half, count) for name in WRITERS for half in "ab"}
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        cluster = Cluster(stack, tmp_path, server)
        observers = {name: Observer(cluster.ports[name][0]) for name in WRITERS}
        for observer in observers.values():
            stack.callback(observer.ending.set)  # also if the test fails: its process would not end
            observer.start()
        appenders = {
            name: Appender(cluster.ports[name[:2]][1], some, n) for n, (name, some) in enumerate(facts.items())
        }
        for appender in appenders.values():
            appender.start()
        break_everything(cluster, random.Random(11), turns=60 if full else 9)
        for appender in appenders.values():
            appender.join()

        cluster.end_reservations()
        want = server.sql(TABLE)
        assert any("reserving" in row for *_, row in want)
        check_table(facts, {name: appender.tokens for name, appender in appenders.items()}, want)
        check_positions(server, want)
        for name, sql in (("copy1", TABLE), ("copy2", TABLE), ("seen", TABLE_SEEN)):
            until(partial(has_all, cluster, name, sql, len(want)), f"{name} has {len(want)} rows")
            assert cluster.rows_of(name, sql) == want, f"I1, I2, I4: {name}"
        for observer in observers.values():
            observer.ending.set()
            observer.join()
        for name, observer in observers.items():
            of_writer: dict[int, list[str]] = {}
            for token, _, writer, row in want:
                if writer == name:
                    of_writer.setdefault(token, []).append(row)
            assert sum(check_connection(lines, name, of_writer) for lines in observer.connections) > 0
        waits = set((tmp_path / "waits.txt").read_text().splitlines())
        assert waits == {"there"}, f"I12: {waits}"
        assert "went back" not in "".join(each.log for each in cluster.followers)


TABLE_SEEN = "SELECT token, ord, writer, row FROM seen ORDER BY 1, 2"


def has_all(cluster: Cluster, name: str, sql: str, rows: int) -> bool:
    """Whether a follower has at least this number of rows."""
    with suppress(sqlite3.OperationalError):  # it has created no table yet
        return len(cluster.rows_of(name, sql)) >= rows
    return False


def check_table(
    facts: dict[str, list[list[list[str]]]], tokens: dict[str, list[int]], want: list[tuple[Any, ...]]
) -> None:
    """Check that each acknowledged fact, retried or not, is in the table once, under its ID (I2, I13)."""
    expected = [
        (token, n, name[:2], json.dumps(row, separators=(",", ":")))
        for name, sent in facts.items()
        for token, rows in zip(tokens[name], sent, strict=True)
        for n, row in enumerate(rows)
    ]
    assert sorted(expected) == [row for row in want if "reserving" not in row[3]]


def check_positions(server: PostgresServer, want: list[tuple[Any, ...]]) -> None:
    """Check that the stored positions of all writers reach the largest ID, although the writers are idle (I8, I10)."""
    positions = "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = 'orders'"

    def all_equal() -> bool:
        stored = dict(server.sql(positions))
        newest = max(stored.values())
        return newest >= want[-1][0] and all(stored.get(name) == newest for name in WRITERS)

    until(all_equal, "every writer has the largest position")
