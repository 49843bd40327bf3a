"""Four processes write one stream in PostgreSQL and three follow, all of it killed again and again, the server too.

At the end the facts are where they were said to be, once each, in every follower's copy (I1 to I10, I12, I13).  100,000
of them; 400,000: ``pytest tests/system/test_writers.py --full``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sqlite3
import subprocess
import time
from bisect import bisect_right
from contextlib import ExitStack, closing, suppress
from functools import partial
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.synapse import free_ports
from tests.postgres import HOW_TO_GET_IT, PostgresServer, find_binaries
from tests.system.daemons import Daemon, environment, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WRITERS = ("w1", "w2", "w3", "w4")
TABLE = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"

# The application's own account: a fact that is seen twice in committed transactions breaks the primary key, a position
# that goes back the trigger.  Whoever waits for a position finds its facts there when it fires (I12).
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
        waiting.addCallbacks(lambda _: look(facts[-1].token), lambda failure: None)  # it was killed, or stopped

    def look(token):
        with open("waits.txt", "a") as notes:
            with sqlite3.connect("file:replication-seen.db?mode=ro", uri=True) as database:
                found = database.execute("SELECT count(*) FROM seen WHERE token = ?", [token]).fetchall()
            print("there" if found != [(0,)] else f"{token} is missing", file=notes)
'''


def facts_of(writer: str, count: int) -> list[list[list[str]]]:
    """Return facts, each a list of rows: most have one, some two, a few none."""
    shapes = [1] * 20 + [2, 2, 0]
    return [[[f"{writer}-{n}-{k}", "placed"] for k in range(shapes[n % len(shapes)])] for n in range(count)]


class Town:
    """Four writers, three followers, and who appends."""

    def __init__(self, stack: ExitStack, folder: Path, server: PostgresServer) -> None:
        self.folder, self.server = folder, server
        ports = free_ports(2 * len(WRITERS))
        self.ports = {name: (ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(WRITERS)}
        (folder / "account.py").write_text(APP)
        self.writers = [self._writer(name) for name in WRITERS]
        self.followers = [self._follower("copy1"), self._follower("copy2"), self._follower("seen", "--app=account")]
        self._ending = Event()
        self._starting = Lock()
        for each in self.everybody:
            stack.enter_context(each)
        keeper = Thread(target=self._keep_up)
        stack.callback(keeper.join)
        stack.callback(self._ending.set)
        keeper.start()
        for each in self.writers:
            until(lambda each=each: "the wire is served" in each.log, f"{each.name} is there")  # type: ignore[misc]

    @property
    def everybody(self) -> list[Daemon]:
        """All daemons."""
        return [*self.writers, *self.followers]

    def kill(self, daemon: Daemon) -> None:
        """SIGKILL; it is started again at once, as a supervisor does."""
        with self._starting:
            daemon.kill()

    def _keep_up(self) -> None:
        """Start whoever is gone: killed, or ended because the server was away just then."""
        while not self._ending.wait(0.1):
            with self._starting:
                for each in self.everybody:
                    if each.ended:
                        each.start()

    def _config(self, name: str, *lines: str) -> str:
        text = [f'instance_name = "{name}"', *lines, "[[streams]]", 'name = "orders"', f"writers = {[*WRITERS]}"]
        (self.folder / f"{name}.toml").write_text("\n".join(text))
        return f"--config={name}.toml"

    def _places(self) -> list[str]:
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
        """Three are masters, and one is a worker that writes."""
        wire, http = (f'"tcp:{port}:interface=127.0.0.1"' for port in self.ports[name])
        own = [f'database = "{self.server.url()}"', f"listen = [{wire}]", f"http = {http}"]
        role = "worker" if name == "w4" else "master"
        if role == "worker":
            own += ['writes = ["orders"]', "copy = false"]
        config = self._config(name, *own)
        if role == "worker":
            path = self.folder / f"{name}.toml"
            path.write_text("\n".join([path.read_text(), *self._places()]))
        return Daemon(self.folder, role, config, name=name)

    def _follower(self, name: str, *options: str) -> Daemon:
        (self.folder / f"{name}.toml").write_text("\n".join([f'instance_name = "{name}"', *self._places()]))
        return Daemon(self.folder, "worker", f"--config={name}.toml", *options, name=name)

    def append(self, name: str, facts: Sequence[Sequence[object]]) -> subprocess.Popen[bytes]:
        """Start what a user would pipe facts into; the IDs go to a file."""
        http = f"http://127.0.0.1:{self.ports[name][1]}"
        command = ["replication", "append", "orders", "-", "--facts", "--http", http, "--retry", "120"]
        source = self.folder / f"{name}.ndjson"
        source.write_text("".join(json.dumps({"rows": rows}) + "\n" for rows in facts))
        with source.open() as lines, (self.folder / f"{name}.ids").open("w") as ids:
            return subprocess.Popen(command, stdin=lines, stdout=ids, env=environment())

    def rows_of(self, follower: str, sql: str) -> list[tuple[Any, ...]]:
        """Read a follower's database."""
        path = self.folder / f"replication-{follower}.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(sql).fetchall()


