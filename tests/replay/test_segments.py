"""Tests of segments: their names, the manifest, sums, order, and what is swept."""

from __future__ import annotations

import gzip
import io
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import CatchUpError, ConfigError, StoreError
from replication.replay import segments
from replication.replay.folders import LocalFolder
from replication.replay.segments import (
    Manifest,
    OpenSegment,
    Segment,
    check_compression,
    check_folder,
    compressed,
    fault_of,
    folder_of,
    read_manifest,
    sweep,
    verify,
    write_manifest,
)
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies
from tests.replay.histories import MASTER, OTHER, STREAM, fact, lines_of, live_lines, write_folder, write_segment

if TYPE_CHECKING:
    from pathlib import Path

HISTORY = [fact(2, "a"), fact(5, "b", ["c", None]), fact(6, {"d": "é"}), fact(9, "e")]


def make(after: int, upto: int, writer: str = MASTER, **changes: Any) -> Segment:
    segment = Segment(STREAM, InstanceName(writer), Token(after), Token(upto), 0, None, None, 0, "0" * 64, 0, "none")
    return attrs.evolve(segment, **changes)


def test_a_segment_is_named_by_its_range_in_twenty_digits() -> None:
    assert make(0, 7).name == "orders/master/00000000000000000000-00000000000000000007.rdata"
    assert make(7, 2**63 - 1, compression="gzip").name.endswith("/00000000000000000007-09223372036854775807.rdata.gz")
    assert make(0, 7, compression="zstd").name.endswith("7.rdata.zst")


@given(strategies.instance_names)
def test_any_instance_has_a_folder_of_its_own_inside_its_stream(name: str) -> None:
    folder = folder_of(InstanceName(name))
    assert "/" not in folder
    assert not folder.startswith(".")


def test_instances_that_are_named_like_folders_stay_inside() -> None:
    assert [folder_of(InstanceName(name)) for name in (".", "..", "a/b", "%2E", "ü")] == [
        "%2E",
        "%2E.",
        "a%2Fb",
        "%252E",
        "%C3%BC",
    ]


def test_the_manifest_says_of_each_segment_what_it_is(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[5, 9])
    said = json.loads((tmp_path / "manifest.json").read_text())
    assert said["version"] == 1
    first, second = said["segments"]
    assert first == {
        "stream": "orders",
        "instance": "master",
        "from": 0,
        "upto": 5,
        "rows": 3,
        "first_token": 2,
        "last_token": 5,
        "bytes": len(live_lines(HISTORY[:2])),
        "sha256": first["sha256"],
        "file": "orders/master/00000000000000000000-00000000000000000005.rdata",
        "file_bytes": len(live_lines(HISTORY[:2])),
        "compression": "none",
    }
    assert (second["from"], second["upto"], second["rows"]) == (5, 9, 2)
    assert read_manifest(folder) == Manifest([make_from(first), make_from(second)])


def make_from(said: dict[str, Any]) -> Segment:
    return Segment.read(said)


def test_a_compacted_segment_says_so() -> None:
    assert "compacted" not in make(0, 7).describe()
    assert make(0, 7, compacted=True).describe()["compacted"] is True
    assert Segment.read(make(0, 7, compacted=True).describe()) == make(0, 7, compacted=True)


def test_segments_stand_in_the_manifest_in_order_whoever_was_first() -> None:
    some = [make(5, 9), make(0, 5), make(0, 9, OTHER)]
    manifest = Manifest(some)
    assert manifest.spell() == Manifest(some[::-1]).spell()
    assert [*manifest.chains()] == [(STREAM, MASTER), (STREAM, OTHER)]
    assert manifest.chains()[STREAM, MASTER] == [some[1], some[0]]


def test_ranges_of_one_writer_must_meet_and_those_of_others_do_not_matter() -> None:
    assert Manifest([make(0, 5), make(5, 9), make(3, 4, OTHER)]).faults() == []
    [gap] = Manifest([make(0, 5), make(6, 9)]).faults()
    assert "leaves a gap after orders/master/00000000000000000000-00000000000000000005" in gap
    [overlap] = Manifest([make(0, 5), make(4, 9)]).faults()
    assert "overlaps" in overlap
    assert any("ends before it begins" in each for each in Manifest([make(5, 5)]).faults())


