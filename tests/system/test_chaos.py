"""Chaos on real parts, for a moment: one of each cheap fault, then a comparison that has to fail.

``tox -e chaos`` runs it for an hour (docs/simulation.md).
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.chaos.comparison import Findings, check
from tests.chaos.databases import (
    CutWal,
    FileLimit,
    FullServerDisk,
    KillSession,
    RestoreFollower,
    RestoreStopped,
    ServerAway,
    StopSessions,
    TornWal,
)
from tests.chaos.faults import Cut, Kill, KillAppender, KillSeveral, Stop, Terminate, Toxic
from tests.chaos.needs import POSTGRES
from tests.chaos.rounds import Round
from tests.chaos.scene import Plan

if TYPE_CHECKING:
    from pathlib import Path

FAULTS = (Stop, Kill, Toxic, TornWal, FileLimit, KillSeveral, RestoreFollower, Cut, KillAppender, Terminate)


def test_nothing_is_lost_twice_or_different_after_one_of_each_cheap_fault(tmp_path: Path) -> None:
    chaos = Round(Plan("7", "SQLite"), tmp_path, [], lambda text: None)
    with chaos.scene as scene:
        chaos.begin()
        chaos.turn([each() for each in FAULTS], RestoreStopped())
        chaos.turn([], CutWal())
        assert chaos.totals.good, chaos.totals.findings.examples
        assert scene.kills["appender"] == 1
        assert len(scene.losses) == 2

        # And the comparison finds what is wrong.
        copy, seen = scene.followers["far-copy"].file, scene.followers["seen"].file
        with closing(sqlite3.connect(copy)) as opened, opened:
            last = "stream_id = (SELECT max(stream_id) FROM stream_orders) AND ord = 0"
            assert opened.execute(f"UPDATE stream_orders SET row = '[]' WHERE {last}").rowcount == 1
        with closing(sqlite3.connect(seen)) as opened, opened:
            assert opened.execute("INSERT INTO effects SELECT * FROM effects WHERE stream = 'events' LIMIT 1").rowcount
            assert opened.execute("DELETE FROM effects WHERE stream = 'orders' AND ord = 1").rowcount
        check(scene, found := Findings(), 0)
        assert (found.twice, found.diverged) == (1, 1), found.examples
        assert found.lost >= 2, found.examples


@pytest.mark.usefixtures("postgres")  # which skips or fails, if there is none
def test_faults_of_one_server_may_overlap(tmp_path: Path) -> None:
    chaos = Round(Plan("8", POSTGRES), tmp_path, [], lambda text: None)
    with chaos.scene as scene:
        chaos.begin()
        chaos.turn([ServerAway(), FullServerDisk(), KillSession()])
        chaos.turn([KillSession(), StopSessions(), FullServerDisk(), ServerAway()])
        assert chaos.totals.good, chaos.totals.findings.examples
        assert scene.kills["PostgreSQL"] >= 3
