"""Facts over wire, HTTP, database and segments, and the replay with kills; with real daemons.

Smaller by default; the full sizes: ``pytest tests/system/test_replay.py --full``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.segments.databases import resolve_url
from replication.segments.files import verify
from replication.segments.folders import LocalFolder
from replication.segments.manifest import read_manifest
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.segments.histories import lines_of, write_database
from tests.spark.sessions import need_spark
from tests.system.daemons import CHECKOUT, PATIENCE, Daemon, append, environment, fixed_ports, until
from tests.system.test_kills import table

if TYPE_CHECKING:
    from collections.abc import Iterator


def make_facts(folder: Path, rows: int, writers: str, seed: int = 9) -> dict[tuple[str, str], list[Fact]]:
    """Return facts by stream and writer: multi-row ones, gaps, unicode, rows near the limit of a line."""
    out = folder / "facts.ndjson"
    script = [sys.executable, str(CHECKOUT / "tests/data/make_facts.py"), "--writers", writers, "--out", str(out)]
    subprocess.run([*script, "--rows", str(rows), "--seed", str(seed)], check=True, capture_output=True)
    facts: dict[tuple[str, str], list[Fact]] = {}
    for line in out.read_text().splitlines():
        made = json.loads(line)
        texts = tuple(json.dumps(row, separators=(",", ":")) for row in made["rows"])
        facts.setdefault((made["stream"], made["instance"]), []).append(Fact(Token(made["token"]), texts))
    return facts


def segment_lines(folder: Path, stream: str, writer: str) -> list[bytes]:
    manifest = read_manifest(LocalFolder(folder))
    assert manifest is not None
    chain = [each for each in manifest.segments if (each.stream, each.instance) == (stream, writer)]
    return b"".join(lines_of(LocalFolder(folder), each) for each in chain).splitlines()


def pages(http: str, stream: str, writer: str, upto: int) -> list[Any]:
    """Return rows with their tokens, page by page."""
    found: list[Any] = []
    after = 0
    while after < upto:
        url = f"http://{http}/v1/streams/{stream}/updates?instance={writer}&from={after}&upto={upto}&limit=333"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            page = json.load(answer)
        found += page["updates"]
        after = page["upto_token"]
    return found


class Recorder:
    """A connection that only reads."""

    def __init__(self, wire: str) -> None:
        host, port = wire.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._data = b""
        self._socket.settimeout(60)

    def until(self, line: bytes) -> list[bytes]:
        """Return all lines of facts up to one with this beginning."""
        while not re.search(rb"^" + re.escape(line), self._data, re.MULTILINE) or self._data[-1:] != b"\n":
            data = self._socket.recv(2**20)
            assert data, "the master has closed the connection"
            self._data += data
        return [each for each in self._data.splitlines() if each.startswith((b"RDATA ", b"POSITION "))]

    def close(self) -> None:
        self._socket.close()


def test_wire_http_database_and_segments_have_the_same_bytes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Invariant I15, from the wire of a running master; two rows at the end are too long for a line."""
    facts = make_facts(tmp_path, 400_000 if request.config.getoption("--full") else 6_000, "master")
    long = Fact(Token(0), ('["f",[],1]', json.dumps(["f", ["x" * 20_000], 2], separators=(",", ":"))))
    (tmp_path / "master").mkdir()
    with fixed_ports(Daemon(tmp_path / "master", "master", "--stream=events")) as (wire, http):
        recorder = Recorder(wire)
        last = {}
        for stream in ("events", "caches"):
            mine = [*facts[stream, "master"], long, facts[stream, "master"][0]]
            for start in range(0, len(mine), 1_000):
                last[stream] = append(http, stream, mine[start : start + 1_000])[-1]
        live: dict[str, list[bytes]] = {}
        for stream, token in last.items():
            sent = recorder.until(f"RDATA {stream} master {token} ".encode())
            live[stream] = [each for each in sent if each.split(b" ")[1] == stream.encode()]
        recorder.close()
        over_http = {stream: pages(http, stream, "master", token) for stream, token in last.items()}
    database = resolve_url(f"sqlite:///{tmp_path}/master/replication.db")
    run_in_process(ReplayRequest(database, str(tmp_path / "segments")))
    for stream, token in last.items():
        assert segment_lines(tmp_path / "segments", stream, "master") == live[stream]
        assert f"POSITION {stream} master {token - 1} {token - 1}".encode() in live[stream]
        stored = table(tmp_path / "master/replication.db", stream)
        assert [(token, json.loads(str(text))) for token, _, _, text in stored] == [
            (at, row) for at, row in over_http[stream]
        ]
        encoded = [str(text) for _, _, _, text in stored]
        assert [json.dumps(row, separators=(",", ":")) for _, row in over_http[stream]] == encoded
        texts = [each.split(b" ", 4)[4].decode() for each in live[stream] if each.startswith(b"RDATA")]
        assert texts == [text for text, (at, *_) in zip(encoded, stored, strict=True) if at != token - 1]


