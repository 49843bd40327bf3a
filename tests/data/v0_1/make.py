"""Make the files of this folder.  Run it with replication 0.1.0 installed: ``python make.py``.

It needs the extras ``postgres`` and ``spark``, and PostgreSQL's ``initdb`` and ``pg_dump``.  It starts daemons as a user
does, in a temporary folder, stops them, and copies what they leave.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg

import replication
from replication.bench.cluster import Cluster, find_binaries

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
LOCAL = ("--listen=tcp:0:interface=127.0.0.1", "--http=tcp:0:interface=127.0.0.1")
ROOM = "!tour:shop.example"
EVENTS = [  # a fork and a merge, after a history that is missing
    {"event_id": "$1", "type": "note", "prev_event_ids": ["$earlier"], "depth": 5, "state_before": []},
    {"event_id": "$2", "type": "note", "prev_event_ids": ["$1"], "state_key": "colour"},
    {"event_id": "$3", "type": "note", "prev_event_ids": ["$1"], "state_key": "colour"},
    {"event_id": "$4", "type": "note", "prev_event_ids": ["$2", "$3"]},
]
ORDERS = [
    [["o1", "placed"]],
    [["o2", "placed"], ["o2", "paid"]],
    [],
    [["o3", "Zoë ordered ☃"]],
    [["o4", "x" * 17_000]],  # too long for a line of the wire
]
STREAMS = ("orders", "payments", "typing", "events", "backfill", "caches")


@contextmanager
def daemon(folder: Path, role: str, *options: str):
    """Start a daemon, yield the addresses of its HTTP and its wire, and stop it with SIGTERM."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [BIN / "twistd", "-n", "--pidfile=", "replication", role, *options],
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

        def addresses() -> dict[str, str]:
            log.seek(0)
            return dict(re.findall(r"(the wire|HTTP) is served at (\S+)", log.read()))

        try:
            if role == "master":
                until(lambda: len(addresses()) == 2, log)
            found = addresses()
            yield found.get("HTTP", ""), found.get("the wire", "")
        finally:
            process.terminate()
            assert process.wait(60) == 0


def until(condition, what) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def ask(url: str, body: object = None, **headers: str):
    """Send an HTTP request and return the JSON of its answer."""
    data = None if body is None else json.dumps(body).encode()
    headers["Content-Type"] = "application/json"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
        return json.load(answer)


def write(http: str, wire: str) -> dict[str, object]:
    """Write facts of each kind to a master; return what it answers about them."""
    url = f"http://{http}/v1"
    for n, rows in enumerate(ORDERS):
        ask(f"{url}/streams/orders/facts", {"rows": rows}, **({} if n else {"Idempotency-Key": "first order"}))
    for n in range(3):
        ask(f"{url}/streams/payments/facts", {"rows": [[f"p{n}", n * 10]]})
    ask(f"{url}/streams/typing/facts", {"rows": [["!room", ["@anna:shop.example"]]]})
    ask(f"{url}/streams/caches/facts", {"rows": [["get_order", ["o1"], 1_700_000_000_000]]})
    ask(f"{url}/rooms/{ROOM}/events", {"backfilled": False, "events": EVENTS})
    ask(
        f"{url}/rooms/{ROOM}/events",
        {"backfilled": True, "events": [{"event_id": "$earlier", "type": "note", "prev_event_ids": [], "depth": 4}]},
    )
    host, _, port = wire.rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        place = ["token", "192.0.2.7", "curl", None, 4_102_444_800_000]  # 2100: a master deletes old places
        peer.sendall(f"NAME phone\nUSER_IP @anna:shop.example {json.dumps(place)}\n".encode())
        until(lambda: ask(f"{url}/users/@anna:shop.example")["seen"], "where the user was seen")
    return {
        "streams": {name: ask(f"{url}/streams/{name}/updates?instance=master&from=0&upto={2**40}") for name in STREAMS},
        "room": ask(f"{url}/rooms/{ROOM}"),
        "user": ask(f"{url}/users/@anna:shop.example"),
    }


