"""A master serves a Synapse's database with conf/synapse.toml: the same bytes that Synapse sent.

Over HTTP in both forms, by replay, and live, as the rows come in while a worker follows. tests/spark has Spark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from replication.streams.access_tokens import hide_in_row
from replication.synapse import STREAMS
from replication.wire.grammar import encode_row
from tests.synapse.recorded import (
    CONFIGURATION,
    NAMES,
    NEWEST,
    SERVERS,
    UNSENT,
    WHOLE,
    check_history,
    lines_of,
    recorded_facts,
    restore_postgres,
    restore_sqlite,
)
from tests.system.daemons import CHECKOUT, LOCAL, Daemon, environment, get_json, until
from tests.system.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.postgres import PostgresServer

KEPT: list[str] = [*WHOLE, *NEWEST]


@pytest.fixture(params=NAMES)
def restored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Yield a recording's name, and the URL of its database."""
    if request.param == "synapse-sqlite":
        yield request.param, restore_sqlite(tmp_path)
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    with server.database() as database:
        yield request.param, restore_postgres(server, database)


@contextmanager
def master_over(folder: Path, name: str, url: str) -> Iterator[Daemon]:
    options = (f"--config={CONFIGURATION}", f"--database={url}", f"--server-name={SERVERS[name]}", *LOCAL)
    with Daemon(folder, "master", *options) as daemon:
        yield daemon


def fetch(http: str, stream: str, first: str, second: str) -> list[str]:
    """Return the lines of all pages; ``first`` and ``second`` are the parts of the URL before and after ``from``."""
    found: dict[int, list[str]] = {}
    token, limited = 0, True
    while limited:
        page = get_json(f"http://{http}", f"{first.format(stream=stream)}{token}{second}")
        for at, row in page["updates"]:
            found.setdefault(at, []).append(encode_row(row))
        token, limited = page["upto_token"], page["limited"]
    return lines_of(stream, found)


def test_recorded_facts_are_the_same_over_http_and_in_segments(restored: tuple[str, str], tmp_path: Path) -> None:
    name, url = restored
    with master_over(tmp_path, name, url) as master:
        http = master.address("HTTP")
        fetched = {
            stream: fetch(http, stream, "/v1/streams/{stream}/updates?limit=37&instance=master&from=", "&upto=99999")
            for stream in KEPT
        }
        check_history(name, fetched)
        path = "/_synapse/replication/get_repl_stream_updates/{stream}/x1?upto_token=99999&from_token="
        assert {stream: fetch(http, stream, path, "") for stream in KEPT} == fetched
        streams = [*positions(http)]
        assert master.terminate() == 0  # it has stored its positions
    assert streams == [each.name for each in STREAMS]
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")
    assert lines_of_replay(tmp_path / "segments", url) == {stream: lines for stream, lines in fetched.items() if lines}


def lines_of_replay(out: Path, url: str) -> dict[str, list[str]]:
    """Return the lines of all segments, by stream."""
    command = ["replication", "replay", f"--config={CONFIGURATION}", f"--database={url}", f"--out={out}"]
    options = ["--master=none", "--compression=none", "--segment-rows=700", "--access-tokens"]
    done = subprocess.run([*command, *options], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for segment in sorted(out.glob("*/master/*.rdata")):
        lines = [line for line in segment.read_text().splitlines() if line.startswith("RDATA ")]
        if lines:
            found.setdefault(segment.parts[-3], []).extend(lines)
    return found


def test_recorded_facts_are_the_same_live(restored: tuple[str, str], tmp_path: Path) -> None:
    name, url = restored
    # The master reads each fact that it has written, by a join of many tables: this makes it quick to plan.
    options = "?options=-c%20join_collapse_limit%3D1" if name == "synapse-postgres" else ""
    script = [sys.executable, str(CHECKOUT / "tests/synapse/loading.py"), url + options, SERVERS[name]]
    with subprocess.Popen(
        script, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as loading:
        assert loading.stdin is not None
        assert loading.stdout is not None
        try:
            wire = loading.stdout.readline().strip()
            follow = (
                f"--connect=tcp:{wire}",
                f"--server-name={SERVERS[name]}",
                f"--catch-up={url}",
                "--http=tcp:0:interface=127.0.0.1",
            )
            with Peer(wire) as peer, Daemon(tmp_path, "worker", *follow) as worker:
                peer.send(b"NAME recorder\nREPLICATE \n")
                peer.read_until("POSITION user_signature")
                http = worker.address("HTTP")
                until(
                    lambda: len(get_json(f"http://{http}", "/v1/streams")["streams"]) == len(STREAMS), "it follows all"
                )
                loading.stdin.write("load\n")
                loading.stdin.flush()
                ends = json.loads(loading.stdout.readline())
                for stream, token in ends.items():
                    peer.read_until(f"RDATA {stream} master {token} ")
                found: dict[str, list[str]] = {stream: [] for stream in KEPT}
                for line in peer.lines:
                    if line.startswith("RDATA "):
                        found[line.split(" ")[1]].append(line)
                check_history(name, found)
                until(lambda: has_reached(http, ends), "the worker has applied it all")
                copies = {
                    stream: fetch(http, stream, "/v1/streams/{stream}/updates?instance=master&from=", "&upto=99999")
                    for stream in KEPT
                }
                assert copies == {stream: [*map(hide, lines)] for stream, lines in found.items()}
        finally:
            loading.kill()


def hide(line: str) -> str:
    """Return a line of RDATA as a copy has it."""
    *head, row = line.split(" ", 4)
    return " ".join([*head, hide_in_row(row) if head[1] == "caches" else row])


def positions(http: str) -> dict[str, int]:
    """Return the position of each stream."""
    streams = get_json(f"http://{http}", "/v1/streams")["streams"]
    return {each["name"]: each["writers"][0]["position"] for each in streams if each["writers"]}


def has_reached(http: str, ends: dict[str, int]) -> bool:
    at = positions(http)
    return all(at.get(stream, 0) >= token for stream, token in ends.items())


def test_the_page_lists_all_facts_that_are_missing() -> None:
    for (name, stream), tokens in UNSENT.items():
        assert not set(recorded_facts(name).get(stream, {})) & set(tokens)