def test_a_folder_without_a_manifest_has_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "none")
    assert read_manifest(folder) is None
    assert check_folder(folder) == Manifest()
    folder.path.mkdir()
    entry = make(0, 5).describe()
    for text in (
        "",
        "{}",
        "[]",
        '{"version":1}',
        '{"version":1,"segments":[{}]}',
        json.dumps({"version": 1, "segments": [{**entry, "file": "elsewhere"}]}),
        json.dumps({"version": 1, "segments": [{**entry, "compression": "lz4"}]}),
        json.dumps({"version": 2, "segments": []}),
    ):
        (folder.path / "manifest.json").write_text(text)
        with pytest.raises(CatchUpError, match=r"none/manifest.json: "):
            read_manifest(folder)
        with pytest.raises(StoreError, match="move this one away"):
            check_folder(folder)


def test_a_folder_whose_ranges_do_not_meet_is_not_added_to(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([make(0, 5), make(6, 9)]))
    with pytest.raises(StoreError, match="leaves a gap"):
        check_folder(folder)


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_what_is_written_is_read_again_whatever_the_compression(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    folder = write_folder(tmp_path, HISTORY, ends=[9], compression=compression)
    manifest = read_manifest(folder)
    assert manifest is not None
    [segment] = manifest.segments
    assert lines_of(folder, segment) == live_lines(HISTORY)
    opened = OpenSegment(folder, segment)
    assert [each for some in opened.facts() for each in some] == HISTORY
    opened.close()
    assert [fault for _, fault in verify(folder)] == [None]


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_the_same_lines_give_the_same_file(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    first, second = (
        write_segment(LocalFolder(tmp_path / name), HISTORY, compression=compression) for name in ("a", "b")
    )
    assert first == second
    assert (tmp_path / "a" / first.name).read_bytes() == (tmp_path / "b" / second.name).read_bytes()


@given(lines=st.binary(min_size=1, max_size=300), cuts=st.lists(st.integers(0, 300), max_size=9))
def test_zstandard_frames_are_cut_where_the_lines_say_however_they_come(lines: bytes, cuts: list[int]) -> None:
    zstandard = pytest.importorskip("zstandard")

    def written(*cuts: int) -> bytes:
        sink = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch, compressed(sink, "zstd") as squeezed:
            patch.setattr(segments, "FRAME", 50)
            for start, end in pairwise([0, *cuts, len(lines)]):
                squeezed.write(memoryview(lines)[start:end])
        return sink.getvalue()

    file = written(*sorted(min(each, len(lines)) for each in cuts))
    assert file == written()
    assert zstandard.frame_content_size(file) == min(50, len(lines))
    assert zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).readall() == lines


@given(history=strategies.facts(min_rows=1), chunk=st.integers(1, 40))
def test_facts_are_whole_however_the_lines_are_cut(
    tmp_path_factory: pytest.TempPathFactory, history: list[Any], chunk: int
) -> None:
    folder = LocalFolder(tmp_path_factory.mktemp("cut"))
    segment = write_segment(folder, history, upto=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "CHUNK", chunk)
        opened = OpenSegment(folder, segment)
        assert [each for some in opened.facts() for each in some] == history
        opened.close()
        assert fault_of(folder, segment) is None


def test_an_empty_range_has_an_empty_segment(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, [], upto=9)
    assert (segment.rows, segment.first, segment.last, segment.size) == (0, None, None, 0)
    assert fault_of(folder, segment) is None


def test_a_fact_too_long_for_a_line_is_there_without_its_rows(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, [HISTORY[0], fact(5, "x" * 100), HISTORY[3]], limit=60)
    assert lines_of(folder, segment).split(b"\n")[1] == b"POSITION orders master 5 5"
    opened = OpenSegment(folder, segment)
    assert [each for some in opened.facts() for each in some] == [HISTORY[0], fact(5), HISTORY[3]]
    opened.close()
    assert fault_of(folder, segment) is None


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_a_damaged_byte_anywhere_is_found_before_a_fact_is_given(tmp_path: Path, compression: str) -> None:
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
            OpenSegment(folder, segment)
    for end in range(len(good)):
        file.write_bytes(good[:end])
        if lines_or_none(folder, segment) != live_lines(HISTORY):
            with pytest.raises(CatchUpError, match="damaged"):
                OpenSegment(folder, segment)


def lines_or_none(folder: LocalFolder, segment: Segment) -> bytes | None:
    try:
        return lines_of(folder, segment)
    except Exception:  # noqa: BLE001 (three libraries have three kinds)
        return None


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
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
        (b"POSITION orders master 3 4\n", "not a line of this segment"),
        (b"RDATA orders master batch 1\nPOSITION orders master 4 4\n", "not a line of this segment"),
        (b"RDATA orders master five 1\n", "not a plain integer"),
        (b"RDATA orders master 5 [1\n", "between fact 5 and 5: not JSON"),
        (b"RDATA orders master 5 \xff\n", "utf-8"),
        (live_lines(HISTORY[1:]), "the manifest says otherwise"),
    ],
)
def test_verify_reads_lines_whose_sums_are_right(tmp_path: Path, lines: bytes, fault: str) -> None:
    folder = LocalFolder(tmp_path)
    good = write_segment(folder, HISTORY)
    (tmp_path / good.name).write_bytes(lines)
    import hashlib

    bad = attrs.evolve(good, sha256=hashlib.sha256(lines).hexdigest(), size=len(lines), stored_size=len(lines))
    assert fault in str(fault_of(folder, bad))


