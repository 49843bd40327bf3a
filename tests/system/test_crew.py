"""Writers of one stream in PostgreSQL come and go while others write: one joins, leaves, is renamed, and comes back."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, get_json, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer

NAMES = ("anna", "ben", "carl", "dora")
TABLE = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"


class Crew:
    """Whoever writes, each where it always is, and the rows that were acknowledged."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database = folder, database
        ports = free_ports(2 * len(NAMES))
        self._ports = {name: (ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(NAMES)}
        self.written: list[tuple[int, int, str, str]] = []

    def writer(self, name: str, crew: Sequence[str]) -> Daemon:
        """Return a master that knows who writes beside it; without a crew anybody may."""
        wire, http = self._ports[name]
        self._configure(
            name,
            f'instance_name = "{name}"',
            f'database = "{self.database}"',
            f'listen = ["tcp:{wire}:interface=127.0.0.1"]',
            f'http = "tcp:{http}:interface=127.0.0.1"',
            "[[streams]]",
            'name = "orders"',
            f"writers = {[*crew]}" if crew else "",
        )
        return Daemon(self.folder, "master", f"--config={name}.toml", name=name)

    def follower(self, name: str, crew: Sequence[str]) -> Daemon:
        """Return a worker that follows each of a crew, and keeps a copy."""
        places = [
            line
            for each in crew
            for line in (
                f"[writers.{each}]",
                f'connect = "tcp:127.0.0.1:{self._ports[each][0]}"',
                f'http = "http://127.0.0.1:{self._ports[each][1]}"',
            )
        ]
        self._configure(name, f'instance_name = "{name}"', *places)
        return Daemon(self.folder, "worker", f"--config={name}.toml", name=name)

    def _configure(self, name: str, *lines: str) -> None:
        (self.folder / f"{name}.toml").write_text("\n".join(lines))

    def write(self, name: str, count: int) -> None:
        """Append facts of two rows, all in one call."""
        start = len(self.written)
        facts = [Fact(Token(0), (f'["{name}",{start + n}]', "[null]")) for n in range(count)]
        tokens = append(f"127.0.0.1:{self._ports[name][1]}", "orders", facts)
        for token, fact in zip(tokens, facts, strict=True):
            self.written += [(token, n, name, text) for n, text in enumerate(fact.texts)]

    def positions(self, asked: str) -> dict[str, Any]:
        """Return what a writer says of itself and the others."""
        found: dict[str, Any] = get_json(f"http://127.0.0.1:{self._ports[asked][1]}", "/v1/streams/orders")["positions"]
        return found

    def copy(self, follower: str) -> list[tuple[Any, ...]]:
        """Return what a follower has."""
        path = self.folder / f"replication-{follower}.db"
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
                return database.execute(TABLE).fetchall()
        except sqlite3.OperationalError:  # there is no database yet, or no table in it
            return []

    def has_all(self, follower: str) -> bool:
        """Whether a follower has, once each and by the right writer, all that was acknowledged."""
        return self.copy(follower) == sorted(self.written)


def test_f17_a_writer_joins_under_load_leaves_is_renamed_and_comes_back(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """Followers that were there all the while, or come later, miss nothing; nobody waits for whoever is not there."""
    crew = Crew(tmp_path, postgres.url())
    resting = Event()

    def work() -> None:
        while not resting.wait(0.01):
            crew.write("anna", 3)

    first, later = NAMES[:2], NAMES[:3]
    with ExitStack() as stack:
        anna, ben = (stack.enter_context(crew.writer(*each)) for each in (("anna", later), ("ben", first)))
        stack.enter_context(crew.follower("early", later))
        for each in (anna, ben):
            each.address("the wire")
        crew.write("ben", 10)
        until(lambda: crew.has_all("early"), "the follower is there")
        load = Thread(target=work)
        load.start()
        try:
            carl = stack.enter_context(crew.writer("carl", later))  # joins under load
            carl.address("the wire")
            for name in ("carl", "ben", "carl"):
                crew.write(name, 5)
            assert ben.terminate() == 0  # leaves
            crew.write("carl", 5)
        finally:
            resting.set()
            load.join()
        until(lambda: crew.has_all("early"), "the follower that was there has all")
        assert (anna.terminate(), carl.terminate()) == (0, 0)

    new = ("anna", "dora")  # carl is called dora from now on, ben is away
    with crew.writer("anna", new) as anna, crew.writer("dora", new) as dora:
        for each in (anna, dora):
            each.address("the wire")
        for name in ("dora", "anna", "dora"):
            crew.write(name, 200)
        newest = max(token for token, *_ in crew.written)
        until(lambda: crew.positions("anna").get("anna") == newest, "nobody waits for whoever is not there")
        with crew.follower("late", new):
            until(lambda: crew.has_all("late"), "a follower that comes now hears of ben and carl, too")
        assert (dora.terminate(), anna.terminate()) == (0, 0)

    back = ("anna", "ben")  # a month later
    with crew.writer("anna", back) as anna, crew.writer("ben", back) as ben:
        for each in (anna, ben):
            each.address("the wire")
        until(lambda: crew.positions("ben").get("ben") == newest, "ben is where the others are before it writes")
        crew.write("ben", 5)
        crew.write("anna", 5)
        with crew.follower("early", back), crew.follower("late", back):
            for name in ("early", "late"):
                until(lambda name=name: crew.has_all(name), f"{name} has all")  # type: ignore[misc]


def test_f17_a_sole_writer_is_renamed_while_its_follower_is_away(tmp_path: Path, postgres: PostgresServer) -> None:
    """Nobody has said who may write; and of two who do, each speaks for itself, whoever comes first."""
    with postgres.database() as name:
        _rename(Crew(tmp_path, postgres.url(name)))


def _rename(crew: Crew) -> None:
    with crew.writer("anna", ()) as anna:
        anna.address("the wire")
        with crew.follower("one", ("anna",)):
            crew.write("anna", 3)
            until(lambda: crew.has_all("one"), "the follower has what it was there for")
        crew.write("anna", 3)
        assert anna.terminate() == 0
    with crew.writer("ben", ()) as ben:
        ben.address("the wire")
        crew.write("ben", 3)
        with crew.follower("one", ("ben",)):
            until(lambda: crew.has_all("one"), "it hears from ben of what anna wrote meanwhile")
        with crew.writer("anna", ()) as anna:  # comes back
            anna.address("the wire")
            with crew.follower("one", ("anna", "ben")), crew.follower("both", ("anna", "ben")):
                for name in ("anna", "ben", "anna"):
                    crew.write(name, 3)
                    for each in ("one", "both"):
                        until(lambda each=each: crew.has_all(each), f"{each} has all")  # type: ignore[misc]
