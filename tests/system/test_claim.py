"""Two masters on one database file: the second one refuses to start, whatever it calls the file.

On PostgreSQL a second one may claim the name of a process without sessions, which then ends.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from pathlib import Path

    from tests.postgres import PostgresServer


def started_or_ended(daemon: Daemon) -> bool:
    return daemon.ended or "is served at" in daemon.log


def test_a_second_master_is_refused_under_every_name_until_the_first_one_is_killed(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        master.address("HTTP")
        (tmp_path / "symbolic.db").symlink_to("replication.db")
        (tmp_path / "hard.db").hardlink_to(tmp_path / "replication.db")
        for each in tmp_path.glob("*claim"):
            each.unlink()
        for name in ("replication.db", "symbolic.db", "hard.db"):
            with Daemon(tmp_path, "master", f"--database=sqlite:///{name}", *LOCAL, name=f"second-{name}") as second:
                until(partial(started_or_ended, second), "it has started or ended")
                refusal = f"database {name!r} is written by process {master.pid} already: stop that"
                assert refusal in second.log, second.log
        append(master.address("HTTP"), "orders", [Fact(Token(0), ('["o1"]',))])
        master.kill()  # the fact is in the WAL, which has the first name
        for name in ("replication.db", "hard.db"):
            with Daemon(tmp_path, "master", f"--database=sqlite:///{name}", *LOCAL, name=f"linked-{name}") as linked:
                until(partial(started_or_ended, linked), "it has started or ended")
                assert f"database {name!r} has 2 names (hard links)" in linked.log, linked.log
        (tmp_path / "hard.db").unlink()
        with Daemon(
            tmp_path, "master", "--stream=orders", "--database=sqlite:///symbolic.db", *LOCAL, name="third"
        ) as third:
            _, orders = ask(f"http://{third.address('HTTP')}/v1/streams/orders")
            assert orders["positions"] == {"master": 2}
            assert third.terminate() == 0
    files = {each.name for each in tmp_path.iterdir() if each.suffix != ".log"}
    assert files - {"twistd.log"} == {"replication.db", "symbolic.db"}


def test_a_master_that_has_lost_its_name_ends_although_nothing_is_requested_of_it(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    """Its followers would wait for it for ever: it publishes nothing, and its connections last."""
    with postgres.database() as database:
        options = ("--stream=orders", f"--database={postgres.url(database)}", *LOCAL)
        with Daemon(tmp_path, "master", *options) as master:
            append(master.address("HTTP"), "orders", [Fact(Token(0), ('["o1"]',))])
            os.kill(master.pid, signal.SIGSTOP)
            postgres.end_sessions("FROM pg_stat_activity WHERE datname = %s", database)
            with Daemon(tmp_path, "master", *options, name="second") as second:
                append(second.address("HTTP"), "orders", [Fact(Token(0), ('["o2"]',))])
            os.kill(master.pid, signal.SIGCONT)
            assert master.wait() == 1
            assert "another process has taken over the name 'master'" in master.log
            _, orders = ask(f"http://{master.start().address('HTTP')}/v1/streams/orders")
            assert orders["positions"] == {"master": 3}
