"""A recorded Synapse lost rows between its processes and Redis: the audit finds each of them in its database."""

from __future__ import annotations

import re
import sqlite3
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING
from urllib.request import urlopen

from replication.streams.access_tokens import hide_in_row
from replication.streams.typed_rows import History
from replication.synapse.since_1_159 import STREAMS
from tests.synapse.published import NAME, SERVER, UNSENT, check_facts, final_positions, messages, published_facts
from tests.synapse.recorded import restore_postgres
from tests.system.daemons import CHECKOUT, LOCAL, PATIENCE, Daemon, fixed_ports, get_json, until
from tests.system.effects import app_of, effects, facts_of, positions, rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer
    from tests.redis import RedisServer
    from tests.synapse.published import Facts

KEPT = [each.name for each in STREAMS if not each.definition.in_memory]
FUNCTIONS = ("events", "push_rules")
READ = "events"  # these facts are read from the database, which is that of the end of the recording
WHOLE = [each.name for each in STREAMS if each.history is History.WHOLE]  # of the others the tables lack older rows
# The recorded positions are those of the end.  Without any, a restore would seem to be in progress.
EARLY = "DELETE FROM stream_positions; INSERT INTO stream_positions VALUES ('another', 'master', 1)"
# Facts that Redis never carried, and that no POSITION made a follower fetch. Those of `caches` and `account_data`
# are fetched before an audit: facts of these streams came out of order, or a later POSITION opened a gap.
LOST = {("push_rules", "writer1"): 23, ("receipts", "persister1"): 1}


