"""Writers of one stream in PostgreSQL join, leave, change their names and come back, while other writers append."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, get_json, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer

NAMES = ("anna", "ben", "carl", "dora")
LINEAR_APP = """
def register(worker):
    @worker.on("orders", linear=True)
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (token INTEGER)")
        await txn.executemany("INSERT INTO seen VALUES (?)", [(fact.token,) for fact in facts])
"""
TABLE = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"


class Cluster:
    """Writers and followers of one stream; each has fixed ports. It stores the rows that were acknowledged."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database = folder, database
        ports = free_ports(2 * len(NAMES))
        self._ports = {name: (ports[2 * n], ports[2 * n + 1]) for n, name in enumerate(NAMES)}
        self.written: list[tuple[int, int, str, str]] = []

    def writer(self, name: str, writers: Sequence[str], *, role: str = "master") -> Daemon:
        """Return a process with these ``writers``; with none, each instance may write."""
        wire, http = self._ports[name]
        self._configure(
            name,
            f'instance_name = "{name}"',
            f'database = "{self.database}"',
            f'listen = ["tcp:{wire}:interface=127.0.0.1"]',
            f'http = "tcp:{http}:interface=127.0.0.1"',
            'writes = ["orders"]\nconnect = ["tcp:127.0.0.1:1"]' if role == "worker" else "",
            "[[streams]]",
            'name = "orders"',
            f"writers = {[*writers]}" if writers else "",
        )
        return Daemon(self.folder, role, f"--config={name}.toml", name=name)

    def follower(self, name: str, writers: Sequence[str], *options: str) -> Daemon:
        """Return a worker that follows these writers, and keeps a copy unless ``options`` name an application."""
        connections = [
            line
            for each in writers
            for line in (
                f"[writers.{each}]",
                f'connect = "tcp:127.0.0.1:{self._ports[each][0]}"',
                f'http = "http://127.0.0.1:{self._ports[each][1]}"',
            )
        ]
        self._configure(name, f'instance_name = "{name}"', *options, *connections)
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

    def url(self, name: str) -> str:
        """Return the HTTP of a writer."""
        return f"http://127.0.0.1:{self._ports[name][1]}"

    def positions(self, name: str) -> dict[str, Any]:
        """Return the positions of all writers, as one writer reports them."""
        found: dict[str, Any] = get_json(self.url(name), "/v1/streams/orders")["positions"]
        return found

    def copy(self, follower: str) -> list[tuple[Any, ...]]:
        """Return the rows that a follower has."""
        path = self.folder / f"replication-{follower}.db"
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
                return database.execute(TABLE).fetchall()
        except sqlite3.OperationalError:  # the database does not exist yet, or has no table
            return []

    def applied(self, follower: str) -> list[int]:
        """Return the IDs that the function of ``LINEAR_APP`` has received, in its order."""
        path = self.folder / f"replication-{follower}.db"
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, timeout=30)) as database:
            return [token for (token,) in database.execute("SELECT token FROM seen")]
        return []

    def has_all(self, follower: str) -> bool:
        """Whether a follower has each acknowledged row once, under the right writer."""
        return self.copy(follower) == sorted(self.written)


