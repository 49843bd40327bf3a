"""200,000 facts are appended while two workers follow; all processes are killed repeatedly.

Smaller by default. The full size: ``pytest tests/system/test_kills.py --full``.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING

from tests.system.daemons import CHECKOUT, Daemon, environment, fixed_ports, until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

# The application keeps its own account of what it saw, in the transaction that it was called in.  A fact that is seen
# twice in committed transactions breaks the primary key; a position that goes back is caught by the trigger.
APP = '''
from twisted.logger import Logger
log = Logger()

def register(worker):
    for stream in ("caches", "events"):
        worker.on(stream)(make(stream))

def make(stream):
    async def apply(facts, txn):
        await txn.execute("CREATE TABLE IF NOT EXISTS seen (stream TEXT, token INTEGER, ord INTEGER, row TEXT, "
                          "PRIMARY KEY (stream, token, ord))")
        await txn.execute("""CREATE TRIGGER IF NOT EXISTS forward BEFORE UPDATE ON stream_positions
                             WHEN new.stream_id < old.stream_id
                             BEGIN SELECT RAISE(ABORT, 'a position went back'); END""")
        await txn.executemany("INSERT INTO seen VALUES (?, ?, ?, ?)",
            [(stream, fact.token, n, text) for fact in facts for n, text in enumerate(fact.texts)])
    return apply
'''


def make_facts(folder: Path, rows: int) -> dict[str, list[str]]:
    """Return random facts by stream, as lines for ``replication append --facts``."""
    out = folder / "facts.ndjson"
    subprocess.run(
        [sys.executable, CHECKOUT / "tests/data/make_facts.py", "--rows", str(rows), "--seed", "5", "--out", out],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    facts: dict[str, list[str]] = {"caches": [], "events": []}
    for line in out.read_text().splitlines():
        head, rows_text = line.split(',"rows":', 1)
        facts[head.split('"')[3]].append('{"rows":' + rows_text)
    return facts


def rows_of(database: Path, sql: str) -> list[tuple[object, ...]]:
    """Query a database that another process writes."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(sql).fetchall()


def has(database: Path, sql: str, rows: list[tuple[object, ...]]) -> bool:
    """Return whether a query gives these rows; False if the database does not exist yet."""
    with suppress(sqlite3.OperationalError):
        return rows_of(database, sql) == rows
    return False


def table(database: Path, stream: str) -> list[tuple[object, ...]]:
    """Return the rows of a stream's generic table."""
    return rows_of(database, f'SELECT stream_id, ord, instance_name, row FROM "stream_{stream}" ORDER BY 1, 2')


def test_no_fact_is_lost_or_applied_twice(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    full = bool(request.config.getoption("--full"))
    facts = make_facts(tmp_path, 350_000 if full else 24_000)
    limit = 100_000 if full else 6_000  # facts a stream
    (tmp_path / "account.py").write_text(APP)
    chance = random.Random(7)
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=events")
        wire, http = stack.enter_context(fixed_ports(master))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        copy = stack.enter_context(Daemon(tmp_path, "worker", "--instance-name=copy", *follow, name="copy"))
        seen = stack.enter_context(
            Daemon(tmp_path, "worker", "--instance-name=seen", "--app=account", *follow, name="seen")
        )
        kills = (10, 20) if full else (3, 6)  # of the master, of the workers
        victims = [master] * kills[0] + [copy, seen] * (kills[1] // 2)
        chance.shuffle(victims)
        slices = limit // len(victims)
        appends = {stream: stack.enter_context(start_append(tmp_path, stream, http)) for stream in facts}
        for turn, victim in enumerate(victims):
            last = limit if turn == len(victims) - 1 else (turn + 1) * slices
            for stream, process in appends.items():
                assert process.stdin is not None
                process.stdin.writelines(f"{line}\n" for line in facts[stream][turn * slices : last])
                process.stdin.flush()
            time.sleep(chance.uniform(0.0, 1.0))
            victim.kill()
            victim.start()
        for process in appends.values():
            process.communicate()
        assert [process.returncode for process in appends.values()] == [0, 0]
        appended = {stream: (tmp_path / f"{stream}.ids").read_text().split() for stream in facts}

        for stream in ("caches", "events"):
            want = table(tmp_path / "replication.db", stream)
            of_stream = f"SELECT stream_id FROM stream_positions WHERE stream_name = '{stream}'"
            reached = rows_of(tmp_path / "replication.db", of_stream)
            for name in ("copy", "seen"):
                until(
                    partial(has, tmp_path / f"replication-{name}.db", of_stream, reached),
                    f"{name} reaches {reached} on {stream}",
                )
            assert table(tmp_path / "replication-copy.db", stream) == want
            saw = rows_of(
                tmp_path / "replication-seen.db",
                f"SELECT token, ord, 'master', row FROM seen WHERE stream = '{stream}' ORDER BY 1, 2",
            )
            assert saw == want
            # The retries after a kill doubled nothing either: one ID a fact, and what was sent is what is there.
            assert len(appended[stream]) == len(set(appended[stream])) == limit
            assert {int(token) for token in appended[stream]} >= {token for token, *_ in want}
            sent = [row for line in facts[stream][:limit] for row in split_rows(line)]
            assert sorted(sent) == sorted(str(row) for *_, row in want)
        assert "a position went back" not in seen.log


def start_append(folder: Path, stream: str, http: str) -> subprocess.Popen[str]:
    """Start ``replication append`` with a pipe; the IDs go to a file."""
    command = ["replication", "append", stream, "-", "--facts", "--http", f"http://{http}", "--retry", "120"]
    with (folder / f"{stream}.ids").open("w") as ids:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=ids, text=True, env=environment())


def split_rows(line: str) -> list[str]:
    """Return the texts of one fact's rows."""
    return [json.dumps(row, separators=(",", ":")) for row in json.loads(line)["rows"]]
