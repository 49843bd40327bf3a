"""A worker follows a real Synapse."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop import reporting
from tests.interop.actions import move_all_streams
from tests.interop.recorder import Recorder
from tests.interop.synapse import SECRET, SERVER_NAME, Client, Main, quoted
from tests.system.daemons import Daemon, until
from tests.system.peers import ask
from tests.system.terminals import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.postgres import PostgresServer

REPLACED = {"presence", "pushers", "typing"}  # of those that move, where the story replaces its own rows


@pytest.fixture
def main(synapse_python: Path, tmp_path: Path, database: str) -> Iterator[Main]:
    """A main process on an empty database."""
    with Main(synapse_python, tmp_path / "main", database) as process:
        yield process


class Follower(Daemon):
    """A worker of a Synapse, which keeps copies."""

    def __init__(self, folder: Path, main: Main, *options: str, secret: str = SECRET) -> None:
        (folder / "secret").write_text(f"{secret}\n")
        super().__init__(
            folder,
            "worker",
            f"--server-name={SERVER_NAME}",
            f"--connect=tcp:127.0.0.1:{main.wire_port}",
            f"--catch-up=http://127.0.0.1:{main.http_port}",
            "--secret-file=secret",
            "--http=tcp:0:interface=127.0.0.1",
            *options,
        )

    def positions(self) -> dict[str, int]:
        """Return its position in each stream."""
        return {name: writer["position"] for name, writer in self.writers().items()}

    def writers(self) -> dict[str, dict[str, Any]]:
        """Return the status of the only writer, by stream."""
        headers = {"Authorization": f"Bearer {(self.folder / 'secret').read_text().strip()}"}
        _, answer = ask(f"http://{self.address('HTTP')}/v1/streams", headers=headers)
        return {each["name"]: writer for each in answer["streams"] for writer in each["writers"]}

    def copy(self, streams: Iterable[str]) -> dict[str, dict[int, list[str]]]:
        """Return the copied rows of each fact of some streams, by stream and token."""
        facts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        with closing(sqlite3.connect(self.folder / "replication-worker1.db")) as opened:
            for stream in streams:
                for token, row in opened.execute(
                    f'SELECT stream_id, row FROM "stream_{stream}" ORDER BY stream_id, ord'
                ):
                    facts[stream][token].append(row)
        return facts


def users(main: Main) -> tuple[Client, Client]:
    """Make two users."""
    return Client(main.client_port).register("anna"), Client(main.client_port).register("bert")


def caught_up(follower: Follower, recorder: Recorder) -> bool:
    """Return whether the follower has the positions of the main process."""
    return all(follower.positions().get(name) == token for name, token in recorder.positions().items())


def different(follower: Follower, recorder: Recorder) -> list[str]:
    """Return the streams whose copy differs from the recorded facts, from the recorder's first fact on."""
    sent, copy = recorder.facts(), follower.copy(recorder.moved)

    def since(facts: dict[int, list[str]], first: int) -> dict[int, list[str]]:
        return {token: rows for token, rows in facts.items() if token > first}

    firsts = {stream: recorder.first[stream] for stream in recorder.moved}
    return [each for each, first in firsts.items() if since(copy[each], first) != since(sent[each], first)]


def test_a_worker_copies_every_stream_of_synapse(main: Main, tmp_path: Path) -> None:
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        until(lambda: caught_up(follower, recorder), "the worker has connected")
        move_all_streams(*users(main))
        until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse")
        until(lambda: recorder.facts().keys() == recorder.moved, "Synapse has sent facts of every stream that moves")
        until(lambda: not different(follower, recorder), "the copy equals the recording")


def test_a_worker_fetches_missed_facts_from_synapse(main: Main, tmp_path: Path) -> None:
    """Pages have a hundred rows; facts that Synapse has replaced have no rows any more."""
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        anna, bert = users(main)
        until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse")
        follower.kill()
        room = move_all_streams(anna, bert)
        for number in range(150):
            anna.send_message(room, f"message {number}")
        follower.start()
        until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse again")

        def lacking() -> list[str]:
            sent, copy = recorder.facts(), follower.copy(recorder.moved)
            return [
                stream
                for stream in recorder.moved
                if {token: copy[stream].get(token, rows) for token, rows in sent[stream].items()} != sent[stream]
                or (stream not in REPLACED and not copy[stream].keys() >= sent[stream].keys())
            ]

        until(lambda: not lacking(), "the copy has the recorded facts")


def test_kills_lose_and_double_no_fact_of_active_users(main: Main, tmp_path: Path) -> None:
    """It is killed repeatedly, each time after progress, while facts arrive."""
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        anna, _ = users(main)
        room = str(anna.post("/createRoom", {})["room_id"])
        sending = threading.Thread(
            target=lambda: [anna.send_message(room, f"message {number}") for number in range(60)]
        )
        sending.start()
        applied, kills = 0, 0

        def is_further() -> bool:
            return not sending.is_alive() or follower.positions().get("events", 0) > applied

        while sending.is_alive():
            until(is_further, "the worker gets further")
            follower.kill()
            kills += 1
            applied = max(follower.copy(["events"])["events"], default=0)
            follower.start()
        sending.join()
        assert kills
        until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse")
        until(lambda: not {"events", "caches"} & {*different(follower, recorder)}, "the copy equals the recording")


