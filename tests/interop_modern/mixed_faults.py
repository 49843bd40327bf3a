"""Mixed faults on a real Synapse, at random: ``pytest tests/interop_modern/mixed_faults.py --minutes=60``.

Our worker copies every stream over Redis, and is a relay.  Two more workers, one over Redis and one behind the relay,
each have a function for some streams and copy the others.  After each fault the time is taken until the relay's copy
has all facts of the database.  At the end all copies equal the database, row by row, and each function was called once
for each fact, with these rows.  The figures are printed.

pytest collects this module by its name only.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop.synapse import SERVER_NAME
from tests.interop_modern.copies import SQL, differences, in_copy, in_database, in_effects
from tests.interop_modern.homeserver import ADDED, MAIN
from tests.redis import Monitor
from tests.synapse.reading import READER
from tests.system.daemons import CHECKOUT, Daemon, fixed_ports, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.interop_modern.cluster import Cluster

FUNCTIONS = ("events", "push_rules", "caches", "quarantined_media")
COPIES = [each for each in SQL if each not in FUNCTIONS]
INTERVAL = 10.0  # seconds, the default of audit_interval
MINUTE = 60.0  # seconds between two REPLICATEs at least: `caches` has no other sign of what was lost
MOMENT = 5.0  # seconds to look again, to fetch and to compare
PATIENCE = 240.0
APP = f"""
import json


async def store(facts, txn):
    await txn.execute("CREATE TABLE IF NOT EXISTS effects (stream TEXT, token INTEGER, writer TEXT, rows TEXT)")
    effects = [(txn.stream, each.token, txn.writer_of(each), json.dumps(each.texts)) for each in facts]
    await txn.executemany("INSERT INTO effects VALUES (?, ?, ?, ?)", effects)


def register(worker):
    for stream in {FUNCTIONS!r}:
        worker.on(stream)(store)
