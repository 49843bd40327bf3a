"""Tests of writing a span: the same bytes as the live master's, whole facts, bounds; no Spark."""

from __future__ import annotations

import gc
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy", reason="pip install '.[spark]' in the checkout")
pa = pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.errors import StoreError  # noqa: E402
from replication.replay import databases, history  # noqa: E402
from replication.replay.databases import open_database  # noqa: E402
from replication.replay.folders import LocalFolder  # noqa: E402
from replication.replay.history import (  # noqa: E402
    LineSpeller,
    Shape,
    Span,
    Window,
    plan_spans,
    staged_name,
    write_span,
)
from replication.replay.segments import Segment, fault_of  # noqa: E402
from replication.replay.tables import open_table  # noqa: E402
from replication.streams.registry import StreamDefinition  # noqa: E402
from replication.wire.grammar import InstanceName, Token  # noqa: E402
from tests import strategies  # noqa: E402
from tests.replay.histories import (  # noqa: E402
    MASTER,
    OTHER,
    STREAM,
    fact,
    lines_of,
    live_lines,
    write_database,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from replication.streams.facts import Fact

DEFINITION = StreamDefinition(STREAM)
PLAIN = Shape(compression="none")


def window(after: int, upto: int, writer: str = MASTER) -> Window:
    return Window(InstanceName(writer), Token(after), Token(upto))


def write(
    database: str,
    folder: LocalFolder,
    *windows: Window,
    shape: Shape = PLAIN,
    definition: StreamDefinition = DEFINITION,
    everybody: bool = True,
) -> list[Segment]:
    """Write one span over all that ``windows`` cover, each segment under its final name."""
    after, upto = min(each.after for each in windows), max(each.upto for each in windows)
    segments = write_span(database, folder, Span(definition, after, upto, windows, everybody), shape)
    for each in segments:
        folder.move(staged_name(each.stream, each.instance, each.after), each.name)
    return segments


def lines(folder: LocalFolder, segments: Sequence[Segment], writer: str = MASTER) -> bytes:
    return b"".join(lines_of(folder, each) for each in segments if each.instance == writer)


@st.composite
def histories(draw: st.DrawFn) -> dict[str, list[Fact]]:
    """Draw facts of one stream, dealt to one to three writers; a row may be too long for a line of 200 bytes."""
    drawn = draw(strategies.facts(min_rows=1, max_size=12))
    long = draw(st.sets(st.integers(0, 11), max_size=2))
    writers = [MASTER, OTHER, "w 3".replace(" ", "'")][: draw(st.integers(1, 3))]
    dealt: dict[str, list[Fact]] = {writer: [] for writer in writers}
    for index, each in enumerate(drawn):
        texts = (*each.texts, f'"{"x" * 200}"') if index in long else each.texts
        dealt[draw(st.sampled_from(writers))].append(each._replace(texts=texts))
    return {writer: facts for writer, facts in dealt.items() if facts}


@given(
    dealt=histories(), batch=st.integers(1, 5), rows=st.integers(1, 6), compression=st.sampled_from(["none", "gzip"])
)
def test_lines_are_what_the_live_master_sends_however_batches_and_segments_are_cut(
    tmp_path_factory: pytest.TempPathFactory, dealt: dict[str, list[Fact]], batch: int, rows: int, compression: str
) -> None:
    if not dealt:
        return
    path = tmp_path_factory.mktemp("same")
    database = write_database(path / "m.db", dealt)
    folder = LocalFolder(path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "BATCH_ROWS", batch)
        windows = [window(0, facts[-1].token, writer) for writer, facts in dealt.items()]
        segments = write(database, folder, *windows, shape=Shape(rows, compression, line_limit=200))
    for writer, facts in dealt.items():
        mine = [each for each in segments if each.instance == writer]
        assert lines(folder, mine, writer) == live_lines(facts, writer, limit=200)
        assert [each.after for each in mine] == [0, *[each.upto for each in mine[:-1]]]
        assert mine[-1].upto == facts[-1].token
    sizes = {each.token: len(each.texts) for facts in dealt.values() for each in facts}
    for each in segments:
        assert fault_of(folder, each) is None
        assert each.rows <= rows or (each.first == each.last and each.first in sizes)
    staged = [name for name in folder.names() if name.startswith(".")]
    assert staged == []


def test_a_fact_with_a_row_too_long_is_announced_as_the_live_master_does(tmp_path: Path) -> None:
    """Interfaces 6: byte for byte what the master sends, which for such a fact is ``POSITION s i T T``."""
    limit = 16_384
    head = len("RDATA orders master 3 ") + 2
    fits, long = "x" * (limit - head), "x" * (limit - head + 1)
    facts = [fact(2, "a"), fact(3, fits), fact(4, long), fact(5, "b", long, "c"), fact(6, "d", fits), fact(7, long)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    [segment] = write(database, folder, window(0, 9))
    said = lines(folder, [segment])
    assert said == live_lines(facts)
    words = [line.split(b" ")[0:1] + line.split(b" ")[3:4] for line in said.splitlines()]
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


def test_what_lies_outside_a_writers_window_is_left_out(tmp_path: Path) -> None:
    """Above a position there may be facts whose smaller IDs are still open."""
    mine = [fact(token, ["mine", token]) for token in (2, 4, 6, 8)]
    others = [fact(token, ["other's", token]) for token in (3, 5, 7)]
    database = write_database(tmp_path / "m.db", {MASTER: mine, OTHER: others})
    folder = LocalFolder(tmp_path / "out")
    segments = write(database, folder, window(2, 6), window(0, 5, OTHER))
    assert lines(folder, segments) == live_lines(mine[1:3])
    assert lines(folder, segments, OTHER) == live_lines(others[:2], OTHER)
    assert {(each.instance, each.after, each.upto) for each in segments} == {(MASTER, 2, 6), (OTHER, 0, 5)}


def test_a_writer_asked_for_alone_has_its_own_rows_only(tmp_path: Path) -> None:
    mine, others = [fact(2, "a"), fact(4, "b")], [fact(3, "c", "d")]
    database = write_database(tmp_path / "m.db", {MASTER: mine, "o'ther": others})
    folder = LocalFolder(tmp_path / "out")
    segments = write(database, folder, window(0, 9, "o'ther"), everybody=False)
    assert lines(folder, segments, "o'ther") == live_lines(others, "o'ther")


def test_a_range_without_facts_is_an_empty_segment(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(90, "b")]})
    folder = LocalFolder(tmp_path / "out")
    [segment] = write(database, folder, window(2, 80))
    assert (segment.rows, segment.first, segment.after, segment.upto) == (0, None, 2, 80)
    assert lines(folder, [segment]) == b""


