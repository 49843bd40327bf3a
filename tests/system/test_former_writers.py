"""A process of a Synapse was removed: the facts that it wrote are copied, applied once, and relayed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from tests.synapse.published import NAME, SERVER, check_facts, final_positions, published_facts
from tests.synapse.reading import nothing_written
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, fixed_ports, get_json, until
from tests.system.effects import app_of, effects, facts_of, positions, rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

STREAM, END = "events", 1474
# `events` was once written by the main process, under no name; persister2 was removed.
REMOVED = """
    UPDATE events SET instance_name = NULL WHERE stream_ordering < 700;
    UPDATE current_state_delta_stream SET instance_name = NULL WHERE stream_id < 700;
    UPDATE ex_outlier_stream SET instance_name = NULL WHERE event_stream_ordering < 700;
    DELETE FROM stream_positions WHERE instance_name = 'persister2';
"""

# account_data moves to another process, whose positions replace those of the former one.  Its tables name no writer.
MOVED = """
    UPDATE stream_positions SET instance_name = 'mover', stream_id = 202 WHERE stream_name = 'account_data';
    INSERT INTO room_account_data (user_id, room_id, account_data_type, stream_id, content)
        VALUES ('@a:b', '!c:b', 'moved', 201, '{}'), ('@a:b', '!c:b', 'moved.too', 202, '{}');
"""


def test_facts_of_removed_processes_are_copied_applied_once_and_relayed(  # noqa: PLR0915
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    """No process sends a position of them.  The second worker is killed before it has searched for the first time."""
    (tmp_path / "effects.py").write_text(app_of(STREAM))
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "relay.toml").write_text(f"audit_interval = 1\n{configuration}")
    (tmp_path / "late.toml").write_text(f"audit_interval = 600\n{configuration}")
    published = published_facts()[STREAM]
    ends = [(stream, writer, end) for (stream, writer), end in final_positions().items() if writer != "persister2"]

    def announce(number: int) -> None:
        until(lambda: redis.subscribers(SERVER) >= number, "the workers subscribe")
        redis.publish(*[f"POSITION {stream} {writer} {end} {end}" for stream, writer, end in ends], channel=SERVER)

    def has_all(daemon: Daemon) -> None:
        wanted = dict.fromkeys([(STREAM, each) for each in ("master", "persister1", "persister2")], END)
        http = f"http://{daemon.address('HTTP')}"
        until(lambda: wanted.items() <= positions(http).items(), f"{daemon.name} has all")

    def state(http: str) -> dict[str, str]:
        (found,) = [each for each in get_json(http, "/v1/streams")["streams"] if each["name"] == STREAM]
        return {each["instance"]: each["state"] for each in found["writers"]}

    with postgres.database() as name:
        url = restore_postgres(postgres, name, NAME)
        postgres.sql(REMOVED, database=name)
        options = (f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        copies = [f"--database=sqlite:///{tmp_path}/{each}.db" for each in ("relay", "direct", "behind")]
        relay = Daemon(tmp_path, "worker", *options, copies[0], "--config=relay.toml", name="relay")
        direct = Daemon(
            tmp_path, "worker", *options, copies[1], "--instance-name=direct", "--app=effects", name="direct"
        )
        with nothing_written(url), fixed_ports(relay) as (wire, http):
            announce(1)
            has_all(relay)
            common = direct.options
            direct.options = (*common, LOCAL[1], "--config=late.toml")
            with direct:
                announce(2)
                address = f"http://{direct.address('HTTP')}"
                until(lambda: positions(address).get((STREAM, "persister1")) == END, "its other facts are applied")
                direct.kill()
            assert len(effects(tmp_path / "direct.db")[STREAM]) < len(published) - 100
            direct.options = (*common, LOCAL[1], "--config=relay.toml")
            for _ in range(2):
                with direct:
                    announce(2)
                    has_all(direct)
                    assert direct.terminate() == 0
            relay.kill()  # and a copy that is complete announces all at the next start
            relay.start()
            announce(1)
            has_all(relay)
            source = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", f"--server-name={SERVER}")
            behind = Daemon(tmp_path, "worker", *source, copies[2], "--instance-name=behind", LOCAL[1], name="behind")
            with behind:
                has_all(behind)
                assert {*state(f"http://{behind.address('HTTP')}").values()} == {"live"}
                assert behind.terminate() == 0
            assert relay.terminate() == 0
    whole = facts_of(rows(tmp_path / "relay.db", STREAM))
    assert {writer for writer, _ in whole.values()} == {"master", "persister1", "persister2"}
    assert {writer for token, (writer, _) in whole.items() if token < 700} == {"master"}
    assert effects(tmp_path / "direct.db")[STREAM] == whole
    assert facts_of(rows(tmp_path / "behind.db", STREAM)) == whole
    named = {
        token: (published[token][0] if token in published else writer, texts)
        for token, (writer, texts) in whole.items()
    }
    check_facts(STREAM, named, published)
    for daemon in (relay, direct, behind):
        assert "ERROR" not in daemon.log


def test_account_data_that_moves_to_another_process_is_applied_once(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    """The database has all facts under any name: a copy stopped, and a function received them twice."""
    (tmp_path / "effects.py").write_text(app_of("account_data"))
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "worker.toml").write_text(f"audit_interval = 1\n{configuration}")
    former, writer, last = "writer1", "mover", 202
    own = ("--config=worker.toml", LOCAL[1])

    def follow(daemons: Sequence[Daemon], of: str, end: int) -> None:
        until(lambda: redis.subscribers(SERVER) >= 2, "the workers subscribe")
        redis.publish(f"POSITION account_data {of} {end} {end}", channel=SERVER)
        for each in daemons:
            http = f"http://{each.address('HTTP')}"
            until(lambda: positions(http).get(("account_data", of)) == end, f"{each.name} has all")  # noqa: B023

    with postgres.database() as name:
        url = restore_postgres(postgres, name, NAME)
        options = (f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}", *own)
        databases = [f"--database=sqlite:///{tmp_path}/{each}.db" for each in ("copy", "function")]
        copy = Daemon(tmp_path, "worker", *options, databases[0], "--instance-name=copy", name="copy")
        function = Daemon(
            tmp_path, "worker", *options, databases[1], "--instance-name=function", "--app=effects", name="function"
        )
        with copy, function:
            follow([copy, function], former, 194)
        before = facts_of(rows(tmp_path / "copy.db", "account_data"))
        postgres.sql(MOVED, database=name)
        for _ in range(2):
            with copy, function:
                follow([copy, function], writer, last)
                time.sleep(3)  # three audits
                function.kill()
    whole = facts_of(rows(tmp_path / "copy.db", "account_data"))
    moved = {201: ["@a:b", "!c:b", "moved"], 202: ["@a:b", "!c:b", "moved.too"]}
    assert whole == before | {token: (writer, [json.dumps(row, separators=(",", ":"))]) for token, row in moved.items()}
    assert effects(tmp_path / "function.db")["account_data"] == whole
    for daemon in (copy, function):
        assert "ERROR" not in daemon.log
