"""A database is exchanged after one of its writers was renamed: a copy names the writer whose facts only it has."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from replication.bench.cluster import free_ports
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import CHECKOUT, Daemon, append, until
from tests.system.databases import SqliteDatabase
from tests.system.peers import ask
from tests.system.test_kills import has

if TYPE_CHECKING:
    from pathlib import Path

COPY = "SELECT stream_id, ord, instance_name, row FROM stream_orders ORDER BY 1, 2"
FOUND = "no followed process knows writer 'old' of stream 'orders' any more"


def statements() -> list[str]:
    """Return the statements of the page."""
    page = (CHECKOUT / "docs" / "operations.md").read_text()
    return [line.strip() for line in page.splitlines() if line.startswith("    DELETE FROM stream_")]


def test_a_copy_names_a_writer_that_its_new_database_has_not(tmp_path: Path) -> None:
    database, (wire, port) = SqliteDatabase(tmp_path), free_ports(2)
    file = tmp_path / "replication-copy.db"
    places = f"--listen=tcp:{wire}:interface=127.0.0.1", f"--http=tcp:{port}:interface=127.0.0.1"

    def writer(name: str) -> Daemon:
        options = [f"--instance-name={name}", "--stream=orders", f"--database={database.url}", *places]
        return Daemon(tmp_path, "master", *options, name=name)

    def write(daemon: Daemon, *rows: str) -> None:
        daemon.address("HTTP")
        append(f"127.0.0.1:{port}", "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

    def followed() -> bool:
        return has(file, COPY, database.rows())

    first, old = writer("first"), writer("old")
    options = f"--connect=tcp:127.0.0.1:{wire}", "--instance-name=copy", "--http=tcp:0:interface=127.0.0.1"
    with Daemon(tmp_path, "worker", *options, name="copy") as copy:
        with first:
            write(first, "a", "b")
            until(followed, "the copy has all")
        with old:
            write(old, "c", "d")
            until(followed, "the copy has all")
        with first:  # it sends the position of the other one now
            write(first, "e")
            until(followed, "the copy has all")
        copy.kill()
        database.empty()
        with first:
            write(first, "x", "y")
            copy.options += ("--accept-new-history",)
            copy.start()
            until(lambda: FOUND in copy.log, "it is found")
            _, answer = ask(f"http://{copy.address('HTTP')}/v1/streams")
            notes = [note for each in answer["streams"] for note in each["notes"]]
            assert [FOUND in each for each in notes] == [True]
            copy.kill()
            with closing(sqlite3.connect(file)) as opened, opened:
                assert len(statements()) == 3
                for each in statements():
                    opened.execute(each)
            copy.options = options
            copy.start()
            until(followed, "the copy equals the master")
