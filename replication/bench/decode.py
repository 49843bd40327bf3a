"""Bytes to the application's function: one worker process receives lines over a socket as fast as it reads.

The sender is another process with lines that were encoded before.  The worker is complete: it parses, checks, orders,
calls a function that decodes every row, and stores its position in SQLite in the same transaction.
"""

from __future__ import annotations

import socket
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from replication.bench.daemons import ROWS, STREAM, WRITER, BenchWorker, MasterAddress, database_in, make_worker
from replication.bench.processes import BenchError, ChildProcess
from replication.bench.series import Stopwatch, rates
from replication.session.encoder import encode_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.series import BenchOptions, Sample, Series

GREETING: Final = f"SERVER localhost\nPOSITION {STREAM} {WRITER} 0 1\n"  # from 0, so nothing is missing
NOWHERE: Final = "http://127.0.0.1:1"  # a catch-up source that does not exist: none is needed


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each length of rows, one row per fact."""
    rows = options.size(500_000, 2_000)
    for shape in ROWS:
        yield from rates(shape, "rows", options, _follow_once, shape, rows)


def _follow_once(shape: str, rows: int) -> Sample:
    with TemporaryDirectory(prefix="replication-bench-") as folder, ChildProcess(_Sender, shape, rows) as sender:
        address = MasterAddress(sender.call(_Sender.port), NOWHERE)
        with ChildProcess(make_worker, address, database_in(folder, "worker")) as worker:
            sender.begin(_Sender.greet)
            worker.call(BenchWorker.start, 1)
            sender.result()
            worker.begin(_follow, rows)
            sender.call(_Sender.send)
            sample: Sample = worker.result()
    if sample.count != rows:
        raise BenchError(f"{rows} rows were sent, but the function received {sample.count}")
    return sample


class _Sender:
    def __init__(self, _: object, shape: str, rows: int) -> None:
        """Encode all lines."""
        make_row = ROWS[shape]
        facts = [Fact(Token(number), (encode_row(make_row(number)),)) for number in range(2, rows + 2)]
        chunks = encode_facts(STREAM, WRITER, facts, after=Token(1), upto=Token(rows + 1))
        self._lines = b"".join(each.data for each in chunks)
        self._listener = socket.create_server(("127.0.0.1", 0))

    def port(self) -> int:
        """Return the port on which the worker is awaited."""
        number: int = self._listener.getsockname()[1]
        return number

    def greet(self) -> None:
        """Wait for the worker, and send what a writer sends first."""
        self._peer, _ = self._listener.accept()
        self._peer.sendall(GREETING.encode())

    def send(self) -> None:
        """Send all lines."""
        self._peer.sendall(self._lines)


async def _follow(worker: BenchWorker, rows: int) -> Sample:
    watch = Stopwatch()
    await worker.wait_for(rows + 1)
    return watch.sample(sum(worker.taken))
