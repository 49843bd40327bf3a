"""Tests of writing a range as segments: the live master's bytes, whole facts, bounds; without Spark."""

from __future__ import annotations

import gc
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

import pyarrow as pa

from replication.errors import StoreError
from replication.segments import compression, databases, files
from replication.segments import export as exporting
from replication.segments.databases import open_database
from replication.segments.export import LineEncoder, export_range
from replication.segments.files import verify_segment
from replication.segments.folders import LocalFolder
from replication.segments.manifest import WORK
from replication.segments.run import CACHES_DEFINITION, SegmentOptions, StreamRange
from replication.segments.tables import open_table
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.wire.grammar import Token
from tests import strategies
from tests.segments.histories import (
    MASTER,
    OTHER,
    STREAM,
    export,
    fact,
    live_lines,
    segment_lines,
    write_database,
    writer_range,
)

if TYPE_CHECKING:
    from pathlib import Path


@st.composite
def histories(draw: st.DrawFn) -> dict[str, list[Fact]]:
    """Draw facts of one stream, dealt to one to three writers; a row may be too long for a line of 200 bytes."""
    last_value = draw(strategies.facts(min_rows=1, max_size=12))
    long = draw(st.sets(st.integers(0, 11), max_size=2))
    writers = [MASTER, OTHER, "w 3".replace(" ", "'")][: draw(st.integers(1, 3))]
    dealt: dict[str, list[Fact]] = {writer: [] for writer in writers}
    for index, each in enumerate(last_value):
        texts = (*each.texts, f'"{"x" * 200}"') if index in long else each.texts
        dealt[draw(st.sampled_from(writers))].append(each._replace(texts=texts))
    return {writer: facts for writer, facts in dealt.items() if facts}


@given(
    dealt=histories(), batch=st.integers(1, 5), rows=st.integers(1, 6), compression=st.sampled_from(["none", "gzip"])
)
def test_lines_are_those_of_the_live_master_for_any_batches_and_segments(
    tmp_path_factory: pytest.TempPathFactory, dealt: dict[str, list[Fact]], batch: int, rows: int, compression: str
) -> None:
    if not dealt:
        return
    path = tmp_path_factory.mktemp("same")
    database = write_database(path / "m.db", dealt)
    folder = LocalFolder(path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "BATCH_ROWS", batch)
        parts = [writer_range(0, facts[-1].token, writer) for writer, facts in dealt.items()]
        segments = export(database, folder, *parts, options=SegmentOptions(rows, compression, line_limit=200))
    for writer, facts in dealt.items():
        mine = [each for each in segments if each.instance == writer]
        assert segment_lines(folder, mine, writer) == live_lines(facts, writer, limit=200)
        assert [each.after for each in mine] == [0, *[each.upto for each in mine[:-1]]]
        assert mine[-1].upto == facts[-1].token
    sizes = {each.token: len(each.texts) for facts in dealt.values() for each in facts}
    for each in segments:
        assert verify_segment(folder, each) is None
        assert each.rows <= rows or (each.first == each.last and each.first in sizes)
    staged = [name for name in folder.names() if name.startswith(".")]
    assert staged == []


