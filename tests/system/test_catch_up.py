"""New workers with many facts to catch up: segments, then HTTP or a database, then live; with kills and appends.

Smaller by default; a million facts: ``pytest tests/system/test_catch_up.py --full``.
"""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from replication.follower.catch_up import LARGE_GAP
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.answering import answering
from tests.segments.histories import write_database
from tests.system.daemons import PATIENCE, Daemon, append, fixed_ports, until
from tests.system.test_kills import APP, rows_of, table

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from replication.segments.manifest import Segment

SEGMENTS = 8
DAMAGED, MISSING = 3, 1  # which of them are
LIVE = 1_000  # IDs that a live worker may be behind


class RecordingProxy:
    """A proxy of a master's HTTP API that records the requested ranges."""

    def __init__(self, http: str) -> None:
        self.http = http
        self.url = ""
        self.asked: list[tuple[int, int]] = []

    def pass_on(self, path: str, _: str | None) -> tuple[int, bytes]:
        """Return the master's answer."""
        parts = urlsplit(path)
        if parts.path.endswith("/updates"):
            query = parse_qs(parts.query)
            self.asked.append((int(query["from"][0]), int(query["upto"][0])))
        with urllib.request.urlopen(f"http://{self.http}{path}", timeout=PATIENCE) as answer:
            return answer.status, answer.read()


@contextmanager
def road_to(http: str) -> Iterator[RecordingProxy]:
    """Run a proxy of the HTTP API at this address until the block is left."""
    proxy = RecordingProxy(http)

    with answering(proxy.pass_on) as proxy.url:
        yield proxy


@contextmanager
def appending(http: str) -> Iterator[list[int]]:
    """Append facts until the block is left; the list has the last ID."""
    ended = threading.Event()
    ids = [0]

    def work() -> None:
        while not ended.wait(0.05):
            ids[:] = append(http, "orders", [Fact(Token(0), ('["live"]',))] * 20)[-1:]

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield ids
    finally:
        ended.set()
        thread.join()


class Follower:
    """A worker that is killed at certain positions and started again."""

    def __init__(self, daemon: Daemon, kill_at: Sequence[int]) -> None:
        self.daemon = daemon
        self.kill_at = sorted(kill_at)
        self.database = daemon.folder / f"replication-{daemon.name}.db"

    def position(self) -> int:
        """Return its position."""
        if not self.database.exists():
            return 0
        if not rows_of(self.database, "SELECT name FROM sqlite_master WHERE name = 'stream_positions'"):
            return 0
        rows = rows_of(self.database, "SELECT stream_id FROM stream_positions WHERE stream_name = 'orders'")
        return int(str(rows[0][0])) if rows else 0

    def look(self) -> int:
        """Kill it if it has reached the next position; return its position."""
        position = self.position()
        if self.kill_at and position >= self.kill_at[0]:
            del self.kill_at[0]
            self.daemon.kill()
            self.daemon.start()
        return position


def make_history(folder: Path, history: int) -> list[Segment]:
    """Write facts with IDs below ``history`` into a master's database, and segments of them; two are damaged."""
    facts = [
        Fact(Token(token), (f'["o{token}",{token % 7}]', "[]")[: 1 + (token % 9 == 0)]) for token in range(2, history)
    ]
    long = '"' + "x" * 20_000 + '"'  # no line can hold it
    facts[history // 4] = Fact(facts[history // 4].token, ('"begun"', long, '"ended"'))
    url = write_database(folder / "replication.db", {"master": facts}, stream="orders")
    segments = run_in_process(ReplayRequest(url, str(folder / "segments"), options=SegmentOptions(history // SEGMENTS)))
    damaged = folder / "segments" / segments[DAMAGED].name
    damaged.write_bytes(damaged.read_bytes()[:-9] + b"something")
    (folder / "segments" / segments[MISSING].name).unlink()
    return segments


def inside(token: int, segments: Sequence[Segment]) -> bool:
    """Return whether one of these segments has the facts after ``token``."""
    return any(each.after <= token < each.upto for each in segments)


def test_a_new_worker_reads_segments_then_another_source_then_follows(
    tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Despite two bad segments and kills, no fact is missing or doubled, and HTTP is used only where needed."""
    history, late = (1_000_000, 50_000) if request.config.getoption("--full") else (160_000, 8_000)
    segments = make_history(tmp_path, history)
    good = [each for place, each in enumerate(segments) if place not in (DAMAGED, MISSING)]
    rest = [Fact(Token(token), (f'["late{token}"]',)) for token in range(history, history + late)]
    write_database(tmp_path / "replication.db", {"master": rest}, stream="orders")
    (tmp_path / "account.py").write_text(APP.replace('("caches", "events")', '("orders",)'))
    chance = random.Random(11)
    with ExitStack() as stack:
        wire, http = stack.enter_context(fixed_ports(Daemon(tmp_path, "master", "--stream=orders")))
        proxies = [stack.enter_context(road_to(http)) for _ in range(2)]
        followers = []
        began = time.monotonic()
        for name, app, sources in (
            ("copy", (), ("segments", proxies[0].url)),
            ("seen", ("--app=account",), (proxies[1].url, "segments")),
            ("near", (), ("segments", "sqlite:///replication.db")),
        ):
            options = [f"--instance-name={name}", f"--connect=tcp:{wire}", *app]
            options += [f"--catch-up={each}" for each in sources]
            daemon = stack.enter_context(Daemon(tmp_path, "worker", *options, name=name))
            kill_at = [chance.randrange(1, history) for _ in range(3)]
            followers.append(Follower(daemon, [*kill_at, chance.randrange(history, history + late), history + late]))
        with appending(http) as last:
            while any(each.kill_at or each.position() < last[0] - LIVE for each in followers):
                assert time.monotonic() < began + 600, [(each.daemon.log, each.position()) for each in followers]
                for each in followers:
                    each.look()
                time.sleep(0.05)
            seconds = time.monotonic() - began
        want = table(tmp_path / "replication.db", "orders")
        for each in followers:
            until(lambda: each.position() == last[0], f"{each.daemon.name} reaches {last[0]}")  # noqa: B023 (at once)
        for name in ("copy", "near"):
            assert table(tmp_path / f"replication-{name}.db", "orders") == want
        saw = "SELECT token, ord, 'master', row FROM seen ORDER BY 1, 2"
        assert rows_of(tmp_path / "replication-seen.db", saw) == want
    for each in followers:
        logs = "".join(each.daemon.log_of(start) for start in range(1, each.daemon.starts + 1))
        assert each.daemon.starts == 6
        assert "a position went back" not in logs
        assert f"{segments[DAMAGED].name}: damaged" in logs
        assert f"{segments[MISSING].name}: No such file" in logs
    first, second = [[ask for ask in proxy.asked if inside(ask[0], good)] for proxy in proxies]
    long = history // 4 + 1  # the ID before that of the fact which no line can hold
    assert {after for after, _ in first} == {long}, "what segments have is not asked for over HTTP"
    assert all(upto - after <= LARGE_GAP or after == long for after, upto in second), "nor is a large gap"
    with capsys.disabled():
        print(f"\n{history + late:,} facts, killed 5 times: three workers live after {seconds:.1f} s")  # noqa: T201