def test_every_row_that_redis_lost_is_found_once_also_after_a_kill(
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    ends = {key: end for key, end in final_positions().items() if key[0] in KEPT}
    (tmp_path / "effects.py").write_text(app_of(*FUNCTIONS))
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    both = f"copy = true  # of streams without a function\n{configuration}"
    (tmp_path / "idle.toml").write_text(f"audit_interval = 600\n{both}")
    (tmp_path / "audit.toml").write_text(f"audit_interval = 2\n{both}")
    with postgres.database() as name:
        url = restore_postgres(postgres, name, NAME)
        postgres.sql(EARLY, database=name)
        options = (
            f"--connect={redis.url}",
            f"--server-name={SERVER}",
            f"--database=sqlite:///{tmp_path}/copy.db",
            f"--catch-up={url}",
            "--app=effects",
            LOCAL[1],
        )
        with Daemon(tmp_path, "worker", *options, "--config=idle.toml") as worker:
            until(lambda: redis.subscribers(SERVER), "the worker subscribes")
            sent = [each for each in messages() if each != "REPLICATE "]
            for start in range(0, len(sent), 500):
                redis.publish(*sent[start : start + 500], channel=SERVER)
            http = f"http://{worker.address('HTTP')}"
            until(lambda: ends.items() <= positions(http).items(), "all that was received is applied")
            worker.kill()
        with Daemon(tmp_path, "worker", *options, "--config=audit.toml") as worker:
            until(lambda: redis.subscribers(SERVER), "the worker subscribes")
            redis.publish(*[f"POSITION {key[0]} {key[1]} {end} {end}" for key, end in ends.items()], channel=SERVER)
            http = f"http://{worker.address('HTTP')}"
            until(lambda: found(http) == LOST, "what was lost is found")
            assert found_on_page(http) == LOST
            assert worker.terminate() == 0
            assert "ERROR" not in worker.log_of(1)
    published = published_facts()
    seen = effects(tmp_path / "copy.db")
    check_facts(READ, seen[READ], published[READ])
    check_whole("push_rules", seen["push_rules"], published["push_rules"])
    with closing(sqlite3.connect(tmp_path / "copy.db")) as database:
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


def test_what_a_relay_finds_late_reaches_each_follower_once_also_after_kills(  # noqa: PLR0915
    tmp_path: Path, redis: RedisServer, postgres: PostgresServer
) -> None:
    """Followers have passed the lost facts before the relay finds them; one is away then; the relay is killed after."""
    ends = {key: end for key, end in final_positions().items() if key[0] in KEPT}
    (tmp_path / "effects.py").write_text(app_of(*FUNCTIONS))
    configuration = (CHECKOUT / "conf/synapse-redis.toml").read_text()
    (tmp_path / "idle.toml").write_text(f"audit_interval = 600\n{configuration}")
    (tmp_path / "audit.toml").write_text(f"audit_interval = 2\n{configuration}")
    (tmp_path / "behind.toml").write_text("audit_interval = 2\ncopy = true\n")
    with postgres.database() as name, ExitStack() as stack:
        url = restore_postgres(postgres, name, NAME)
        postgres.sql(EARLY, database=name)
        options = (f"--connect={redis.url}", f"--server-name={SERVER}", f"--catch-up={url}")
        relay = Daemon(tmp_path, "worker", *options, f"--database=sqlite:///{tmp_path}/relay.db", name="relay")
        relay.options += ("--config=idle.toml",)
        wire, http = stack.enter_context(fixed_ports(relay))

        def behind(name: str, wire: str, http: str, *options: str) -> Daemon:
            sources = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
            follow = (f"--instance-name={name}", f"--server-name={SERVER}", *sources)
            database = f"--database=sqlite:///{tmp_path}/{name}.db"
            return Daemon(tmp_path, "worker", "--config=behind.toml", *follow, database, *options, name=name)

        second = behind("second", wire, http)
        second_wire, second_http = stack.enter_context(fixed_ports(second))
        near = stack.enter_context(behind("near", wire, http, "--app=effects", LOCAL[1]))
        away = stack.enter_context(behind("away", wire, http, "--app=effects", LOCAL[1]))
        far = stack.enter_context(behind("far", second_wire, second_http, "--app=effects", LOCAL[1]))
        followers = (near, away, far)
        until(lambda: redis.subscribers(SERVER), "the relay subscribes")
        sent = [each for each in messages() if each != "REPLICATE "]
        for start in range(0, len(sent), 500):
            redis.publish(*sent[start : start + 500], channel=SERVER)
        for each in followers:
            address = f"http://{each.address('HTTP')}"
            until(lambda: ends.items() <= positions(address).items(), f"{each.name} has applied all")  # noqa: B023
        away.kill()
        relay.kill()
        relay.options = (*(each for each in relay.options if each != "--config=idle.toml"), "--config=audit.toml")
        relay.start()
        relay.address("HTTP")
        until(lambda: redis.subscribers(SERVER), "the relay subscribes again")
        redis.publish(*[f"POSITION {key[0]} {key[1]} {end} {end}" for key, end in ends.items()], channel=SERVER)
        until(lambda: found(f"http://{http}") == LOST, "the relay has found what was lost")
        relay.kill()
        near.kill()
        relay.start()
        relay.address("HTTP")
        until(lambda: redis.subscribers(SERVER), "the relay subscribes for the third time")
        redis.publish(*[f"POSITION {key[0]} {key[1]} {end} {end}" for key, end in ends.items()], channel=SERVER)
        for each in (near, away):
            each.start()
        published, copy = published_facts(), tmp_path / "relay.db"
        until(
            lambda: all({*UNSENT[stream]} <= facts_of(rows(copy, stream)).keys() for stream, _ in LOST),
            "the relay has stored what it found, or has found it again",
        )
        wanted = {stream: facts_of(rows(copy, stream)) for stream in FUNCTIONS}
        check_facts(READ, wanted[READ], published[READ])
        check_whole("push_rules", wanted["push_rules"], published["push_rules"])
        for each in followers:
            file = tmp_path / f"{each.name}.db"
            until(lambda: effects(file) == wanted, f"{each.name} has what was lost")  # noqa: B023
        copied = {stream: rows(tmp_path / "relay.db", stream) for stream in KEPT}
        for each in (*followers, second):
            for stream in [stream for stream in KEPT if each is second or stream not in FUNCTIONS]:
                until(lambda: rows(tmp_path / f"{each.name}.db", stream) == copied[stream], f"{each.name} has {stream}")  # noqa: B023
        for each in (*followers, second, relay):
            assert each.terminate() == 0
        assert [effects(tmp_path / f"{each.name}.db") for each in followers] == [wanted] * len(followers)


def check_whole(stream: str, found: Facts, published: Facts) -> None:
    """Check that there are all facts that Redis has carried, with their rows, and all that it has lost."""
    assert sorted(found) == sorted({*published, *UNSENT[stream]}), stream
    assert {token: found[token] for token in published} == published, stream


def found(http: str) -> dict[tuple[str, str], int]:
    """Return the number of facts that were found, of each stream and writer."""
    streams = get_json(http, "/v1/streams")["streams"]
    return {
        (each["name"], writer["instance"]): writer["lost_and_found"]
        for each in streams
        for writer in each["writers"]
        if writer["lost_and_found"]
    }


def found_on_page(http: str) -> dict[tuple[str, str], int]:
    """Return what the column ``found late`` of the live page has above 0."""
    with urlopen(f"{http}/", timeout=PATIENCE) as answer:
        _, _, streams = answer.read().decode().partition("<h2>Streams</h2>")
    heads, *rows = [
        [re.sub(r"<svg.*?</svg>|<[^>]+>", "", cell) for cell in re.findall(r"<t[hd]\b.*?</t[hd]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", streams.partition("</table>")[0])
    ]
    seen = [dict(zip(heads, row, strict=True)) for row in rows]
    return {(row["stream"], row["writer"]): int(row["found late"]) for row in seen if row["found late"] != "0"}