def test_a_wrong_secret_is_reported_and_corrected_without_loss(main: Main, tmp_path: Path) -> None:
    users(main)
    with Recorder(main.wire) as recorder:
        with Follower(tmp_path, main, secret="not-it") as follower:
            refusal = "a missing or wrong secret"
            until(lambda: refusal in str(follower.writers().get("device_lists")), "the status has the reason still")
            until(lambda: follower.positions().get("backfill") == 1, "where nothing is missing it goes on")
        with Follower(tmp_path, main) as follower:
            until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse")
            assert {*follower.copy(["device_lists"])["device_lists"]} == {2, 3}


def test_a_worker_follows_a_main_process_that_was_killed(main: Main, tmp_path: Path) -> None:
    """The stream typing restarts with the main process (docs/protocol/traps.md 29), so its tokens decrease."""
    with Follower(tmp_path, main) as follower:
        with Recorder(main.wire) as recorder:
            anna, bert = users(main)
            until(lambda: caught_up(follower, recorder), "the worker has connected")
            room = move_all_streams(anna, bert)
            until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse")
            assert recorder.positions()["typing"] == 2
        main.kill()
        main.start()
        with Recorder(main.wire) as recorder:
            until(lambda: caught_up(follower, recorder), "the worker has the position of Synapse again")
            assert recorder.positions()["typing"] == 0
            bert.put(f"/rooms/{quoted(room)}/typing/{quoted(bert.user_id)}", {"typing": True, "timeout": 30_000})
            bert.send_message(room, "again")
            until(lambda: caught_up(follower, recorder), "the worker is where Synapse is, and on")
            until(lambda: not different(follower, recorder), "the copy equals the recording")


def tail(main: Main, folder: Path, *options: str) -> Terminal:
    """Start ``tail`` of all streams."""
    (folder / "secret").write_text(SECRET)
    http = f"--http=http://127.0.0.1:{main.http_port} --secret-file=secret --from=beginning"
    return Terminal(f"replication tail tcp:{main.wire} {http} {' '.join(options)}", folder)


def test_tail_prints_facts_of_synapse(main: Main, tmp_path: Path) -> None:
    with Recorder(main.wire) as recorder:
        anna, bert = users(main)
        room = move_all_streams(anna, bert)
        printer = tail(main, tmp_path, "--stream=events", "--stream=receipts")
        try:
            until(lambda: len(printer.lines) >= len(recorder.rdata("events", "receipts")), "the tail has caught up")
            anna.send_message(room, "one more")
            until(lambda: sorted(printer.lines) == sorted(recorder.rdata("events", "receipts")), "it prints the same")
        finally:
            printer.close()


def test_tail_names_the_fields(main: Main, tmp_path: Path) -> None:
    anna, bert = users(main)
    move_all_streams(anna, bert)
    for option, named in (("--json", f'"user_id":"{bert.user_id}"'), ("--typed", f"user_id='{bert.user_id}'")):
        printer = tail(main, tmp_path, "--stream=receipts", option)
        try:
            until(lambda printer=printer: printer.lines, "the tail has caught up")  # type: ignore[misc]
            assert named in printer.lines[0]
        finally:
            printer.close()


def test_synapse_receives_the_users_of_the_worker(main: Main, tmp_path: Path, postgres: PostgresServer) -> None:
    shutil.copy(Path(reporting.__file__), tmp_path)
    with Recorder(main.wire) as recorder, Follower(tmp_path, main, "--app=reporting") as follower:
        anna, bert = users(main)
        until(lambda: caught_up(follower, recorder), "the worker has connected")
        room = str(anna.post("/createRoom", {"invite": [bert.user_id]})["room_id"])
        bert.post(f"/rooms/{quoted(room)}/join", {})
        bert.post(f"/rooms/{quoted(room)}/receipt/m.read/{quoted(anna.send_message(room, 'read this'))}", {})
        presence = f"/presence/{quoted(bert.user_id)}/status"
        until(lambda: anna.get(presence)["presence"] == "online", "bert is online, because he syncs at our worker")
        seen = "SELECT access_token, device_id FROM user_ips WHERE user_id = %s AND ip = %s"
        place = (bert.user_id, reporting.IP)
        until(
            lambda: postgres.sql(seen, *place, database=main.database) == [(f"token of {bert.user_id}", "A DEVICE")],
            "Synapse has written where our worker saw him",
        )
        follower.terminate()
        until(lambda: main.received("CLEAR_USER_SYNC") == 1, "Synapse has received the end of the sync")