def test_a_fact_larger_than_a_segment_has_one_to_itself(tmp_path: Path) -> None:
    facts = [fact(2, "a"), fact(3, *range(7)), fact(4, "b"), fact(5, "c"), fact(6, "d")]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    segments = write(database, folder, window(0, 6), shape=Shape(2, "none"))
    assert [(each.after, each.upto, each.rows) for each in segments] == [(0, 2, 1), (2, 3, 7), (3, 5, 2), (5, 6, 1)]
    assert lines(folder, segments) == live_lines(facts)


def test_trap_12_a_table_that_counts_down_is_written_counting_up(tmp_path: Path) -> None:
    """Protocol C5: stored IDs are negative, tokens are positive and ascend."""
    definition = StreamDefinition(STREAM, negative=True)
    facts = [fact(2, "a", "b"), fact(3, "c"), fact(7, "d", "e", "f"), fact(8, "g")]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream=definition)
    folder = LocalFolder(tmp_path / "out")
    segments = write(database, folder, window(2, 7), definition=definition, shape=Shape(2, "none"))
    assert lines(folder, segments) == live_lines(facts[1:3])
    with closing(open_database(database)) as opened:
        table = open_table(opened, definition)
        assert [table.reach(Token(0), count) for count in (1, 2, 3, 4, 6, 7, 8)] == [2, 2, 3, 3, 7, None, None]


