"""A master, a relay and workers behind it: real processes that are killed, a peer that does not read, a restore."""

from __future__ import annotations

import random
import re
import socket
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, fixed_ports, get_json, until
from tests.system.databases import SqliteDatabase
from tests.system.test_kills import APP, has, rows_of, table
from tests.system.test_restores import SEEN, Shop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer

OF_STREAM = "SELECT stream_id FROM stream_positions WHERE stream_name = 'events'"


@contextmanager
def appending(http: str, stream: str = "events") -> Iterator[None]:
    """Append facts of one to three rows until the block is left; errors while the master is down are expected."""
    ended = Event()

    def run() -> None:
        number = 0
        while not ended.wait(0.005):
            facts = [Fact(Token(0), tuple(f"[{number},{n},{row}]" for row in range(n % 3 + 1))) for n in range(20)]
            number += 1
            try:
                append(http, stream, facts)
            except OSError:
                time.sleep(0.1)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", ["copies", "reads the database"])
def test_each_fact_is_applied_once_behind_a_relay_that_is_killed(
    tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """Two workers behind the relay, and a third behind a second relay; one keeps account of what it was given."""
    kills = 40 if request.config.getoption("--full") else 3
    (tmp_path / "account.py").write_text(APP)
    (tmp_path / "plain.toml").write_text("copy = false\n")
    chance = random.Random(11)
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=events")
        wire, http = stack.enter_context(fixed_ports(master))

        def worker(name: str, wire: str, source: str, *options: str) -> Daemon:
            follow = (f"--instance-name={name}", f"--connect=tcp:{wire}", f"--catch-up={source}")
            return Daemon(tmp_path, "worker", *follow, *options, name=name)

        if kind == "copies":
            relay = worker("relay", wire, f"http://{http}")
        else:
            relay = worker("relay", wire, f"sqlite:///{tmp_path}/replication.db", "--config=plain.toml")
        relay_wire, relay_http = stack.enter_context(fixed_ports(relay))
        second = worker("second", relay_wire, f"http://{relay_http}")
        second_wire, second_http = stack.enter_context(fixed_ports(second))
        copy = stack.enter_context(worker("copy", relay_wire, f"http://{relay_http}"))
        seen = stack.enter_context(worker("seen", relay_wire, f"http://{relay_http}", "--app=account"))
        far = stack.enter_context(worker("far", second_wire, f"http://{second_http}"))
        host, _, port = relay_wire.rpartition(":")
        with socket.create_connection((host, int(port))) as stuck, appending(http):
            stuck.sendall(b"NAME stuck\nREPLICATE\n")  # and it never reads
            for _ in range(kills):
                time.sleep(chance.uniform(0.2, 2.0))
                victim = chance.choice([master, relay, relay, second, copy, seen, far])
                victim.kill()
                time.sleep(chance.uniform(0.0, 0.5))
                victim.start()
        master.address("HTTP")
        (last,) = append(http, "events", [Fact(Token(0), ('"last"',))])
        want = table(tmp_path / "replication.db", "events")
        reached: list[tuple[object, ...]] = [(last,)]
        for each in (copy, seen, far):
            until(
                partial(has, tmp_path / f"replication-{each.name}.db", OF_STREAM, reached),
                f"{each.name} is at {reached}",
            )
        assert len(want) > 100
        for each in (copy, far):
            assert table(tmp_path / f"replication-{each.name}.db", "events") == want
        saw = "SELECT token, ord, 'master', row FROM seen WHERE stream = 'events' ORDER BY 1, 2"
        assert rows_of(tmp_path / "replication-seen.db", saw) == want
        assert "went back" not in "".join(
            each.log_of(n) for each in (copy, seen, far) for n in range(1, each.starts + 1)
        )
        master.kill()
        names = [each["name"] for each in get_json(f"http://{relay_http}", "/v1/connections")["connections"]]
        assert {"second", "copy", "seen"} <= {*names}


def test_a_relay_serves_what_it_has_while_the_master_is_away(tmp_path: Path) -> None:
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=events")
        wire, http = stack.enter_context(fixed_ports(master))
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")
        relay = Daemon(tmp_path, "worker", "--instance-name=relay", *follow, name="relay")
        relay_wire, relay_http = stack.enter_context(fixed_ports(relay))
        follow = (f"--connect=tcp:{relay_wire}", f"--catch-up=http://{relay_http}")
        append(http, "events", [Fact(Token(0), (f"[{n}]",)) for n in range(3_000)])
        want = table(tmp_path / "replication.db", "events")
        until(lambda: has(tmp_path / "replication-relay.db", OF_STREAM, [(3_001,)]), "the relay has all facts")
        master.kill()
        late = stack.enter_context(Daemon(tmp_path, "worker", "--instance-name=late", *follow, name="late"))
        until(lambda: has(tmp_path / "replication-late.db", OF_STREAM, [(3_001,)]), "a new worker has all facts")
        assert table(tmp_path / "replication-late.db", "events") == want
        assert "no source" not in late.log


@pytest.mark.parametrize("new", [8, 2])
def test_a_restore_of_the_master_passes_through_a_relay(tmp_path: Path, new: int) -> None:
    """At 11; the backup ends at 6; new facts reach 14, or only 8.  The relay and its followers run all the time."""
    database = SqliteDatabase(tmp_path)
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url, relayed=True)
        shop.append(*"abcde")
        shop.is_at(6, shop.copy, shop.undoing, shop.plain)
        database.back_up()
        shop.append(*"lost!")
        shop.is_at(11, shop.copy, shop.undoing, shop.plain)
        shop.master.kill()
        database.restore()
        shop.restart_master(*(f"new {number}" for number in range(new)))
        rows = database.rows()
        shop.is_at(6 + new, shop.copy, shop.undoing)
        assert table(shop.file(shop.copy), "orders") == rows
        assert rows_of(shop.file(shop.undoing), SEEN) == [(token, row) for token, _, _, row in rows]
        until(lambda: "register a function with @worker.on_reset('orders')" in shop.plain.log, "the stream stops")
        shop.is_at(11, shop.plain)


