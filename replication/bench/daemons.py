"""A master and a worker on real sockets, embedded as in an application, and the rows that they write and read."""

from __future__ import annotations

import time
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from twisted.internet.task import deferLater

from replication.bench.processes import PATIENCE
from replication.bench.series import Sample, Stopwatch
from replication.follower.worker import Worker
from replication.net.endpoints import server_endpoint
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName
from replication.writer.master import Master

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.interfaces import IProtocolFactory

    from replication.streams.definitions import StreamDefinition
    from replication.streams.facts import Fact
    from replication.writer.stream import StreamWriter

STREAM: Final = StreamName("events")
WRITER: Final = InstanceName("master")


def short_row(number: int) -> list[object]:
    """Return a row like those of Synapse's caches stream, which has most rows."""
    return ["get_user_by_id", [f"@u{number % 100_000:05}:example.com"], 1700000000000 + number]


def long_row(number: int) -> list[object]:
    """Return a row like those of Synapse's events stream."""
    event = f"$2s{number:09}xmJk7QmW9rVbT4yHc0LpZe6NfUaGdSiXo1BkR4w"
    return ["ev", [event, "!hTqYwLbVzDnRkPcMaE:example.com", "m.room.message", None, None, None, None, False]]


ROWS: Final[Mapping[str, Callable[[int], list[object]]]] = {"84-byte lines": short_row, "167-byte lines": long_row}


def database_in(folder: str, name: str) -> str:
    """Return the URL of an SQLite database."""
    return f"sqlite:///{Path(folder, name)}.db"


class MasterAddress(msgspec.Struct, frozen=True):
    """The port of a master's wire on this machine, and the URL of its HTTP API."""

    wire: int
    url: str


class BenchMaster(msgspec.Struct, frozen=True):
    """A started master of a child process, and the times of its start."""

    reactor: Any
    master: Master
    address: MasterAddress
    start: Sample

    @property
    def writer(self) -> StreamWriter:
        """The writer of STREAM."""
        return self.master.stream(STREAM)


address_of: Final = attrgetter("address")
start_of: Final = attrgetter("start")


async def serve_master(
    reactor: Any, database: str, name: str = WRITER, streams: Sequence[str | StreamDefinition] = (STREAM,)
) -> BenchMaster:
    """Return a started master."""
    watch = Stopwatch()
    master = Master(database=database, instance_name=name, streams=streams, reactor=reactor)
    await master.start()
    wire = await listen(reactor, master.factory())
    http = await listen(reactor, make_site(master.served, secret=None, reactor=reactor))
    return BenchMaster(reactor, master, MasterAddress(wire, f"http://127.0.0.1:{http}"), watch.sample(1))


async def stop(bench: BenchMaster) -> None:
    """Stop a master."""
    await bench.master.stop()


async def listen(reactor: Any, factory: IProtocolFactory) -> int:
    """Listen on a free port of this machine, and return it."""
    port = await server_endpoint(reactor, "tcp:0:interface=127.0.0.1").listen(factory)
    host: Any = port.getHost()  # Twisted's annotation has only what every address has
    number: int = host.port
    return number


class BenchWorker(msgspec.Struct, frozen=True):
    """A worker of a child process; its function decodes every row, and adds the numbers of rows to ``taken``."""

    reactor: Any
    worker: Worker
    taken: list[int]

    async def start(self, upto: int) -> None:
        """Start the worker, and wait until it has applied the facts up to ``upto``."""
        await self.worker.start()
        await self.wait_for(upto)

    async def wait_for(self, token: int) -> None:
        """Wait until a fact is applied."""
        await self.worker.wait_for(STREAM, WRITER, token, timeout=PATIENCE)


def make_worker(
    reactor: Any, master: MasterAddress, database: str, source: str | None = None, others: Sequence[MasterAddress] = ()
) -> BenchWorker:
    """Return a worker that follows masters; it fetches missed facts from ``source``, else from the masters."""
    masters = [master, *others]
    connect = [f"tcp:127.0.0.1:{each.wire}" for each in masters]
    urls = [each.url for each in masters]  # segments are used once a master has sent its history
    sources = [*dict.fromkeys([source, *urls])] if source else urls
    worker = Worker(connect=connect, catch_up=sources, database=database, reactor=reactor)
    taken: list[int] = []

    @worker.on(STREAM)
    def apply(facts: Sequence[Fact], txn: object) -> None:  # noqa: ARG001 (the database holds only the position)
        taken.append(sum([len(fact.rows) for fact in facts]))

    return BenchWorker(reactor, worker, taken)


async def rest(daemon: BenchMaster | BenchWorker, seconds: int) -> float:
    """Wait, and return the share of a core that was used."""
    watch = Stopwatch()
    await deferLater(daemon.reactor, seconds)
    sample = watch.sample(1)
    return sample.cpu / sample.wall


def cpu_time(_: object) -> float:
    """Return the CPU time of this process in seconds."""
    return time.process_time()