def test_spans_cover_everything_once_and_cut_no_fact(tmp_path: Path) -> None:
    facts = [fact(token, *range(token % 4 + 1)) for token in range(2, 60, 3)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        table = open_table(opened, DEFINITION)
        for rows in range(1, 20):
            spans = list(plan_spans(table, DEFINITION, [window(0, 70)], rows))
            assert [each.after for each in spans] == [0, *[each.upto for each in spans[:-1]]]
            assert spans[-1].upto == 70
            for each in spans:
                inside = [len(some.texts) for some in facts if each.after < some.token <= each.upto]
                assert sum(inside) <= rows or len(inside) == 1
                assert each.windows == (window(each.after, each.upto),)


def test_a_large_span_is_guessed_from_its_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PROBE", 10)
    facts = [fact(token, token) for token in range(2, 402, 2)]  # 200 rows, every other ID
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        spans = list(plan_spans(open_table(opened, DEFINITION), DEFINITION, [window(0, 400)], 100))
    assert [(each.after, each.upto) for each in spans] == [(0, 180), (180, 360), (360, 400)]


def test_windows_that_differ_share_spans(tmp_path: Path) -> None:
    facts = [fact(token, token) for token in range(2, 12)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        table = open_table(opened, DEFINITION)
        spans = list(plan_spans(table, DEFINITION, [window(4, 11), window(0, 6, OTHER)], 4))
    assert [each.windows for each in spans] == [
        (window(4, 5), window(0, 5, OTHER)),
        (window(5, 9), window(5, 6, OTHER)),
        (window(9, 11),),
    ]


def test_a_failure_leaves_nothing_that_looks_done(tmp_path: Path) -> None:
    """A row that is no text, half-way through."""
    facts = [fact(token, "x" * 50) for token in range(2, 40)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("UPDATE stream_orders SET row = x'00ff' WHERE stream_id = 30")
    folder = LocalFolder(tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "BATCH_ROWS", 4)
        with pytest.raises(StoreError, match="is no JSON text"):
            write(database, folder, window(0, 39))
    assert folder.names() == []


def test_a_row_with_a_line_end_in_it_is_refused(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a"), fact(3, "b"), fact(4, "c")]})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("UPDATE stream_orders SET row = '[1,\n2]' WHERE stream_id = 3")
    with pytest.raises(StoreError, match="between ID 2 and 4, is no JSON text on one line"):
        write(database, LocalFolder(tmp_path / "out"), window(0, 4))


def test_lines_of_a_slice_are_its_own() -> None:
    tokens, rows = np.array([2, 3, 3, 4]), pa.array(["1", "2", "3", "4"])
    lines = LineSpeller(STREAM, MASTER, 100).spell(tokens[1:], rows[1:]).part(0, 2)
    assert bytes(lines.data()) == b"\nRDATA orders master batch 2\nRDATA orders master 3 3"
    assert lines.rdata() == 2


def test_ids_of_64_bits_are_kept(tmp_path: Path) -> None:
    """JDBC's 32 bits made negative numbers of them (spark.md 2)."""
    facts = [fact(3_000_000_000, "a"), fact(2**62, "b", "c"), fact(2**63 - 1, "d")]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    segments = write(database, folder, window(0, 2**63 - 1))
    assert lines(folder, segments) == live_lines(facts)


def test_compaction_keeps_the_last_fact_of_each_key_and_facts_whole(tmp_path: Path) -> None:
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
    shape = Shape(compression="none", compact=True)
    segments = write(database, folder, window(0, 12), window(0, 12, OTHER), shape=shape, definition=definition)
    kept = [each for each in facts if each.token not in (2, 6)]
    assert lines(folder, segments) == live_lines(kept)
    assert lines(folder, segments, OTHER) == live_lines(others, OTHER), "a writer replaces nothing of another"
    assert [(each.after, each.upto, each.compacted) for each in segments] == [(0, 12, True)] * 2
    assert [fault_of(folder, each) for each in segments] == [None, None]


def test_a_stream_without_a_key_is_never_compacted(tmp_path: Path) -> None:
    facts = [fact(2, ["a"]), fact(3, ["a"])]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    folder = LocalFolder(tmp_path / "out")
    [segment] = write(database, folder, window(0, 3), shape=Shape(compression="none", compact=True))
    assert lines(folder, [segment]) == live_lines(facts)
    assert not segment.compacted


def test_nothing_is_compacted_unless_it_is_asked(tmp_path: Path) -> None:
    definition = StreamDefinition(STREAM, row=("id",), key=("id",))
    facts = [fact(2, ["a"]), fact(3, ["a"])]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream=definition)
    folder = LocalFolder(tmp_path / "out")
    [segment] = write(database, folder, window(0, 3), definition=definition)
    assert lines(folder, [segment]) == live_lines(facts)
    assert "compacted" not in segment.describe()


def test_cycles_are_looked_for_again_afterwards(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    write(database, LocalFolder(tmp_path / "out"), window(0, 2))
    assert gc.isenabled()
    gc.disable()
    try:
        write(database, LocalFolder(tmp_path / "out"), window(0, 2))
        assert not gc.isenabled()
    finally:
        gc.enable()
