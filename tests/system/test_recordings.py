"""The recorded lines of a Synapse and its worker, sent to real daemons over sockets."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from replication.session.connection import Role
from replication.streams.access_tokens import hide_in_row
from replication.synapse import STREAMS
from tests.synapse.playing import PlayedMaster
from tests.synapse.recorded import CONFIGURATION, NAMES, SERVERS, Facts, recorded_facts, restore_sqlite
from tests.system.daemons import LOCAL, Daemon, get_json, until
from tests.system.peers import Peer, ask
from tests.transcripts.recordings import RECORDINGS, read_recording

if TYPE_CHECKING:
    from pathlib import Path

    from replication.streams.typed_rows import TypedStream

BY_NAME: dict[str, TypedStream[Any]] = {each.name: each for each in STREAMS}


def applied(path: Path) -> dict[str, dict[int, list[Any]]]:
    """Return the named fields of all rows that the application has stored, by stream and token."""
    found: dict[str, dict[int, list[Any]]] = {}
    with closing(sqlite3.connect(path)) as database:
        for stream, token, place, fields in database.execute("SELECT * FROM applied ORDER BY rowid"):
            rows = found.setdefault(stream, {}).setdefault(token, [])
            assert place == len(rows), f"{stream} {token} came twice"
            rows.append(json.loads(fields))
    return found


def typed(facts: Facts) -> dict[str, dict[int, list[Any]]]:
    """Return the expected rows."""
    return {
        stream: {
            token: [json.loads(json.dumps(BY_NAME[stream].read_row(row).named())) for row in rows]
            for token, rows in some.items()
        }
        for stream, some in facts.items()
    }


@pytest.mark.parametrize(("seed", "pause_after"), [(1, b""), (2, b"RDATA backfill ")])
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_applies_a_whole_recording_of_synapse(
    name: str, seed: int, pause_after: bytes, tmp_path: Path
) -> None:
    """Each row is typed and applied once; earlier and disordered facts are fetched (docs/protocol/traps.md 12).

    In order, too, but where it turned out too late that there is none: after the first line of backfill was applied.
    """
    facts = recorded_facts(name)
    if "caches" in facts:  # its first POSITION covers these
        facts["caches"] |= {1: ['["user_last_seen_monthly_active",null,1]'], 2: ['["get_monthly_active_count",[],1]']}
    with PlayedMaster(read_recording(f"{name}/recording.txt"), facts, seed, pause_after=pause_after) as played:
        options = (
            f"--server-name={SERVERS[name]}",
            f"--connect={played.wire}",
            f"--catch-up={played.url}",
            "--http=tcp:0:interface=127.0.0.1",
            "--app=tests.synapse.typed_app",
        )
        with Daemon(tmp_path, "worker", *options) as worker:
            http = f"http://{worker.address('HTTP')}"
            ends = {stream: max(some) for stream, some in facts.items()}

            def positions() -> dict[str, int]:
                streams = get_json(http, "/v1/streams")["streams"]
                return {each["name"]: each["writers"][0]["position"] for each in streams if each["writers"]}

            if pause_after and "backfill" in facts:
                first = next(iter(facts["backfill"]))
                until(lambda: positions().get("backfill", 0) >= first, "the first line of backfill is applied")
            played.resume.set()
            until(lambda: ends.items() <= positions().items(), "the worker has applied all")
            assert [*positions()] == [each.name for each in STREAMS]
            assert "faults_total" not in ask(f"{http}/metrics")[1]
            assert worker.terminate() == 0
        assert b"ERROR" not in played.received.replace(b"ERROR server stopping", b"")
        assert played.received.startswith(b"NAME worker1\n")
    found = applied(tmp_path / "replication-worker1.db")
    if "caches" in facts:
        facts["caches"] = {token: [*map(hide_in_row, texts)] for token, texts in facts["caches"].items()}
    assert found == typed(facts)
    for stream, some in found.items():
        late = pause_after and stream == "backfill"
        assert ([*some] == sorted(some)) is not bool(late), stream
    assert {stream for stream, _, _ in played.fetched} <= {"backfill", "caches"}


@pytest.mark.parametrize("name", [name for name, role in RECORDINGS if role is Role.WORKER])
def test_a_master_accepts_all_lines_of_synapses_workers(name: str, tmp_path: Path) -> None:
    options = (f"--config={CONFIGURATION}", f"--database={restore_sqlite(tmp_path)}", "--server-name=peer.test", *LOCAL)
    recording = read_recording(name)
    lines = recording.count(b"\n")
    with Daemon(tmp_path, "master", *options) as master, Peer(master.address("the wire")) as peer:
        peer.send(recording)
        peer.read_until("POSITION user_signature")
        http = f"http://{master.address('HTTP')}"

        def received() -> bool:
            text = ask(f"{http}/metrics")[1]
            return f'lines_total{{direction="in"}} {float(lines)}' in text

        until(received, "the master has received every line")
        (connection,) = get_json(http, "/v1/connections")["connections"]
        assert (connection["name"], connection["last_command"]) == (recording.split()[1].decode(), "PING")
        assert "faults_total" not in ask(f"{http}/metrics")[1]
        peer.read_what_is_there()
        assert [line for line in peer.lines if line.startswith("ERROR")] == []
        streams = [line.split(" ")[1] for line in peer.lines if line.startswith("POSITION ")]
        assert " ".join(each.name for each in STREAMS) in " ".join(streams)  # the answer, all at once
        assert peer.lines[0] == "SERVER peer.test"
