"""Tests of a replay from a database with a retention: no segment claims facts that were deleted."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.errors import StoreError
from replication.segments.folders import LocalFolder
from replication.segments.run import run_in_process
from replication.segments.tables import GenericTable
from replication.storage.tables.kept_facts import CREATE
from tests.segments.histories import (
    MASTER,
    MASTERS_FACTS,
    OTHER,
    OTHERS_FACTS,
    STREAM,
    chain_lines,
    export,
    live_lines,
    request,
    write_database,
    writer_range,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from replication.segments.run import StreamRange
    from replication.segments.tables import Columns


@pytest.fixture
def database(tmp_path: Path) -> str:
    return write_database(tmp_path / "m.db", {MASTER: MASTERS_FACTS, OTHER: OTHERS_FACTS})


def forget(database: str, upto: int) -> None:
    with closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as opened, opened:
        opened.execute(CREATE)
        opened.execute(f'DELETE FROM "stream_{STREAM}" WHERE instance_name = ? AND stream_id <= ?', (MASTER, upto))
        opened.execute("INSERT INTO gone_facts VALUES (?, ?, ?)", (STREAM, MASTER, upto))


def test_a_replay_that_would_lack_deleted_facts_is_refused_with_the_cure(database: str, tmp_path: Path) -> None:
    forget(database, 50)
    with pytest.raises(StoreError, match=r"facts of \S+ by \S+ up to 50 are gone .*, with --stream \S+ --from 50"):
        run_in_process(request(database, tmp_path))
    assert [*run_in_process(request(database, tmp_path, instances=[OTHER]))]
    run_in_process(request(database, tmp_path, out="new", after=50))
    assert chain_lines(tmp_path / "new") == live_lines([each for each in MASTERS_FACTS if each.token > 50])


def test_segments_that_have_what_was_deleted_are_extended(database: str, tmp_path: Path) -> None:
    run_in_process(request(database, tmp_path, upto=100))
    forget(database, 100)
    run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)
    later = write_database(tmp_path / "later.db", {MASTER: MASTERS_FACTS})
    run_in_process(request(later, tmp_path, out="short", upto=100))
    forget(later, 150)
    with pytest.raises(StoreError, match=r"begin after 100: write to a new folder, with --stream \S+ --from 150"):
        run_in_process(request(later, tmp_path, out="short"))


def test_a_range_that_is_deleted_while_it_is_read_makes_no_segment(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = GenericTable.columns

    def columns(table: GenericTable, part: StreamRange) -> Iterator[Columns]:
        yield from read(table, part)
        forget(database, 50)

    monkeypatch.setattr(GenericTable, "columns", columns)
    folder = LocalFolder(tmp_path / "out")
    with pytest.raises(StoreError, match="up to 50 are gone"):
        export(database, folder, writer_range(0, 190))
    assert folder.names() == []