"""


class Faults:
    """What can go wrong; each method makes one fault, and returns when its cause is gone."""

    def __init__(self, cluster: Cluster, workers: list[Daemon], chance: random.Random) -> None:
        self.cluster, self.workers, self.chance = cluster, workers, chance

    def redis_is_killed(self) -> None:
        """Kill it, and start it again, empty."""
        self.cluster.redis.kill()
        self.cluster.act(self.chance.uniform(0.5, 4))
        self.cluster.redis.start()
        self.cluster.monitors.append(Monitor(self.cluster.redis))

    def subscriptions_are_dropped(self) -> None:
        """Close all subscribed connections."""
        self.cluster.redis.drop_subscribers()

    def publishers_are_dropped(self) -> None:
        """Close the connections on which Synapse publishes, with a second of unread messages."""
        self.cluster.redis.call("CLIENT", "PAUSE", "1500", "WRITE")
        self.cluster.act(1)
        for each in self.cluster.homeserver.publishers():
            self.cluster.redis.call("CLIENT", "KILL", "ID", each)

    def redis_is_paused(self) -> None:
        """Let it answer nothing for a moment."""
        self.cluster.redis.call("CLIENT", "PAUSE", "3000", "ALL")
        self.cluster.act(3)

    def our_worker_is_killed(self) -> None:
        """Kill one of our workers, and start it again."""
        worker = self.chance.choice(self.workers)
        worker.kill()
        self.cluster.act(self.chance.uniform(0, 3))
        worker.start()

    def postgresql_is_restarted(self) -> None:
        """Restart the database."""
        self.cluster.postgres.restart()

    def synapse_is_killed(self) -> None:
        """Kill one process of Synapse but the main one, and start it again."""
        name = self.chance.choice([name for name in self.cluster.homeserver.processes if name not in (MAIN, ADDED)])
        self.cluster.homeserver.processes[name].kill()
        self.cluster.act(self.chance.uniform(0.5, 3))
        self.cluster.homeserver.processes[name].start()

    def synapse_is_added(self) -> None:
        """Add a process of Synapse, or take it away."""
        added = self.cluster.homeserver.processes[ADDED]
        if added.running:
            added.stop()
            for user in self.cluster.traffic.users:
                user.anywhere = [each for each in user.anywhere if each.port != added.client_port]
        else:
            added.start()
            for user in self.cluster.traffic.users:
                user.anywhere.append(user.at_main.at(added.client_port))

    def all(self) -> list[Callable[[], None]]:
        """Return all faults; the first loses rows without a trace."""
        return [
            *[self.publishers_are_dropped] * 3,
            self.redis_is_killed,
            self.subscriptions_are_dropped,
            self.redis_is_paused,
            *[self.our_worker_is_killed] * 2,
            self.postgresql_is_restarted,
            self.synapse_is_killed,
            self.synapse_is_added,
        ]


@pytest.mark.timeout(0)
def test_mixed_faults(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    minutes = request.config.getoption("--minutes")
    chance = random.Random(minutes)
    terminal = request.config.get_terminal_writer()

    def show(text: str) -> None:
        terminal.line(text)
        terminal.flush()

    took: dict[str, list[dict[str, float]]] = defaultdict(list)
    (tmp_path / "effects.py").write_text(APP)
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "direct.toml").write_text(f"copy = true\n{configuration}")
    (tmp_path / "behind.toml").write_text("copy = true\n")
    with ExitStack() as stack:
        cluster.worker.kill()
        cluster.worker.options = tuple(each for each in cluster.worker.options if not each.startswith("--http="))
        wire, http = stack.enter_context(fixed_ports(cluster.worker))
        redis = [each for each in cluster.worker.options if each.startswith(("--connect=", "--redis-password-file="))]
        sources = {
            "direct": [*redis, f"--catch-up={cluster.postgres.url(cluster.database, READER)}"],
            "behind": [f"--connect=tcp:{wire}", f"--catch-up=http://{http}"],
        }
        followers = [
            stack.enter_context(
                Daemon(
                    tmp_path,
                    "worker",
                    f"--config={name}.toml",
                    f"--instance-name={name}",
                    f"--server-name={SERVER_NAME}",
                    f"--database=sqlite:///{tmp_path}/{name}.db",
                    "--app=effects",
                    *options,
                    name=name,
                )
            )
            for name, options in sources.items()
        ]
        workers = [cluster.worker, *followers]
        faults = Faults(cluster, workers, chance)
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            cluster.act(chance.uniform(1, 5))
            fault = chance.choice(faults.all())
            fault()
            seconds = _seconds_until_complete(cluster)
            took[fault.__name__].append(seconds)
            slowest = max(seconds, key=lambda stream: seconds[stream])
            show(f"{time.strftime('%H:%M:%S')} {fault.__name__}: complete after {seconds[slowest]:.1f} s ({slowest})")
        until(lambda: cluster.redis.subscribers(SERVER_NAME) >= cluster.subscribers + 1, "all are subscribed")
        cluster.traffic.pause()
        cluster.check_copy()
        cluster.traffic.pause()
        unlike = {each.name: _differences(cluster, tmp_path / f"{each.name}.db") for each in followers}
        wanted = in_database(cluster.postgres, cluster.database)
        effects = {each.name: in_effects(tmp_path / f"{each.name}.db") for each in followers}
        report: dict[str, Any] = {
            "minutes": minutes,
            "faults": {name: len(each) for name, each in took.items()},
            "seconds until a stream was complete, without caches": _summary(took, without="caches"),
            "seconds until caches was complete": _summary(took, only="caches"),
            "facts": {stream: len(facts) for stream, facts in wanted.items()},
            "facts that Redis did not carry": len(cluster.unpublished()),
            "lost and found": {each.name: _found(each) for each in workers},
            "effects": {name: sum(map(len, facts.values())) for name, (facts, _) in effects.items()},
            "repeated effects": {name: repeated for name, (_, repeated) in effects.items()},
            "facts that differ": {name: sum(map(len, facts.values())) for name, facts in unlike.items()},
            "calls of users": sum(cluster.traffic.done().values()),
        }
        show(json.dumps(report, indent=2))
        shown = {name: {stream: facts[:3] for stream, facts in each.items()} for name, each in unlike.items()}
        assert unlike == {each.name: {} for each in followers}, shown
        assert {*report["repeated effects"].values()} == {0}
        for stream, limit in (("", 0.0), ("caches", MINUTE)):
            late = [
                each
                for seconds in took["publishers_are_dropped"]
                for name, each in seconds.items()
                if (name == "caches") == bool(stream) and each > 2 * INTERVAL + MOMENT + limit
            ]
            assert not late, late


def _seconds_until_complete(cluster: Cluster) -> dict[str, float]:
    """Return the time until the relay's copy has all that the database has now, for each stream."""
    begin = time.monotonic()
    wanted = in_database(cluster.postgres, cluster.database)
    seconds: dict[str, float] = {}

    def complete() -> bool:
        here = in_copy(cluster.copy)
        for stream, facts in wanted.items():
            if stream not in seconds and facts.items() <= here[stream].items():
                seconds[stream] = time.monotonic() - begin
        time.sleep(0.2)
        return len(seconds) == len(wanted)

    try:
        until(complete, "the copy has what the database had", PATIENCE)
    except AssertionError as error:
        unlike = {stream: each[:5] for stream, each in differences(in_copy(cluster.copy), wanted).items()}
        raise AssertionError(f"{error}; token, copy, database: {unlike}; {cluster.positions()}") from None
    return seconds


def _differences(cluster: Cluster, file: Path) -> dict[str, list[tuple[int, Any, Any]]]:
    """Return what differs from the database, which Synapse may still write, after PATIENCE; nothing if it is equal."""
    unlike: dict[str, list[tuple[int, Any, Any]]] = {}

    def equal() -> bool:
        nonlocal unlike
        wanted = in_database(cluster.postgres, cluster.database)
        unlike = differences({**in_copy(file, COPIES), **in_effects(file)[0]}, wanted)
        time.sleep(0.3)
        return not unlike

    try:
        until(equal, "it has all", PATIENCE)
    except AssertionError:
        return unlike
    return {}


def _summary(took: dict[str, list[dict[str, float]]], *, only: str = "", without: str = "") -> dict[str, Any]:
    """Return the median and the largest time of each fault: that of the slowest stream."""
    found = {}
    for name, each in took.items():
        seconds = [
            max(at for stream, at in streams.items() if stream != without and (not only or stream == only))
            for streams in each
        ]
        found[name] = {"median": round(statistics.median(seconds), 1), "largest": round(max(seconds), 1)}
    return found


def _found(worker: Daemon) -> dict[str, int]:
    """Return how many facts the audits of all its processes have found, by stream."""
    logs = [worker.log_of(start + 1) for start in range(worker.starts)]
    found: dict[str, int] = defaultdict(int)
    for count, stream in chain.from_iterable(
        re.findall(r"(\d+) facts of (\S+) by \S+ did not arrive", log) for log in logs
    ):
        found[stream] += int(count)
    return found
