"""A worker is connected to two masters that have one name, each with a database of its own: nothing is mixed."""

from __future__ import annotations

import sqlite3
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import Daemon, append, fixed_ports, get_json, until
from tests.system.test_kills import has

if TYPE_CHECKING:
    from pathlib import Path

COPY = "SELECT row FROM stream_orders ORDER BY stream_id"


@pytest.mark.parametrize("same", [True, False])
def test_the_facts_of_two_masters_with_one_name_are_not_mixed(tmp_path: Path, same: bool) -> None:
    """The worker fetched pages from the master that had sent the last POSITION, and received rows from the other one.

    With ``same``, one database began as a backup of the other one.
    """
    with ExitStack() as stack:

        def master(name: str) -> tuple[str, str]:
            daemon = Daemon(tmp_path, "master", "--stream=orders", f"--database=sqlite:///{name}.db", name=name)
            return stack.enter_context(fixed_ports(daemon))

        def write(http: str, *rows: str) -> None:
            append(http, "orders", [Fact(Token(0), (f'"{row}"',)) for row in rows])

        first, http = master("first")
        write(http, "a", "b")
        if same:
            with closing(sqlite3.connect(tmp_path / "first.db")) as database:
                database.execute("VACUUM INTO ?", [str(tmp_path / "second.db")])
        second, second_http = master("second")
        write(http, *(f"first {number}" for number in range(6)))
        write(second_http, *(f"second {number}" for number in range(3)))
        follow = [f"--connect=tcp:{first}", f"--connect=tcp:{second}", "--http=tcp:0:interface=127.0.0.1"]
        worker = stack.enter_context(Daemon(tmp_path, "worker", "--instance-name=copy", *follow, name="copy"))
        noted = f"tcp:{min(first, second)} and tcp:{max(first, second)} send facts of writer 'master'"
        until(lambda: noted in worker.log, "both are named")
        write(second_http, "second 3")
        write(http, "first 6")

        def of_one() -> bool:
            with closing(sqlite3.connect(tmp_path / "first.db")) as ours, closing(sqlite3.connect(second_db)) as theirs:
                found = [database.execute(COPY).fetchall() for database in (ours, theirs)]
            return any(has(tmp_path / "replication-copy.db", COPY, rows) for rows in found)

        second_db = tmp_path / "second.db"
        until(of_one, "the copy has the facts of one of them")
        streams = get_json(f"http://{worker.address('HTTP')}", "/v1/streams")["streams"]
        notes = {stream["name"]: stream["notes"] for stream in streams}
        assert [noted in note for note in notes["orders"]] == [True]
