"""Spark beside a Synapse: over a relay that follows its Redis, and from segments of its database."""

from __future__ import annotations

import json
import runpy
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

pytest.importorskip("pyspark", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from replication import replay as exported
from replication.bench.cluster import free_ports
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.spark.datasource import ReplicationDataSource
from replication.synapse import STREAMS as STREAMS_1_47
from replication.synapse.since_1_159 import STREAMS as SYNAPSE_STREAMS
from tests.answering import answering
from tests.synapse.published import final_positions
from tests.synapse.reading import read_only_synapse
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import CHECKOUT, PATIENCE, Daemon, environment, get_json, until
from tests.system.test_redis import Recording
from tests.system.test_replay import contents

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

SERVER = "alpha.test"
STREAMS = ("events", "push_rules")


def test_recorded_facts_are_the_same_segments_on_spark_and_in_one_process(
    spark: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    definitions = [each.definition for each in STREAMS_1_47]
    with postgres.database() as database:
        url = restore_postgres(postgres, database)
        options: Any = {"definitions": definitions, "upto": 99_999}
        sizes: Any = {"segment_rows": 700, "compression": "none"}
        written = exported.replay(spark, url, str(tmp_path / "spark"), **options, **sizes)
        run_in_process(ReplayRequest(url, str(tmp_path / "here"), options=SegmentOptions(**sizes), **options))
    assert sum(each.rows for each in written) > 2_000
    assert contents(tmp_path / "spark") == contents(tmp_path / "here")


def test_a_batch_over_a_relay_has_the_facts_and_the_names_of_their_writers(
    spark: Any, redis: RedisServer, tmp_path: Path
) -> None:
    recording = Recording()
    expected = {
        stream: [
            (writer, token, json.loads(row))
            for (name, writer), facts in sorted(recording.facts.items())
            if name == stream
            for token in sorted(facts)
            for row in facts[token]
        ]
        for stream in STREAMS
    }
    assert {writer for writer, *_ in expected["events"]} == {"persister1", "persister2"}
    ends = {key: end for key, end in recording.positions.items() if key[0] in STREAMS}
    wire, http = free_ports(2)
    with answering(recording.answer) as url:
        relay = Daemon(tmp_path, "worker", f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        relay.options += tuple(f"--stream={each}" for each in STREAMS)
        relay.options += (f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{http}:interface=127.0.0.1")
        with relay:
            until(lambda: redis.subscribers(SERVER), "it subscribes")
            redis.publish(*recording.messages, channel=SERVER)

            def positions() -> dict[tuple[str, str], int]:
                streams = get_json(f"http://127.0.0.1:{http}", "/v1/streams")["streams"]
                return {(each["name"], of["instance"]): of["position"] for each in streams for of in each["writers"]}

            until(lambda: positions() == ends, "everything is applied")
            spark.dataSource.register(ReplicationDataSource)
            for stream in STREAMS:
                options = {"stream": stream, "http": f"http://127.0.0.1:{http}"}
                read = spark.read.format("replication").options(**options).load().orderBy("instance", "token").collect()
                assert [(row.instance, row.token, json.loads(row.row)) for row in read] == expected[stream], stream
            users = spark.read.format("replication").options(**options, fields=True).load().select("user_id").collect()
            assert sorted(each.user_id for each in users) == sorted(row[0] for _, _, row in expected["push_rules"])


def test_the_table_of_the_page_equals_its_live_counter(
    spark: Any, redis: RedisServer, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events per room and minute, as "Follow a Synapse" has them; the database user may only read."""
    examples = CHECKOUT / "examples"
    ends = [f"POSITION {name} {of} {end} {end}" for (name, of), end in final_positions().items() if name == "events"]
    with read_only_synapse(postgres) as url:
        config = CHECKOUT / "conf/synapse-redis.toml"
        options = (f"--config={config}", f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        counter = Daemon(
            tmp_path, "worker", *options, "--stream=events", "--app=room_minutes", "--http=tcp:0:interface=127.0.0.1"
        )
        counter.environment |= {"SYNAPSE": url, "PYTHONPATH": f"{examples}:{CHECKOUT}"}
        with counter:
            until(lambda: redis.subscribers(SERVER), "it subscribes")
            redis.publish(*ends, channel=SERVER)
            command = ["replay", f"--config={examples}/event_times.toml", f"--database={url}", "--out=segments"]
            command = [sys.executable, "-m", "replication", *command, "--compression=gzip", "--master=none"]
            subprocess.run(command, cwd=tmp_path, env=environment(), check=True, timeout=PATIENCE)

            def at_the_ends() -> bool:
                streams = get_json(f"http://{counter.address('HTTP')}", "/v1/streams")["streams"]
                writers = [of for each in streams for of in each["writers"]]
                return len(writers) == len(ends) and all(of["state"] == "live" for of in writers)

            until(at_the_ends, "everything is counted")
    with closing(sqlite3.connect(tmp_path / "replication-synapse.db")) as database:
        counted = database.execute("SELECT room, minute, events FROM room_minutes ORDER BY 1, 2").fetchall()
    assert sum(events for *_, events in counted) > 500
    program = (examples / "room_table.py").read_text().replace('"segments/', f'"{tmp_path}/segments/')
    (tmp_path / "room_table.py").write_text(program)
    monkeypatch.setattr(exported, "open_session", lambda _: nullcontext(spark))
    table = runpy.run_path(str(tmp_path / "room_table.py"))["table"].selectExpr(
        "room", "date_format(minute, 'yyyy-MM-dd HH:mm') AS minute", "count"
    )
    assert [tuple(each) for each in table.orderBy("room", "minute").collect()] == counted


def test_the_user_of_the_page_has_enough_sessions_for_a_replay_beside_other_programs(
    spark: Any, postgres: PostgresServer, tmp_path: Path
) -> None:
    """Of its 20 sessions, two cores of Spark need four."""
    definitions = [each.definition for each in SYNAPSE_STREAMS]
    with read_only_synapse(postgres) as url, ExitStack() as others:
        for _ in range(16):
            others.enter_context(psycopg.connect(url))
        new = exported.replay(spark, url, str(tmp_path / "out"), streams=STREAMS, definitions=definitions)
    assert {each.stream for each in new} == {*STREAMS}
