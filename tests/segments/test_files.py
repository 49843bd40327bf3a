"""Tests of segment files: facts written and read, and damage."""

from __future__ import annotations

import gzip
import hashlib
import re
import tracemalloc
from contextlib import closing
from os import truncate
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replication.errors import CatchUpError
from replication.segments import compression as codecs
from replication.segments import files
from replication.segments.files import MAX_LINE, SegmentReader, verify, verify_segment
from replication.segments.folders import LocalFolder
from replication.segments.histories import HISTORIES
from replication.segments.manifest import (
    Manifest,
    Segment,
    read_manifest,
    write_manifest,
)
from replication.streams.facts import row_bytes
from replication.wire.grammar import StreamName, Token
from tests import strategies
from tests.segments.histories import (
    HISTORY,
    OTHER,
    STREAM,
    fact,
    lines_of,
    live_lines,
    replace_lines,
    write_folder,
    write_segment,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_facts_survive_writing_and_reading_in_every_compression(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    folder = write_folder(tmp_path, HISTORY, ends=[9], compression=compression)
    manifest = read_manifest(folder)
    assert manifest is not None
    [segment] = manifest.segments
    assert lines_of(folder, segment) == live_lines(HISTORY)
    opened = SegmentReader(folder, segment)
    assert [each for some in opened.facts() for each in some] == HISTORY
    opened.close()
    assert [fault for _, fault in verify(folder)] == [None]


@given(history=strategies.facts(min_rows=1), chunk=st.integers(1, 40))
def test_facts_do_not_depend_on_the_chunks_that_are_read(
    tmp_path_factory: pytest.TempPathFactory, history: list[Any], chunk: int
) -> None:
    folder = LocalFolder(tmp_path_factory.mktemp("cut"))
    segment = write_segment(folder, history, upto=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "CHUNK", chunk)
        opened = SegmentReader(folder, segment)
        assert [each for some in opened.facts() for each in some] == history
        opened.close()
        assert verify_segment(folder, segment) is None


def test_a_range_without_facts_gives_an_empty_segment(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, [], upto=9)
    assert (segment.rows, segment.first, segment.last, segment.size) == (0, None, None, 0)
    assert verify_segment(folder, segment) is None


def test_a_fact_too_long_for_a_line_is_a_position_and_reads_without_rows(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, [fact(1, "x" * 100), HISTORY[0], fact(5, "x" * 100), HISTORY[3]], limit=60)
    first, _, third, _, _ = lines_of(folder, segment).split(b"\n")
    assert (first, third) == (b"POSITION orders master 2 1", b"POSITION orders master 5 5")
    opened = SegmentReader(folder, segment)
    assert [each for some in opened.facts() for each in some] == [fact(1), HISTORY[0], fact(5), HISTORY[3]]
    opened.close()
    assert verify_segment(folder, segment) is None


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_any_damaged_or_missing_byte_is_found_before_a_fact_is_returned(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY * 1, compression=compression)
    file = tmp_path / segment.name
    good = file.read_bytes()
    for place in range(len(good)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        if lines_or_none(folder, segment) == live_lines(HISTORY):
            continue  # a byte of a header that means nothing
        with pytest.raises(CatchUpError, match=r"00009\.rdata.*damaged"):
            SegmentReader(folder, segment)
    for end in range(len(good)):
        file.write_bytes(good[:end])
        if lines_or_none(folder, segment) != live_lines(HISTORY):
            with pytest.raises(CatchUpError, match="damaged"):
                SegmentReader(folder, segment)


def lines_or_none(folder: LocalFolder, segment: Segment) -> bytes | None:
    try:
        return lines_of(folder, segment)
    except Exception:  # noqa: BLE001 (three libraries have three kinds)
        return None


def test_verify_names_a_missing_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[5, 9])
    (tmp_path / "orders/master/00000000000000000005-00000000000000000009.rdata").unlink()
    faults = [fault for _, fault in verify(folder) if fault]
    assert len(faults) == 1
    assert "00000000000000000005-00000000000000000009.rdata: No such file" in faults[0]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (live_lines(HISTORY[::-1]), "do not ascend"),
        (live_lines([*HISTORY, fact(10, "x")]), "do not ascend from 0 to 9"),
        (live_lines(HISTORY) + b"RDATA orders master batch 1\n", "in the middle of a fact"),
        (live_lines(HISTORY)[:-1], "in the middle of a fact"),
        (live_lines(HISTORY, OTHER), "not a line of this segment"),
        (live_lines(HISTORY) + b"\n", "not a line of this segment"),
        (b"x" * 99 + b"\n", f"not a line of this segment: '{'x' * 80}'"),
        (b"POSITION orders master 3 4\n", "not a line of this segment"),
        (b"RDATA orders master batch 1\nPOSITION orders master 4 4\n", "not a line of this segment"),
        (b"RDATA orders master five 1\n", "not a plain integer"),
        (b"RDATA orders master 5 [1\n", "between fact 5 and 5: not JSON"),
        (b"RDATA orders master 5 \xff\n", "utf-8"),
        (live_lines(HISTORY[1:]), "the manifest has 5 rows from 2 to 9"),
    ],
)
def test_verify_finds_wrong_lines_under_a_right_checksum(tmp_path: Path, lines: bytes, fault: str) -> None:
    folder = LocalFolder(tmp_path)
    good = write_segment(folder, HISTORY)
    bad = replace_lines(folder, good, lines)
    assert fault in str(verify_segment(folder, bad))
    with closing(SegmentReader(folder, bad)) as reader, pytest.raises(CatchUpError, match=re.escape(fault)):
        list(reader.facts())


