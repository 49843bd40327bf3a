"""The lag of Synapse's own workers, without and with our workers: ``pytest -s tests/interop_modern/lag.py``.

One user sends ``RATE`` messages a second at the main process, and receives them with ``/sync`` at a worker that does
not write them.  The lag of a message is the time from the commit of its event until that answer.  Phases of
``--seconds`` alternate: without our workers, and with a relay that copies all streams over Redis and a worker behind
it.  With ``--spare`` our workers run only while a processor is free, as on a machine with a processor more.  The
figures are printed; no time is a failure.  PostgreSQL must have the extension ``pg_stat_statements``.

pytest collects this module by its name only.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.synapse import SERVER_NAME
from tests.interop_modern.copies import differences, in_copy, in_database
from tests.interop_modern.homeserver import MAIN, NAMES
from tests.postgres import PostgresServer
from tests.synapse.reading import READER
from tests.system.daemons import Daemon, fixed_ports, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.interop.synapse import Client
    from tests.interop_modern.cluster import Cluster

WITHOUT, WITH = "without our workers", "with our workers"
PHASES = (WITHOUT, WITH, WITH, WITHOUT) * 2  # so what grows with time is in both
RATE = 10  # messages a second
WARMING = 20  # messages before each phase that are not counted
TICKS = os.sysconf("SC_CLK_TCK")  # a second of CPU in /proc


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Start a server that stores the time of each commit, and counts the queries of each user."""
    more = {"track_commit_timestamp": "on", "shared_preload_libraries": "pg_stat_statements"}
    with PostgresServer(fsync=False, checkpoint_timeout="1d", autovacuum="off", **more) as server:
        server.sql("CREATE EXTENSION pg_stat_statements")
        yield server


class Reader(Thread):
    """One user at one process; ``times`` has when each message of a room was received, as ``time.time()``."""

    def __init__(self, user: Client, room: str) -> None:
        super().__init__(daemon=True)
        self.times: dict[str, float] = {}
        self._user, self._room = user, room
        self._ended = False

    def run(self) -> None:
        none: dict[str, list[str]] = {"types": []}
        of_room = {"rooms": [self._room], "timeline": {"limit": 100}, "ephemeral": none, "account_data": none}
        filtered = json.dumps({"room": of_room, "presence": none, "account_data": none})
        since: dict[str, str] = {}
        while not self._ended:
            answer = self._user.get("/sync", filter=filtered, timeout=1_000, set_presence="offline", **since)
            now = time.time()
            since = {"since": answer["next_batch"]}
            joined = answer.get("rooms", {}).get("join", {})
            for event in joined[self._room]["timeline"]["events"] if self._room in joined else ():
                self.times.setdefault(event["event_id"], now)

    def end(self) -> None:
        """End it, after its last answer."""
        self._ended = True
        self.join()


