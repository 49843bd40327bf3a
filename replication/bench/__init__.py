"""The scenarios of ``replication bench`` (docs/performance.md), and the simulation (docs/simulation.md).

Each scenario is a module with ``measure(options)``, which yields a :class:`Series` for each figure.  Its sockets,
processes and databases are real; databases lie in a temporary folder, so ``TMPDIR`` decides which disk is measured.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.bench.series import BenchOptions, Result

# Modules of this package, imported when they run.
SCENARIOS: Final[Mapping[str, str]] = {
    "ids": "reserve and complete stream IDs",
    "encode": "facts to RDATA lines",
    "decode": "bytes to the application's function, rows decoded",
    "redis": "10,000 RDATA a second of a Synapse, over Redis (with the extra redis)",
    "fanout": "settled facts to 1, 10 and 100 connections",
    "latency": "completed ID to applied by a worker in another process",
    "sql": "plain SQL to applied at a worker, and a master at rest over mapped tables",
    "append": "durable facts, through Python and through HTTP",
    "http": "one fact a request over HTTP, 1 and 32 clients, beside an empty resource of twisted.web",
    "own": "a statement of the application and a fact in one transaction, beside the bare drivers",
    "catchup": "all facts of a master to the function of a new worker",
    "replay": "a table to segments on Spark, against a plain scan (with the extra spark)",
    "rooms": "events of rooms persisted, and read",
    "scale": "the growth with streams, connections, open IDs, stored facts, rows and writers",
    "hostile": "latency as above, while bad peers attack the wire",
    "page": "the cost of the live page: a follower beside 100 browsers, and a start",
    "start": "CPU of a start: daemons until they serve, and short commands",
    "idle": "CPU and memory at rest, and while a peer does not read",
}
# The scenarios that ``--against`` measures, and the brokers that it measures them beside.
COMPARED: Final = ("fanout", "latency")
BROKERS: Final = ("redis", "nats")


def run(scenarios: Sequence[str], options: BenchOptions) -> Iterator[Result]:
    """Yield the results of ``scenarios`` one by one, as they are measured."""
    for name in dict.fromkeys(scenarios):
        for series in import_module(f"{__name__}.{name}").measure(options):
            yield series.result(name)


def compare(scenarios: Sequence[str], broker: str, options: BenchOptions) -> Iterator[Result]:
    """Yield our results of ``scenarios`` (see COMPARED), and those of ``broker`` (see BROKERS)."""
    against = import_module(f"{__name__}.against")
    for name in dict.fromkeys(scenarios):
        for series in getattr(against, f"compare_{name}")(broker, options):
            yield series.result(name)


def version_of(broker: str) -> str:
    """Return the version of a broker on this machine; BenchError with the cure if its program is missing."""
    version: str = import_module(f"{__name__}.brokers").version_of(broker)
    return version
