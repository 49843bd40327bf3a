"""A worker follows a Synapse since 1.67: missed facts come from Synapse's database, which is only read."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing, suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from replication.streams.access_tokens import hide_in_row
from replication.streams.typed_rows import History
from replication.synapse.since_1_159 import STREAMS
from replication.wire.grammar import encode_row
from tests.answering import answering
from tests.synapse.playing import PlayedMaster
from tests.synapse.published import (
    CHANGED,
    GONE,
    SERVER,
    UNSENT,
    check_facts,
    final_positions,
    messages,
    published_facts,
)
from tests.synapse.reading import read_only_synapse
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, environment, get_json, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer
    from tests.synapse.published import Facts

KEPT = [each.name for each in STREAMS if not each.definition.in_memory]
CONFIGURATION = CHECKOUT / "conf/synapse-redis.toml"
COMMON = (f"--config={CONFIGURATION}", f"--server-name={SERVER}", LOCAL[1])
ANNOUNCED = {"events": [1016, 1024, 1025, 1026, 1029], "receipts": [145], "account_data": [78]}  # by a POSITION


def test_all_facts_are_fetched_from_a_database_that_may_only_be_read(postgres: PostgresServer, tmp_path: Path) -> None:
    ends = {key: end for key, end in final_positions().items() if key[0] in KEPT}
    lines = [f"POSITION {stream} {writer} {end} {end}\n" for (stream, writer), end in ends.items()]
    script = f"SERVER {SERVER}\n{''.join(lines)}".encode()
    with read_only_synapse(postgres) as url, PlayedMaster(script, {}, seed=1) as played:
        options = (f"--connect={played.wire}", f"--catch-up={url}", f"--database=sqlite:///{tmp_path}/copy.db")
        with Daemon(tmp_path, "worker", *COMMON, *options) as worker:
            http = f"http://{worker.address('HTTP')}"
            until(lambda: ends.items() <= positions(http).items(), "the worker has applied all")
            found = {stream: copied(http, stream, ends) for stream in KEPT}
            assert worker.terminate() == 0
        assert "ERROR" not in worker.log_of(1)
        assert "fails" not in worker.log_of(1)
    published = hidden(published_facts())
    for stream in KEPT:
        check_facts(stream, found[stream], published[stream])


def segments(folder: Path, stream: str) -> dict[int, tuple[str, list[str]]]:
    """Return the facts in the segments of a stream."""
    facts: dict[int, tuple[str, list[str]]] = {}
    begun: list[str] = []
    for segment in sorted(folder.glob(f"{stream}/*/*.rdata")):
        for line in segment.read_text().splitlines():
            if line.startswith("RDATA "):
                _, _, writer, token, row = line.split(" ", 4)
                begun.append(row)
                if token != "batch":
                    facts[int(token)] = writer, begun
                    begun = []
    return facts


def positions(http: str) -> dict[tuple[str, str], int]:
    """Return the applied position of each stream and writer."""
    streams = get_json(http, "/v1/streams")["streams"]
    return {(each["name"], writer["instance"]): writer["position"] for each in streams for writer in each["writers"]}


def copied(http: str, stream: str, ends: dict[tuple[str, str], int]) -> dict[int, tuple[str, list[str]]]:
    """Return the facts of a copy."""
    facts: dict[int, tuple[str, list[str]]] = {}
    for writer in [writer for name, writer in ends if name == stream]:
        token, limited = 0, True
        while limited:
            path = f"/v1/streams/{stream}/updates?instance={quote(writer)}&from={token}&limit=500&upto=99999"
            answer = get_json(http, path)
            for at, row in answer["updates"]:
                facts.setdefault(at, (writer, []))[1].append(encode_row(row))
            token, limited = answer["upto_token"], answer["limited"]
    return facts


def test_a_recorded_conversation_over_redis_gives_a_copy_with_all_that_positions_announce(
    postgres: PostgresServer, redis: RedisServer, tmp_path: Path
) -> None:
    """Also what Redis has not carried, from the database.  A fact that was lost without a POSITION may be missing."""
    ends = {key: end for key, end in final_positions().items() if key[0] in KEPT}
    sent = [*messages(), *(f"POSITION {stream} {writer} {end} {end}" for (stream, writer), end in ends.items())]
    with read_only_synapse(postgres) as url:
        options = (f"--connect={redis.url}", f"--catch-up={url}", f"--database=sqlite:///{tmp_path}/copy.db")
        with Daemon(tmp_path, "worker", *COMMON, *options) as worker:
            http = f"http://{worker.address('HTTP')}"
            until(lambda: redis.subscribers(SERVER), "the worker has subscribed")
            for start in range(0, len(sent), 500):
                redis.publish(*sent[start : start + 500], channel=SERVER)
            until(lambda: ends.items() <= positions(http).items(), "the worker has applied all")
            found = {stream: copied(http, stream, ends) for stream in KEPT}
            assert worker.terminate() == 0
        assert any("syt_masked_" in message for message in sent)
        assert b"syt_masked_" not in (tmp_path / "copy.db").read_bytes()
        assert "syt_masked_" not in worker.log_of(1)
        assert "ERROR" not in worker.log_of(1)
        (skipped,) = [line for line in worker.log_of(1).splitlines() if "missed facts of" in line]
        assert "missed facts of typing are skipped: the HTTP of writer1 is not known" in skipped
    published = hidden(published_facts())
    for stream, history in [(each.name, each.history) for each in STREAMS if each.name in KEPT]:
        received, recorded = found[stream], published[stream]
        assert {*ANNOUNCED.get(stream, [])} <= received.keys() - recorded.keys() <= {*UNSENT.get(stream, [])}, stream
        changed = [token for token in received.keys() & recorded.keys() if received[token][1] != recorded[token][1]]
        assert {*changed} <= {*CHANGED.get(stream, [])}, stream
        gone = len(recorded.keys() - received.keys())
        # the facts of `events` are read from the database, which is that of the end of the recording
        assert history is History.NEWEST or gone == (GONE[stream] if stream == "events" else 0), stream


def test_missed_facts_in_memory_are_fetched_from_the_http_of_their_writer(redis: RedisServer, tmp_path: Path) -> None:
    requests: list[tuple[str, str | None]] = []

    def answer(path: str, secret: str | None) -> tuple[int, bytes]:
        requests.append((path.split("?", maxsplit=1)[0].rpartition("/")[0], secret))
        if "get_repl_stream_updates/typing" not in path:
            return 404, b"{}"
        return 200, b'{"updates": [[33, ["!r:alpha.test", ["@u:beta.test"]]]], "upto_token": 33, "limited": false}'

    (tmp_path / "secret").write_text("a-secret")
    with answering(answer) as url:
        configuration = tmp_path / "worker.toml"
        configuration.write_text(f'{CONFIGURATION.read_text()}\n[writers.writer1]\nhttp = "{url}"\n')
        database = f"sqlite:///{tmp_path}/copy.db"
        options = (f"--connect={redis.url}", f"--database={database}", f"--secret-file={tmp_path}/secret", *COMMON[1:])
        with Daemon(tmp_path, "worker", f"--config={configuration}", *options) as worker:
            until(lambda: redis.subscribers(SERVER), "the worker has subscribed")
            redis.publish("POSITION typing writer1 33 33", channel=SERVER)
            until(lambda: typing(tmp_path / "copy.db"), "the worker has fetched")
            assert worker.terminate() == 0
        assert "missed facts of" not in worker.log_of(1)
    assert ("/_synapse/replication/get_repl_stream_updates/typing", "Bearer a-secret") in requests
    assert typing(tmp_path / "copy.db") == [(33, '["!r:alpha.test",["@u:beta.test"]]')]


def typing(copy: Path) -> list[tuple[int, str]]:
    """Return the tokens and rows of the stream typing in a copy."""
    with closing(sqlite3.connect(copy)) as opened, suppress(sqlite3.OperationalError):
        rows: list[tuple[int, str]] = opened.execute('SELECT stream_id, "row" FROM stream_typing').fetchall()
        return rows
    return []


def hidden(published: dict[str, Facts]) -> dict[str, Facts]:
    """Return facts as a copy has them."""
    caches = {token: (writer, [*map(hide_in_row, texts)]) for token, (writer, texts) in published["caches"].items()}
    return {**published, "caches": caches}


def test_a_replay_writes_the_segments_of_what_redis_carried(postgres: PostgresServer, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    pytest.importorskip("adbc_driver_postgresql", reason="pip install '.[spark]' in the checkout")
    with read_only_synapse(postgres) as url:
        command = ["replication", "replay", f"--config={CONFIGURATION}", f"--database={url}", f"--out={tmp_path}/out"]
        options = ["--master=none", "--compression=none", "--segment-rows=300", "--access-tokens"]
        for more in ([f"--upto={upto}"] if upto else [] for upto in (90, 700, None)):
            run = [*command, *options, *more]
            done = subprocess.run(run, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    published, found = published_facts(), {stream: segments(tmp_path / "out", stream) for stream in KEPT}
    for stream in KEPT:
        check_facts(stream, found[stream], published[stream])
