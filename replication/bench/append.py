"""Durable facts per second: one at a time, 32 callers at once, batches of 1,000; through Python and through HTTP.

Each fact has one row; an append returns when its facts are durable.  HTTP requests come from another process, on
connections that are kept.  One is also measured that sends lines while it receives IDs, as ``replication append``.
With PostgreSQL the same is measured through Python, with a statement of the application in each transaction, and with
several processes that write one stream.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace
from twisted.internet.defer import Deferred, gatherResults

from replication.bench.cluster import database_kinds
from replication.bench.daemons import STREAM, BenchMaster, MasterAddress, address_of, cpu_time, serve_master, short_row
from replication.bench.processes import ChildProcess
from replication.bench.series import Sample, Stopwatch, rates
from replication.web.blocking_client import HttpClient
from replication.web.line_upload import LineUpload
from replication.wire.grammar import encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.cluster import DatabaseKind
    from replication.bench.series import BenchOptions, Series


class Workload(msgspec.Struct, frozen=True):
    """``callers`` append at the same time, each ``batches`` batches of ``batch`` facts, one after the other."""

    callers: int
    batches: int
    batch: int
    statement: bool = False

    @property
    def facts(self) -> int:
        """The number of all facts."""
        return self.callers * self.batches * self.batch


WORKLOADS: Final = (
    ("one at a time", Workload(callers=1, batches=2_000, batch=1)),
    ("32 at once", Workload(callers=32, batches=200, batch=1)),
    ("batches of 1,000", Workload(callers=1, batches=100, batch=1_000)),
)


LINES: Final = 200_000  # of one request
PROCESSES: Final = 4
SHARED: Final = (*WORKLOADS, ("32 at once, with SQL", Workload(callers=32, batches=50, batch=1, statement=True)))
TOGETHER: Final = WORKLOADS[1:]


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each workload, through Python and then through HTTP."""
    with database_kinds() as (sqlite, *shared):
        with ChildProcess(serve_master, sqlite.make()) as master:
            address: MasterAddress = master.call(address_of)
            for name, workload in _sized(WORKLOADS, options):
                yield from rates(f"Python, {name}", "facts", options, master.call, _append, workload)
                yield from rates(f"HTTP, {name}", "facts", options, _post, master, address, workload)
            lines = options.size(LINES, 2_000)
            yield from rates("HTTP, lines in one request", "facts", options, _upload, master, address, lines)
        for kind in shared:
            with ChildProcess(serve_master, kind.make()) as master:
                for name, workload in _sized(SHARED, options):
                    yield from rates(f"{kind.name}, {name}", "facts", options, master.call, _append, workload)
            yield from _measure_together(kind, options)


def _measure_together(kind: DatabaseKind, options: BenchOptions) -> Iterator[Series]:
    """Measure several processes that write one stream at the same time."""
    database = kind.make()
    with ExitStack() as stack:
        names = [f"writer{number}" for number in range(PROCESSES)]
        masters = [stack.enter_context(ChildProcess(serve_master, database, name)) for name in names]
        for each in masters:
            each.call(address_of)  # it has started
        for name, workload in _sized(TOGETHER, options):
            variant = f"{kind.name}, {PROCESSES} writers, {name}"
            yield from rates(variant, "facts", options, _append_together, masters, workload)


def _append_together(masters: Sequence[ChildProcess], workload: Workload) -> Sample:
    for each in masters:
        each.begin(_append, workload)
    every: list[Sample] = [each.result() for each in masters]
    count, cpu = sum(each.count for each in every), sum(each.cpu for each in every)
    return Sample(count, max(each.wall for each in every), cpu)


def _sized(workloads: Sequence[tuple[str, Workload]], options: BenchOptions) -> list[tuple[str, Workload]]:
    return [(name, replace(workload, batches=options.size(workload.batches, 2))) for name, workload in workloads]


async def _append(master: BenchMaster, workload: Workload) -> Sample:
    facts = [[short_row(number)] for number in range(workload.batch)]

    async def call() -> None:
        for _ in range(workload.batches):
            if workload.statement:
                async with master.writer.reserve() as fact:
                    await fact.execute("SELECT 1")
                    await fact.write(*facts[0])
            else:
                await master.writer.append(facts)

    watch = Stopwatch()
    await gatherResults([Deferred.fromCoroutine(call()) for _ in range(workload.callers)])
    return watch.sample(workload.facts)


def _upload(master: ChildProcess, address: MasterAddress, count: int) -> Sample:
    lines = [f'{{"rows":[{encode_row(short_row(number))}]}}'.encode() for number in range(count)]
    ids: list[int] = []
    with closing(HttpClient(address.url)) as client:
        upload = LineUpload(client, STREAM, ids.extend)
        cpu: float = master.call(cpu_time)
        watch = Stopwatch()
        for start in range(0, count, 1_000):
            upload.add(lines[start : start + 1_000])
        upload.finish()
        wall = watch.sample(count).wall
        return Sample(len(ids), wall, master.call(cpu_time) - cpu)


def _post(master: ChildProcess, address: MasterAddress, workload: Workload) -> Sample:
    body = b"\n".join([f'{{"rows":[{encode_row(short_row(number))}]}}'.encode() for number in range(workload.batch)])

    def call(_: int) -> None:
        with closing(HttpClient(address.url)) as client:
            for _ in range(workload.batches):
                headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": uuid.uuid4().hex}
                client.request("POST", f"/v1/streams/{STREAM}/facts", body, headers)

    with ThreadPoolExecutor(workload.callers) as callers:
        cpu: float = master.call(cpu_time)
        watch = Stopwatch()
        list(callers.map(call, range(workload.callers)))
        wall = watch.sample(workload.facts).wall
        return Sample(workload.facts, wall, master.call(cpu_time) - cpu)
