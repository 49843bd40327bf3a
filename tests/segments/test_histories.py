"""A segments folder belongs to one history: facts of a restored or exchanged database are not added to it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import CatchUpError, StoreError
from replication.segments import run
from replication.segments.archive import Archive
from replication.segments.databases import open_database
from replication.segments.files import verify
from replication.segments.folders import LocalFolder
from replication.segments.histories import HISTORIES, check_histories, read_histories, stored_histories
from replication.segments.manifest import WORK, Manifest, read_manifest, read_manifest_to_extend, write_manifest
from replication.storage.tables.histories import CREATE
from replication.streams.history import Epoch, encode_history
from replication.wire.grammar import InstanceName, Token
from tests.segments.histories import MASTER, OTHER, STREAM, fact, request, write_database, write_folder, write_segment

if TYPE_CHECKING:
    from pathlib import Path

    from replication.segments.histories import Histories

pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

FACTS = [fact(token, [token]) for token in range(2, 12)]


def epoch(name: str, start: int) -> Epoch:
    return Epoch(name, Token(start), Token(start))


def of_master(*history: Epoch) -> Histories:
    return {(STREAM, MASTER): [*history]}


A, B = epoch("a", 1), epoch("b", 5)


@pytest.fixture
def folder(tmp_path: Path) -> tuple[LocalFolder, Manifest]:
    """Return a folder with segments up to 11, of the epochs a and b."""
    written = write_folder(tmp_path / "out", FACTS, ends=[6, 11])
    manifest = read_manifest(written)
    assert manifest is not None
    check_histories(written, manifest, of_master(A, B))
    return written, manifest


def test_a_restarted_writer_extends_the_folder(folder: tuple[LocalFolder, Manifest]) -> None:
    written, manifest = folder
    for start in (11, 30):
        check_histories(written, manifest, of_master(A, B, epoch("c", start)))


@pytest.mark.parametrize(("published", "above"), [((A, B, epoch("c", 6)), 6), ((epoch("x", 1),), 0)])
def test_a_restored_or_exchanged_database_is_refused(
    folder: tuple[LocalFolder, Manifest], published: tuple[Epoch, ...], above: int
) -> None:
    with pytest.raises(StoreError, match=f"segments of orders by master reach 11, but .* facts above {above}: .*other"):
        check_histories(*folder, of_master(*published))
    check_histories(*folder, of_master(A, B))  # nothing has changed


def test_segments_with_a_fact_that_was_open_in_the_restored_backup_are_refused(tmp_path: Path) -> None:
    """The backup has the larger ID 6, and lacks ID 5, so the new epoch begins where the segments end."""
    written = write_folder(tmp_path / "out", FACTS, ends=[6])
    manifest = read_manifest(written)
    assert manifest is not None
    first = epoch("a.1", 1)
    check_histories(written, manifest, of_master(first))
    with pytest.raises(StoreError, match=r"segments of orders by master reach 6, but .* other facts above 4: .*other"):
        check_histories(written, manifest, of_master(first, Epoch("b.2", Token(4), Token(6))))
    check_histories(written, manifest, of_master(first, epoch("b.2", 6)))  # an ordinary restart


def test_what_an_interrupted_run_left_behind_is_removed_if_the_history_goes_on(
    folder: tuple[LocalFolder, Manifest],
) -> None:
    written, manifest = folder
    for history, left in (((A, B), True), ((A, B, epoch("c", 11)), False)):
        with written.create(f"{WORK}/receipt") as sink:
            sink.write(b"{}")
        check_histories(written, manifest, of_master(*history))
        assert (written.size(f"{WORK}/receipt") is not None) == left


def test_a_folder_or_a_database_of_version_0_1_is_trusted(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "out", FACTS, ends=[11])
    manifest = read_manifest(written)
    assert manifest is not None
    check_histories(written, manifest, {})
    assert written.size(HISTORIES) is None
    check_histories(written, manifest, of_master(A))
    check_histories(written, manifest, {})
    assert [*stored_histories(written, Manifest())[STREAM, MASTER]] == [A]


def test_segments_are_not_trusted_once_their_histories_are_missing(folder: tuple[LocalFolder, Manifest]) -> None:
    written, manifest = folder
    write_manifest(written, Manifest(manifest.segments, has_histories=True))
    archive = Archive(written)
    assert [*archive.history(STREAM, MASTER)] == [A, B]
    written.remove(HISTORIES)
    for read in (archive, Archive(written)):
        with pytest.raises(
            StoreError, match=r"histories\.json is missing, and .*: if this folder is a copy, copy it again"
        ):
            read.history(STREAM, MASTER)
    with pytest.raises(StoreError, match="is missing"):
        check_histories(written, read_manifest_to_extend(written), of_master(A, epoch("c", 6)))
    assert [str(fault).partition(",")[0] for _, fault in verify(written) if fault] == [
        f"{written.url}/{HISTORIES} is missing"
    ]


def test_a_copy_with_histories_of_other_segments_is_not_trusted(tmp_path: Path) -> None:
    """The folder of a restored database is copied over an older copy, and the copy ends in the middle."""
    former, restored = tmp_path / "former.db", tmp_path / "restored.db"
    for path, facts, history in ((former, FACTS, [A]), (restored, FACTS[:4], [A, B])):
        write_database(path, {MASTER: facts})
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(CREATE)
            values = STREAM, MASTER, encode_history(history)
            connection.execute("INSERT INTO stream_histories VALUES (?, ?, '', ?)", values)
        run.run_in_process(request(f"sqlite:///{path}", tmp_path, out=path.stem))
    copy = tmp_path / "former"
    assert [*Archive(LocalFolder(copy)).history(STREAM, MASTER)] == [A]
    archive = Archive(LocalFolder(copy))
    archive.history(STREAM, MASTER)
    (copy / HISTORIES).write_bytes((tmp_path / "restored" / HISTORIES).read_bytes())
    for read in (archive, Archive(LocalFolder(copy))):
        with pytest.raises(StoreError, match=r"histories\.json is of other segments.*: if this folder is a copy, copy"):
            read.history(STREAM, MASTER)
    assert [fault for _, fault in verify(LocalFolder(copy)) if fault]
    with pytest.raises(StoreError, match="is of other segments"):
        check_histories(LocalFolder(copy), read_manifest_to_extend(LocalFolder(copy)), of_master(A, B))


def test_histories_that_go_on_are_trusted_beside_each_manifest_of_their_run(tmp_path: Path) -> None:
    """A killed run has replaced the histories only; a copy may have the histories from before a run."""
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:4]})
    out, known = tmp_path / "out", list[bytes]()
    for number, upto in enumerate([3, 5, 5]):
        with closing(sqlite3.connect(tmp_path / "m.db")) as connection, connection:
            connection.execute(CREATE)
            history = encode_history([A, *[epoch(f"e{each}", 5) for each in range(number)]])
            connection.execute("REPLACE INTO stream_histories VALUES (?, ?, '', ?)", (STREAM, MASTER, history))
        with run.start_run(request(database, tmp_path, upto=upto)):
            pass  # killed
        if known:
            assert [fault for _, fault in verify(LocalFolder(out)) if fault] == []
        run.run_in_process(request(database, tmp_path, upto=upto))
        known.append((out / HISTORIES).read_bytes())
        for each in known:
            (out / HISTORIES).write_bytes(each)
            assert [fault for _, fault in verify(LocalFolder(out)) if fault] == []


def test_the_chains_after_one_without_a_history_are_compared(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "out", FACTS, ends=[11])
    of_other = write_segment(written, FACTS, writer=OTHER)
    chains = read_manifest_to_extend(written).segments
    check_histories(written, Manifest(), {(STREAM, OTHER): [A, B]})
    with pytest.raises(StoreError, match="segments of orders by worker2 reach 11, but the database has other facts"):
        check_histories(written, Manifest([*chains, of_other]), {(STREAM, OTHER): [A, epoch("c", 6)]})


def test_the_histories_of_another_database_in_the_folder_stay_while_it_has_their_segments(
    folder: tuple[LocalFolder, Manifest],
) -> None:
    written, manifest = folder
    of_other = {(STREAM, OTHER): [epoch("o", 1)]}
    check_histories(written, manifest, of_other)
    assert stored_histories(written, Manifest()) == {**of_master(A, B), **of_other}
    with pytest.raises(StoreError, match="segments of orders by master reach 11, but the database has other facts"):
        check_histories(written, manifest, of_master(A, B, epoch("c", 6)))
    check_histories(written, Manifest(), of_other)
    assert stored_histories(written, Manifest()) == of_other


def test_a_file_that_cannot_be_read_is_named(folder: tuple[LocalFolder, Manifest]) -> None:
    written, manifest = folder
    with written.create(HISTORIES) as sink:
        sink.write(b"[1]")
    with pytest.raises(StoreError, match=f"{HISTORIES} cannot be read: .*: if this folder is a copy, copy it again"):
        check_histories(written, manifest, of_master(A, B))


def test_histories_are_read_from_the_database(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {MASTER: FACTS})

    def found() -> Histories:
        with closing(open_database(url)) as database:
            return read_histories(database)

    assert found() == {}
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute(CREATE)
        opened.execute("INSERT INTO stream_histories VALUES ('orders', 'master', '', '[[\"a\",1,1]]')")
        opened.execute("INSERT INTO stream_histories VALUES ('orders', 'other', 'worker1', '[]')")
    assert found() == of_master(A)
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("UPDATE stream_histories SET epochs = '[1]'")
    with pytest.raises(StoreError, match=r"stream_histories in .* cannot be read"):
        found()


def test_an_archive_reads_the_histories_again_when_they_have_changed(folder: tuple[LocalFolder, Manifest]) -> None:
    written, manifest = folder
    with closing(Archive(written)) as archive:
        assert [*archive.history(STREAM, MASTER)] == [A, B]
        assert archive.history(STREAM, InstanceName("worker2")) == ()
        check_histories(written, manifest, of_master(A, B, epoch("c", 11)))
        assert [*archive.history(STREAM, MASTER)] == [A, B, epoch("c", 11)]


def test_a_page_is_of_the_history_that_was_read_before_it(folder: tuple[LocalFolder, Manifest]) -> None:
    """A follower compares the history, then takes the page: between both, the folder may be exchanged."""
    written, manifest = folder
    archive = Archive(written)
    read = partial(archive.page, STREAM, MASTER, upto=Token(11), limit=2)
    assert [*archive.history(STREAM, MASTER)] == [A, B]
    assert read(after=Token(1)).facts
    write_manifest(written, Manifest(manifest.segments))  # as a run that adds segments
    assert read(after=Token(3)).facts
    written.remove(HISTORIES)
    check_histories(written, Manifest(), of_master(A, epoch("c", 5)))
    write_manifest(written, Manifest(manifest.segments))
    with pytest.raises(CatchUpError, match="has other histories now"):
        read(after=Token(5))
    assert [*archive.history(STREAM, MASTER)] == [A, epoch("c", 5)]
    assert read(after=Token(5)).facts


def test_a_run_is_planned_again_if_the_database_is_restored_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts up to the lost position would else be counted as those of the new history."""
    url = write_database(tmp_path / "m.db", {MASTER: FACTS})
    planned = []

    def change(statement: str) -> None:
        with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
            opened.execute(statement)

    plan_ranges = run.plan_ranges

    def plan_and_restore(*arguments: Any) -> list[Any]:
        planned.append(list(plan_ranges(*arguments)))
        if len(planned) == 1:
            change('UPDATE stream_histories SET epochs = \'[["a",1,1],["c",6,6]]\'')
            change("UPDATE stream_positions SET stream_id = 6 WHERE stream_name = 'orders'")
        return planned[-1]

    change(CREATE)
    change("INSERT INTO stream_histories VALUES ('orders', 'master', '', '[[\"a\",1,1]]')")
    monkeypatch.setattr(run, "plan_ranges", plan_and_restore)
    request = run.ReplayRequest(url, str(tmp_path / "out"))
    assert [each.upto for each in run.run_in_process(request)] == [6]
    assert len(planned) == 2


