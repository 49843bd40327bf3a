"""The history as segments, written by a real Spark, compared with the writer's database."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from replication.segments.folders import LocalFolder
from replication.segments.manifest import read_manifest
from replication.wire.commands import LINE_LIMIT
from tests.chaos.faults import replay_command, segments_folder
from tests.chaos.scene import STREAMS
from tests.segments.histories import lines_of
from tests.system.daemons import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chaos.comparison import Findings, History
    from tests.chaos.scene import Scene

REPLAY = 600  # seconds


def check_segments(scene: Scene, histories: Mapping[str, History], findings: Findings, spark: str) -> None:
    """Write what is missing, on the Spark ``spark`` or without one (``none``), and compare."""
    for stream, history in histories.items():
        scene.act(1.5)  # within a second a writer stores its position
        with (scene.folder / "replay.log").open("ab") as log:
            command = replay_command(scene, stream, spark)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=scene.folder)
            try:
                scene.until(lambda process=process: process.poll() is not None, "the replay ends", REPLAY)  # type: ignore[misc]
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            last = (scene.folder / "replay.log").read_text(errors="replace").strip().splitlines()[-1:]
            findings.add("diverged", f"the replay of {stream} ended with status {process.returncode}", last)
            continue
        there = {(token, text) for token, _, _, text in history.rows}
        rows, positions = read_segments(scene, stream)
        here = {*rows}
        findings.add("twice", f"rows in segments of {stream}", range(len(rows) - len(here)))
        findings.add("diverged", f"segments of {stream}", sorted(here - there))
        # A fact with a row that no line has room for is a POSITION.
        long = {token for token, text in there if len(str(text).encode()) > LINE_LIMIT - 200}
        gone = {each for each in there - here if each[0] not in long}
        findings.add("lost", f"segments of {stream}", sorted(gone, key=str))
        findings.add("lost", f"POSITIONs in segments of {stream}", sorted(long - positions, key=str))


def read_segments(scene: Scene, stream: str) -> tuple[list[tuple[object, ...]], set[object]]:
    """Return the rows with their IDs, and the IDs of the POSITIONs."""
    folder = LocalFolder(segments_folder(scene, stream))
    manifest = read_manifest(folder)
    rows: list[tuple[object, ...]] = []
    positions: set[object] = set()
    batch: list[str] = []
    for segment in manifest.segments if manifest else ():
        for line in lines_of(folder, segment).decode().splitlines():
            command, _, writer, token, rest = line.split(" ", 4)
            assert writer == STREAMS[stream]
            if command == "POSITION":
                positions.add(int(rest.split(" ")[0]))
                continue
            batch.append(rest)
            if token != "batch":
                rows += [(int(token), text) for text in batch]
                batch = []
    return rows, positions