def test_a_backup_of_a_worker_that_writes_is_made_under_load_and_restored_behind_a_relay(tmp_path: Path) -> None:
    """What was appended after the backup is lost at the copy and at the function that can undo it, too."""
    database = SqliteDatabase(tmp_path)
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, database.url, writing_worker=True, relayed=True)

        def reached(count: int) -> None:
            sql = f"SELECT COUNT(*) >= {count} FROM stream_orders"
            until(partial(has, shop.file(shop.copy), sql, [(1,)]), f"{count} rows are copied")

        with appending(shop.http, "orders"):
            reached(200)
            database.back_up()
            reached(len(database.backup_rows()) + 200)
        shop.master.kill()
        lost = len(database.rows()) - len(database.backup_rows())
        assert lost >= 200
        database.restore()
        shop.master.start()
        shop.master.address("HTTP")
        (last,) = append(shop.http, "orders", [Fact(Token(0), ('"new"',))])
        shop.is_at(last, shop.copy, shop.undoing)
        rows = database.rows()
        assert table(shop.file(shop.copy), "orders") == rows
        seen = [token for token, _ in rows_of(shop.file(shop.undoing), SEEN)]
        assert seen == [*dict.fromkeys(row[0] for row in rows)]


def test_a_restart_of_the_master_undoes_nothing_behind_a_relay(tmp_path: Path) -> None:
    """A follower that missed the new epoch would go back to its start later."""
    with ExitStack() as stack:
        shop = Shop(tmp_path, stack, f"sqlite:///{tmp_path}/replication.db", relayed=True)
        token = 1
        for run in range(4):
            if run:
                shop.master.kill()
                shop.restart_master()
            shop.append(*"abcde")
            token += 5
            shop.is_at(token, shop.copy, shop.undoing, shop.plain)
        for each in (shop.copy, shop.undoing, shop.plain):
            assert "went back" not in each.log
            each.kill()
            each.start()
        shop.append("z")
        shop.is_at(token + 1, shop.copy, shop.undoing, shop.plain)
        for each in (shop.copy, shop.undoing, shop.plain):
            assert "went back" not in each.log