def test_f17_a_writer_joins_under_load_leaves_is_renamed_and_comes_back(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """Followers from the start, and new ones, miss no row. No writer waits for an instance that does not run."""
    cluster = Cluster(tmp_path, postgres.url())
    ending = Event()

    def append_repeatedly() -> None:
        while not ending.wait(0.01):
            cluster.write("anna", 3)

    first, later = NAMES[:2], NAMES[:3]
    with ExitStack() as stack:
        anna, ben = (stack.enter_context(cluster.writer(*each)) for each in (("anna", later), ("ben", first)))
        stack.enter_context(cluster.follower("early", later))
        for each in (anna, ben):
            each.address("the wire")
        cluster.write("ben", 10)
        until(lambda: cluster.has_all("early"), "the follower has the first rows")
        load = Thread(target=append_repeatedly)
        load.start()
        try:
            carl = stack.enter_context(cluster.writer("carl", later))  # joins under load
            carl.address("the wire")
            for name in ("carl", "ben", "carl"):
                cluster.write(name, 5)
            assert ben.terminate() == 0  # leaves
            cluster.write("carl", 5)
        finally:
            ending.set()
            load.join()
        until(lambda: cluster.has_all("early"), "the follower has all rows")
        assert (anna.terminate(), carl.terminate()) == (0, 0)

    new = ("anna", "dora")  # carl has the name dora from now on; ben does not run
    with cluster.writer("anna", new) as anna, cluster.writer("dora", new) as dora:
        for each in (anna, dora):
            each.address("the wire")
        for name in ("dora", "anna", "dora"):
            cluster.write(name, 200)
        newest = max(token for token, *_ in cluster.written)
        until(lambda: cluster.positions("anna").get("anna") == newest, "anna waits for neither ben nor carl")
        with cluster.follower("late", new):
            until(lambda: cluster.has_all("late"), "a new follower receives the rows of ben and carl, too")
        assert (dora.terminate(), anna.terminate()) == (0, 0)

    back = ("anna", "ben")  # a month later
    with cluster.writer("anna", back) as anna, cluster.writer("ben", back) as ben:
        for each in (anna, ben):
            each.address("the wire")
        until(lambda: cluster.positions("ben").get("ben") == newest, "ben has the position of the others")
        cluster.write("ben", 5)
        cluster.write("anna", 5)
        with cluster.follower("early", back), cluster.follower("late", back):
            for name in ("early", "late"):
                until(lambda name=name: cluster.has_all(name), f"{name} has all rows")  # type: ignore[misc]


def test_f17_a_removed_writer_holds_back_no_linear_order(tmp_path: Path, postgres: PostgresServer) -> None:
    """Neither that of a function nor that of a program that polls with ``since``."""
    (tmp_path / "linear_app.py").write_text(LINEAR_APP)
    with postgres.database() as name:
        cluster = Cluster(tmp_path, postgres.url(name))
        with cluster.writer("anna", NAMES[:2]) as anna, cluster.writer("ben", NAMES[:2]) as ben:
            for each in (anna, ben):
                each.address("the wire")
            cluster.write("ben", 3)
            assert (anna.terminate(), ben.terminate()) == (0, 0)
        linear = cluster.follower("linear", NAMES[:1], 'app = "linear_app"')
        linear.environment["PYTHONPATH"] += f":{tmp_path}"
        with cluster.writer("anna", NAMES[:1]) as anna, linear:
            anna.address("the wire")
            cluster.write("anna", 3)
            newest = max(token for token, *_ in cluster.written)

            until(
                lambda: cluster.applied("linear") == [*range(2, newest + 1)], "the function has all facts in order", 20
            )
            path = "/v1/streams/orders/updates?since=0"
            until(
                lambda: get_json(cluster.url("anna"), path)["upto_token"] == str(newest), "the token reaches them", 20
            )


def test_f17_a_sole_writer_is_renamed_while_its_follower_does_not_run(tmp_path: Path, postgres: PostgresServer) -> None:
    """No ``writers`` are configured. Each of two writers sends its own facts, in either order of their starts."""
    with postgres.database() as name:
        _rename(Cluster(tmp_path, postgres.url(name)))


def _rename(cluster: Cluster) -> None:
    with cluster.writer("anna", ()) as anna:
        anna.address("the wire")
        with cluster.follower("one", ("anna",)):
            cluster.write("anna", 3)
            until(lambda: cluster.has_all("one"), "the follower has the rows of its run")
        cluster.write("anna", 3)
        assert anna.terminate() == 0
    with cluster.writer("ben", ()) as ben:
        ben.address("the wire")
        cluster.write("ben", 3)
        with cluster.follower("one", ("ben",)):
            until(lambda: cluster.has_all("one"), "ben sends what anna wrote meanwhile")
        with cluster.writer("anna", ()) as anna:  # comes back
            anna.address("the wire")
            with cluster.follower("one", ("anna", "ben")), cluster.follower("both", ("anna", "ben")):
                for name in ("anna", "ben", "anna"):
                    cluster.write(name, 3)
                    for each in ("one", "both"):
                        until(lambda each=each: cluster.has_all(each), f"{each} has all rows")  # type: ignore[misc]


def test_f17_a_worker_that_writes_on_sqlite_is_renamed_and_serves_the_facts_of_its_former_names(tmp_path: Path) -> None:
    """It announced the former name, and answered 404 for its facts: new followers stood at 1."""
    cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/writer.db")
    for number, name in enumerate(("anna", "ben", "anna")):
        with cluster.writer(name, (), role="worker") as writer:
            writer.address("the wire")
            with cluster.follower("first", (name,)):
                cluster.write(name, 3)
                until(lambda: cluster.has_all("first"), "its follower has all rows")
            late = f"late-{number}"
            with cluster.follower(late, (name,)) as follower:
                until(lambda each=late: cluster.has_all(each), "a new follower has all rows")  # type: ignore[misc]
                assert "404" not in follower.log


def test_f17_a_writer_is_removed_from_the_others_before_it_stops(tmp_path: Path, postgres: PostgresServer) -> None:
    """What it writes until it stops stays at its followers, and reaches those that come later."""
    both, left = NAMES[:2], NAMES[:1]
    with postgres.database() as name:
        cluster = Cluster(tmp_path, postgres.url(name))
        with cluster.writer("anna", both) as anna, cluster.writer("ben", both) as ben:
            for each in (anna, ben):
                each.address("the wire")
            with cluster.follower("early", both) as early:
                cluster.write("ben", 3)
                assert anna.terminate() == 0
                with cluster.writer("anna", left) as again:
                    again.address("the wire")
                    cluster.write("ben", 3)
                    until(lambda: cluster.has_all("early"), "the follower has what ben wrote meanwhile")
                    assert ben.terminate() == 0
                    early.terminate()
                    for follower in ("early", "late"):
                        with cluster.follower(follower, left) as daemon:
                            cluster.write("anna", 1)
                            until(lambda each=follower: cluster.has_all(each), f"{follower} has all rows", 20)  # type: ignore[misc]
                            assert "went back" not in daemon.log


def test_f17_a_process_that_goes_on_and_writes_a_stream_no_more_publishes_what_it_wrote(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """New followers receive it, and linear order does not wait for this process."""
    (tmp_path / "linear_app.py").write_text(LINEAR_APP)
    both, left = NAMES[:2], NAMES[:1]
    with postgres.database() as name:
        cluster = Cluster(tmp_path, postgres.url(name))
        with cluster.writer("anna", both) as anna, cluster.writer("ben", both) as ben:
            for each in (anna, ben):
                each.address("the wire")
            cluster.write("ben", 3)
            cluster.write("anna", 3)
            assert (anna.terminate(), ben.terminate()) == (0, 0)
        linear = cluster.follower("linear", both, 'app = "linear_app"')
        linear.environment["PYTHONPATH"] += f":{tmp_path}"
        with cluster.writer("ben", left) as ben, cluster.writer("anna", left) as anna:
            for each in (ben, anna):
                each.address("the wire")
            with cluster.follower("late", both), linear:
                cluster.write("anna", 3)
                newest = max(token for token, *_ in cluster.written)
                until(lambda: cluster.has_all("late"), "a new follower has all rows", 20)
                until(lambda: cluster.applied("linear") == [*range(2, newest + 1)], "the function has all facts", 20)


MAPPED = """
    CREATE TABLE payments (id bigserial PRIMARY KEY, writer text, amount integer);
    INSERT INTO payments (writer, amount) VALUES ('a batch', 0);
"""
MAPPED_STREAM = """
[[streams]]
name = "payments"
table = "payments"
id_column = "id"
instance_column = "writer"
row = ["amount"]
writers = {}
"""


def test_f17_facts_of_a_renamed_writer_of_a_mapped_stream_are_published(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """New followers have them, followers of before do not receive them again, and linear order goes on.

    Rows of a name that no process has had are not published.
    """
    cluster = Cluster(tmp_path, postgres.url())
    (tmp_path / "linear.py").write_text(LINEAR_APP.replace('"orders"', '"payments"'))

    def write(name: str, count: int) -> None:
        append(cluster.url(name)[7:], "payments", [Fact(Token(0), ("[7]",)) for _ in range(count)])

    def published() -> list[tuple[Any, ...]]:
        return postgres.sql(
            "SELECT id, 0, writer, '[' || amount || ']' FROM payments WHERE writer <> 'a batch' ORDER BY 1"
        )

    def copy(follower: str) -> list[tuple[Any, ...]]:
        with (
            suppress(sqlite3.OperationalError),
            closing(sqlite3.connect(tmp_path / f"replication-{follower}.db")) as file,
        ):
            return file.execute(TABLE.replace("orders", "payments")).fetchall()
        return []

    def run(writers: Sequence[str], followers: Mapping[str, Sequence[str]]) -> None:
        with ExitStack() as stack:
            for each in writers:
                master = cluster.writer(each, writers)
                (tmp_path / f"{each}.toml").write_text(
                    (tmp_path / f"{each}.toml").read_text().partition("[[streams]]")[0]
                    + MAPPED_STREAM.format([*writers])
                )
                stack.enter_context(master).address("the wire")
            for each, options in followers.items():
                stack.enter_context(cluster.follower(each, writers, *options))
            for each in writers:
                write(each, 3)
            ids = [token for token, *_ in published()]
            for each, options in followers.items():
                if options:
                    until(lambda: cluster.applied(each) == ids, f"{each} has applied all")  # noqa: B023
                else:
                    until(lambda: copy(each) == published(), f"{each} has all")  # noqa: B023
            notes = get_json(cluster.url(writers[0]), "/v1/streams/payments")["notes"]
            assert any("has rows of 'a batch'," in each for each in notes)
            assert not any("'ben'" in each for each in notes)

    postgres.sql(MAPPED)
    linear = ['app = "linear"']
    run(["anna", "ben"], {"early": [], "linear": linear})
    run(["anna", "carl"], {"early": [], "linear": linear, "new": []})
    run(["anna", "carl"], {"early": [], "linear": linear, "new": [], "newest": []})
