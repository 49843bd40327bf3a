"""A folder of segments as a source: what every ICatchUp promises, and what is particular to segments."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed

from replication.errors import CatchUpError
from replication.replay.archive import Archive
from replication.replay.folders import LocalFolder
from replication.replay.segments import Manifest, OpenSegment, read_manifest, write_manifest
from replication.sources import SegmentCatchUp
from replication.streams.seams import Page
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies
from tests.contract import catch_up
from tests.contract.catch_up import CatchUpContract
from tests.replay.histories import MASTER, OTHER, STREAM, fact, write_folder, write_segment
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from replication.streams.facts import Fact

HISTORY = [fact(token, *[[token, index] for index in range(token % 3 + 1)]) for token in range(2, 60, 2)]


class SegmentCatchUpTests(CatchUpContract):
    """One segment for each writer, compressed, read on its thread."""

    __test__ = True

    def make_source(self, histories: Mapping[InstanceName, Sequence[Fact]], settled: Token) -> SegmentCatchUp:
        holder = TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        folder = LocalFolder(Path(holder.name))
        segments = [
            write_segment(
                folder, facts, upto=settled, writer=writer, stream=catch_up.STREAM, compression="gzip", limit=10**6
            )
            for writer, facts in histories.items()
        ]
        write_manifest(folder, Manifest(segments))
        self.pump = pump = Pump()
        source = SegmentCatchUp(holder.name, pump)
        self.addCleanup(lambda: pump.wait(source.close()))
        return source

    def start(self, work: Coroutine[Any, Any, Page]) -> Deferred[Page]:
        try:
            return succeed(self.pump.wait(work))
        except CatchUpError:
            return fail()


def page(archive: Archive, after: int, upto: int, limit: int = 1_000, writer: str = MASTER) -> Page:
    return archive.page(STREAM, InstanceName(writer), after=Token(after), upto=Token(upto), limit=limit)


def all_of(archive: Archive, upto: int, limit: int, after: int = 0) -> list[Fact]:
    """Follow pages to ``upto``."""
    found: list[Fact] = []
    while after < upto:
        got = page(archive, after, upto, limit)
        assert got.upto > after
        found += got.facts
        after = got.upto
    return found


@given(history=strategies.facts(min_rows=1, max_size=12), ends=st.sets(st.integers(1, 50)), limit=st.integers(1, 9))
def test_pages_over_any_segments_put_together_are_the_history(
    tmp_path_factory: pytest.TempPathFactory, history: list[Fact], ends: set[int], limit: int
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("pages"), history, ends=[*sorted(ends), 60])
    archive = Archive(folder)
    assert all_of(archive, 60, limit) == history
    for each in history:  # and from anywhere, backwards too
        got = page(archive, each.token - 1, 60, limit)
        assert got.facts[0] == each
    archive.close()


def test_a_page_ends_with_its_segment_and_beyond_the_last_there_is_none(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[21, 58]))
    first = page(archive, 0, 100)
    assert ([each.token for each in first.facts][-1], first.upto, first.limited) == (20, 21, True)
    second = page(archive, 21, 100)
    assert (second.upto, second.limited) == (58, True)
    third = page(archive, 58, 100)
    assert (third.facts, third.upto, third.limited) == ((), 58, True)


def test_a_fact_too_long_for_a_line_is_left_to_another_source(tmp_path: Path) -> None:
    """The page reaches to just before it; what follows can be had once somebody else has told it."""
    history = [fact(2, "a"), fact(5, "x" * 200), fact(6, "b"), fact(7, "y" * 200), fact(8, "z" * 200), fact(9, "c")]
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([write_segment(folder, history, limit=100, upto=12)]))
    archive = Archive(folder)
    told = [(2, 4), (5, 6), (8, 12)]
    for after, reached in told:
        got = page(archive, after if after > 2 else 0, 12)
        assert (got.upto, got.limited) == (reached, reached < 12)
    for after in (4, 6, 7):
        assert page(archive, after, 12) == Page([], Token(after), limited=True)
    assert page(archive, 8, 12).facts == [history[-1]]


def test_a_stream_or_writer_that_is_not_there_is_named(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    with pytest.raises(CatchUpError, match=r"has no segments of stream 'orders' by 'worker2'"):
        page(archive, 0, 9, writer=OTHER)
    with pytest.raises(CatchUpError, match=r"has no segments of stream 'odrers' by 'master'"):
        archive.page(StreamName("odrers"), MASTER, after=Token(0), upto=Token(9), limit=1)


def test_what_lies_before_the_first_segment_is_not_pretended_to_be_empty(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([write_segment(folder, HISTORY[5:], after=10)]))
    with pytest.raises(CatchUpError, match="begin after 10"):
        page(Archive(folder), 9, 58)
    assert page(Archive(folder), 10, 58).facts == HISTORY[5:]


def test_a_folder_without_a_manifest_and_one_whose_ranges_do_not_meet(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    archive = Archive(folder)
    with pytest.raises(CatchUpError, match="has `replication replay` finished there"):
        page(archive, 0, 9)
    kept = [write_segment(folder, HISTORY[:3]), write_segment(folder, HISTORY[3:], after=7)]
    write_manifest(folder, Manifest(kept))
    with pytest.raises(CatchUpError, match="leaves a gap"):
        page(archive, 0, 58)


def test_a_folder_may_grow_while_it_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY[:10], ends=[20])
    archive = Archive(folder)
    assert page(archive, 0, 58, limit=5).upto < 20
    assert page(archive, 20, 58).upto == 20
    write_folder(tmp_path, HISTORY, ends=[20, 58])
    assert all_of(archive, 58, 7) == HISTORY


@pytest.mark.parametrize("place", [30, -4])
def test_a_damaged_segment_gives_no_fact_at_all_and_those_around_it_do(tmp_path: Path, place: int) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[20, 40, 58], compression="gzip")
    second = tmp_path / "orders/master/00000000000000000020-00000000000000000040.rdata.gz"
    good = second.read_bytes()
    damaged = bytearray(good)
    damaged[place] ^= 1
    second.write_bytes(damaged)
    archive = Archive(folder)
    assert all_of(archive, 20, 5) == HISTORY[:10]
    for _ in range(2):
        with pytest.raises(CatchUpError, match=r"0020-00000000000000000040\.rdata\.gz: damaged"):
            page(archive, 20, 58)
        with pytest.raises(CatchUpError, match="damaged"):
            page(archive, 31, 58)
    assert all_of(archive, 58, 5, after=40) == HISTORY[20:]
    second.write_bytes(gzip.compress(b""))
    with pytest.raises(CatchUpError, match="damaged"):
        page(archive, 20, 58)
    second.write_bytes(good)  # somebody has mended it
    assert page(archive, 20, 40).facts == HISTORY[10:20]


def test_a_segment_that_was_written_wrong_is_named_where_its_sum_is_right(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, upto=58)
    path = tmp_path / segment.name
    lines = path.read_bytes().replace(b"RDATA orders master 50 ", b"RDATA orders other 50 ")
    path.write_bytes(lines)
    sums: dict[str, Any] = {"size": len(lines), "sha256": hashlib.sha256(lines).hexdigest(), "stored_size": len(lines)}
    write_manifest(folder, Manifest([attrs.evolve(segment, **sums)]))
    archive = Archive(folder)
    for _ in range(2):
        with pytest.raises(CatchUpError, match=r"0058\.rdata: not a line of this segment: 'RDATA orders other 50"):
            all_of(archive, 58, 5)
    path.write_bytes(lines[:-1])
    with pytest.raises(CatchUpError, match="damaged"):
        all_of(archive, 58, 5)


def test_a_missing_segment_is_named_until_it_is_there(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[20, 58])
    first = tmp_path / "orders/master/00000000000000000000-00000000000000000020.rdata"
    first.rename(tmp_path / "elsewhere")
    archive = Archive(folder)
    with pytest.raises(CatchUpError, match=r"0000-00000000000000000020\.rdata: No such file"):
        page(archive, 0, 58)
    (tmp_path / "elsewhere").rename(first)
    assert page(archive, 0, 58).upto == 20


def test_sums_are_checked_once_a_segment_not_once_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = OpenSegment._check

    def noted(self: OpenSegment) -> None:
        checked.append(self.segment.name)
        check(self)

    monkeypatch.setattr(OpenSegment, "_check", noted)
    folder = write_folder(tmp_path, HISTORY, ends=[20, 58])
    archive = Archive(folder)
    all_of(archive, 58, 2)
    all_of(archive, 58, 2)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert checked == [each.name for each in manifest.segments]


def test_files_are_closed_when_they_have_been_read_or_nobody_goes_on(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[20, 58]))
    page(archive, 0, 58, limit=3)
    [reading] = archive._readings.values()
    source = reading._opened._source
    all_of(archive, 20, 3, after=4)
    assert source.closed
    assert archive._readings == {}
    page(archive, 20, 58, limit=3)
    [reading] = archive._readings.values()
    archive.close()
    assert reading._opened._source.closed