def test_a_relay_takes_no_follower_back_to_where_a_writer_was_that_is_back(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """The relay of another master had its old position.  No ``writers`` are configured, and nothing was restored."""
    (tmp_path / "app.py").write_text(
        'def register(worker):\n    @worker.on("events")\n    async def apply(facts, txn):\n        pass\n'
    )
    with postgres.database() as database, ExitStack() as stack:

        def run(role: str, name: str, *options: str, behind: Sequence[tuple[str, str]] = ()) -> tuple[str, str]:
            follow = [each for wire, http in behind for each in (f"--connect=tcp:{wire}", f"--catch-up=http://{http}")]
            daemons[name] = Daemon(tmp_path, role, f"--instance-name={name}", *follow, *options, name=name)
            return stack.enter_context(fixed_ports(daemons[name]))

        def put(http: str, count: int) -> int:
            return append(http, "events", [Fact(Token(0), ('"x"',))] * count)[-1]

        def is_at(http: str, place: int, state: str = "live") -> None:
            def status() -> bool:
                streams = {
                    each["name"]: each["writers"] for each in get_json(f"http://{http}", "/v1/streams")["streams"]
                }
                found = [(each["instance"], each["position"], each["state"]) for each in streams.get("events", ())]
                return ("m2", place, state) in found

            until(status, f"m2 is {state} at {place}", pause=0.1)

        daemons: dict[str, Daemon] = {}
        master = "--stream=events", f"--database={postgres.url(database)}"
        second, http = run("master", "m2", *master)
        old = put(http, 3)
        daemons["m2"].terminate()
        below = run("worker", "a1", behind=[run("master", "m1", *master)])
        is_at(below[1], old)
        daemons["m2"].start().address("HTTP")
        new = put(http, 10)
        beside = run("worker", "a2", behind=[(second, http)])
        _, seen = run("worker", "x", "--app=app", behind=[below, beside])
        is_at(seen, new)
        is_at(below[1], old, "not connected")
        daemons["a2"].kill()
        is_at(seen, new, "not connected")
        daemons["m1"].kill()
        daemons["m1"].start().address("HTTP")
        daemons["a2"].start()
        newest = put(http, 2)
        is_at(seen, newest)
        assert "went back" not in daemons["x"].log


@pytest.mark.parametrize("copy", ["true", "false"])
def test_relays_that_name_each_other_as_sources_ask_each_other_once(tmp_path: Path, copy: str) -> None:
    """A follower receives all facts, and its report reaches the master; before, each request went round for ever."""
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=events")
        wire, http = stack.enter_context(fixed_ports(master))
        append(http, "events", [Fact(Token(0), (f"[{n}]",)) for n in range(300)])
        ports = free_ports(4)
        for name, own, other in (("one", ports[:2], ports[3]), ("two", ports[2:], ports[1])):
            (tmp_path / f"{name}.toml").write_text(
                f'instance_name = "{name}"\ncopy = {copy}\nconnect = ["tcp:{wire}"]\n'
                f'catch_up = ["http://127.0.0.1:{other}", "http://{http}"]\n'
                f'listen = ["tcp:{own[0]}:interface=127.0.0.1"]\nhttp = "tcp:{own[1]}:interface=127.0.0.1"\n'
            )
            stack.enter_context(Daemon(tmp_path, "worker", f"--config={name}.toml", name=name)).address("HTTP")
        relay = f"127.0.0.1:{ports[1]}"
        follow = (f"--connect=tcp:127.0.0.1:{ports[0]}", f"--catch-up=http://{relay}", "--instance-name=far")
        stack.enter_context(Daemon(tmp_path, "worker", *follow, name="far"))
        until(lambda: has(tmp_path / "replication-far.db", OF_STREAM, [(301,)]), "the follower has all facts")
        assert table(tmp_path / "replication-far.db", "events") == table(tmp_path / "replication.db", "events")

        def reported() -> bool:
            known = get_json(f"http://{http}", "/v1/followers")["followers"]
            return any(each["name"] == "far" and each["positions"].get("events") == {"master": 301} for each in known)

        until(reported, "the master knows the follower")
        for port in (ports[1], ports[3]):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                (line,) = re.findall(rb"^replication_http_connections (\S+)$", answer.read(), re.MULTILINE)
            assert float(line) < 30
