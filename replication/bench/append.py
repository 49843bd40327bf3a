"""Durable facts per second: one at a time, 32 at once, and in batches of 1,000; over Python and over HTTP.

One row a fact; an append has returned when its facts are on the disk.  HTTP is asked as ``replication append`` asks it,
by another process, on connections that are kept.  Where there is a PostgreSQL, the same over Python, with a statement
of the application in each transaction, and by several processes that write one stream.
"""

from __future__ import annotations

import http.client
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred, gatherResults

from replication.bench.children import BenchError, Child, hear
from replication.bench.daemons import Address, serve_master
from replication.bench.databases import kinds
from replication.bench.rows import STREAM, WRITER, short_row
from replication.bench.series import Lap, Stopwatch, rates
from replication.wire.grammar import spell_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from replication.bench.databases import Kind
    from replication.bench.series import Effort, Series
    from replication.writer import StreamWriter


@attrs.frozen
class Way:
    """So many callers, each of which appends so many batches of so many facts, one batch after the other."""

    callers: int
    batches: int
    batch: int
    statement: bool = False

    @property
    def facts(self) -> int:
        """How many facts there are in all."""
        return self.callers * self.batches * self.batch


WAYS: Final = (
    ("one at a time", Way(callers=1, batches=2_000, batch=1)),
    ("32 at once", Way(callers=32, batches=200, batch=1)),
    ("batches of 1,000", Way(callers=1, batches=100, batch=1_000)),
)


PROCESSES: Final = 4
SHARED: Final = (
    *WAYS,
    ("32 at once, with SQL", Way(callers=32, batches=50, batch=1, statement=True)),
)
TOGETHER: Final = WAYS[1:]


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each way, over Python and then over HTTP."""
    with kinds() as (sqlite, *shared):
        with Child(_write, sqlite.make()) as master:
            address: Address = master.hear()
            for name, way in _sized(WAYS, effort):
                yield from rates(f"Python, {name}", "facts", [master.ask(way) for _ in range(effort.rounds)])
                yield from rates(f"HTTP, {name}", "facts", [_post(master, address, way) for _ in range(effort.rounds)])
        for kind in shared:
            with Child(_write, kind.make()) as master:
                master.hear()
                for name, way in _sized(SHARED, effort):
                    yield from rates(f"{kind.name}, {name}", "facts", [master.ask(way) for _ in range(effort.rounds)])
            yield from _measure_together(kind, effort)


def _measure_together(kind: Kind, effort: Effort) -> Iterator[Series]:
    """Measure several processes that write one stream at once."""
    database = kind.make()
    with ExitStack() as stack:
        masters: list[Child] = []
        for number in range(PROCESSES):
            masters.append(stack.enter_context(Child(_write, database, f"writer{number}")))
            masters[-1].hear()
        for name, way in _sized(TOGETHER, effort):
            laps = []
            for _ in range(effort.rounds):
                for each in masters:
                    each.say(way)
                every: list[Lap] = [each.hear() for each in masters]
                count, cpu = sum(each.count for each in every), sum(each.cpu for each in every)
                laps.append(Lap(count, max(each.wall for each in every), cpu))
            yield from rates(f"{kind.name}, {PROCESSES} writers, {name}", "facts", laps)


def _sized(ways: Sequence[tuple[str, Way]], effort: Effort) -> list[tuple[str, Way]]:
    return [(name, attrs.evolve(way, batches=effort.size(way.batches, 2))) for name, way in ways]


async def _write(reactor: Any, pipe: Connection[Any, Any], database: str, name: str = WRITER) -> None:
    master, address = await serve_master(reactor, database, name)
    pipe.send(address)
    while True:
        way: Way | None = await hear(reactor, pipe)
        pipe.send(time.process_time() if way is None else await _append(master.stream(STREAM), way))


async def _append(writer: StreamWriter, way: Way) -> Lap:
    facts = [[short_row(number)] for number in range(way.batch)]

    async def call() -> None:
        for _ in range(way.batches):
            if way.statement:
                async with writer.reserve() as fact:
                    await fact.execute("SELECT 1")
                    await fact.write(*facts[0])
            else:
                await writer.append(facts)

    watch = Stopwatch.start()
    await gatherResults([Deferred.fromCoroutine(call()) for _ in range(way.callers)])
    return watch.lap(way.facts)


def _post(master: Child, address: Address, way: Way) -> Lap:
    body = b"\n".join([f'{{"rows":[{spell_row(short_row(number))}]}}'.encode() for number in range(way.batch)])

    def call(_: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", address.http)
        for _ in range(way.batches):
            headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": uuid.uuid4().hex}
            connection.request("POST", f"/v1/streams/{STREAM}/facts", body, headers)
            with connection.getresponse() as answer:
                said = answer.read()
            if answer.status != http.HTTPStatus.OK:
                raise BenchError(f"an append was answered {answer.status}: {said.decode()}")
        connection.close()

    with ThreadPoolExecutor(way.callers) as callers:
        cpu: float = master.ask(None)
        watch = Stopwatch.start()
        list(callers.map(call, range(way.callers)))
        wall = watch.lap(way.facts).wall
        return Lap(way.facts, wall, master.ask(None) - cpu)