def tokens(database: Path, sql: str) -> int:
    """Return a number from an SQLite file, 0 while its table is missing."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return connection.execute(sql).fetchone()[0] or 0
    except sqlite3.OperationalError:
        return 0


def make_sqlite(folder: Path) -> None:
    """Make a master's database, that of a worker which copies and of one which applies, and segments."""
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.execute(
            "CREATE TABLE payments "
            "(id INTEGER PRIMARY KEY AUTOINCREMENT, instance_name TEXT, payment_id TEXT, amount INTEGER)"
        )
    with daemon(folder, "master", "--config=shop.toml", *LOCAL) as (http, wire):
        follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--server-name=shop.example")
        with (
            daemon(folder, "worker", "--instance-name=copier", *follow),
            daemon(folder, "worker", "--instance-name=reader", "--app=shop_app", *follow),
        ):
            expected = write(http, wire)
            last = expected["streams"]["orders"]["upto_token"]
            position = "SELECT min(stream_id) FROM stream_positions WHERE stream_name = 'orders'"
            for name in ("copier", "reader"):
                until(lambda name=name: tokens(folder / f"replication-{name}.db", position) == last, name)
            time.sleep(2)  # the other streams are followed too
    (HERE / "sqlite.json").write_text(json.dumps(expected) + "\n")
    for compression in ("none", "gzip", "zstd"):
        command = [BIN / "replication", "replay", "--config=shop.toml", "--master=none", "--segment-rows=3"]
        subprocess.run(
            [*command, f"--compression={compression}", f"--out=segments-{compression}"], cwd=folder, check=True
        )
        out = HERE / f"segments-{compression}"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder / out.name, out)
    for name in ("shop", "replication-copier", "replication-reader"):
        with closing(sqlite3.connect(folder / f"{name}.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (HERE / f"{name}.db.gz").write_bytes(gzip.compress((folder / f"{name}.db").read_bytes(), mtime=0))


def make_postgres(folder: Path) -> None:
    """Make a master's database, which a worker with functions shares, and the copy of another worker, as SQL."""
    with Cluster() as server:
        server.sql("CREATE DATABASE shop")
        server.sql("CREATE DATABASE copy")
        server.sql(
            "CREATE TABLE payments (id bigserial PRIMARY KEY, instance_name text, payment_id text, amount integer)",
            database="shop",
        )
        shop, copy = f"--database={server.url('shop')}", f"--database={server.url('copy')}"
        subprocess.run([BIN / "replication", "streams", "install", "--config=shop.toml", shop], cwd=folder, check=True)
        with daemon(folder, "master", "--config=shop.toml", shop, *LOCAL) as (http, wire):
            follow = (f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--server-name=shop.example")
            with (
                daemon(folder, "worker", "--instance-name=copier", copy, *follow),
                daemon(folder, "worker", "--instance-name=reader", "--app=shop_app", shop, *follow),
            ):
                expected = write(http, wire)
                last = expected["streams"]["orders"]["upto_token"]
                for database, table in (("copy", "stream_positions"), ("shop", "follower_positions")):
                    position = f"SELECT min(stream_id) FROM {table} WHERE stream_name = 'orders'"

                    def there(position=position, database=database) -> bool:
                        try:
                            return server.sql(position, database=database)[0][0] == last
                        except psycopg.errors.UndefinedTable:
                            return False

                    until(there, database)
                time.sleep(2)
        (HERE / "postgres.json").write_text(json.dumps(expected) + "\n")
        for name in ("shop", "copy"):
            command = [find_binaries() / "pg_dump", "--inserts", "--no-owner", server.url(name)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            # commands of psql, and settings that older servers lack
            kept = [line for line in text.splitlines() if not line.startswith(("\\", "--", "SET ")) and line]
            (HERE / f"postgres-{name}.sql").write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    assert replication.__version__ == "0.1.0"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for file in ("shop.toml", "shop_app.py"):
            shutil.copy(HERE / file, work)
        make_sqlite(work)
        make_postgres(work)