class Observer(Thread):
    """Listens to one writer by hand, and keeps what it said, by connection."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.conversations: list[list[str]] = []
        self.ending = Event()
        self._port = port

    def run(self) -> None:
        while not self.ending.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=5) as connection:
                self._listen(connection)
            self.ending.wait(0.1)

    def _listen(self, connection: socket.socket) -> None:
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
            self.conversations.append([line for line in whole.splitlines() if " orders " in line])


def check_conversation(said: Sequence[str], writer: str, rows: dict[int, list[str]]) -> int:
    """Hold what a writer said on one connection to what it committed in the end; returns how many facts that were."""
    tokens = sorted(rows)
    told = None
    begun: list[str] = []
    facts = 0
    for line in said:
        word, _, instance, rest = line.split(" ", 3)
        assert instance == writer
        if word == "POSITION":
            prev, new = map(int, rest.split())
            assert told is None or told <= prev <= new, f"I7: {line} after {told}"
            between = tokens[bisect_right(tokens, prev) : bisect_right(tokens, new)]
            assert not between, f"I6: {line} passes {between}"
            told = new
            continue
        place, text = rest.split(" ", 1)
        begun.append(text)
        if place == "batch" or told is None:
            continue
        token = int(place)
        assert token > told, f"I7: {line} after {told}"
        skipped = tokens[bisect_right(tokens, told) : bisect_right(tokens, token - 1)]
        assert not skipped, f"I1: {line} after {told} leaves out {skipped}"
        assert rows.get(token) == begun, f"I5, I4: {writer} said {begun} of {token}, and committed {rows.get(token)}"
        told, begun, facts = token, [], facts + 1
    return facts


@pytest.mark.timeout(900)
def test_four_writers_and_three_followers_through_every_kind_of_kill(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if find_binaries() is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(HOW_TO_GET_IT)
    full = bool(request.config.getoption("--full"))
    count = 100_000 if full else 25_000  # facts a writer
    facts = {name: facts_of(name, count) for name in WRITERS}
    chance = random.Random(11)
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer())
        town = Town(stack, tmp_path, server)
        observers = {name: Observer(town.ports[name][0]) for name in WRITERS}
        for observer in observers.values():
            observer.start()
        appends = {name: stack.enter_context(town.append(name, facts[name])) for name in WRITERS}
        victims: list[Daemon | PostgresServer] = []
        turns = 0
        while turns < (60 if full else 16):
            turns += 1
            if not victims:
                victims = [*town.everybody, server, server]
                chance.shuffle(victims)
            victim = victims.pop()
            time.sleep(chance.uniform(0.1, 1.0))
            if isinstance(victim, Daemon):
                town.kill(victim)
            else:
                victim.stop("immediate")
                time.sleep(chance.uniform(0.0, 0.5))
                victim.start()
        assert [process.wait() for process in appends.values()] == [0] * len(WRITERS)

        want = server.sql(TABLE)
        check_table(town, facts, want)
        check_positions(server, want)
        for name, sql in (("copy1", TABLE), ("copy2", TABLE), ("seen", TABLE_SEEN)):
            until(partial(has_all, town, name, sql, len(want)), f"{name} has {len(want)} rows")
            assert town.rows_of(name, sql) == want, f"I1, I2, I4: {name}"
        for observer in observers.values():
            observer.ending.set()
            observer.join()
        for name, observer in observers.items():
            of_writer: dict[int, list[str]] = {}
            for token, _, writer, row in want:
                if writer == name:
                    of_writer.setdefault(token, []).append(row)
            assert sum(check_conversation(said, name, of_writer) for said in observer.conversations) > 0
        waits = set((tmp_path / "waits.txt").read_text().splitlines())
        assert waits == {"there"}, f"I12: {waits}"
        assert "went back" not in "".join(each.log for each in town.followers)


TABLE_SEEN = "SELECT token, ord, writer, row FROM seen ORDER BY 1, 2"


def has_all(town: Town, name: str, sql: str, rows: int) -> bool:
    """Whether a follower has so many rows."""
    with suppress(sqlite3.OperationalError):  # it has made no table yet
        return len(town.rows_of(name, sql)) >= rows
    return False


def check_table(town: Town, facts: dict[str, list[list[list[str]]]], want: list[tuple[Any, ...]]) -> None:
    """Hold the database to what was acknowledged: each fact, retried or not, is there once, under its ID (I2, I13)."""
    expected = []
    for name, sent in facts.items():
        tokens = [int(each) for each in (town.folder / f"{name}.ids").read_text().split()]
        assert len(tokens) == len(sent)
        for token, rows in zip(tokens, sent, strict=True):
            expected += [(token, n, name, json.dumps(row, separators=(",", ":"))) for n, row in enumerate(rows)]
    assert sorted(expected) == want


def check_positions(server: PostgresServer, want: list[tuple[Any, ...]]) -> None:
    """Hold the writers to being all as far as the furthest, soon, though each is idle (I8, I10)."""
    positions = "SELECT instance_name, stream_id FROM stream_positions WHERE stream_name = 'orders'"

    def all_there() -> bool:
        stored = dict(server.sql(positions))
        newest = max(stored.values())
        return newest >= want[-1][0] and all(stored.get(name) == newest for name in WRITERS)

    until(all_there, "every writer is as far as the furthest", patience=10.0)
