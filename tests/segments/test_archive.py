"""A segments folder as a catch-up source: what every ICatchUp guarantees, and what is particular to segments."""

from __future__ import annotations

import gzip
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed

from replication.errors import CatchUpError, FactsGoneError
from replication.follower.sources import SegmentCatchUp
from replication.segments import archive as archives
from replication.segments import compression as codecs
from replication.segments.archive import Archive
from replication.segments.files import SegmentReader
from replication.segments.folders import LocalFolder
from replication.segments.manifest import Manifest, Segment, read_manifest, write_manifest
from replication.streams.interfaces import Page
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies
from tests.contract import catch_up
from tests.contract.catch_up import CatchUpContract
from tests.segments.histories import (
    MASTER,
    OTHER,
    STREAM,
    fact,
    live_lines,
    replace_lines,
    write_folder,
    write_segment,
)
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence

    from replication.streams.facts import Fact

T = TypeVar("T")
HISTORY = [fact(token, *[[token, index] for index in range(token % 3 + 1)]) for token in range(2, 60, 2)]


class SegmentCatchUpTests(CatchUpContract):
    """One compressed segment for each writer, read on a thread."""

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

    def start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
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
def test_pages_over_any_segments_add_up_to_the_facts(
    tmp_path_factory: pytest.TempPathFactory, history: list[Fact], ends: set[int], limit: int
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("pages"), history, ends=[*sorted(ends), 60])
    archive = Archive(folder)
    assert all_of(archive, 60, limit) == history
    for each in history:  # from anywhere, also backwards
        got = page(archive, each.token - 1, 60, limit)
        assert got.facts[0] == each
    archive.close()


def test_a_page_ends_with_its_segment_and_is_empty_after_the_last(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[21, 58]))
    first = page(archive, 0, 100)
    assert ([each.token for each in first.facts][-1], first.upto, first.limited) == (20, 21, True)
    second = page(archive, 21, 100)
    assert (second.upto, second.limited) == (58, True)
    third = page(archive, 58, 100)
    assert (third.facts, third.upto, third.limited) == ((), 58, True)


