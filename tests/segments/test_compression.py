"""Tests of compressions: equal bytes for equal lines, and the modules that they need."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from replication.errors import CatchUpError, ConfigError
from replication.segments import compression as codecs
from replication.segments.compression import check_compression, compress
from replication.segments.files import SegmentReader
from replication.segments.folders import LocalFolder
from tests.segments.histories import (
    HISTORY,
    write_segment,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_equal_lines_give_equal_files(tmp_path: Path, compression: str) -> None:
    if compression == "zstd":
        pytest.importorskip("zstandard")
    first, second = (
        write_segment(LocalFolder(tmp_path / name), HISTORY, compression=compression) for name in ("a", "b")
    )
    assert first == second
    assert (tmp_path / "a" / first.name).read_bytes() == (tmp_path / "b" / second.name).read_bytes()


@example(lines=bytes(100), cuts=[75])  # the second piece ends with a frame
@given(lines=st.binary(min_size=1, max_size=300), cuts=st.lists(st.integers(0, 300), max_size=9))
def test_zstd_frames_do_not_depend_on_the_pieces_that_are_written(lines: bytes, cuts: list[int]) -> None:
    zstandard = pytest.importorskip("zstandard")

    def written(*cuts: int) -> bytes:
        sink = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch, compress(sink, "zstd") as squeezed:
            patch.setattr(codecs, "FRAME", 50)
            for start, end in pairwise([0, *cuts, len(lines)]):
                squeezed.write(memoryview(lines)[start:end])
        return sink.getvalue()

    file = written(*sorted(min(each, len(lines)) for each in cuts))
    assert file == written()
    assert zstandard.frame_content_size(file) == min(50, len(lines))
    assert zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).readall() == lines


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'lz4'.*none, gzip, zstd"):
        check_compression("lz4")
    check_compression("gzip")


def test_zstd_without_its_module_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"\.\[zstd\]"):
        check_compression("zstd")
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY)
    asked = replace(segment, compression="zstd")
    (tmp_path / segment.name).rename(tmp_path / asked.name)
    with pytest.raises(CatchUpError, match=r"\.\[zstd\]"):
        SegmentReader(folder, asked)
