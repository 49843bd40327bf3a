"""Synapse's database is restored from a backup, while a worker and a relay follow it over Redis."""

from __future__ import annotations

import sqlite3
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from tests.synapse.published import GONE, NAME, SERVER, UNSENT, final_positions, published_facts
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, fixed_ports, get_json, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer

STREAMS = ("events", "caches")
ENDS = {key: end for key, end in final_positions().items() if key[0] in STREAMS}
BACKUP = {"events": 1000, "caches": 500}  # where the streams end in the backup
LATER = 1010  # the next events that Synapse writes, instead of those that are lost, end here
RESTORE = f"""
    SET session_replication_role = replica;  -- no foreign keys
    CREATE TABLE lost AS SELECT * FROM events WHERE stream_ordering > {BACKUP["events"]};
    DELETE FROM events WHERE stream_ordering > {BACKUP["events"]};
    DELETE FROM ex_outlier_stream WHERE event_stream_ordering > {BACKUP["events"]};
    DELETE FROM current_state_delta_stream WHERE stream_id > {BACKUP["events"]};
    DELETE FROM cache_invalidation_stream_by_instance WHERE stream_id > {BACKUP["caches"]};
    UPDATE stream_positions SET stream_id = {BACKUP["events"]} WHERE stream_name = 'events';
"""
WRITE = f"""
    SET session_replication_role = replica;
    INSERT INTO events SELECT * FROM lost WHERE stream_ordering <= {LATER};
    UPDATE events SET event_id = event_id || '-again' WHERE stream_ordering > {BACKUP["events"]};
    UPDATE stream_positions SET stream_id = {LATER} WHERE stream_name = 'events';
"""
# What `pg_restore` does: first it makes all tables, then it fills them.
EMPTY = "ALTER SCHEMA public RENAME TO kept; CREATE SCHEMA public; " + "; ".join(
    f"CREATE TABLE public.{each} (LIKE kept.{each} INCLUDING ALL)"
    for each in (
        "stream_positions", "events", "event_json", "state_events", "redactions", "event_relations",
        "room_memberships", "rejections", "ex_outlier_stream", "current_state_delta_stream",
    )
)  # fmt: skip
FILLED = "DROP SCHEMA public CASCADE; ALTER SCHEMA kept RENAME TO public"


def test_copies_lose_what_the_database_has_lost_and_receive_what_follows(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    streams = ", ".join(f'"{each}"' for each in STREAMS)
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "relay.toml").write_text(f"audit_interval = 1\nstream = [{streams}]\n{configuration}")
    (tmp_path / "behind.toml").write_text("audit_interval = 1\ncopy = true\n")
    copies = [tmp_path / "relay.db", tmp_path / "behind.db"]
    with postgres.database() as name, ExitStack() as stack:
        url = restore_postgres(postgres, name, NAME)
        options = ("--config=relay.toml", f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        relay = Daemon(tmp_path, "worker", *options, f"--database=sqlite:///{copies[0]}", name="relay")
        wire, http = stack.enter_context(fixed_ports(relay))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", f"--server-name={SERVER}", *LOCAL[1:])
        behind = ("--config=behind.toml", "--instance-name=behind", f"--database=sqlite:///{copies[1]}")
        stack.enter_context(Daemon(tmp_path, "worker", *behind, *follow, name="behind"))
        until(lambda: redis.subscribers(SERVER), "the relay subscribes")
        redis.publish(*[f"POSITION {key[0]} {key[1]} {end} {end}" for key, end in ENDS.items()], channel=SERVER)
        for copy in copies:
            until(lambda: last(copy, "events") > LATER and last(copy, "caches") > 700, f"{copy} has all")  # noqa: B023
        until(lambda: min(audited(f"http://{http}")) > BACKUP["events"], "all is compared")

        postgres.sql(RESTORE, database=name)
        for copy in copies:
            until(lambda: {each: last(copy, each) for each in STREAMS} == BACKUP, f"{copy} went back")  # noqa: B023
        postgres.sql(WRITE, database=name)
        redis.publish(f"POSITION events persister1 {BACKUP['events']} {LATER}", channel=SERVER)
        redis.publish(f"POSITION events persister2 {BACKUP['events']} {LATER}", channel=SERVER)
        for copy in copies:
            until(lambda: again(copy) == again(copies[0]) > 5, f"{copy} has the new facts")  # noqa: B023
            assert last(copy, "events") <= LATER
        log = relay.log_of(1)
        end = f"and is followed again from {BACKUP['events']}"
        assert f"events: the database was restored: persister1 was received up to 1474, {end}" in log


def test_empty_tables_of_an_unfinished_restore_are_not_read(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    """The worker fetches what it has missed while a backup is restored; it passed over it, and was live."""
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "worker.toml").write_text(f'audit_interval = 1\nstream = ["events"]\n{configuration}')
    copy = tmp_path / "copy.db"
    ends = {writer: end for (stream, writer), end in ENDS.items() if stream == "events"}
    with postgres.database() as name:
        url = restore_postgres(postgres, name, NAME)
        postgres.sql(EMPTY, database=name)
        options = ("--config=worker.toml", f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        with Daemon(tmp_path, "worker", *options, f"--database=sqlite:///{copy}", LOCAL[1]) as worker:
            until(lambda: redis.subscribers(SERVER), "the worker subscribes")
            redis.publish(*[f"POSITION events {writer} {end} {end}" for writer, end in ends.items()], channel=SERVER)
            until(lambda: "cannot compare streams" in worker.log, "a check of the audit")
            time.sleep(3)  # more checks
            assert last(copy, "events") == 0
            postgres.sql(FILLED, database=name)
            wanted = len({*published_facts()["events"]} | {*UNSENT["events"]}) - GONE["events"]
            until(lambda: count(copy, "events") == wanted, "the copy has all facts")
            assert "table 'stream_positions' of the database is empty" in worker.log


def count(copy: Path, stream: str) -> int:
    """Return how many facts a copy has."""
    with closing(sqlite3.connect(copy)) as database:
        ((facts,),) = database.execute(f'SELECT count(DISTINCT stream_id) FROM "stream_{stream}"')
    return int(facts)


def last(copy: Path, stream: str) -> int:
    """Return the last ID of a copy; 0 if it has none, or does not exist yet."""
    with closing(sqlite3.connect(copy)) as database:
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (f"stream_{stream}",)).fetchall():
            return 0
        ((found,),) = database.execute(f'SELECT max(stream_id) FROM "stream_{stream}"').fetchall()
        return found or 0


def again(copy: Path) -> int:
    """Return the number of rows of the events that were written after the restore."""
    with closing(sqlite3.connect(copy)) as database:
        ((found,),) = database.execute("SELECT count(*) FROM stream_events WHERE row LIKE '%-again%'").fetchall()
        return int(found)


def audited(http: str) -> list[int]:
    """Return up to where each writer of events was compared."""
    streams = get_json(http, "/v1/streams")["streams"]
    return [writer["audited"] or 0 for each in streams if each["name"] == "events" for writer in each["writers"]]