@pytest.mark.parametrize("chunk", [1, codecs.CHUNK], ids=["fact by fact", "all at once"])
def test_a_page_has_as_many_rows_as_its_limit_unless_its_first_fact_has_more(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts 2, 4 and 6 have 3, 2 and 1 rows."""
    monkeypatch.setattr(codecs, "CHUNK", chunk)
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    ends = {limit: page(archive, 0, 58, limit).facts[-1].token for limit in (1, 3, 4, 5, 6)}
    assert ends == {1: 2, 3: 2, 4: 2, 5: 4, 6: 6}
    assert all_of(archive, 58, 4) == HISTORY
    archive.close()


def test_an_empty_range_needs_no_segment(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    assert page(archive, 9, 9, writer=OTHER) == Page((), Token(9), limited=False)


def test_a_fact_too_long_for_a_line_is_left_to_another_source(tmp_path: Path) -> None:
    """The page ends before it; the facts after it are readable once another source has given it."""
    history = [fact(2, "a"), fact(5, "x" * 200), fact(6, "b"), fact(7, "y" * 200), fact(8, "z" * 200), fact(9, "c")]
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([write_segment(folder, history, limit=100, upto=12)]))
    archive = Archive(folder)
    expected = [(2, 4), (5, 6), (8, 12)]
    for after, reached in expected:
        got = page(archive, after if after > 2 else 0, 12)
        assert (got.upto, got.limited) == (reached, reached < 12)
    for after, lacking in ((4, 5), (6, 7), (7, 8)):
        assert page(archive, after, 12) == Page([], Token(after), limited=True, lacking=Token(lacking))
    assert page(archive, 8, 12).facts == [history[-1]]


def test_a_missing_chain_is_named(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    with pytest.raises(CatchUpError, match=r"has no segments of stream 'orders' by 'worker2'"):
        page(archive, 0, 9, writer=OTHER)
    with pytest.raises(CatchUpError, match=r"has no segments of stream 'odrers' by 'master'"):
        archive.page(StreamName("odrers"), MASTER, after=Token(0), upto=Token(9), limit=1)


def test_a_range_before_the_first_segment_is_an_error(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_manifest(folder, Manifest([write_segment(folder, HISTORY[5:], after=10)]))
    with pytest.raises(FactsGoneError, match="begin after 10") as gone:
        page(Archive(folder), 9, 58)
    assert (gone.value.stream, gone.value.writer, gone.value.upto) == (STREAM, MASTER, 10)
    assert page(Archive(folder), 10, 58).facts == HISTORY[5:]


def test_a_folder_without_a_manifest_or_with_a_gap_is_an_error(tmp_path: Path) -> None:
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
def test_a_damaged_segment_gives_no_fact_and_the_others_remain_readable(tmp_path: Path, place: int) -> None:
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
    second.write_bytes(good)  # restored
    assert page(archive, 20, 40).facts == HISTORY[10:20]


def test_a_wrong_line_under_a_right_checksum_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Segment] = []

    def noted(folder: LocalFolder, segment: Segment, **options: bool) -> SegmentReader:
        opened.append(segment)
        return SegmentReader(folder, segment, **options)

    monkeypatch.setattr(archives, "SegmentReader", noted)
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, upto=58)
    path = tmp_path / segment.name
    lines = path.read_bytes().replace(b"RDATA orders master 50 ", b"RDATA orders other 50 ")
    write_manifest(folder, Manifest([replace_lines(folder, segment, lines)]))
    archive = Archive(folder)
    for _ in range(2):
        with pytest.raises(CatchUpError, match=r"0058\.rdata: not a line of this segment: 'RDATA orders other 50"):
            all_of(archive, 58, 5)
    assert len(opened) == 1, "a wrong segment is not read again before it has changed"
    path.write_bytes(lines[:-1])
    with pytest.raises(CatchUpError, match="damaged"):
        all_of(archive, 58, 5)


@pytest.mark.parametrize(
    ("token", "wrong"), [(b"20", b"4"), (b"20", b"59"), (b"20", b"-20")], ids=["descending", "beyond", "negative"]
)
def test_a_wrong_token_under_a_right_checksum_hides_no_fact(tmp_path: Path, token: bytes, wrong: bytes) -> None:
    """Each page is an error, so that the next source is tried."""
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, upto=58)
    lines = (tmp_path / segment.name).read_bytes()
    changed = lines.replace(b"RDATA orders master %s " % token, b"RDATA orders master %s " % wrong)
    assert changed != lines
    write_manifest(folder, Manifest([replace_lines(folder, segment, changed)]))
    archive = Archive(folder)
    for after in (0, 4, 30):
        with pytest.raises(CatchUpError, match=r"0058\.rdata: its tokens do not ascend from 0 to 58"):
            page(archive, after, 58)


def test_a_segment_with_too_few_facts_under_a_right_checksum_is_an_error(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    segment = write_segment(folder, HISTORY, upto=58)
    write_manifest(folder, Manifest([replace_lines(folder, segment, live_lines(HISTORY[:-3]))]))
    with pytest.raises(CatchUpError, match="the manifest has"):
        page(Archive(folder), 0, 58)


def test_a_missing_segment_is_an_error_until_it_appears(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, HISTORY, ends=[20, 58])
    first = tmp_path / "orders/master/00000000000000000000-00000000000000000020.rdata"
    first.rename(tmp_path / "elsewhere")
    archive = Archive(folder)
    with pytest.raises(CatchUpError, match=r"0000-00000000000000000020\.rdata: No such file"):
        page(archive, 0, 58)
    (tmp_path / "elsewhere").rename(first)
    assert page(archive, 0, 58).upto == 20


class FailingFile(BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError("AWS Error NETWORK_CONNECTION")


class FailingEnd(FailingFile):
    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence:
            raise OSError("AWS Error NETWORK_CONNECTION")
        return super().seek(offset)


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("checked", [False, True])
def test_a_file_that_could_not_be_read_is_read_again_although_it_has_not_changed(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch, *, checked: bool
) -> None:
    """A store was away, the rights were corrected, or a disk read the sector at the second attempt."""
    folder = write_folder(tmp_path, HISTORY, ends=[58], compression=compression)
    archive = Archive(folder)
    if checked:
        assert all_of(archive, 58, 5) == HISTORY
    opened = folder.open

    def failing(name: str, file: type[FailingFile] = FailingFile) -> BinaryIO:
        if not name.partition(".")[2].startswith("rdata"):
            return opened(name)
        return file(bytes(folder.size(name) or 0))

    def refused(name: str) -> BinaryIO:
        if name == "manifest.json":
            return opened(name)
        raise PermissionError(13, "Permission denied")

    for open_file, why in (
        (failing, "AWS Error NETWORK_CONNECTION"),
        (partial(failing, file=FailingEnd), "AWS Error NETWORK_CONNECTION"),
        (refused, "Permission denied"),
    ):
        monkeypatch.setattr(folder, "open", open_file)
        monkeypatch.setattr(folder, "stamp_of", lambda _, name: folder.stamp(name))
        with pytest.raises(CatchUpError, match=rf"0058\.rdata[.a-z]*: {why}$"):
            page(archive, 0, 58)
        monkeypatch.undo()
        assert all_of(archive, 58, 5) == HISTORY


def test_a_checksum_is_compared_once_per_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = SegmentReader._check

    def noted(self: SegmentReader) -> None:
        checked.append(self.segment.name)
        check(self)

    monkeypatch.setattr(SegmentReader, "_check", noted)
    folder = write_folder(tmp_path, HISTORY, ends=[20, 58])
    archive = Archive(folder)
    all_of(archive, 58, 2)
    all_of(archive, 58, 2)
    manifest = read_manifest(folder)
    assert manifest is not None
    assert checked == [each.name for each in manifest.segments]
    damaged = tmp_path / manifest.segments[0].name
    damaged.write_bytes(damaged.read_bytes().replace(b"[4,", b"[5,"))
    for _ in range(3):
        with pytest.raises(CatchUpError, match="damaged: its lines do not have the checksum of the manifest"):
            page(archive, 0, 58)
    assert checked[2:] == checked[:1], "a damaged file is not read again before it has changed"


@pytest.mark.parametrize("repaired", [True, False])
def test_a_file_that_is_replaced_while_it_is_checked_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, repaired: bool
) -> None:
    """What was found in the former file would be remembered of the new one: damaged for good, or never checked."""
    folder = write_folder(tmp_path, HISTORY, ends=[58])
    [path] = tmp_path.rglob("*.rdata")
    good = path.read_bytes()
    damaged = good.replace(b"[4,", b"[5,")
    path.write_bytes(damaged if repaired else good)
    check = SegmentReader._check

    def replaced(self: SegmentReader) -> None:
        monkeypatch.setattr(SegmentReader, "_check", check)
        (tmp_path / "new").write_bytes(good if repaired else damaged)
        (tmp_path / "new").rename(path)
        check(self)

    monkeypatch.setattr(SegmentReader, "_check", replaced)
    archive = Archive(folder)
    if repaired:
        with pytest.raises(CatchUpError, match="damaged"):
            page(archive, 0, 58)
        assert all_of(archive, 58, 5) == HISTORY
    else:
        assert page(archive, 0, 58).facts == HISTORY, "the file that was opened"
        with pytest.raises(CatchUpError, match="damaged"):
            page(archive, 0, 58)


def test_a_file_that_is_written_while_it_is_read_gives_no_fact_of_the_new_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a copy of another folder over this one: a program that copies may write into the file that is there."""
    monkeypatch.setattr(codecs, "CHUNK", 100)
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    [path] = tmp_path.rglob("*.rdata")
    good = path.read_bytes()
    facts = page(archive, 0, 58, limit=3).facts
    path.write_bytes(good.replace(b",0]", b",9]"))
    with pytest.raises(CatchUpError, match="was changed while it was read"):
        page(archive, facts[-1].token, 58)
    with pytest.raises(CatchUpError, match="damaged: its lines do not have the checksum"):
        page(archive, facts[-1].token, 58)
    path.write_bytes(good)
    assert [*facts, *all_of(archive, 58, 5, facts[-1].token)] == HISTORY


def test_a_checksum_is_compared_again_with_a_new_entry(tmp_path: Path) -> None:
    """A folder is replaced by another one, and its manifest arrives before its segments."""
    folder = write_folder(tmp_path / "here", HISTORY, ends=[58])
    archive = Archive(folder)
    assert all_of(archive, 58, 5) == HISTORY
    others = [fact(each.token, *[[each.token, index + 5] for index in range(len(each.texts))]) for each in HISTORY]
    write_folder(tmp_path / "new", others, ends=[58])
    (tmp_path / "new/manifest.json").rename(tmp_path / "here/manifest.json")
    with pytest.raises(CatchUpError, match="damaged: "):
        page(archive, 0, 58)
    [segment] = (tmp_path / "new").rglob("*.rdata")
    segment.rename(tmp_path / "here" / segment.relative_to(tmp_path / "new"))
    assert all_of(archive, 58, 5) == others


def test_the_manifest_is_read_again_once_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(folder: LocalFolder) -> Manifest | None:
        read.append(folder.url)
        return read_manifest(folder)

    monkeypatch.setattr(archives, "read_manifest", noted)
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[20, 58]))
    all_of(archive, 58, 2)
    assert len(read) == 1
    write_folder(tmp_path, HISTORY, ends=[20, 58, 60])
    all_of(archive, 60, 2)
    assert len(read) == 2


