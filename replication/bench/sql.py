"""Programs that write with plain SQL into mapped tables of PostgreSQL, and a master over many such tables at rest.

Commit to applied: from the moment when an INSERT of a program that knows nothing of us has returned, in a transaction
of its own, to the moment when ``wait_for`` fires at a worker in another process.  At rest: CPU of the master, and what
it asks the server.  All on a server of our own; without one, or without the driver, nothing is measured.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.task import deferLater

from replication.bench.children import PATIENCE, Child, hear
from replication.bench.cluster import Cluster
from replication.bench.daemons import Address, Wiring, listen, make_worker
from replication.bench.databases import missing
from replication.bench.rows import STREAM, WRITER
from replication.bench.series import Series, Stopwatch
from replication.master import Master
from replication.storage.mappings import number_first
from replication.streams.registry import StreamDefinition
from replication.web.site import make_site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from replication.bench.series import Effort

PACE: Final = 200  # commits a second
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99))
STREAMS: Final = [STREAM, *(f"mapped{number}" for number in range(2, 51))]
SETTLE: Final = 12.0  # seconds after which looks are rare, and PostgreSQL has counted what the start asked for
ASKED: Final = "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = %s"


def measure(effort: Effort) -> Iterator[Series]:
    """Measure both, if there is a PostgreSQL here."""
    if missing():
        return
    with Cluster() as cluster:
        definitions = [StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in STREAMS]
        for name in STREAMS:
            cluster.sql(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, name text)")
        number_first(cluster.url(), definitions)
        commits, seconds = effort.size(2_000, 20), effort.size(20, 1)
        rounds = [_delays(cluster.url(), definitions, commits) for _ in range(effort.rounds)]
        for name, share in QUANTILES:
            values = [delays[min(int(len(delays) * share), len(delays) - 1)] for delays in rounds]
            yield Series(f"plain SQL, {PACE} commits/s", name, "s", values)
        rests = [_rest(cluster, definitions, seconds) for _ in range(effort.rounds)]
        variant = f"a master at rest over {len(STREAMS)} mapped streams"
        yield Series(variant, "CPU", "cores", [cpu for cpu, _ in rests])
        yield Series(variant, "asked of the server", "queries/s", [asked for _, asked in rests])


async def _serve(reactor: Any, pipe: Connection[Any, Any], database: str, streams: Sequence[StreamDefinition]) -> None:
    """Serve; asked for so many seconds, tell what share of a core they took."""
    master = Master(database=database, streams=streams, reactor=reactor)
    await master.start()
    wire = await listen(reactor, master.factory())
    pipe.send(Address(wire, await listen(reactor, make_site(master, secret=None, reactor=reactor))))
    while True:
        seconds: int = await hear(reactor, pipe)
        watch = Stopwatch.start()
        await deferLater(reactor, seconds)
        lap = watch.lap(1)
        pipe.send(lap.cpu / lap.wall)


# ---- commit to applied


def _delays(database: str, streams: Sequence[StreamDefinition], commits: int) -> list[float]:
    """Return, shortest first, how long each commit took to be applied."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="replication-bench-"))
        address: Address = stack.enter_context(Child(_serve, database, streams)).hear()
        writer = stack.enter_context(Child(_write, database, commits))
        first: int = writer.hear()
        worker = stack.enter_context(Child(_apply, address.wire_up(folder), first, commits))
        worker.hear()  # it is connected
        committed: Sequence[float] = writer.ask("go")
        applied: Sequence[float] = worker.hear()
    return sorted(there - here for here, there in zip(committed, applied, strict=True))


def _write(pipe: Connection[Any, Any], database: str, commits: int) -> None:
    """Be the program: INSERT once, and so many times more when told."""
    import psycopg  # noqa: PLC0415 (an extra)

    insert = f"INSERT INTO {STREAM} (name) VALUES ('a name') RETURNING id"  # noqa: S608 (a constant)
    with psycopg.connect(database, autocommit=True) as connection:
        pipe.send((connection.execute(insert).fetchone() or [0])[0])
        pipe.recv()
        committed = []
        start = time.monotonic()
        for number in range(commits):
            time.sleep(max(0.0, start + number / PACE - time.monotonic()))
            connection.execute(insert)
            committed.append(time.monotonic())
        pipe.send(committed)
        pipe.recv()  # until we are ended


async def _apply(reactor: Any, pipe: Connection[Any, Any], wiring: Wiring, first: int, commits: int) -> None:
    worker, _ = make_worker(reactor, wiring)
    await worker.start()
    await worker.wait_for(STREAM, WRITER, first, timeout=PATIENCE)
    pipe.send("connected")
    applied = []
    for token in range(first + 1, first + 1 + commits):
        await worker.wait_for(STREAM, WRITER, token, timeout=PATIENCE)
        applied.append(time.monotonic())
    pipe.send(applied)
    await worker.stop()


# ---- at rest


def _rest(cluster: Cluster, streams: Sequence[StreamDefinition], seconds: int) -> tuple[float, float]:
    """Return the share of a core, and how many transactions a second the server saw."""
    with Child(_serve, cluster.url(), streams) as master:
        master.hear()
        time.sleep(min(SETTLE, float(seconds)))
        ((before,),) = cluster.sql(ASKED, "postgres")
        start = time.monotonic()
        share: float = master.ask(seconds)
        ((after,),) = cluster.sql(ASKED, "postgres")
        return share, (after - before - 1) / (time.monotonic() - start)  # one is our own question
