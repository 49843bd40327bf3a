"""A recorded Synapse lost rows between its processes and Redis: the audit finds each of them in its database."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

from replication.streams.access_tokens import hide_in_row
from replication.streams.typed_rows import History
from replication.synapse.since_1_159 import STREAMS
from tests.synapse.published import NAME, SERVER, UNSENT, final_positions, messages, published_facts
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, get_json, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

KEPT = [each.name for each in STREAMS if not each.definition.in_memory]
FUNCTIONS = ("events", "push_rules")
WHOLE = [each.name for each in STREAMS if each.history is History.WHOLE]  # of the others the tables lack older rows
# Facts that Redis never carried, and that no POSITION made a follower fetch. Those of `caches` and `account_data`
# are fetched before an audit: facts of these streams came out of order, or a later POSITION opened a gap.
LOST = {("events", "persister1"): 2, ("push_rules", "writer1"): 23, ("receipts", "persister1"): 1}
APP = """
async def store(facts, txn):
    await txn.execute("CREATE TABLE IF NOT EXISTS effects (stream TEXT, token INTEGER)")
    await txn.executemany("INSERT INTO effects VALUES (?, ?)", [(txn.stream, each.token) for each in facts])


def register(worker):
    worker.on("events")(store)
    worker.on("push_rules")(store)
"""


def test_every_row_that_redis_lost_is_found_once_also_after_a_kill(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    ends = {key: end for key, end in final_positions().items() if key[0] in KEPT}
    (tmp_path / "effects.py").write_text(APP)
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    both = f"copy = true  # of streams without a function\n{configuration}"
    (tmp_path / "idle.toml").write_text(f"audit_interval = 600\n{both}")
    (tmp_path / "audit.toml").write_text(f"audit_interval = 2\n{both}")
    with postgres.database() as name:
        url = restore_postgres(postgres, name, NAME)
        postgres.sql("DELETE FROM stream_positions", database=name)  # they are of the end of the recording
        options = (
            f"--connect={redis.url}",
            f"--server-name={SERVER}",
            f"--database=sqlite:///{tmp_path}/copy.db",
            f"--catch-up={url}",
            "--app=effects",
            LOCAL[1],
        )
        with Daemon(tmp_path, "worker", *options, "--config=idle.toml") as worker:
            until(lambda: redis.subscribers(SERVER), "it subscribes")
            sent = [each for each in messages() if each != "REPLICATE "]
            for start in range(0, len(sent), 500):
                redis.publish(*sent[start : start + 500], channel=SERVER)
            http = f"http://{worker.address('HTTP')}"
            until(lambda: ends.items() <= positions(http).items(), "all that was received is applied")
            worker.kill()
        with Daemon(tmp_path, "worker", *options, "--config=audit.toml") as worker:
            until(lambda: redis.subscribers(SERVER), "it subscribes")
            redis.publish(*[f"POSITION {key[0]} {key[1]} {end} {end}" for key, end in ends.items()], channel=SERVER)
            http = f"http://{worker.address('HTTP')}"
            until(lambda: found(http) == LOST, "what was lost is found")
            assert worker.terminate() == 0
            assert "ERROR" not in worker.log_of(1)
    published = published_facts()
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database:
        effects = Counter(database.execute("SELECT stream, token FROM effects").fetchall())
        assert {*effects.values()} == {1}
        for stream in FUNCTIONS:
            seen = [token for name, token in effects if name == stream]
            assert sorted(seen) == sorted({*published[stream], *UNSENT[stream]}), stream
        for stream in [each for each in KEPT if each not in FUNCTIONS]:
            rows: dict[int, list[str]] = {}
            select = f'SELECT stream_id, row FROM "stream_{stream}" ORDER BY stream_id, ord'
            for token, row in database.execute(select):
                rows.setdefault(token, []).append(row)
            hide = hide_in_row if stream == "caches" else str
            carried = {token: [*map(hide, texts)] for token, (_, texts) in published[stream].items()}
            assert sorted(rows.keys() - carried.keys()) == UNSENT.get(stream, []), stream
            if stream in WHOLE:
                assert {token: rows[token] for token in carried} == carried, stream


def positions(http: str) -> dict[tuple[str, str], int]:
    """Return the applied position of each stream and writer."""
    streams = get_json(http, "/v1/streams")["streams"]
    return {(each["name"], writer["instance"]): writer["position"] for each in streams for writer in each["writers"]}


def found(http: str) -> dict[tuple[str, str], int]:
    """Return the number of facts that were found, of each stream and writer."""
    streams = get_json(http, "/v1/streams")["streams"]
    return {
        (each["name"], writer["instance"]): writer["lost_and_found"]
        for each in streams
        for writer in each["writers"]
        if writer["lost_and_found"]
    }
