"""A master and a worker as they run in an application's process, on real sockets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.endpoints import serverFromString

from replication.bench.rows import STREAM, WRITER
from replication.master import Master
from replication.web.site import make_site
from replication.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.internet.interfaces import IProtocolFactory

    from replication.streams.facts import Fact


def database_in(folder: str, name: str) -> str:
    """Return the URL of an SQLite database."""
    return f"sqlite:///{Path(folder, name)}.db"


@attrs.frozen
class Wiring:
    """What a worker connects to, where it catches up, and where it keeps its position."""

    connect: str
    source: str
    database: str


@attrs.frozen
class Address:
    """Where a master is reached: ports of this machine."""

    wire: int
    http: int

    @property
    def endpoint(self) -> str:
        """What a worker connects to."""
        return f"tcp:127.0.0.1:{self.wire}"

    @property
    def url(self) -> str:
        """Where its HTTP is."""
        return f"http://127.0.0.1:{self.http}"

    def wire_up(self, folder: str) -> Wiring:
        """Return what a worker needs that follows this master and keeps its database in ``folder``."""
        return Wiring(self.endpoint, self.url, database_in(folder, "worker"))


async def serve_master(reactor: Any, database: str, name: str = WRITER) -> tuple[Master, Address]:
    """Return a master that has started, and where it listens."""
    master = Master(database=database, instance_name=name, streams=[STREAM], reactor=reactor)
    await master.start()
    wire = await listen(reactor, master.factory())
    return master, Address(wire, await listen(reactor, make_site(master, secret=None, reactor=reactor)))


async def listen(reactor: Any, factory: IProtocolFactory) -> int:
    """Serve on a free port of this machine, and return which."""
    port = await serverFromString(reactor, "tcp:0:interface=127.0.0.1").listen(factory)
    number: int = port.getHost().port
    return number


def make_worker(reactor: Any, wiring: Wiring) -> tuple[Worker, list[int]]:
    """Return a worker whose function decodes every row, and the list whose sum is how many it got."""
    worker = Worker(connect=[wiring.connect], catch_up=[wiring.source], database=wiring.database, reactor=reactor)
    taken: list[int] = []

    @worker.on(STREAM)
    def apply(facts: Sequence[Fact], txn: object) -> None:  # noqa: ARG001 (the database has nothing but the position)
        taken.append(sum([len(fact.rows) for fact in facts]))

    return worker, taken
