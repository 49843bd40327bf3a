"""Bytes to the application's function, its rows decoded: one worker process, fed over a socket as fast as it reads.

The sender is another process, which only sends: lines that were spelt before.  The worker is whole: it parses, checks,
orders, hands facts to a function that decodes every row, and moves its position in SQLite in the same transaction.
"""

from __future__ import annotations

import socket
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from replication.bench.children import PATIENCE, BenchError, Child, hear
from replication.bench.daemons import Wiring, database_in, make_worker
from replication.bench.rows import SHAPES, STREAM, WRITER
from replication.bench.series import Stopwatch, rates
from replication.session.feed import spell_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, spell_row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from replication.bench.series import Effort, Lap, Series

GREETING: Final = f"SERVER localhost\nPOSITION {STREAM} {WRITER} 0 1\n"  # 0: a worker that knows nothing misses nothing
NOWHERE: Final = (
    "http://127.0.0.1:1"  # where the sender's facts could be caught up with; a worker that asks is too slow
)


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each shape of rows, a row a fact."""
    rows = effort.size(500_000, 2_000)
    for shape in SHAPES:
        yield from rates(shape, "rows", [_follow_once(shape, rows) for _ in range(effort.rounds)])


def _follow_once(shape: str, rows: int) -> Lap:
    with TemporaryDirectory(prefix="replication-bench-") as folder, Child(_send, shape, rows) as sender:
        wiring = Wiring(f"tcp:127.0.0.1:{sender.hear()}", NOWHERE, database_in(folder, "worker"))
        sender.hear()  # all is spelt
        with Child(_follow, wiring, rows) as worker:
            worker.hear()  # it is connected
            worker.say("go")
            sender.say("go")
            lap: Lap = worker.hear()
    if lap.count != rows:
        raise BenchError(f"{rows} rows were sent, {lap.count} came to the function")
    return lap


def _send(pipe: Connection[Any, Any], shape: str, rows: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    make_row = SHAPES[shape]
    facts = [Fact(Token(number), (spell_row(make_row(number)),)) for number in range(2, rows + 2)]
    lines = b"".join(each.data for each in spell_facts(STREAM, WRITER, facts, after=Token(1), upto=Token(rows + 1)))
    pipe.send("spelt")
    peer, _ = listener.accept()
    peer.sendall(GREETING.encode())
    pipe.recv()
    peer.sendall(lines)
    pipe.recv()  # until we are ended


async def _follow(reactor: Any, pipe: Connection[Any, Any], wiring: Wiring, rows: int) -> None:
    worker, taken = make_worker(reactor, wiring)
    await worker.start()
    pipe.send("connected")
    await hear(reactor, pipe)
    watch = Stopwatch.start()
    await worker.wait_for(STREAM, WRITER, rows + 1, timeout=PATIENCE)
    pipe.send(watch.lap(sum(taken)))
    await worker.stop()
