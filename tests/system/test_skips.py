"""Facts that a function cannot take, in real processes: skipped once, never silently, also behind a relay."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.system.daemons import LOCAL, Daemon, append, fixed_ports, get_json, run_command, until
from tests.system.test_kills import rows_of

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

HTTP = "--http=tcp:0:interface=127.0.0.1"
# Facts with "bad" cannot be applied while there is no file "cured"; "auto" lets a function skip them.
APP = """
from pathlib import Path
from replication import FailedFactAction


async def note(table, facts, txn):
    await txn.execute(f"CREATE TABLE IF NOT EXISTS {table} (token INTEGER PRIMARY KEY)")
    await txn.executemany(f"INSERT INTO {table} VALUES (?)", [(fact.token,) for fact in facts])


def register(worker):
    @worker.on("orders")
    async def apply(facts, txn):
        await note("seen", facts, txn)
        if any("bad" in row for fact in facts for row in fact.rows) and not Path("cured").exists():
            raise ValueError("a bad order")


def auto(worker):
    register(worker)

    @worker.on_failed_fact("orders", attempts=1)
    async def decide(failed, txn):
        await note("letters", [failed.fact], txn)
        return FailedFactAction.SKIP
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ``replication``."""
    return run_command("replication", *words, folder=folder)


def order(*, bad: bool = False) -> Fact:
    return Fact(Token(0), ('["bad"]' if bad else '["good"]',))


def follow(process: Daemon) -> tuple[str, str]:
    """Return the options of a worker that follows a process."""
    return f"--connect=tcp:{process.address('the wire')}", f"--catch-up=http://{process.address('HTTP')}"


def writer_of(http: str) -> dict[str, Any]:
    """Return the status of the stream's writer at a worker."""
    found: list[dict[str, Any]] = get_json(f"http://{http}", "/v1/streams")["streams"]
    return next((each["writers"][0] for each in found if each["name"] == "orders" and each["writers"]), {})


def seen(folder: Path, table: str = "seen", name: str = "worker1") -> list[int]:
    return [int(str(token)) for (token,) in rows_of(folder / f"replication-{name}.db", f"SELECT token FROM {table}")]