def test_a_run_adds_nothing_if_the_database_is_restored_while_it_is_read(tmp_path: Path) -> None:
    """A later, newer backup would else make a worker trust a range that lacks facts."""
    url = write_database(tmp_path / "m.db", {MASTER: FACTS})
    history = '[["a",1,1]]'

    def restore(position: int, epochs: str = history) -> None:
        with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
            opened.execute(CREATE)
            opened.execute("REPLACE INTO stream_histories VALUES ('orders', 'master', '', ?)", (epochs,))
            opened.execute("UPDATE stream_positions SET stream_id = ? WHERE stream_name = 'orders'", (position,))

    restore(11)
    request = run.ReplayRequest(url, str(tmp_path / "out"))
    for position, epochs in ((6, history), (11, '[["a",1,1],["c",6,6]]'), (11, "[]")):
        with pytest.raises(StoreError, match="restored or exchanged while orders"), run.start_run(request) as begun:
            restore(position, epochs)
            begun.finish([task.do() for task in begun.tasks])
        assert read_manifest(LocalFolder(tmp_path / "out")) is None
        restore(11)
    with run.start_run(request) as begun:
        restore(11, '[["a",1,1],["c",11,11]]')  # the master was only started again
        assert [each.upto for each in begun.finish([task.do() for task in begun.tasks])] == [11]
    assert read_manifest_to_extend(LocalFolder(tmp_path / "out")).has_histories
