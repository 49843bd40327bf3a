"""The cost of the live page: the latency of a follower while browsers show it, and a start with the page and without.

The browsers follow the facts of the stream.  They are one process of the lowest priority, which stands for other hosts,
as in ``hostile``.  They have opened the page before the measurement begins.  The starts are of
``twistd replication master``; memory is known on Linux only.
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

import msgspec
from twisted.internet.task import deferLater

from replication.bench.cluster import free_ports
from replication.bench.daemons import STREAM, address_of, cpu_time, database_in, make_worker, short_row
from replication.bench.latency import PACE, delays_between, quantiles, write_facts
from replication.bench.processes import PATIENCE, BenchError, ChildProcess
from replication.bench.series import Series, Stopwatch
from replication.bench.turns import begin_turns, serve_watched, turns_of
from replication.net.admission import allow_open_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.daemons import MasterAddress
    from replication.bench.series import BenchOptions
    from replication.bench.turns import WatchedMaster

VIEWERS: Final = ((100, 2), (1_000, 20))  # full and quick size
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
    facts, seconds = options.size(2_000, 20), options.size(20, 3)
    counts = (0, *(options.size(*each) for each in VIEWERS))
    rounds = [
        {count: _round(count, facts, seconds) for count in _turned(counts, each)} for each in range(options.rounds)
    ]
    for count in counts:
        variant = f"{count:,} viewers, {PACE} facts/s"
        yield from quantiles(variant, [each[count].delays for each in rounds], QUANTILES)
        yield Series(variant, "CPU of the master", "cores", [each[count].cores for each in rounds])
        yield Series(variant, "CPU of the longest turn", "s", [each[count].longest for each in rounds])
        slow = f"{count:,} viewers, 1 fact/s"
        yield Series(slow, "CPU of the master", "cores", [each[count].slow_cores for each in rounds])
        if count:
            yield Series(slow, "bytes a second to each", "bytes", [each[count].received for each in rounds])
    starts = [{page: _start(live_page=page) for page in _turned((True, False), each)} for each in range(options.rounds)]
    for page, variant in ((True, "a master with the page"), (False, "a master without it")):
        yield Series(variant, "start", "s", [each[page][0] for each in starts])
        if MEMORY.exists():
            yield Series(variant, "memory", "bytes", [each[page][1] for each in starts])


def _turned(variants: Sequence[_Variant], number: int) -> Sequence[_Variant]:
    """Return the variants in another order every second round: what a machine does then disturbs both alike."""
    return variants if number % 2 == 0 else variants[::-1]


class _Round(msgspec.Struct, frozen=True):
    """The seconds from each commit until a worker has applied the fact, and what the master did meanwhile.

    ``cores``: its CPU time, by the clock.  ``longest``: the CPU time of its longest turn, in seconds.

    ``slow_cores``: its CPU time afterwards, at one fact a second: almost all of it is for the viewers.  ``received``:
    the bytes that each viewer received a second then.
    """

    delays: list[float]
    cores: float
    longest: float
    slow_cores: float
    received: float


def _round(viewers: int, facts: int, seconds: int) -> _Round:
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="replication-bench-"))
        master = stack.enter_context(ChildProcess(serve_watched, database_in(folder, "master")))
        address: MasterAddress = master.call(address_of)
        worker = stack.enter_context(ChildProcess(make_worker, address, database_in(folder, "worker")))
        settled = 1 + PACE // 4  # facts before it: both processes have done everything once
        delays_between(master, write_facts, worker, 1, settled - 1)
        browsers = stack.enter_context(ChildProcess(_Browsers, address.url, viewers))
        browsers.call(_Browsers.open)
        browsers.begin(_Browsers.read, facts / PACE)
        master.call(begin_turns)
        watch, before = Stopwatch(), master.call(cpu_time)
        delays = delays_between(master, write_facts, worker, settled, facts)
        cores = (master.call(cpu_time) - before) / watch.sample(1).wall
        longest, _ = master.call(turns_of)
        browsers.result()
        browsers.begin(_Browsers.read, seconds)
        watch, before = Stopwatch(), master.call(cpu_time)
        master.call(_write_slowly, seconds)
        slow_cores = (master.call(cpu_time) - before) / watch.sample(1).wall
        return _Round(delays, cores, longest, slow_cores, browsers.result())


async def _write_slowly(master: WatchedMaster, seconds: int) -> None:
    """Write a fact each second, so that the viewers have something new to see."""
    for number in range(seconds):
        async with master.writer.reserve() as fact:
            await fact.write(short_row(number))
        await deferLater(master.reactor, 1.0)


class _Browsers:
    """Many open pages, which follow the facts of the stream."""

    def __init__(self, _: object, url: str, count: int) -> None:
        allow_open_files()
        os.nice(19)
        host, port = urlsplit(url).netloc.split(":")
        self._place, self._count = (host, int(port)), count
        self._selector = selectors.DefaultSelector()

    def open(self) -> None:
        """Open the pages, and return once each has received the beginning of its events."""
        for _ in range(self._count):
            browser = socket.create_connection(self._place, PATIENCE)
            browser.sendall(EVENTS)
            received = b""
            while b"retry: " not in received:
                if not (block := browser.recv(BLOCK)):
                    raise BenchError("a browser opened the page, and was not answered")
                received += block
            self._selector.register(browser, selectors.EVENT_READ, browser)

    def read(self, seconds: float) -> float:
        """Read for some time; return the bytes that each page received a second."""
        size, end = 0, time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _events in self._selector.select(left):
                size += len(key.data.recv(BLOCK))
        return size / seconds / max(self._count, 1)


def _start(*, live_page: bool) -> tuple[float, float]:
    """Return the seconds until a master is ready, and its resident memory in bytes."""
    with TemporaryDirectory(prefix="replication-bench-") as folder:
        http, wire = free_ports(2)
        options = [f"--{each}=tcp:{port}:interface=127.0.0.1" for each, port in (("listen", wire), ("http", http))]
        Path(folder, "master.toml").write_text(f"live_page = {str(live_page).lower()}\n", encoding="utf-8")
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
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
