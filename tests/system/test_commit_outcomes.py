"""PostgreSQL goes down at the moment of a COMMIT, stays down for a while, and comes back.

No append fails for certain whose row is stored, and every stored row reaches followers.
"""

from __future__ import annotations

import socket
import sqlite3
import threading
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

from tests.postgres import PostgresServer
from tests.system.daemons import Daemon, fixed_ports, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

NEEDLE = b"at the moment of its commit"
COMMITTED = b"C\x00\x00\x00\x0bCOMMIT\x00"  # the server's answer to COMMIT
NOT_COMMITTED = "nothing was committed"


class Proxy:
    """A proxy of PostgreSQL that breaks all connections once, at the COMMIT of a transaction with the needle.

    ``moment``: the transaction does not arrive, or it arrives, or its outcome does not come back.
    """

    def __init__(self, server: PostgresServer, moment: str) -> None:
        self.server, self.moment = server, moment
        self.cut = threading.Event()
        self._armed, self._lock = True, threading.Lock()
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no further connection."""
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.server.port))
                except OSError:  # it is down
                    client.close()
                    continue
                self._open += [client, server]
                state = {"needle": False}
                for source, target, up in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=(source, target, up, state), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, up: bool, state: dict[str, bool]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if up and NEEDLE in data:
                    state["needle"] = True
                at_moment = state["needle"] and (
                    up and NEEDLE in data if self.moment != "answered" else COMMITTED in data
                )
                if at_moment and self._armed:
                    with self._lock:
                        self._armed = False
                    if self.moment == "sent":
                        target.sendall(data)
                    self.server.stop("immediate")
                    for each in self._open:
                        _end(each)
                    self.cut.set()
                    return
                target.sendall(data)
        for each in (source, target):
            _end(each)


def _end(connection: socket.socket) -> None:
    """Close a connection that another thread may be reading."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Cluster:
    """A master behind a proxy of its database, and a follower with a copy."""

    def __init__(self, folder: Path, stack: ExitStack, server: PostgresServer, moment: str) -> None:
        self.folder, self.server = folder, server
        self.database = stack.enter_context(server.database())
        self.proxy = Proxy(self.server, moment)
        stack.callback(self.proxy.close)
        url = f"postgresql://postgres@127.0.0.1:{self.proxy.port}/{self.database}"
        self.master = Daemon(folder, "master", "--stream=orders", f"--database={url}")
        wire, self.http = stack.enter_context(fixed_ports(self.master))
        options = (f"--connect=tcp:{wire}", f"--catch-up=http://{self.http}", "--instance-name=copy")
        stack.enter_context(Daemon(folder, "worker", *options, name="copy"))
        self.answers: list[tuple[str, int, str]] = []
        self.threads: list[threading.Thread] = []

    def append(self, row: str) -> None:
        """Append a row, and keep the answer."""
        try:
            status, body = ask(
                f"http://{self.http}/v1/streams/orders/facts",
                b'{"rows":["%s"]}' % row.encode(),
                {"Content-Type": "application/json"},
            )
        except OSError:  # the master was killed
            status, body = 0, ""
        self.answers.append((row, status, str(body)))

    def begin(self, row: str) -> None:
        """Append a row on a thread."""
        self.threads.append(threading.Thread(target=self.append, args=(row,)))
        self.threads[-1].start()

    def break_at_commit(self) -> None:
        """Append the row at whose COMMIT the server goes down, and rows after it."""
        self.append("first")
        self.begin(NEEDLE.decode())
        assert self.proxy.cut.wait(60)
        for number in range(3):
            self.begin(f"while it is down {number}")

    def end(self) -> Sequence[str]:
        """Check all answers and the copy; return the stored rows."""
        for each in self.threads:
            each.join()
        until(lambda: self.answered("last"), "an append works again")
        rows = self.server.sql('SELECT "row" FROM stream_orders ORDER BY stream_id', database=self.database)
        stored = [row.strip('"') for (row,) in rows]
        for row, status, body in self.answers:
            assert stored.count(row) <= 1, "twice"
            if status == 200:
                assert row in stored
            if row in stored:
                assert status in (0, 200) or NOT_COMMITTED not in body, (row, status, body)
        until(lambda: self.copied() == stored, f"the copy has {stored}")
        return stored

    def answered(self, row: str) -> bool:
        """Append a row unless that was done; return whether it was acknowledged."""
        self.append(row)
        return self.answers[-1][1] == 200

    def copied(self) -> list[str]:
        """Return the rows of the follower."""
        with closing(sqlite3.connect(self.folder / "replication-copy.db")) as database:
            try:
                rows = database.execute('SELECT "row" FROM stream_orders ORDER BY stream_id').fetchall()
            except sqlite3.OperationalError:
                return []
        return [row.strip('"') for (row,) in rows]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Start a server that is killed and started again."""
    with PostgresServer(fsync=False) as server:
        yield server


@pytest.fixture(params=["not sent", "sent", "answered"])
def cluster(request: pytest.FixtureRequest, server: PostgresServer, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack, server, request.param)


def test_a_server_that_goes_down_at_a_commit_and_comes_back(cluster: Cluster) -> None:
    cluster.break_at_commit()
    threading.Event().wait(2.0)
    cluster.server.start()
    stored = cluster.end()
    needle = next(each for each in cluster.answers if each[0] == NEEDLE.decode())
    assert needle[1] == 200, "the append waits for the outcome"
    if cluster.proxy.moment == "answered":
        assert stored[1] == NEEDLE.decode()
    assert cluster.master.starts == 1


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_master_that_ends_while_an_outcome_is_unknown(cluster: Cluster, how: str) -> None:
    cluster.break_at_commit()
    threading.Event().wait(1.0)
    getattr(cluster.master, how)()
    cluster.server.start()
    cluster.master.start()
    cluster.master.address("HTTP")
    stored = cluster.end()
    assert cluster.proxy.moment != "answered" or stored[1] == NEEDLE.decode()