@pytest.mark.timeout(0)
def test_lag(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    seconds = request.config.getoption("--seconds")
    terminal = request.config.get_terminal_writer()
    cluster.traffic.pause()
    user = cluster.homeserver.register("erna")
    room = user.post("/createRoom", {"preset": "private_chat"})["room_id"]
    reader = Reader(user.at(cluster.homeserver.processes["writer1"].client_port), room)
    lags, sends = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    loads = defaultdict[str, list[dict[str, float]]](list)
    with ExitStack() as stack:
        workers = _workers(cluster, stack, tmp_path)
        if request.config.getoption("--spare"):
            for each in workers:
                each.before = ("chrt", "--idle", "0")
        reader.start()
        stack.callback(reader.end)
        for phase in PHASES:
            for each in workers:
                each.kill()
            if phase == WITH:
                for each in workers:
                    each.start()
                until(lambda: all(f"following {SERVER_NAME}" in each.log for each in workers), "both follow")
                _wait_until_equal(cluster, tmp_path / "behind.db")
            cluster.homeserver.wait_for_subscribers(len(NAMES) + (phase == WITH))
            _send(user, room, WARMING)
            before = _load(cluster, workers if phase == WITH else ())
            began = time.monotonic()
            took = _send(user, room, round(seconds * RATE))
            elapsed = time.monotonic() - began
            after = _load(cluster, workers if phase == WITH else ())
            here = _lags(cluster, reader, [*took])
            lags[phase] += here
            sends[phase] += [1_000 * each for each in took.values()]
            loads[phase].append({what: (after[what] - before[what]) / elapsed for what in after})
            terminal.line(f"{phase}: {len(took) / elapsed:.1f} messages/s, lag in ms: {_summary(here)}", flush=True)
    report: dict[str, dict[str, Any]] = {
        phase: {
            "messages": len(lags[phase]),
            "lag in ms": _summary(lags[phase]),
            "send and its answer in ms": _summary(sends[phase]),
            **{what: round(statistics.fmean(each[what] for each in loads[phase]), 3) for what in loads[phase][0]},
        }
        for phase in (WITHOUT, WITH)
    }
    terminal.line(json.dumps(report, indent=2))


def _workers(cluster: Cluster, stack: ExitStack, folder: Path) -> list[Daemon]:
    """Start the relay and the worker behind it; return both."""
    cluster.worker.kill()
    cluster.worker.options = tuple(each for each in cluster.worker.options if not each.startswith("--http="))
    wire, http = stack.enter_context(fixed_ports(cluster.worker))
    (folder / "behind.toml").write_text("copy = true\n")
    behind = Daemon(
        folder,
        "worker",
        "--config=behind.toml",
        "--instance-name=behind",
        f"--server-name={SERVER_NAME}",
        f"--database=sqlite:///{folder}/behind.db",
        f"--connect=tcp:{wire}",
        f"--catch-up=http://{http}",
    )
    return [cluster.worker, stack.enter_context(behind)]


def _wait_until_equal(cluster: Cluster, behind: Path) -> None:
    """Wait until both copies equal the database."""

    def equal() -> bool:
        time.sleep(0.3)
        wanted = in_database(cluster.postgres, cluster.database)
        return not any(differences(in_copy(each), wanted) for each in (cluster.copy, behind))

    until(equal, "both copies equal the database")


def _send(user: Client, room: str, number: int) -> dict[str, float]:
    """Send messages at the fixed rate; return the events, with the seconds until the answer."""
    begin = time.monotonic()
    took = {}
    for each in range(number):
        time.sleep(max(0.0, begin + each / RATE - time.monotonic()))
        began = time.monotonic()
        event = user.send_message(room, f"message {each}")
        took[event] = time.monotonic() - began
    return took


def _lags(cluster: Cluster, reader: Reader, events: Sequence[str]) -> list[float]:
    """Wait until all events are received; return the milliseconds from the commit of each."""
    until(lambda: reader.times.keys() >= {*events}, "all messages are received")
    sql = "SELECT event_id, extract(epoch FROM pg_xact_commit_timestamp(xmin)) FROM events WHERE event_id = ANY(%s)"
    commits = dict(cluster.postgres.sql(sql, events, database=cluster.database))
    return [1_000 * (reader.times[event] - float(commits[event])) for event in events]


def _summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive")
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1)}


def _load(cluster: Cluster, workers: Sequence[Daemon]) -> dict[str, float]:
    """Return the queries, the commands and the seconds of CPU until now."""
    queries = "SELECT rolname, sum(calls) FROM pg_stat_statements JOIN pg_roles ON pg_roles.oid = userid GROUP BY 1"
    called = {name: float(calls) for name, calls in cluster.postgres.sql(queries)}
    redis = dict(each.split(":", 1) for each in cluster.redis.call("INFO").decode().splitlines() if ":" in each)
    postmaster = int((cluster.postgres.folder / "data/postmaster.pid").read_text().split()[0])
    sessions = [int(each.name) for each in Path("/proc").glob("[0-9]*") if _stat(int(each.name))[1] == str(postmaster)]
    synapse = [cluster.homeserver.processes[each].pid for each in NAMES]
    return {
        "queries/s of Synapse": called["postgres"],
        "queries/s of our workers": called.get(READER, 0.0),
        "commands/s of Redis": float(redis["total_commands_processed"]),
        "cores of the main process": _cpu(cluster.homeserver.processes[MAIN].pid),
        "cores of Synapse": sum(map(_cpu, synapse)),
        "cores of PostgreSQL": _cpu(postmaster, ended=True) + sum(map(_cpu, sessions)),
        "cores of Redis": float(redis["used_cpu_user"]) + float(redis["used_cpu_sys"]),
        "cores of our workers": sum(_cpu(each.pid) for each in workers),
    }


def _cpu(process: int, *, ended: bool = False) -> float:
    """Return the seconds of CPU of a process, 0 if it has ended; ``ended``: with those of its children that have."""
    return sum(map(int, _stat(process)[11 : 15 if ended else 13])) / TICKS


def _stat(process: int) -> list[str]:
    """Return the fields of a process in /proc after its name: state, parent, …; those of one that has ended are few."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["X", "0"]