def test_a_line_beyond_the_limit_is_found_before_it_is_in_memory(tmp_path: Path) -> None:
    """The file of a few hundred bytes would unpack to 300 MB."""
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, compression="gzip")
    checksum, size = hashlib.sha256(), 0
    with gzip.open(tmp_path / segment.name, "wb", 9) as file:
        for part in (b'RDATA orders master 2 "', *[b"x" * 10**6] * 300, b'"\n'):
            file.write(part)
            checksum.update(part)
            size += len(part)
    stored = (tmp_path / segment.name).stat().st_size
    bad = replace(segment, sha256=checksum.hexdigest(), size=size, stored_size=stored)
    tracemalloc.start()
    try:
        assert f"a line of more than {MAX_LINE} bytes" in str(verify_segment(folder, bad))
        assert tracemalloc.get_traced_memory()[1] < MAX_LINE / 2
    finally:
        tracemalloc.stop()


def test_a_line_up_to_the_limit_is_read_in_any_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LocalFolder(tmp_path)
    long = b'RDATA orders master 5 "' + b"x" * 100 + b'"'
    segment = replace_lines(folder, write_segment(folder, HISTORY), live_lines(HISTORY[:1]) + long + b"\n")
    segment = replace(segment, rows=2, last=Token(5))
    for chunk in (1, 7, len(long)):
        monkeypatch.setattr(codecs, "CHUNK", chunk)
        monkeypatch.setattr(files, "MAX_LINE", len(long))
        assert verify_segment(folder, segment) is None
        monkeypatch.setattr(files, "MAX_LINE", len(long) - 1)
        assert "a line of more than" in str(verify_segment(folder, segment))


def test_a_fact_of_many_short_lines_takes_no_memory_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may unpack to millions of rows of one fact, each of which is held until the last one has come."""
    folder = LocalFolder(tmp_path)
    facts = [fact(2, "x"), fact(3, *range(10)), fact(4, *range(10, 20))]
    segment = write_segment(folder, facts)
    monkeypatch.setattr(codecs, "CHUNK", 1)  # each line is read by itself
    size = row_bytes(facts[2].texts[:-1])
    monkeypatch.setattr(files, "MAX_FACT", size)
    assert verify_segment(folder, segment) is None
    monkeypatch.setattr(files, "MAX_FACT", size - 1)
    assert f"{segment.name}: a fact of more than {size - 1} bytes" in str(verify_segment(folder, segment))


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_file_that_unpacks_to_more_than_the_manifest_has_is_read_no_further(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    folder = LocalFolder(tmp_path)
    history = [fact(token, "x" * 1000) for token in range(2, 200)]
    whole = write_segment(folder, history, compression=compression)
    monkeypatch.setattr(codecs, "CHUNK", 1000)
    read = 0

    def counted(source: BinaryIO, compression: str) -> Iterator[bytes]:
        nonlocal read
        for chunk in codecs.decompress(source, compression):
            read += len(chunk)
            yield chunk

    monkeypatch.setattr(files, "decompress", counted)
    with pytest.raises(CatchUpError, match="damaged: it has more than the 5000 bytes of the manifest"):
        SegmentReader(folder, replace(whole, size=5000))
    assert read < 10_000


def test_verify_finds_bytes_appended_to_a_file(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, compression="gzip")
    file = tmp_path / segment.name
    file.write_bytes(file.read_bytes() + gzip.compress(b""))
    assert "the manifest has" in str(verify_segment(folder, segment))


def test_zeros_at_the_end_of_a_gzip_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library skips them one after the other: a sparse file of 10 GB took hours."""
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, compression="gzip")
    truncate(tmp_path / segment.name, 10**10)
    monkeypatch.setattr(files, "decompress", None)
    with pytest.raises(CatchUpError, match="damaged: it has 10000000000 bytes; the manifest has"):
        SegmentReader(folder, segment)


def test_verify_finds_a_gap_and_needs_a_manifest(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with pytest.raises(CatchUpError, match=r"no manifest.json"):
        list(verify(folder))
    kept = [write_segment(folder, HISTORY[:2]), write_segment(folder, HISTORY[3:], after=6)]
    write_manifest(folder, Manifest(kept))
    (segment, fault), *others = verify(folder)
    assert segment is None
    assert "leaves a gap" in str(fault)
    assert others == [(kept[0], None), (kept[1], None)]


def test_verify_finds_histories_that_cannot_be_read(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([write_segment(folder, HISTORY)]))
    (tmp_path / HISTORIES).write_text("")
    (segment, fault), (_, none) = verify(folder)
    assert (segment, none) == (None, None)
    assert f"{HISTORIES} cannot be read" in str(fault)


def test_verify_finds_lines_of_another_stream(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, stream="caches")
    assert segment.stream == StreamName("caches")
    assert "not a line of this segment" in str(verify_segment(folder, renamed(folder, segment)))


def renamed(folder: LocalFolder, segment: Segment) -> Segment:
    other = replace(segment, stream=STREAM)
    folder.move(segment.name, other.name)
    return other