def test_a_fact_with_a_row_too_long_is_a_position_as_from_the_live_master(tmp_path: Path) -> None:
    """The master sends ``POSITION s i T T`` for such a fact (docs/protocol/wire.md A4)."""
    limit = 16_384
    head = len("RDATA orders master 3 ") + 2
    fits, long = "x" * (limit - head), "x" * (limit - head + 1)
    facts = [fact(2, "a"), fact(3, fits), fact(4, long), fact(5, "b", long, "c"), fact(6, "d", fits), fact(7, long)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    [segment] = export(database, folder, writer_range(0, 9))
    written = segment_lines(folder, [segment])
    assert written == live_lines(facts)
    words = [line.split(b" ")[0:1] + line.split(b" ")[3:4] for line in written.splitlines()]
    assert words == [
        [b"RDATA", b"2"],
        [b"RDATA", b"3"],
        [b"POSITION", b"4"],
        [b"POSITION", b"5"],
        [b"RDATA", b"batch"],
        [b"RDATA", b"6"],
        [b"POSITION", b"7"],
    ]
    assert (segment.rows, segment.first, segment.last, segment.upto) == (4, 2, 7, 9)


def test_no_line_is_longer_than_a_reader_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ``line_limit`` is."""
    for module in (files, exporting):
        monkeypatch.setattr(module, "MAX_LINE", 1000)
    monkeypatch.setattr(compression, "CHUNK", 100)
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(3, "x" * 1000), fact(4, "b")]})
    folder = LocalFolder(tmp_path / "out")
    [segment] = export(
        database, folder, writer_range(0, 9), options=SegmentOptions(compression="none", line_limit=10**9)
    )
    assert b"\nPOSITION orders master 3 3\n" in segment_lines(folder, [segment])
    assert verify_segment(folder, segment) is None


def test_access_tokens_are_written_only_if_they_are_asked_for(tmp_path: Path) -> None:
    cache = "get_user_by_access_token"
    facts = [fact(2, ["get_user_by_id", ["@u:h"], 5], [cache, ["syt_1"], 5]), fact(3, ["other", [cache], 6])]
    hidden = [fact(2, ["get_user_by_id", ["@u:h"], 5], [cache, None, 5]), facts[1]]
    url = write_database(tmp_path / "writer.db", {MASTER: facts}, stream="caches")
    for compact in (False, True):
        for shown, expected in ((False, hidden), (True, facts)):
            folder = LocalFolder(tmp_path / f"out-{shown}-{compact}")
            options = SegmentOptions(compression="none", compact=compact, access_tokens=shown)
            segments = export(url, folder, writer_range(0, 3), options=options, definition=CACHES_DEFINITION)
            assert segment_lines(folder, segments) == live_lines(expected, stream="caches")


def test_no_access_token_is_written_if_its_row_has_the_name_of_the_cache_in_escapes(tmp_path: Path) -> None:
    """A row as another program may send it."""
    texts = [r'["get_user_by_access_tok\u0065n",["syt_1"],5]', r'["get_user_by_id",["\u0040u:h"],5]']
    url = write_database(tmp_path / "writer.db", {MASTER: [Fact(Token(2), tuple(texts))]}, stream="caches")
    folder = LocalFolder(tmp_path / "out")
    options = SegmentOptions(compression="none")
    segments = export(url, folder, writer_range(0, 3), options=options, definition=CACHES_DEFINITION)
    found = segment_lines(folder, segments)
    assert b"syt_1" not in found
    assert (b'"get_user_by_access_token",null' in found, texts[1].encode() in found) == (True, True)


def test_facts_outside_a_writers_range_are_not_written(tmp_path: Path) -> None:
    """Above a position, smaller IDs may still be open."""
    mine = [fact(token, ["mine", token]) for token in (2, 4, 6, 8)]
    others = [fact(token, ["other's", token]) for token in (3, 5, 7)]
    database = write_database(tmp_path / "m.db", {MASTER: mine, OTHER: others})
    folder = LocalFolder(tmp_path / "out")
    segments = export(database, folder, writer_range(2, 6), writer_range(0, 5, OTHER))
    assert segment_lines(folder, segments) == live_lines(mine[1:3])
    assert segment_lines(folder, segments, OTHER) == live_lines(others[:2], OTHER)
    assert {(each.instance, each.after, each.upto) for each in segments} == {(MASTER, 2, 6), (OTHER, 0, 5)}


def test_facts_of_a_single_writer_outside_its_range_are_not_written(tmp_path: Path) -> None:
    """The task ends at a later ID: other writers have facts there, in segments of an earlier run."""
    facts = [fact(token, token) for token in (2, 4, 6, 8)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    part = StreamRange(StreamDefinition(STREAM), Token(0), Token(7), (writer_range(2, 4),))
    (segment,) = export_range(database, folder, part, SegmentOptions(compression="none"), WORK)
    assert (segment.after, segment.upto, segment.rows) == (2, 4, 1)


def test_rows_of_other_writers_are_not_written(tmp_path: Path) -> None:
    mine, others = [fact(2, "a"), fact(4, "b")], [fact(3, "c", "d")]
    database = write_database(tmp_path / "m.db", {MASTER: mine, "o'ther": others})
    folder = LocalFolder(tmp_path / "out")
    segments = export(database, folder, writer_range(0, 9, "o'ther"), exclusive=False)
    assert segment_lines(folder, segments, "o'ther") == live_lines(others, "o'ther")


def test_a_range_without_facts_is_one_empty_segment(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(90, "b")]})
    folder = LocalFolder(tmp_path / "out")
    [segment] = export(database, folder, writer_range(2, 80))
    assert (segment.rows, segment.first, segment.after, segment.upto) == (0, None, 2, 80)
    assert segment_lines(folder, [segment]) == b""


def test_a_fact_larger_than_a_segment_gets_a_segment_of_its_own(tmp_path: Path) -> None:
    facts = [fact(2, "a"), fact(3, *range(7)), fact(4, "b"), fact(5, "c"), fact(6, "d")]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    segments = export(database, folder, writer_range(0, 6), options=SegmentOptions(2, "none"))
    assert [(each.after, each.upto, each.rows) for each in segments] == [(0, 2, 1), (2, 3, 7), (3, 5, 2), (5, 6, 1)]
    assert segment_lines(folder, segments) == live_lines(facts)


def test_trap_12_a_table_that_counts_downwards_gives_ascending_tokens(tmp_path: Path) -> None:
    """Stored IDs are negative; tokens are positive and ascend (docs/protocol/streams.md C5)."""
    definition = StreamDefinition(STREAM, negative=True)
    facts = [fact(2, "a", "b"), fact(3, "c"), fact(7, "d", "e", "f"), fact(8, "g")]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream=definition)
    folder = LocalFolder(tmp_path / "out")
    segments = export(database, folder, writer_range(2, 7), definition=definition, options=SegmentOptions(2, "none"))
    assert segment_lines(folder, segments) == live_lines(facts[1:3])
    with closing(open_database(database)) as opened:
        table = open_table(opened, definition)
        assert [table.reach(Token(0), count) for count in (1, 2, 3, 4, 6, 7, 8)] == [2, 2, 3, 3, 7, None, None]


@pytest.mark.parametrize("row", ["00ff", "3180"])
def test_a_failed_export_leaves_no_file(tmp_path: Path, row: str) -> None:
    """A row in the middle of the table is not text."""
    facts = [fact(token, "x" * 50) for token in range(2, 40)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute(f"UPDATE stream_orders SET row = x'{row}' WHERE stream_id = 30")
    folder = LocalFolder(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "BATCH_ROWS", 4)
        with pytest.raises(StoreError, match="is not JSON text"):
            export(database, folder, writer_range(0, 39))
    assert folder.names() == []


def test_a_row_with_a_line_feed_is_refused(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(3, "b"), fact(4, "c")]})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("UPDATE stream_orders SET row = '[1,\n2]' WHERE stream_id = 3")
    where = "stream 'orders', written by 'master' between ID 2 and 4"
    why = f"^a row of {where}, is not JSON text on one line: correct it in the table$"
    with pytest.raises(StoreError, match=why):
        export(database, LocalFolder(tmp_path / "out"), writer_range(0, 4))


def test_a_row_with_a_tab_stays_as_it_is(tmp_path: Path) -> None:
    """JSON may have tabs between its values."""
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("UPDATE stream_orders SET row = '[1,\t2]'")
    folder = LocalFolder(tmp_path / "out")
    assert segment_lines(folder, export(database, folder, writer_range(0, 2))) == b"RDATA orders master 2 [1,\t2]\n"


def test_ids_keep_their_64_bits(tmp_path: Path) -> None:
    """JDBC would read 32 bits of an INTEGER column of SQLite."""
    facts = [fact(3_000_000_000, "a"), fact(2**62, "b", "c"), fact(2**63 - 1, "d")]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    segments = export(database, folder, writer_range(0, 2**63 - 1))
    assert segment_lines(folder, segments) == live_lines(facts)


def test_the_garbage_collector_is_left_as_it_was(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    export(database, LocalFolder(tmp_path / "out"), writer_range(0, 2))
    assert gc.isenabled()
    gc.disable()
    try:
        export(database, LocalFolder(tmp_path / "out"), writer_range(0, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_compaction_keeps_the_last_fact_of_each_key_whole(tmp_path: Path) -> None:
    definition = StreamDefinition(STREAM, row=("id", "state", "n"), key=("id", "n"))
    facts = [
        fact(2, ["a", "placed", 1]),
        fact(3, ["a", "placed", 2]),
        fact(4, ["b", "placed", 1], ["c", "placed", 1]),
        fact(5, ["a", "paid", 1]),
        fact(6, ["b", "paid", 1]),
        fact(7, ["b", "paid", 1], ["d", "x", 1.0]),
        fact(8, ["é", None]),
        fact(9, "odd"),
        fact(10, ["d", "y", 1]),
    ]
    others = [fact(11, ["a", "sent", 1])]
    database = write_database(tmp_path / "m.db", {MASTER: facts, OTHER: others}, stream=definition)
    folder = LocalFolder(tmp_path / "out")
    options = SegmentOptions(compression="none", compact=True)
    segments = export(
        database, folder, writer_range(0, 12), writer_range(0, 12, OTHER), options=options, definition=definition
    )
    kept = [each for each in facts if each.token not in (2, 6)]
    assert segment_lines(folder, segments) == live_lines(kept)
    assert segment_lines(folder, segments, OTHER) == live_lines(others, OTHER), "a writer replaces nothing of another"
    assert [(each.after, each.upto) for each in segments] == [(0, 12)] * 2
    assert [(each.compacted, each.compacted_upto) for each in segments] == [(True, 12)] * 2
    assert [verify_segment(folder, each) for each in segments] == [None, None]


def test_a_stream_without_a_key_is_never_compacted(tmp_path: Path) -> None:
    facts = [fact(2, ["a"]), fact(3, ["a"])]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    [segment] = export(database, folder, writer_range(0, 3), options=SegmentOptions(compression="none", compact=True))
    assert segment_lines(folder, [segment]) == live_lines(facts)
    assert not segment.compacted


def test_without_compact_every_fact_is_kept(tmp_path: Path) -> None:
    definition = StreamDefinition(STREAM, row=("id",), key=("id",))
    facts = [fact(2, ["a"]), fact(3, ["a"])]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream=definition)
    folder = LocalFolder(tmp_path / "out")
    [segment] = export(database, folder, writer_range(0, 3), definition=definition)
    assert segment_lines(folder, [segment]) == live_lines(facts)
    assert "compacted" not in segment.to_json()


def test_a_part_of_some_lines_has_only_its_own_bytes() -> None:
    import numpy as np

    tokens, rows = np.array([2, 3, 3, 4]), pa.array(["1", "2", "3", "4"])
    lines = LineEncoder(STREAM, MASTER, 100).encode(tokens[1:], rows[1:]).part(0, 2)
    assert bytes(lines.data()) == b"\nRDATA orders master batch 2\nRDATA orders master 3 3"
    assert lines.rdata() == 2


@pytest.mark.parametrize(("rows", "fewer"), [(1_000_000, 1_000), (1_000, 100), (5, 1)])
def test_rows_that_are_together_too_long_are_an_error_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, fewer: int
) -> None:
    """Arrow raises this for more than 2 GiB, such as 9,000 rows of 300 kB."""

    def too_long(*_: object) -> None:
        raise pa.ArrowCapacityError("array cannot contain more than 2147483646 bytes")

    folder = LocalFolder(tmp_path / "out")
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    monkeypatch.setattr(LineEncoder, "encode", too_long)
    why = rf"^the rows of stream 'orders' between ID 0 and 9 are too long to be .* --segment-rows .*, such as {fewer}$"
    with pytest.raises(StoreError, match=why):
        export(url, folder, writer_range(0, 9), options=SegmentOptions(rows))
    assert folder.names() == []
