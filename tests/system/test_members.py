"""The program of "Invalidate caches" beside a Synapse: its cache follows the stream of a Synapse over Redis."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.request import urlopen

from replication.bench.cluster import free_ports
from tests.system.daemons import CHECKOUT, PATIENCE, environment, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

SERVER = "alpha.test"
ROOM = "!tea:alpha.test"
TABLES = """
CREATE TABLE current_state_events (room_id TEXT, state_key TEXT, membership TEXT);
CREATE TABLE stream_positions (stream_name TEXT, instance_name TEXT, stream_id BIGINT);
CREATE TABLE cache_invalidation_stream_by_instance
    (stream_id BIGINT, instance_name TEXT, cache_func TEXT, keys TEXT[], invalidation_ts BIGINT)
"""
JOIN = f"INSERT INTO current_state_events VALUES ('{ROOM}', '@anna:alpha.test', 'join');"


def change(token: int) -> str:
    """Return the SQL of a user who joins."""
    row = f"VALUES ({token}, 'persister1', 'cs_cache_fake', ARRAY['{ROOM}', '@anna:alpha.test'], 1700000000000)"
    return f"{JOIN} INSERT INTO cache_invalidation_stream_by_instance {row}"


def test_a_program_beside_a_synapse_serves_no_stale_value(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    """Neither after a row that arrives, nor after one that Redis has lost: that one is fetched."""
    (port,) = free_ports(1)
    log = tmp_path / "log"
    with postgres.database() as name, ExitStack() as stack:
        postgres.sql(TABLES, database=name)
        listen = f"tcp:{port}:interface=127.0.0.1"
        command = [sys.executable, str(CHECKOUT / "examples/members.py"), redis.url, postgres.url(name), listen]
        output = stack.enter_context(log.open("wb"))
        program = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
        stack.callback(program.wait, PATIENCE)
        stack.callback(program.terminate)
        until(lambda: redis.subscribers(SERVER), "the program subscribes")
        redis.publish("POSITION caches persister1 1 1", channel=SERVER)

        def count() -> int:
            with urlopen(f"http://127.0.0.1:{port}/{ROOM}", timeout=PATIENCE) as answer:
                return int(answer.read())

        until(lambda: "ready" in log.read_text(), "the program serves HTTP")
        assert [count(), count()] == [0, 0]
        postgres.sql(change(2), database=name)
        assert count() == 0
        redis.publish(f'RDATA caches persister1 2 ["cs_cache_fake",["{ROOM}","@anna:alpha.test"],1]', channel=SERVER)
        until(lambda: count() == 1, "a row that arrives invalidates it")
        postgres.sql(change(3), database=name)
        redis.publish("POSITION caches persister1 2 3", channel=SERVER)
        until(lambda: count() == 2, "a row that was lost is fetched, and invalidates it")
        assert log.read_text().count(f"counts the members of {ROOM}") == 3