def test_verify_finds_what_was_appended_to_a_file(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, compression="gzip")
    file = tmp_path / segment.name
    file.write_bytes(file.read_bytes() + gzip.compress(b""))
    assert "the manifest says" in str(fault_of(folder, segment))


def test_verify_says_what_is_wrong_between_segments_and_needs_a_manifest(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    with pytest.raises(CatchUpError, match=r"no manifest.json"):
        list(verify(folder))
    kept = [write_segment(folder, HISTORY[:2]), write_segment(folder, HISTORY[3:], after=6)]
    write_manifest(folder, Manifest(kept))
    (segment, fault), *others = verify(folder)
    assert segment is None
    assert "leaves a gap" in str(fault)
    assert others == [(kept[0], None), (kept[1], None)]


def test_a_sweep_takes_segments_that_nobody_lists_and_leaves_all_else(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[9])
    orphan = write_segment(folder, HISTORY, upto=12)
    kept = write_segment(folder, HISTORY, upto=13)
    for name in ("notes.txt", "orders/master/notes.rdata", "orders/master/1-2.rdata.gz", "a/b/c/d.rdata"):
        with folder.create(name) as sink:
            sink.write(b"mine")
    before = folder.names()
    manifest = check_folder(folder)
    assert sweep(folder, manifest, [kept.name]) == [orphan.name]
    assert folder.names() == [name for name in before if name != orphan.name]


def test_an_unknown_compression_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'lz4'.*none, gzip, zstd"):
        check_compression("lz4")
    check_compression("gzip")


def test_zstd_without_its_module_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"\.\[zstd\]"):
        check_compression("zstd")
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY)
    asked = attrs.evolve(segment, compression="zstd")
    (tmp_path / segment.name).rename(tmp_path / asked.name)
    with pytest.raises(CatchUpError, match=r"\.\[zstd\]"):
        OpenSegment(folder, asked)


def test_streams_are_told_apart(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, stream="caches")
    assert segment.stream == StreamName("caches")
    assert "not a line of this segment" in str(fault_of(folder, renamed(folder, segment)))


def renamed(folder: LocalFolder, segment: Segment) -> Segment:
    other = attrs.evolve(segment, stream=STREAM)
    folder.move(segment.name, other.name)
    return other