def test_pages_that_follow_each_other_are_read_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that begins earlier is read from the beginning of its segment again."""
    read: list[str] = []
    facts = SegmentReader.facts

    def noted(self: SegmentReader) -> Iterator[list[Fact]]:
        read.append(self.segment.name)
        return facts(self)

    monkeypatch.setattr(SegmentReader, "facts", noted)
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[58]))
    assert all_of(archive, 57, 2) == HISTORY[:-1]
    assert len(read) == 1
    assert page(archive, 9, 21).facts == HISTORY[4:10]
    assert (page(archive, 21, 25).facts, len(read)) == (HISTORY[10:12], 2)
    assert (page(archive, 24, 26).facts, len(read)) == (HISTORY[12:13], 3)
    archive.close()


def test_a_file_is_closed_at_its_end_or_when_the_archive_closes(tmp_path: Path) -> None:
    archive = Archive(write_folder(tmp_path, HISTORY, ends=[20, 58]))
    page(archive, 0, 58, limit=3)
    [cursor] = archive._cursors.values()
    source = cursor.reader._source
    all_of(archive, 20, 3, after=4)
    assert source.closed
    assert archive._cursors == {}
    page(archive, 20, 58, limit=3)
    [cursor] = archive._cursors.values()
    archive.close()
    assert cursor.reader._source.closed
