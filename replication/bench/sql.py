"""Programs that write mapped tables of PostgreSQL by plain SQL, and a master that polls many such tables at rest.

Commit to applied: from the return of an INSERT in a transaction of its own, by a program without this package, to
``wait_for`` at a worker in another process.  At rest: CPU of the master, and its queries.  The bench starts the server;
without PostgreSQL or its driver nothing is measured.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from replication.bench.cluster import Cluster, missing
from replication.bench.daemons import STREAM, WRITER, address_of, database_in, make_worker, rest, serve_master
from replication.bench.latency import PACE, QUANTILES, delays_between, quantiles
from replication.bench.processes import ChildProcess
from replication.bench.series import Series
from replication.storage.mapping_checks import install_trigger
from replication.streams.definitions import StreamDefinition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.series import BenchOptions

STREAMS: Final = [STREAM, *(f"mapped{number}" for number in range(2, 51))]
WARM_UP: Final = 12.0  # seconds until polls are rare and PostgreSQL has counted the queries of the start
INSERT: Final = f"INSERT INTO {STREAM} (name) VALUES ('a name') RETURNING id"  # noqa: S608 (a constant)
QUERIES: Final = "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = %s"


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure both if PostgreSQL is installed."""
    if missing():
        return
    with Cluster() as cluster:
        definitions = [StreamDefinition(each, table=each, id_column="id", row=["name"]) for each in STREAMS]
        for name in STREAMS:
            cluster.sql(f"CREATE TABLE {name} (id bigserial PRIMARY KEY, name text)")
        install_trigger(cluster.url(), definitions)
        commits, seconds = options.size(2_000, 20), options.size(20, 1)
        rounds = [_delays(cluster.url(), definitions, commits) for _ in range(options.rounds)]
        yield from quantiles(f"plain SQL, {PACE} commits/s", rounds, QUANTILES[:2])
        rests = [_rest(cluster, definitions, seconds) for _ in range(options.rounds)]
        variant = f"a master at rest over {len(STREAMS)} mapped streams"
        yield Series(variant, "CPU", "cores", [cpu for cpu, _ in rests])
        yield Series(variant, "sent to the server", "queries/s", [queries for _, queries in rests])


def _delays(database: str, streams: Sequence[StreamDefinition], commits: int) -> list[float]:
    """Return the time from commit to applied of each row in seconds."""
    with (
        TemporaryDirectory(prefix="replication-bench-") as folder,
        ChildProcess(serve_master, database, WRITER, streams) as master,
        ChildProcess(_Program, database) as program,
        ChildProcess(make_worker, master.call(address_of), database_in(folder, "worker")) as worker,
    ):
        return delays_between(program, _Program.commit, worker, program.call(_Program.insert), commits)


class _Program:
    """The program that writes by plain SQL."""

    def __init__(self, _: object, database: str) -> None:
        import psycopg  # noqa: PLC0415 (an extra)

        self._connection = psycopg.connect(database, autocommit=True)

    def insert(self) -> int:
        """Insert a row, and return its ID."""
        (number,) = self._connection.execute(INSERT).fetchone() or [0]
        return int(number)

    def commit(self, commits: int) -> list[float]:
        """Insert rows, each in a transaction of its own, and return the times of the commits."""
        committed = []
        start = time.monotonic()
        for number in range(commits):
            time.sleep(max(0.0, start + number / PACE - time.monotonic()))
            self.insert()
            committed.append(time.monotonic())
        return committed


def _rest(cluster: Cluster, streams: Sequence[StreamDefinition], seconds: int) -> tuple[float, float]:
    """Return the share of a core, and the server's transactions per second."""
    with ChildProcess(serve_master, cluster.url(), WRITER, streams) as master:
        master.call(address_of)  # it has started
        time.sleep(min(WARM_UP, float(seconds)))
        ((before,),) = cluster.sql(QUERIES, "postgres")
        start = time.monotonic()
        share: float = master.call(rest, seconds)
        ((after,),) = cluster.sql(QUERIES, "postgres")
        return share, (after - before - 1) / (time.monotonic() - start)  # one is the bench's own query
