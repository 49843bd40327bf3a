"""Spark reads what a relay follows: what a Synapse has published over Redis."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from replication.bench.cluster import free_ports
from replication.spark.datasource import ReplicationDataSource
from tests.answering import answering
from tests.system.daemons import Daemon, get_json, until
from tests.system.test_redis import Recording

if TYPE_CHECKING:
    from pathlib import Path

    from tests.redis import RedisServer

SERVER = "alpha.test"
STREAMS = ("events", "push_rules")


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
