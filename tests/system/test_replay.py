"""History by every road, and the batch that writes it as segments: real daemons, real kills.

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

from replication.replay.databases import resolve_url
from replication.replay.folders import LocalFolder
from replication.replay.history import Shape
from replication.replay.run import Request, run_here
from replication.replay.segments import read_manifest, verify
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests.replay.histories import lines_of, write_database
from tests.replay.sessions import need_spark
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
        said = json.loads(line)
        texts = tuple(json.dumps(row, separators=(",", ":")) for row in said["rows"])
        facts.setdefault((said["stream"], said["instance"]), []).append(Fact(Token(said["token"]), texts))
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
    """A connection that only listens; ``lines`` are what the master has said to it."""

    def __init__(self, wire: str) -> None:
        host, port = wire.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)))
        self._data = b""
        self._socket.settimeout(60)

    def until(self, line: bytes) -> list[bytes]:
        """Return all lines of facts up to one that begins so."""
        while not re.search(rb"^" + re.escape(line), self._data, re.MULTILINE) or self._data[-1:] != b"\n":
            data = self._socket.recv(2**20)
            assert data, "the master has hung up"
            self._data += data
        return [each for each in self._data.splitlines() if each.startswith((b"RDATA ", b"POSITION "))]

    def close(self) -> None:
        self._socket.close()


def test_live_http_database_and_segments_tell_one_history_in_the_same_bytes(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Invariant I15, from the wire of a running master; the long rows at the end fit no line."""
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
            said = recorder.until(f"RDATA {stream} master {token} ".encode())
            live[stream] = [each for each in said if each.split(b" ")[1] == stream.encode()]
        recorder.close()
        over_http = {stream: pages(http, stream, "master", token) for stream, token in last.items()}
    database = resolve_url(f"sqlite:///{tmp_path}/master/replication.db")
    run_here(Request(database, str(tmp_path / "segments")))
    for stream, token in last.items():
        assert segment_lines(tmp_path / "segments", stream, "master") == live[stream]
        assert f"POSITION {stream} master {token - 1} {token - 1}".encode() in live[stream]
        stored = table(tmp_path / "master/replication.db", stream)
        assert [(token, json.loads(str(text))) for token, _, _, text in stored] == [
            (at, row) for at, row in over_http[stream]
        ]
        spelt = [str(text) for _, _, _, text in stored]
        assert [json.dumps(row, separators=(",", ":")) for _, row in over_http[stream]] == spelt
        told = [each.split(b" ", 4)[4].decode() for each in live[stream] if each.startswith(b"RDATA")]
        assert told == [text for text, (at, *_) in zip(spelt, stored, strict=True) if at != token - 1]


@contextmanager
def batch(folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``replication replay`` on a local Spark, in a process group of its own."""
    command = [sys.executable, "-m", "replication.replay", "--out=out", "--segment-rows=2000", *options]
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


def undisturbed(folder: Path, rows: int) -> tuple[str, dict[str, bytes]]:
    """Make a database; return its URL, and what a run that nobody disturbs makes of it."""
    facts = make_facts(folder, rows, "master,writer1")
    for stream in ("events", "caches"):
        dealt = {writer: some for (name, writer), some in facts.items() if name == stream}
        url = write_database(folder / "m.db", dealt, stream=stream)
    run_here(Request(url, str(folder / "undisturbed"), shape=Shape(2_000)))
    return url, contents(folder / "undisturbed")


def check_whole_or_absent(out: Path) -> bool:
    """Check that what an interrupted run has left counts as a whole or not at all; return whether it counts."""
    listed = read_manifest(LocalFolder(out))
    if listed is not None:
        assert [fault for _, fault in verify(LocalFolder(out)) if fault] == []
    return listed is not None


@pytest.mark.timeout(1800)
def test_the_batch_is_killed_anywhere_and_the_next_one_ends_as_if_nothing_had_been(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The command itself, Spark's JVM, or one of its Python workers; what is there in between is whole."""
    need_spark()
    kills = 12 if request.config.getoption("--full") else 3
    url, want = undisturbed(tmp_path, 40_000)
    chance = random.Random(5)
    for number in range(kills):
        victim = ("driver", "java", "pyspark.daemon")[number % 3]
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
            shutil.rmtree(tmp_path / "out")  # it was faster than we were
    with batch(tmp_path, f"--database={url}", "--master=local[2]") as process:
        assert process.wait(300) == 0, (tmp_path / "batch.log").read_text()
    assert contents(tmp_path / "out") == want


def test_the_command_without_spark_is_killed_at_any_moment_of_its_run(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """From its first step to its last; it takes over what the one before has finished, until there is nothing to do."""
    kills = 100 if request.config.getoption("--full") else 12
    url, want = undisturbed(tmp_path, 40_000)
    out = tmp_path / "out"
    chance = random.Random(6)
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        until(out.exists, "it has begun")
        began = time.monotonic()
        assert process.wait(60) == 0
        takes = time.monotonic() - began
    assert contents(out) == want
    left = 0
    for _ in range(kills):
        if check_whole_or_absent(out):
            shutil.rmtree(out)
        with batch(tmp_path, f"--database={url}", "--master=none"):
            until(out.exists, "it has begun")
            time.sleep(chance.uniform(0.0, takes))
        left += (out / ".replay").exists()
    assert left, "no run was killed in the midst of its work"
    with batch(tmp_path, f"--database={url}", "--master=none") as process:
        assert process.wait(60) == 0, (tmp_path / "batch.log").read_text()
    assert contents(out) == want


def _begun(process: subprocess.Popen[bytes], work: Path) -> bool:
    return process.poll() is not None or any(work.rglob("*.json"))


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).names()}
