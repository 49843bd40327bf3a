"""The cost of being idle, and of a peer that does not read.

CPU of a worker whose master publishes nothing.  Memory of a master per connection at rest.  Growth of a master that
publishes at full rate while one peer never reads, until that peer's queue is full and it is disconnected.  Memory is
resident memory, which Linux reports.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from replication.bench.daemons import (
    BenchMaster,
    BenchWorker,
    MasterAddress,
    address_of,
    database_in,
    make_worker,
    rest,
    serve_master,
    short_row,
)
from replication.bench.processes import BenchError, ChildProcess
from replication.bench.series import Series
from replication.net.admission import allow_open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.bench.series import BenchOptions

BATCH: Final = 1_000  # facts in one append


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure all three."""
    seconds = options.size(20, 1)
    yield Series("worker of a quiet master", "CPU", "cores", [_idle_once(seconds) for _ in range(options.rounds)])
    peers = options.size(1_000, 20)
    memory = [_connection_memory(peers) for _ in range(options.rounds)]
    yield Series(f"{peers:,} quiet connections", "memory per connection", "bytes", memory)
    batches = options.size(400, 5)
    memory = [_growth(batches) for _ in range(options.rounds)]
    yield Series("a peer that never reads", "memory", "bytes", memory)


async def _serve(reactor: Any, folder: str) -> BenchMaster:
    allow_open_files()
    return await serve_master(reactor, database_in(folder, "master"))


async def _append(master: BenchMaster, batches: int) -> None:
    rows = [[short_row(number)] for number in range(BATCH)]
    for _ in range(batches):
        await master.writer.append(rows)


def _idle_once(seconds: int) -> float:
    with (
        TemporaryDirectory(prefix="replication-bench-") as folder,
        ChildProcess(_serve, folder) as master,
        ChildProcess(make_worker, master.call(address_of), database_in(folder, "worker")) as worker,
    ):
        worker.call(BenchWorker.start, 1)
        worker.call(rest, seconds // 2)  # the start is over
        share: float = worker.call(rest, seconds)
    return share


def _connection_memory(peers: int) -> float:
    """Return the bytes of memory per connection."""
    with TemporaryDirectory(prefix="replication-bench-") as folder, ChildProcess(_serve, folder) as master:
        address = master.call(address_of)
        before = resident(master, "VmRSS")
        with ChildProcess(_connect, address, peers) as connections:
            connections.call(len)  # all are connected
            return (resident(master, "VmRSS") - before) / peers


def _connect(_: object, address: MasterAddress, peers: int) -> list[socket.socket]:
    allow_open_files()
    opened = []
    for _ in range(peers):
        peer = socket.create_connection(("127.0.0.1", address.wire))
        peer.sendall(b"NAME quiet\nPING 1\nREPLICATE\n")
        opened.append(peer)
    for peer in opened:
        greeting = b""
        while b"POSITION" not in greeting:
            greeting += peer.recv(1_000)
    return opened


def _growth(batches: int) -> float:
    """Return the bytes by which a master grows that has a peer that never reads."""
    with TemporaryDirectory(prefix="replication-bench-") as folder, ChildProcess(_serve, folder) as master:
        address: MasterAddress = master.call(address_of)
        master.call(_append, batches // 4)  # warm-up: the memory that appending needs by itself
        before = resident(master, "VmRSS")
        with socket.create_connection(("127.0.0.1", address.wire)):
            master.call(_append, batches)
        return float(resident(master, "VmHWM") - before)


def resident(child: ChildProcess, which: str) -> int:
    """Return the resident memory of a process in bytes: VmRSS is the current value, VmHWM the peak."""
    status = Path(f"/proc/{child.pid}/status")
    if not status.exists():
        raise BenchError("idle: memory is read from /proc, which only Linux has; run the other scenarios by name")
    found = re.search(rf"^{which}:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise BenchError(f"{status} has no {which}")
    return int(found[1]) * 1024
