"""The examples that embed a master end when a backup is restored into its database, so that they are started again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.docs.test_examples import EXAMPLES
from tests.system.daemons import until
from tests.system.terminals import Terminal

if TYPE_CHECKING:
    from pathlib import Path

PLACE = {  # the program of a command: how an order is placed, and a text that only a success answers
    "shop_site.py": ("-d o1 http://127.0.0.1:8080", "^[0-9]"),
    "orders_api.py": ("""-d '{"id": "o1"}' http://127.0.0.1:8080/orders""", "token"),
}


@pytest.mark.parametrize(
    ("command", "database"),
    [("twistd -n --pidfile= -y shop_site.py", "shop_site.db"), ("python orders_api.py", "orders.db")],
)
def test_a_program_ends_when_its_database_is_exchanged(
    command: str, database: str, tmp_path: Path, default_ports: None
) -> None:
    program = command.rsplit(maxsplit=1)[-1]
    order, answer = PLACE[program]
    place = f"curl -s --max-time 60 {order} | grep '{answer}'"
    (tmp_path / program).write_text((EXAMPLES / program).read_text(encoding="utf-8"))
    running = Terminal(command, tmp_path)
    try:
        until(lambda: Terminal(place, tmp_path).finish() == 0, f"{program} takes an order")
        with closing(sqlite3.connect(tmp_path / database)) as live, closing(sqlite3.connect(tmp_path / "copy")) as copy:
            live.backup(copy)
            assert Terminal(place, tmp_path).finish() == 0  # lost by the restore
            copy.backup(live)
        assert Terminal(place, tmp_path).finish() != 0  # its transaction may be the first to notice the restore
        assert running.finish() == 1
        assert any("has lost commits of this process: restart it" in line for line in running.lines)
    finally:
        running.close()
