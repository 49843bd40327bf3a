"""A master's database moves from SQLite to PostgreSQL with the program of ``docs/how-to/move-to-postgresql.md``."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from replication.storage.tables import kept_facts, known_followers
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, environment, get_json, until
from tests.system.test_upgrade import Shop, append, updates

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer

PAYMENTS = "CREATE TABLE payments (id bigserial PRIMARY KEY, instance_name text, payment_id text, amount integer)"
FACTS = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"


def test_all_tables_move_and_a_follower_that_runs_goes_on(tmp_path: Path, postgres: PostgresServer) -> None:
    shop = Shop(tmp_path)
    with shop.master() as master, postgres.database() as database:
        wire, http = master.address("the wire"), master.address("HTTP")
        with shop.worker("copier", wire, http):
            last = append(http, "orders", ["o5", "placed"], **{"Idempotency-Key": "before"})
            until(lambda: shop.rows("copier", FACTS) == shop.rows("shop", FACTS), "the copy is complete")
            assert master.terminate() == 0
            with closing(sqlite3.connect(tmp_path / "shop.db")) as file, file:  # tables that are made on demand
                file.execute(known_followers.CREATE)
                file.execute("INSERT INTO known_followers VALUES ('away', '{\"orders\": {\"master\": 2}}', 1.5)")
                file.execute(kept_facts.CREATE)
                file.execute("INSERT INTO gone_facts VALUES ('backfill', 'master', 1)")
            before = shop.rows("copier", FACTS)
            postgres.sql(PAYMENTS, database=database)
            url = postgres.url(database)
            with Daemon(tmp_path, "master", "--config=shop.toml", f"--database={url}", *LOCAL, name="tables") as tables:
                tables.address("HTTP")
                assert tables.terminate() == 0
            program = [sys.executable, str(CHECKOUT / "examples/to_postgres.py"), "shop.db", url]
            done = subprocess.run(program, cwd=tmp_path, env=environment(), check=True, capture_output=True, text=True)
            assert f"stream_orders: {len(before)} rows\n" in done.stdout
            for name, moved_rows in (line.split(": ") for line in done.stdout.splitlines()):
                ((count,),) = postgres.sql(f"SELECT count(*) FROM {name}", database=database)
                assert f"{count} rows" == moved_rows, name

            same = [
                f"--{option}=tcp:{address.split(':')[1]}:interface=127.0.0.1"
                for option, address in (("listen", wire), ("http", http))
            ]
            with Daemon(tmp_path, "master", "--config=shop.toml", f"--database={url}", *same, name="moved") as moved:
                http = moved.address("HTTP")
                assert append(http, "orders", ["o5", "placed"], **{"Idempotency-Key": "before"}) == last
                assert append(http, "orders", ["o6", "placed"]) == last + 1
                assert append(http, "payments", ["p3", 30]) == shop.expected["streams"]["payments"]["upto_token"] + 1
                for stream, page in shop.expected["streams"].items():
                    if stream not in {"typing", "backfill"}:
                        assert updates(http, stream)[: len(page["updates"])] == page["updates"], stream
                assert get_json(f"http://{http}", "/v1/rooms/!tour:shop.example") == shop.expected["room"]
                assert "away" in {each["name"] for each in get_json(f"http://{http}", "/v1/followers")["followers"]}
                new = (last + 1, 0, "master", '["o6","placed"]')
                until(lambda: shop.rows("copier", FACTS) == [*before, new], "the copy has the new fact")
