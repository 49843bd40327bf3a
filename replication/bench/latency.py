"""Complete to applied by a worker in another process, at a steady pace, with one kind of database on both sides.

From the moment when the writer's ``async with`` block is left (the fact is durable, its ID complete) to the moment when
``wait_for`` fires at the worker: its function has run, and its position is durable too.  Both read one clock, the
machine's.  p99.9 rests on few facts a round.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.task import deferLater

from replication.bench.children import PATIENCE, Child, hear
from replication.bench.daemons import Address, Wiring, make_worker, serve_master
from replication.bench.databases import POSTGRES, kinds
from replication.bench.rows import STREAM, WRITER, short_row
from replication.bench.series import Series

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from replication.bench.databases import Kind
    from replication.bench.series import Effort

PACE: Final = 200  # facts a second
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))


def measure(effort: Effort) -> Iterator[Series]:
    """Measure one worker that follows one writer, on each kind of database."""
    facts = effort.size(2_000, 20)
    with kinds() as every:
        for kind in every:
            rounds = [_delays(kind, facts) for _ in range(effort.rounds)]
            variant = f"{kind.name}, {PACE} facts/s" if kind.name == POSTGRES else f"{PACE} facts/s"
            for name, share in QUANTILES:
                values = [delays[min(int(len(delays) * share), len(delays) - 1)] for delays in rounds]
                yield Series(variant, name, "s", values)


def _delays(kind: Kind, facts: int) -> list[float]:
    """Return, shortest first, how long each fact took."""
    with Child(_write, kind.make(), facts) as master:
        address: Address = master.hear()
        with Child(_apply, Wiring(address.endpoint, address.url, kind.make()), facts) as worker:
            worker.hear()  # it is connected
            completed: Sequence[float] = master.ask("go")
            applied: Sequence[float] = worker.hear()
    return sorted(there - here for here, there in zip(completed, applied, strict=True))


async def _write(reactor: Any, pipe: Connection[Any, Any], database: str, facts: int) -> None:
    master, address = await serve_master(reactor, database)
    pipe.send(address)
    await hear(reactor, pipe)
    completed = []
    start = time.monotonic()
    for number in range(facts):
        await deferLater(reactor, max(0.0, start + number / PACE - time.monotonic()))
        async with master.stream(STREAM).reserve() as fact:
            await fact.write(short_row(number))
        completed.append(time.monotonic())
    pipe.send(completed)
    await hear(reactor, pipe)  # until we are ended


async def _apply(reactor: Any, pipe: Connection[Any, Any], wiring: Wiring, facts: int) -> None:
    worker, _ = make_worker(reactor, wiring)
    await worker.start()
    await worker.wait_for(STREAM, WRITER, 1)
    pipe.send("connected")
    applied = []
    for token in range(2, facts + 2):
        await worker.wait_for(STREAM, WRITER, token, timeout=PATIENCE)
        applied.append(time.monotonic())
    pipe.send(applied)
    await worker.stop()
