"""The cost of the live page: the latency of a follower while browsers show it, and a start with the page and without.

The browsers follow the facts of the stream.  They are one process of the lowest priority, which stands for other hosts,
as in ``hostile``.  The starts are of ``twistd replication master``; memory is known on Linux only.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from replication.bench.cluster import free_ports
from replication.bench.daemons import STREAM, address_of, cpu_time, database_in, make_worker, serve_master
from replication.bench.latency import PACE, delays_between, quantiles, write_facts
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Series, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.daemons import MasterAddress
    from replication.bench.series import BenchOptions

VIEWERS: Final = 100
QUANTILES: Final = (("p50", 0.5), ("p99", 0.99))
BLOCK: Final = 65_536
TWISTD: Final = "from twisted.scripts.twistd import run; run()"
EVENTS: Final = f"GET /live/events?stream={STREAM} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
READY: Final = b"GET /health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
MEMORY: Final = Path("/proc/self/statm")  # Linux has it
_POLL_INTERVAL: Final = 0.005  # seconds
_Variant = TypeVar("_Variant", int, bool)


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure a follower without and with viewers, and starts with and without the page."""
    facts, counts = options.size(2_000, 20), (0, options.size(VIEWERS, 2))
    rounds = [{count: _delays(count, facts) for count in _turned(counts, each)} for each in range(options.rounds)]
    for count in counts:
        variant = f"{count} viewers, {PACE} facts/s"
        yield from quantiles(variant, [each[count][0] for each in rounds], QUANTILES)
        yield Series(variant, "CPU of the master", "cores", [each[count][1] for each in rounds])
    starts = [{page: _start(live_page=page) for page in _turned((True, False), each)} for each in range(options.rounds)]
    for page, variant in ((True, "a master with the page"), (False, "a master without it")):
        yield Series(variant, "start", "s", [each[page][0] for each in starts])
        if MEMORY.exists():
            yield Series(variant, "memory", "bytes", [each[page][1] for each in starts])


def _turned(variants: Sequence[_Variant], number: int) -> Sequence[_Variant]:
    """Return the variants in another order every second round: what a machine does then disturbs both alike."""
    return variants if number % 2 == 0 else variants[::-1]


def _delays(viewers: int, facts: int) -> tuple[list[float], float]:
    """Return the seconds from each commit until a worker has applied the fact, and the master's share of a core."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="replication-bench-"))
        master = stack.enter_context(ChildProcess(serve_master, database_in(folder, "master")))
        address: MasterAddress = master.call(address_of)
        worker = stack.enter_context(ChildProcess(make_worker, address, database_in(folder, "worker")))
        settled = 1 + PACE // 4  # facts before it: both processes have done everything once
        delays_between(master, write_facts, worker, 1, settled - 1)
        browsers = stack.enter_context(ChildProcess(_be_others))
        browsers.begin(_watch, address.url, viewers, time.monotonic() + facts / PACE)
        watch, before = Stopwatch(), master.call(cpu_time)
        delays = delays_between(master, write_facts, worker, settled, facts)
        share = (master.call(cpu_time) - before) / watch.sample(1).wall
        if (received := browsers.result()) < viewers:
            raise BenchError(f"{viewers} browsers opened the page, and {received} were answered")
        return delays, share


def _be_others(_: object) -> None:
    os.nice(19)


def _watch(_: object, url: str, viewers: int, end: float) -> int:
    """Show the page in so many browsers until ``end``, and until all are answered; return how many were."""
    host, port = urlsplit(url).netloc.split(":")
    received = set[object]()
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for _number in range(viewers):
            browser = stack.enter_context(closing(socket.create_connection((host, int(port)))))
            browser.sendall(EVENTS)
            selector.register(browser, selectors.EVENT_READ, browser)
        while (left := end + (0 if len(received) == viewers else PATIENCE) - time.monotonic()) > 0:
            for key, _events in selector.select(left):
                browser = key.data
                if b"retry: " in browser.recv(BLOCK):  # the beginning of the events
                    received.add(browser)
    return len(received)


def _start(*, live_page: bool) -> tuple[float, float]:
    """Return the seconds until a master is ready, and its resident memory in bytes."""
    with TemporaryDirectory(prefix="replication-bench-") as folder:
        http, wire = free_ports(2)
        options = [f"--{each}=tcp:{port}:interface=127.0.0.1" for each, port in (("listen", wire), ("http", http))]
        Path(folder, "master.toml").write_text(f"live_page = {str(live_page).lower()}\n")
        command = [sys.executable, "-c", TWISTD, "--nodaemon", "--pidfile=", "replication", "master", "--stream=events"]
        begin = time.monotonic()
        with subprocess.Popen(  # noqa: S603 (a constant command)
            [*command, "--config=master.toml", *options],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as master:
            try:
                while not _is_ready(http):
                    if master.poll() is not None or time.monotonic() > begin + PATIENCE:
                        raise BenchError("a master did not start")
                    time.sleep(_POLL_INTERVAL)
                return time.monotonic() - begin, _memory(master.pid)
            finally:
                master.terminate()


def _is_ready(http: int) -> bool:
    with suppress(ConnectionError), closing(socket.create_connection(("127.0.0.1", http))) as client:
        client.sendall(READY)
        return client.recv(BLOCK).startswith(b"HTTP/1.1 200")
    return False


def _memory(pid: int) -> float:
    """Return the resident memory of a process, in bytes; 0 where it is not known."""
    if not MEMORY.exists():
        return 0.0
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
