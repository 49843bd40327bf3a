"""Tests of the manifest: its entries, its faults, and what a run removes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from replication.errors import CatchUpError, StoreError
from replication.segments import folders
from replication.segments.folders import LocalFolder
from replication.segments.manifest import (
    Manifest,
    Segment,
    instance_folder,
    read_manifest,
    read_manifest_to_extend,
    remove_leftovers,
    write_manifest,
)
from replication.streams.retention import SegmentChain
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies
from tests.segments.histories import (
    HISTORY,
    MASTER,
    OTHER,
    STREAM,
    live_lines,
    write_folder,
    write_segment,
)

if TYPE_CHECKING:
    from pathlib import Path


def make(after: int, upto: int, writer: str = MASTER, **changes: Any) -> Segment:
    segment = Segment(STREAM, InstanceName(writer), Token(after), Token(upto), 0, None, None, 0, "0" * 64, 0, "none")
    return replace(segment, **changes)


def test_a_file_name_has_both_ends_of_the_range_in_twenty_digits() -> None:
    assert make(0, 7).name == "orders/master/00000000000000000000-00000000000000000007.rdata"
    assert make(7, 2**63 - 1, compression="gzip").name.endswith("/00000000000000000007-09223372036854775807.rdata.gz")
    assert make(0, 7, compression="zstd").name.endswith("7.rdata.zst")


@given(strategies.instance_names)
def test_the_folder_of_any_instance_name_is_one_visible_path_component(name: str) -> None:
    folder = instance_folder(InstanceName(name))
    assert "/" not in folder
    assert not folder.startswith(".")


def test_characters_that_a_file_name_cannot_have_are_percent_encoded() -> None:
    assert [instance_folder(InstanceName(name)) for name in (".", "..", "a/b", "%2E", "ü")] == [
        "%2E",
        "%2E.",
        "a%2Fb",
        "%252E",
        "%C3%BC",
    ]


def test_the_manifest_has_an_entry_for_each_segment(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[5, 9])
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["version"] == 1
    first, second = content["segments"]
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
    assert read_manifest(folder) == Manifest([Segment.from_json(first), Segment.from_json(second)])


def test_only_a_compacted_segment_has_the_fields_of_compaction() -> None:
    assert make(0, 7).to_json().keys().isdisjoint({"compacted", "compacted_upto"})
    whole = make(0, 7, compacted=True, compacted_upto=Token(9))
    assert (whole.to_json()["compacted_upto"], Segment.from_json(whole.to_json())) == (9, whole)
    assert make(0, 7, compacted=True).to_json()["compacted"] is True
    assert Segment.from_json(make(0, 7, compacted=True).to_json()) == make(0, 7, compacted=True)


def test_a_manifest_sorts_its_segments() -> None:
    some = [make(5, 9), make(0, 5), make(0, 9, OTHER)]
    manifest = Manifest(some)
    assert manifest.encode() == Manifest(some[::-1]).encode()
    assert [*manifest.chains()] == [(STREAM, MASTER), (STREAM, OTHER)]
    assert manifest.chains()[STREAM, MASTER] == [some[1], some[0]]


def test_a_summary_has_the_range_the_rows_and_the_bytes_of_each_chain() -> None:
    some = [make(2, 5, rows=3, stored_size=40), make(5, 9, rows=2, stored_size=50), make(0, 7, OTHER, rows=9)]
    assert Manifest(some).summary("s3://bucket/out") == [
        SegmentChain("s3://bucket/out", STREAM, InstanceName(MASTER), Token(2), Token(9), 5, 90),
        SegmentChain("s3://bucket/out", STREAM, InstanceName(OTHER), Token(0), Token(7), 9, 0),
    ]


def test_a_gap_or_overlap_in_a_chain_is_a_fault() -> None:
    assert Manifest([make(0, 5), make(5, 9), make(3, 4, OTHER)]).faults() == []
    [gap] = Manifest([make(0, 5), make(6, 9)]).faults()
    assert "leaves a gap after orders/master/00000000000000000000-00000000000000000005" in gap
    [overlap] = Manifest([make(0, 5), make(4, 9)]).faults()
    earlier, later = make(0, 5).name, make(4, 9).name
    assert overlap == f"{later}: overlaps {earlier}"
    assert any("ends before it begins" in each for each in Manifest([make(5, 5)]).faults())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"from": -1}, r"Expected `int` >= 0 - at `\$\.from`"),
        ({"upto": 2**63}, r"Expected `int` <= 9223372036854775807 - at `\$\.upto`"),
        ({"compacted": True, "compacted_upto": 4}, "`compacted_upto` 4 is below `upto` 5"),
        ({"compacted": True, "compacted_upto": -1}, r"`int` >= 0 - at `\$\.compacted_upto`"),
        ({"compacted": True, "compacted_upto": 2**63}, r"at `\$\.compacted_upto`"),
        ({"left_out": -1}, r"`int` >= 0 - at `\$\.left_out`"),
        ({"left_out": 1, "left_out_from": 6}, "`left_out_from` 6 is not above `from` and up to `upto`"),
        ({"left_out": 1}, "`left_out_from` 0 is not above"),
        ({"rows": -1}, r"`int` >= 0 - at `\$\.rows`"),
        ({"bytes": None}, r"Expected `int`, got `null` - at `\$\.bytes`"),
        ({"compression": "lz4"}, "`compression` is none of none, gzip, zstd"),
        ({"file": "elsewhere"}, "`file` 'elsewhere' should be 'orders/master/0"),
        ({"stream": "a b"}, "not a stream name"),
    ],
)
def test_a_value_that_no_segment_has_is_refused_with_its_key(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    entry = {**make(0, 5).to_json(), **changes}
    content = {"version": 1, "segments": [make(0, 3, OTHER).to_json(), entry]}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CatchUpError, match=f"manifest.json: not a manifest of segments: segment 2: .*{why}.*: restore"):
        read_manifest(LocalFolder(tmp_path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "not a manifest of segments: Expected `object`, got `array`: restore it from a copy"),
        ('{"version":null}', r"Expected `int`, got `null` - at `\$\.version`"),
        ('{"version":1}', "missing required field `segments`"),
        ('{"version":1,"segments":null}', r"Expected `array`, got `null` - at `\$\.segments`"),
        ('{"version":1,"segments":[null]}', r"Expected `object`, got `null` - at `\$\.segments\[0\]`"),
        ('{"version":1,"segments":[{"stream":"orders"}]}', "segment 1: Object missing required field `instance`"),
        ('{"version":2,"segments":{}}', "it has version 2, not 1: update this package"),
    ],
)
def test_a_manifest_of_another_shape_is_refused_with_what_is_wrong(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CatchUpError, match=why):
        read_manifest(LocalFolder(tmp_path))


def test_a_missing_manifest_reads_as_none_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "none")
    assert read_manifest(folder) is None
    assert read_manifest_to_extend(folder) == Manifest()
    folder.path.mkdir()
    entry = make(0, 5).to_json()
    for text in (
        "",
        "{}",
        "[]",
        '{"version":1}',
        '{"version":1,"segments":[{}]}',
        json.dumps({"version": 1, "segments": [{**entry, "file": "elsewhere"}]}),
        json.dumps({"version": 1, "segments": [{**entry, "compression": "lz4"}]}),
        json.dumps({"version": 2, "segments": []}),
        "[" * 100_000,
        '{"version":1,"segments":' + "[" * 100_000,
    ):
        (folder.path / "manifest.json").write_text(text)
        with pytest.raises(CatchUpError, match=r"none/manifest.json: "):
            read_manifest(folder)
        with pytest.raises(StoreError, match="move this one away"):
            read_manifest_to_extend(folder)


def test_a_segment_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    for stream in (".", ".."):
        write_manifest(folder, Manifest([make(0, 5, stream=StreamName(stream))]))
        with pytest.raises(CatchUpError, match=f"`file` '{stream}/master/.*' is outside of the folder: "):
            read_manifest(folder)


def test_a_manifest_beyond_the_limit_is_neither_read_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([make(0, 5)]))
    monkeypatch.setattr(folders, "MAX_INDEX", 500)
    assert read_manifest(folder) == Manifest([make(0, 5)])
    why = r"manifest\.json would have more than 500 bytes: begin a new folder, with more rows in each segment$"
    with pytest.raises(StoreError, match=why):
        write_manifest(folder, Manifest([make(0, 5), make(5, 9)]))
    assert read_manifest(folder) == Manifest([make(0, 5)])
    with (tmp_path / "manifest.json").open("ab") as file:
        file.truncate(10**12)  # a sparse file
    with pytest.raises(CatchUpError, match=r"manifest\.json: it has more than 500 bytes"):
        read_manifest(folder)


def test_a_folder_with_a_gap_is_not_extended(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([make(0, 5), make(6, 9)]))
    with pytest.raises(StoreError, match="leaves a gap"):
        read_manifest_to_extend(folder)


def test_only_unlisted_segments_are_removed_as_leftovers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[9])
    orphan = write_segment(folder, HISTORY, upto=12)
    kept = write_segment(folder, HISTORY, upto=13)
    digits, segment = "0" * 20, "orders/master/" + "0" * 20 + "-" + "0" * 20
    for name in (
        *(
            "notes.txt",
            "notes.tmp",
            ".notes",
            "orders/master/notes.rdata",
            "orders/master/1-2.rdata.gz",
            "a/b/c/d.rdata",
        ),
        *(f"orders/master/{digits}-{digits[1:]}-.rdata", f"orders/master/{digits}0{digits}.rdata"),
        *(f"{segment}.rdata.bz2", f"{segment}.txt", f"{segment}.rdata.gz.rdata", f"a/{segment}.rdata"),
    ):
        with folder.create(name) as sink:
            sink.write(b"mine")
    before = folder.names()
    manifest = read_manifest_to_extend(folder)
    for begins in ({}, {(STREAM, OTHER): Token(0)}, {(STREAM, MASTER): Token(1)}):  # their facts may be deleted
        assert remove_leftovers(folder, manifest, begins) == []
    assert remove_leftovers(folder, manifest, {(STREAM, MASTER): Token(0)}, [kept.name]) == [orphan.name]
    assert folder.names() == [name for name in before if name != orphan.name]