def test_a_fact_is_found_skipped_listed_and_applied_after_all(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with (
        Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master,
        Daemon(tmp_path, "worker", *follow(master), "--app=shop", HTTP) as worker,
    ):
        append(master.address("HTTP"), "orders", [order(), order(), order(bad=True), order()])
        http = worker.address("HTTP")
        url = f"--http=http://{http}"
        until(lambda: writer_of(http).get("failed") == 4, "the fact that fails is found")
        skip = f"`replication skip orders master 4 --http http://{http}` leaves it out"
        assert skip in command(tmp_path, "status", url).stdout
        refused = command(tmp_path, "skip", "orders", "master", "5", url)
        assert (refused.returncode, "does not fail: 4 does" in refused.stderr) == (1, True)
        for _ in range(2):
            done = command(tmp_path, "skip", "orders", "master", "4", url)
            assert done.stdout == "fact 4 of orders by master: skipped: ValueError: a bad order\n"
        until(lambda: writer_of(http)["position"] == 5, "the stream goes on")
        assert (writer_of(http)["skipped"], writer_of(http)["state"], seen(tmp_path)) == (1, "live", [2, 3, 5])
        (kept,) = json.loads(command(tmp_path, "skipped", "--json", url).stdout)["skipped"]
        assert (kept["token"], kept["rows"], kept["error"]) == (4, [["bad"]], "ValueError: a bad order")
        assert abs(kept["since"] - time.time()) < 3600
        again = command(tmp_path, "retry", "orders", "master", "4", url)
        assert (again.returncode, "stays skipped, the function raised" in again.stderr) == (1, True)
        (tmp_path / "cured").touch()
        assert command(tmp_path, "retry", "orders", "master", "4", url).stdout.startswith(
            "fact 4 of orders by master: applied"
        )
        assert (sorted(seen(tmp_path)), writer_of(http)["skipped"]) == ([2, 3, 4, 5], 0)
        assert command(tmp_path, "skip", "orders", "master", "9", f"--http=http://{master.address('HTTP')}").returncode
        figures = command(tmp_path, "status", "--json", url)
        assert figures.returncode == 0


def test_a_stopped_worker_skips_and_retries_at_its_next_start(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with Daemon(tmp_path, "master", "--stream=orders", *LOCAL) as master:
        worker = Daemon(tmp_path, "worker", *follow(master), "--app=shop", HTTP)
        database = "--database=sqlite:///replication-worker1.db"
        with worker:
            append(master.address("HTTP"), "orders", [order(), order(bad=True), order()])
            until(lambda: writer_of(worker.address("HTTP")).get("failed") == 3, "it fails")
            running = command(tmp_path, "skip", "orders", "master", "3", database)
            assert (running.returncode, "is written by process" in running.stderr) == (1, True)
            assert "; while the worker runs, give --http URL instead of --database" in running.stderr
        for words, error in (
            (("skip", "orders", "unknown", "3"), "no position of 'unknown'"),
            (("skip", "orders", "master", "2"), "fact 2 is applied"),
            (("retry", "orders", "master", "3"), "was not skipped here"),
        ):
            refused = command(tmp_path, *words, database)
            assert (refused.returncode, error in refused.stderr) == (1, True), refused.stderr
        assert command(tmp_path, "skip", "orders", "master", "3", database).stdout.endswith("skip requested\n")
        with worker:
            until(lambda: writer_of(worker.address("HTTP")).get("skipped") == 1, "it is skipped at the start")
        assert seen(tmp_path) == [2, 4]
        (tmp_path / "cured").touch()
        assert "retry requested" in command(tmp_path, "retry", "orders", "master", "3", database).stdout
        with worker:
            until(lambda: len(seen(tmp_path)) == 3, "it is applied at the start")
            until(lambda: writer_of(worker.address("HTTP")).get("skipped") == 0, "none is left out")
        assert "applied" in command(tmp_path, "skipped", database).stdout


def test_whatever_is_killed_a_fact_is_skipped_once_and_never_silently(tmp_path: Path) -> None:
    """Each fact is in the table of the function, or in that of the letters and in the list of skipped facts."""
    (tmp_path / "shop.py").write_text(APP)
    chance, count = random.Random(3), 60
    with ExitStack() as stack:
        master = Daemon(tmp_path, "master", "--stream=orders")
        wire, http = stack.enter_context(fixed_ports(master))
        worker = Daemon(
            tmp_path, "worker", f"--connect=tcp:{wire}", f"--catch-up=http://{http}", "--app=shop:auto", HTTP
        )
        stack.enter_context(worker)
        ids = [append(http, "orders", [order(bad=each % 7 == 0)])[0] for each in range(count)]
        for _ in range(6):
            time.sleep(chance.uniform(0.3, 1.5))
            worker.kill()
            worker.start()
        until(lambda: writer_of(worker.address("HTTP")).get("position") == ids[-1], "all is applied or skipped")
        bad = [token for index, token in enumerate(ids) if index % 7 == 0]
        assert seen(tmp_path) == [token for token in ids if token not in bad]
        assert seen(tmp_path, "letters") == bad
        listed = json.loads(command(tmp_path, "skipped", "--json", f"--http=http://{worker.address('HTTP')}").stdout)[
            "skipped"
        ]
        assert [(each["token"], each["decided_by"]) for each in reversed(listed)] == [
            (each, "function") for each in bad
        ]


def test_what_a_relay_skips_its_followers_receive_and_may_skip_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    with ExitStack() as stack:
        master = stack.enter_context(Daemon(tmp_path, "master", "--stream=orders", *LOCAL))
        relay = stack.enter_context(
            Daemon(
                tmp_path,
                "worker",
                "--instance-name=relay",
                *follow(master),
                "--app=shop:auto",
                *LOCAL,
                name="relay",
            )
        )
        copy = stack.enter_context(
            Daemon(tmp_path, "worker", "--instance-name=copy", *follow(relay), HTTP, name="copy")
        )
        applies = stack.enter_context(Daemon(tmp_path, "worker", *follow(relay), "--app=shop", HTTP))
        append(master.address("HTTP"), "orders", [order(), order(bad=True), order()])
        until(lambda: writer_of(copy.address("HTTP")).get("position") == 4, "the copy behind the relay is complete")
        rows = rows_of(tmp_path / "replication-copy.db", "SELECT stream_id FROM stream_orders")
        assert rows == [(2,), (3,), (4,)]
        assert seen(tmp_path, "letters", "relay") == [3]
        url = f"--http=http://{applies.address('HTTP')}"
        until(lambda: writer_of(applies.address("HTTP")).get("failed") == 3, "it fails behind the relay, too")
        assert command(tmp_path, "skip", "orders", "master", "3", url).returncode == 0
        until(lambda: writer_of(applies.address("HTTP"))["position"] == 4, "the stream goes on")
        refused = command(tmp_path, "skip", "orders", "master", "3", f"--http=http://{copy.address('HTTP')}")
        assert (refused.returncode, "a copy is complete" in refused.stderr) == (1, True)