@contextmanager
def batch(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``replication replay`` on a local Spark, in a process group of its own, as a terminal does.

    In the background of a shell SIGINT is ignored, also by what is started there.
    """
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "replication.replay",
        "--out=out",
        "--segment-rows=2000",
        *options,
    ]
    with (folder / "batch.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def members(group: int, word: str) -> list[int]:
    """Return the processes of a group whose command line has a word."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(each.name)) == group and word in (each / "cmdline").read_bytes().decode():
                found.append(int(each.name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def undisturbed(folder: Path, rows: int, times: int = 1) -> tuple[str, dict[str, bytes]]:
    """Make a database with so many times these rows; return its URL, and the files of a run without interruption."""
    facts = make_facts(folder, rows, "master,writer1")
    last = max(each.token for some in facts.values() for each in some)
    for stream in ("events", "caches"):
        dealt = {
            writer: [Fact(Token(turn * last + token), texts) for turn in range(times) for token, texts in some]
            for (name, writer), some in facts.items()
            if name == stream
        }
        url = write_database(folder / "m.db", dealt, stream=stream)
    run_in_process(ReplayRequest(url, str(folder / "undisturbed"), options=SegmentOptions(2_000)))
    return url, contents(folder / "undisturbed")


def check_whole_or_absent(out: Path) -> bool:
    """Check that an interrupted run has left whole segments or none; return whether there is a manifest."""
    listed = read_manifest(LocalFolder(out))
    if listed is not None:
        assert [fault for _, fault in verify(LocalFolder(out)) if fault] == []
    return listed is not None


@pytest.mark.timeout(1800)
def test_after_a_kill_the_next_replay_gives_the_same_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The command itself, Spark's JVM, or a Python worker is killed; what is left is whole or does not count."""
    need_spark()
    kills = 12 if request.config.getoption("--full") else 1
    url, want = undisturbed(tmp_path, 40_000)
    chance = random.Random(5)
    for number in range(kills):
        victim = ("driver", "pyspark.daemon", "java")[number % 3]
        with batch(tmp_path, f"--database={url}", "--master=local[2]") as process:
            until(partial(_begun, process, tmp_path / "out/.replay"), "a task is done")
            time.sleep(chance.uniform(0.0, 0.6))
            group = process.pid
            for each in [process.pid] if victim == "driver" else members(group, victim)[-1:]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            if victim != "driver":
                assert process.wait(120) in (0, 1)
        if check_whole_or_absent(tmp_path / "out"):
            shutil.rmtree(tmp_path / "out")  # the run had ended before the kill
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        assert process.wait(300) == 0, (tmp_path / "batch.log").read_text()
    assert contents(tmp_path / "out") == want


@pytest.mark.timeout(600)
def test_an_interrupt_ends_spark_with_one_line_and_the_next_run_continues(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C at a terminal sends SIGINT to the whole process group."""
    need_spark()
    url, want = undisturbed(tmp_path, 40_000, times=4)  # many tasks: the run must not end before the interrupt
    moments = ("Spark starts", "a task is done")
    for moment in moments if request.config.getoption("--full") else moments[1:]:
        with batch(tmp_path, f"--database={url}", "--master=local[2]") as process:
            log = tmp_path / "batch.log"
            if moment == "a task is done":
                until(partial(_begun, process, tmp_path / "out/.replay"), moment)
            else:
                until(partial(_has_line, log, moment), moment)
                time.sleep(1.0)
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(120) == 130
        planned, spark, *progress, last = log.read_text().splitlines()
        assert "ranges to write, of caches, events" in planned
        assert "Spark starts" in spark
        assert all(" ranges, " in line for line in progress), progress
        assert "interrupted; finished ranges are kept" in last
        until(partial(_has_ended, process.pid), "Spark's JVM has ended", 30)
        log.unlink()
    assert any((tmp_path / "out/.replay").rglob("*.json"))
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        assert process.wait(300) == 0, (tmp_path / "batch.log").read_text()
    assert contents(tmp_path / "out") == want


def test_after_a_kill_without_spark_the_next_replay_gives_the_same_files(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each run adopts what the one before has finished."""
    kills = 100 if request.config.getoption("--full") else 2
    url, want = undisturbed(tmp_path, 40_000)
    out = tmp_path / "out"
    chance = random.Random(6)
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        until(out.exists, "the run has begun", pause=0.02)
        began = time.monotonic()
        assert process.wait(60) == 0
        takes = time.monotonic() - began
    assert contents(out) == want
    left = done = 0
    while done < kills or (not left and done < 100):  # a busy machine may be late each time
        done += 1
        if check_whole_or_absent(out):
            shutil.rmtree(out)
        with batch(tmp_path, f"--database={url}", "--master=none"):
            until(out.exists, "the run has begun", pause=0.02)
            time.sleep(chance.uniform(0.0, takes))
        left += (out / ".replay").exists()
    assert left, "no run was killed during its work"
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        assert process.wait(60) == 0, (tmp_path / "batch.log").read_text()
    assert contents(out) == want


def _has_line(log: Path, text: str) -> bool:
    return text in log.read_text()


def _has_ended(group: int) -> bool:
    return not members(group, "bin/java")


def _begun(process: subprocess.Popen[bytes], work: Path) -> bool:
    return process.poll() is not None or any(work.rglob("*.json"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).names()}
