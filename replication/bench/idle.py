"""What costs while nothing happens, and what a peer costs that does not read.

CPU of a worker that follows a quiet master; memory of a master per connection that has introduced itself and is quiet;
and how far a master grows while it appends and announces at full rate and one peer never reads (it is cut off when its
queue is full).  Memory is resident memory of the process, as Linux counts it.
"""

from __future__ import annotations

import resource
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from twisted.internet.task import deferLater

from replication.bench.children import BenchError, Child, hear
from replication.bench.daemons import Address, Wiring, database_in, make_worker, serve_master
from replication.bench.rows import STREAM, WRITER, short_row
from replication.bench.series import Series, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from replication.bench.series import Effort

BATCH: Final = 1_000  # facts in one append


def measure(effort: Effort) -> Iterator[Series]:
    """Measure the three."""
    seconds = effort.size(20, 1)
    yield Series("worker of a quiet master", "CPU", "cores", [_rest_once(seconds) for _ in range(effort.rounds)])
    peers = effort.size(1_000, 20)
    memory = [_gather(peers) for _ in range(effort.rounds)]
    yield Series(f"{peers:,} quiet connections", "memory per connection", "bytes", memory)
    batches = effort.size(400, 5)
    memory = [_stuff(batches) for _ in range(effort.rounds)]
    yield Series("a peer that never reads", "memory", "bytes", memory)


async def _serve(reactor: Any, pipe: Connection[Any, Any], folder: str) -> None:
    """Serve, and append so many batches as often as asked."""
    _allow_open_files()
    master, address = await serve_master(reactor, database_in(folder, "master"))
    rows = [[short_row(number)] for number in range(BATCH)]
    pipe.send(address)
    while True:
        batches: int = await hear(reactor, pipe)
        for _ in range(batches):
            await master.stream(STREAM).append(rows)
        pipe.send("done")


# ---- a worker at rest


def _rest_once(seconds: int) -> float:
    with TemporaryDirectory(prefix="replication-bench-") as folder, Child(_serve, folder) as master:
        address: Address = master.hear()
        with Child(_rest, address.wire_up(folder), seconds) as worker:
            share: float = worker.hear()
    return share


async def _rest(reactor: Any, pipe: Connection[Any, Any], wiring: Wiring, seconds: int) -> None:
    worker, _ = make_worker(reactor, wiring)
    await worker.start()
    await worker.wait_for(STREAM, WRITER, 1)
    watch = Stopwatch.start()
    await deferLater(reactor, seconds)
    lap = watch.lap(1)
    pipe.send(lap.cpu / lap.wall)
    await worker.stop()


# ---- connections at rest


def _gather(peers: int) -> float:
    """Return how many bytes a connection takes."""
    with TemporaryDirectory(prefix="replication-bench-") as folder, Child(_serve, folder) as master:
        address: Address = master.hear()
        before = _resident(master, "VmRSS")
        with Child(_connect, address.wire, peers) as connections:
            connections.hear()
            return (_resident(master, "VmRSS") - before) / peers


def _connect(pipe: Connection[Any, Any], port: int, peers: int) -> None:
    _allow_open_files()
    opened = []
    for _ in range(peers):
        peer = socket.create_connection(("127.0.0.1", port))
        peer.sendall(b"NAME quiet\nPING 1\nREPLICATE\n")
        opened.append(peer)
    for peer in opened:
        said = b""
        while b"POSITION" not in said:
            said += peer.recv(1_000)
    pipe.send("connected")
    pipe.recv()  # until we are ended


# ---- a peer that never reads


def _stuff(batches: int) -> float:
    """Return how many bytes the master grew."""
    with TemporaryDirectory(prefix="replication-bench-") as folder, Child(_serve, folder) as master:
        address: Address = master.hear()
        master.ask(batches // 4)  # what appending takes by itself
        before = _resident(master, "VmRSS")
        with socket.create_connection(("127.0.0.1", address.wire)):
            master.ask(batches)
        return float(_resident(master, "VmHWM") - before)


def _resident(child: Child, which: str) -> int:
    """Return the resident memory of a process in bytes: VmRSS what it is, VmHWM the most that it was."""
    status = Path(f"/proc/{child.pid}/status")
    if not status.exists():
        raise BenchError("idle: memory is read from /proc, which only Linux has; name the other scenarios")
    for line in status.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == which:
            return int(value.removesuffix("kB")) * 1024
    raise BenchError(f"{status} does not say {which}")


def _allow_open_files() -> None:
    """Let this process have as many files as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
