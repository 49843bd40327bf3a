"""Masters on an SQLite file that is harmed while they run or start."""

from __future__ import annotations

import resource
import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from replication.storage.proof import FAILURE_LIFE, PROOF_LIFE
from tests.system.daemons import LOCAL, Daemon, until
from tests.system.peers import ask

if TYPE_CHECKING:
    from pathlib import Path


WORKS = "the database works again"


class Probed:
    """A master, and what its probes answer."""

    def __init__(self, master: Daemon) -> None:
        self.master = master
        self.http = f"http://{master.address('HTTP')}"

    def append(self) -> int:
        """Append a fact and return the status."""
        status: int = ask(
            f"{self.http}/v1/streams/orders/facts", b'{"rows":[[1]]}', {"Content-Type": "application/json"}
        )[0]
        return status

    def probe(self, which: str = "ready") -> tuple[int, Any]:
        """Return a probe's status and its reason."""
        status, answer = ask(f"{self.http}/health/{which}".rstrip("/"))
        return status, answer.get("detail")


def limit_files(master: Daemon, size: int) -> None:
    """Let no file of the process grow beyond ``size`` bytes, as a full disk would."""
    resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_on_a_full_disk_a_master_is_not_ready_before_and_after_appends_fail_and_lives(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        probed = Probed(master)
        assert [probed.append() for _ in range(3)] == [200] * 3
        assert probed.probe() == (200, None)
        limit_files(master, (tmp_path / "replication.db-wal").stat().st_size)
        _, why = until(lambda: (found := probed.probe())[0] == 503 and found, "the proof fails", 10)
        assert "replication.db" in why
        assert [probed.append() for _ in range(5)] == [503] * 5
        time.sleep(FAILURE_LIFE + PROOF_LIFE)  # an append that failed long ago is no reason: the proof is made again
        assert [probed.probe(each)[0] for each in ("ready", "", "live")] == [503, 503, 200]
        limit_files(master, resource.RLIM_INFINITY)
        until(lambda: probed.probe()[0] == 200, "it is ready again", 30)
        assert probed.append() == 200
        assert (master.log.count("the database does not work: "), master.log.count(WORKS)) == (1, 1)


def test_appends_that_fail_make_a_master_unready_at_once_although_small_writes_work(tmp_path: Path) -> None:
    """The proof is smaller than the facts: the disk has room for it."""
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        probed, url = Probed(master), "/v1/streams/orders/facts"
        limit_files(master, (tmp_path / "replication.db-wal").stat().st_size + 2**18)
        body, kind = b'{"rows":["%s"]}' % (b"x" * 2**20), {"Content-Type": "application/json"}
        assert probed.probe() == (200, None)
        assert ask(probed.http + url, body, kind)[0] == 503
        status, why = probed.probe()
        assert (status, "replication.db" in why) == (503, True)
        assert probed.append() == 200
        assert probed.probe() == (200, None)


def test_a_master_whose_database_is_gone_is_not_ready_and_acknowledges_nothing(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        probed = Probed(master)
        assert probed.append() == 200
        (tmp_path / "replication.db").unlink()
        assert [probed.append() for _ in range(10)] == [503] * 10
        status, why = probed.probe()
        assert (status, "replication.db' was moved or deleted" in why) == (503, True)
        assert probed.probe("live")[0] == 200


def test_facts_of_a_deleted_wal_are_stored_by_sigterm_and_no_later_fact_is_acknowledged(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        http, json = f"http://{master.address('HTTP')}", {"Content-Type": "application/json"}
        answers = [ask(f"{http}/v1/streams/orders/facts", b'{"rows":[[1]]}', json) for _ in range(3)]
        (tmp_path / "replication.db-wal").unlink()
        for number in range(8):
            keyed = json | ({"Idempotency-Key": f"k{number}"} if number % 2 == 0 else {})
            answers.append(ask(f"{http}/v1/streams/orders/facts", b'{"rows":[[2]]}', keyed))
        assert [status for status, _ in answers] == [200] * 3 + [503] * 8
        assert "replication.db-wal' was moved or deleted" in str(ask(f"{http}/health")[1])
        assert master.terminate() == 0
        master.start()
        http = f"http://{master.address('HTTP')}"
        page = ask(f"{http}/v1/streams/orders/updates?instance=master&from=0&upto=4")[1]
        assert {2, 3, 4} <= {token for token, _ in page["updates"]}, page


@pytest.mark.parametrize("role", ["master", "worker"])
def test_a_start_waits_for_a_locked_database_and_logs_it(tmp_path: Path, role: str) -> None:
    """SQLite itself waits for five seconds; after that a daemon ended, and with it all that depends on it."""
    path = tmp_path / "replication.db"
    options = [f"--database=sqlite:///{path}", LOCAL[1]]
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE mine (a)")
        other.execute("BEGIN IMMEDIATE")
        with Daemon(tmp_path, role, *options, *(["--stream=orders", LOCAL[0]] if role == "master" else [])) as daemon:
            until(lambda: "the start waits" in daemon.log or daemon.ended, "it waits", 30)
            probed = Probed(daemon)
            waits = f"the start waits: database '{path}': database is locked; another process holds its lock"
            assert waits in daemon.log
            assert "next attempt in 2 s" in daemon.log
            assert probed.probe("live") == (200, None)
            status, why = probed.probe()
            assert (status, f"database '{path}'" in why) == (503, True), why
            assert not daemon.ended
            other.execute("ROLLBACK")
            until(lambda: "the start goes on" in daemon.log, "it goes on", 30)
            if role == "master":
                until(lambda: probed.probe()[0] == 200, "it is ready", 30)
                assert probed.append() == 200
            assert daemon.log.count("the start waits") == 1
            assert daemon.terminate() == 0


def test_a_start_that_waits_ends_with_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "replication.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE mine (a)")
        other.execute("BEGIN IMMEDIATE")
        with Daemon(tmp_path, "master", f"--database=sqlite:///{path}", *LOCAL) as master:
            until(lambda: "the start waits" in master.log or master.ended, "it waits", 30)
            assert master.terminate() == 0
