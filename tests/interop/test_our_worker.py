"""Our worker follows a real Synapse."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.interop import speaking
from tests.interop.recorder import Recorder
from tests.interop.stories import tell
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
    """Our worker, as a user would start it beside a Synapse: it keeps a copy."""

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
        """Return how far it is in each stream."""
        return {name: writer["position"] for name, writer in self.writers().items()}

    def writers(self) -> dict[str, dict[str, Any]]:
        """Return how it stands with the only writer that there is, by stream."""
        headers = {"Authorization": f"Bearer {(self.folder / 'secret').read_text().strip()}"}
        _, answer = ask(f"http://{self.address('HTTP')}/v1/streams", headers=headers)
        return {each["name"]: writer for each in answer["streams"] for writer in each["writers"]}

    def copy(self, streams: Iterable[str]) -> dict[str, dict[int, list[str]]]:
        """Return the rows of each fact that it keeps of some streams, by stream and token."""
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
    """Whether the follower is where the main process is."""
    return all(follower.positions().get(name) == token for name, token in recorder.positions().items())


def different(follower: Follower, recorder: Recorder) -> list[str]:
    """Return the streams of which not every row that was said is kept, or one that was not, since the recorder came."""
    said, copy = recorder.facts(), follower.copy(recorder.moved)

    def since(facts: dict[int, list[str]], first: int) -> dict[int, list[str]]:
        return {token: rows for token, rows in facts.items() if token > first}

    firsts = {stream: recorder.first[stream] for stream in recorder.moved}
    return [each for each, first in firsts.items() if since(copy[each], first) != since(said[each], first)]


def test_a_copy_of_every_stream_that_moves(main: Main, tmp_path: Path) -> None:
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        until(lambda: caught_up(follower, recorder), "the worker has connected")
        tell(*users(main))
        until(lambda: caught_up(follower, recorder), "the worker is where Synapse is")
        until(lambda: not different(follower, recorder), "the copy is what was said")
        assert recorder.facts().keys() == recorder.moved


def test_what_was_missed_is_fetched_from_its_http_endpoint(main: Main, tmp_path: Path) -> None:
    """In pages of a hundred rows; what Synapse has replaced since then has no row any more."""
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        anna, bert = users(main)
        until(lambda: caught_up(follower, recorder), "the worker is where Synapse is")
        follower.kill()
        room = tell(anna, bert)
        for number in range(150):
            anna.say(room, f"message {number}")
        follower.start()
        until(lambda: caught_up(follower, recorder), "the worker is where Synapse is again")

        def lacking() -> list[str]:
            said, copy = recorder.facts(), follower.copy(recorder.moved)
            return [
                stream
                for stream in recorder.moved
                if {token: copy[stream].get(token, rows) for token, rows in said[stream].items()} != said[stream]
                or (stream not in REPLACED and not copy[stream].keys() >= said[stream].keys())
            ]

        until(lambda: not lacking(), "the copy has what was said")


def test_nothing_is_lost_or_doubled_by_kills_while_users_talk(main: Main, tmp_path: Path) -> None:
    """Each time it is killed when it has got further, while more comes."""
    with Recorder(main.wire) as recorder, Follower(tmp_path, main) as follower:
        anna, _ = users(main)
        room = str(anna.post("/createRoom", {})["room_id"])
        talking = threading.Thread(target=lambda: [anna.say(room, f"message {number}") for number in range(150)])
        talking.start()
        applied, kills = 0, 0

        def is_further() -> bool:
            return not talking.is_alive() or follower.positions().get("events", 0) > applied

        while talking.is_alive():
            until(is_further, "the worker gets further")
            follower.kill()
            kills += 1
            applied = max(follower.copy(["events"])["events"], default=0)
            follower.start()
        talking.join()
        assert kills
        until(lambda: caught_up(follower, recorder), "the worker is where Synapse is")
        until(lambda: not {"events", "caches"} & {*different(follower, recorder)}, "the copy is what was said")


def test_a_wrong_secret_is_said_and_mended_without_loss(main: Main, tmp_path: Path) -> None:
    users(main)
    with Recorder(main.wire) as recorder:
        with Follower(tmp_path, main, secret="not-it") as follower:
            refusal = "a missing or wrong secret"
            until(lambda: refusal in str(follower.writers().get("device_lists")), "the worker says why it stands still")
            until(lambda: follower.positions().get("backfill") == 1, "where nothing is missing it goes on")
        with Follower(tmp_path, main) as follower:
            until(lambda: caught_up(follower, recorder), "the worker is where Synapse is")
            assert {*follower.copy(["device_lists"])["device_lists"]} == {2, 3}


def test_a_main_process_that_was_killed_is_followed_on(main: Main, tmp_path: Path) -> None:
    """Typing begins anew with it (trap 29), so that its stream goes back."""
    with Follower(tmp_path, main) as follower:
        with Recorder(main.wire) as recorder:
            anna, bert = users(main)
            until(lambda: caught_up(follower, recorder), "the worker has connected")
            room = tell(anna, bert)
            until(lambda: caught_up(follower, recorder), "the worker is where Synapse is")
            assert recorder.positions()["typing"] == 2
        main.kill()
        main.start()
        with Recorder(main.wire) as recorder:
            until(lambda: caught_up(follower, recorder), "the worker is where Synapse is again")
            assert recorder.positions()["typing"] == 0
            bert.put(f"/rooms/{quoted(room)}/typing/{quoted(bert.user_id)}", {"typing": True, "timeout": 30_000})
            bert.say(room, "again")
            until(lambda: caught_up(follower, recorder), "the worker is where Synapse is, and on")
            until(lambda: not different(follower, recorder), "the copy is what was said")


def tail(main: Main, folder: Path, *options: str) -> Terminal:
    """Start a tail of all that there is."""
    (folder / "secret").write_text(SECRET)
    http = f"--http=http://127.0.0.1:{main.http_port} --secret-file=secret --from=beginning"
    return Terminal(f"replication tail tcp:{main.wire} {http} {' '.join(options)}", folder)


def test_tail_prints_what_synapse_says(main: Main, tmp_path: Path) -> None:
    with Recorder(main.wire) as recorder:
        anna, bert = users(main)
        room = tell(anna, bert)
        printer = tail(main, tmp_path, "--stream=events", "--stream=receipts")
        try:
            until(lambda: len(printer.lines) >= len(recorder.rdata("events", "receipts")), "the tail has caught up")
            anna.say(room, "one more")
            until(lambda: sorted(printer.lines) == sorted(recorder.rdata("events", "receipts")), "it says the same")
        finally:
            printer.close()


def test_tail_names_the_fields(main: Main, tmp_path: Path) -> None:
    anna, bert = users(main)
    tell(anna, bert)
    for option, named in (("--json", f'"user_id":"{bert.user_id}"'), ("--typed", f"user_id='{bert.user_id}'")):
        printer = tail(main, tmp_path, "--stream=receipts", option)
        try:
            until(lambda printer=printer: printer.lines, "the tail has caught up")  # type: ignore[misc]
            assert named in printer.lines[0]
        finally:
            printer.close()


def test_synapse_hears_of_the_users_of_our_worker(main: Main, tmp_path: Path, postgres: PostgresServer) -> None:
    shutil.copy(Path(speaking.__file__), tmp_path)
    with Recorder(main.wire) as recorder, Follower(tmp_path, main, "--app=speaking") as follower:
        anna, bert = users(main)
        until(lambda: caught_up(follower, recorder), "the worker has connected")
        room = str(anna.post("/createRoom", {"invite": [bert.user_id]})["room_id"])
        bert.post(f"/rooms/{quoted(room)}/join", {})
        bert.post(f"/rooms/{quoted(room)}/receipt/m.read/{quoted(anna.say(room, 'read this'))}", {})
        presence = f"/presence/{quoted(bert.user_id)}/status"
        until(lambda: anna.get(presence)["presence"] == "online", "bert is online, because he syncs at our worker")
        seen = "SELECT access_token, device_id FROM user_ips WHERE user_id = %s AND ip = %s"
        place = (bert.user_id, speaking.IP)
        until(
            lambda: postgres.sql(seen, *place, database=main.database) == [(f"token of {bert.user_id}", "A DEVICE")],
            "Synapse has written where our worker saw him",
        )
        follower.terminate()
        until(lambda: main.heard("CLEAR_USER_SYNC") == 1, "Synapse has heard that he syncs there no more")
