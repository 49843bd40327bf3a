"""A writer that is not where the configuration places it: logged once, and not ready until it has sent a position."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from unittest.mock import patch

from replication.follower.absent_writers import AbsentWriters
from tests.doubles import begin, logged
from tests.follower.cases import HELLO, WIRE, WorkerCase, position
from tests.system.daemons import LOCAL, Daemon, run_command, until

if TYPE_CHECKING:
    from pathlib import Path

AT = f"tcp:127.0.0.1:{WIRE}"
WRITERS = {"w1": {"connect": AT}, "w2": {"connect": AT}}
WHY = (
    f"the connection of [writers.w2] to {AT} has sent positions of w1, and none of w2: "
    "give the address of w2, or of a relay that follows it"
)


class AbsentWritersTests(WorkerCase):
    def follow(self, *scripts: bytes, seconds: float = 11.0, **options: object) -> tuple[list[str], list[str]]:
        """Return what was logged about such writers, and what is wrong then."""
        self.worker = self.make_worker(**{"writers": WRITERS, **options})
        self.writer = self.serve(HELLO + b"".join(scripts))
        with logged() as messages:
            begin(self.worker.start())
            self.net.run(seconds)
        return [line for line in messages if "[writers." in line], [*self.worker.served.absent_writers()]

    def test_an_address_at_which_only_another_writer_is_found_is_logged_once(self) -> None:
        self.assertEqual(self.follow(position(1, 1, writer="w1"), seconds=61.0), ([WHY], [WHY]))
        self.send(self.writer, position(1, 1, writer="w2"))
        self.assertEqual(self.worker.served.absent_writers(), [], "a relay has found it")

    def test_a_writer_has_time(self) -> None:
        self.assertEqual(self.follow(position(1, 1, writer="w1"), seconds=9.0), ([], []))

    def test_a_relay_that_sends_both_is_no_mistake(self) -> None:
        both = position(1, 1, writer="w1") + position(1, 1, writer="w2")
        self.assertEqual(self.follow(both), ([], []))

    def test_a_connection_without_a_position_proves_nothing(self) -> None:
        self.assertEqual(self.follow(), ([], []))

    def test_a_writer_that_may_write_no_followed_stream_is_only_logged(self) -> None:
        self.assertEqual(self.follow(position(1, 1, writer="w1"), streams=["orders"]), ([WHY], []))

    def test_a_writer_that_never_sends_a_position_is_looked_for_once_a_minute(self) -> None:
        with patch.object(AbsentWriters, "_find", return_value={}) as looked:
            self.assertEqual(self.follow(seconds=600.0), ([], []))
        self.assertIn(looked.call_count, range(10, 16))  # not 120, as every 5 s

    def test_a_new_connection_is_looked_at_within_a_minute_and_the_time_of_a_writer(self) -> None:
        self.follow(seconds=600.0)
        self.serve(HELLO + position(1, 1, writer="w1"))
        self.writer.connections[-1].transport.loseConnection()
        self.net.run(75.0)
        self.assertEqual(self.worker.served.absent_writers(), [WHY])

    def test_a_name_of_this_process_is_not_expected(self) -> None:
        self.assertEqual(self.follow(position(1, 1, writer="w1"), instance_name="w2"), ([], []))


def test_status_check_and_doctor_name_it(tmp_path: Path) -> None:
    with Daemon(tmp_path, "master", "--stream=orders", "--instance-name=w1", *LOCAL) as master:
        wire, http = master.address("the wire"), master.address("HTTP")
        (tmp_path / "worker.toml").write_text(
            f'http = "tcp:0:interface=127.0.0.1"\ncatch_up = ["http://{http}"]\n'
            + "".join(f'[writers.{name}]\nconnect = "tcp:{wire}"\n' for name in ("w1", "w2"))
        )
        with Daemon(tmp_path, "worker", "--config=worker.toml") as worker:
            url = f"--http=http://{worker.address('HTTP')}"

            def status() -> str:
                done = run_command("replication", "status", "--check", url, folder=tmp_path)
                return done.stdout if done.returncode == 1 else ""

            until(lambda: f"[writers.w2] to tcp:{wire} has sent positions of w1" in status(), "it is found")
            done = run_command("replication", "doctor", "--json", url, folder=tmp_path)
            (found,) = json.loads(done.stdout)["findings"]
            assert f"the connection of [writers.w2] to tcp:{wire} has sent positions of w1" in found["what"]
            assert worker.log.count("has sent positions of w1, and none of w2") == 1
