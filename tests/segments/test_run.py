"""Tests of runs: their plan and ranges, what a rerun changes, what an interrupted run leaves; without Spark."""

from __future__ import annotations

import json
import pickle
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.errors import ConfigError, StoreError, UnknownStreamError
from replication.segments import run as runs
from replication.segments.databases import open_database
from replication.segments.files import verify
from replication.segments.folders import LocalFolder
from replication.segments.manifest import MANIFEST, WORK, Segment, read_manifest
from replication.segments.run import ReplayRequest, SegmentOptions, StreamRange, cut_ranges, run_in_process, start_run
from replication.segments.tables import open_table
from replication.storage.tables.histories import CREATE
from replication.streams.definitions import SourceTable, StreamDefinition
from tests.segments.histories import (
    FACTS,
    MASTER,
    MASTERS_FACTS,
    OTHER,
    OTHERS_FACTS,
    STREAM,
    chain_lines,
    fact,
    lines_of,
    live_lines,
    request,
    write_database,
    writer_range,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.facts import Fact


DEFINITION = StreamDefinition(STREAM)


@pytest.fixture
def database(tmp_path: Path) -> str:
    return write_database(tmp_path / "m.db", {MASTER: MASTERS_FACTS, OTHER: OTHERS_FACTS})


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).names()}


def test_a_run_writes_every_fact_up_to_the_positions(database: str, tmp_path: Path) -> None:
    new = run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)
    assert chain_lines(tmp_path / "out", OTHER) == live_lines(OTHERS_FACTS, OTHER)
    ends = {each.instance: each.upto for each in new}
    assert ends == {MASTER: MASTERS_FACTS[-1].token, OTHER: OTHERS_FACTS[-1].token}
    assert min(each.after for each in new) == 0
    assert len(new) > 8


def state_of(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written again: inode, size and modification time."""
    stat = path.stat()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def test_a_rerun_changes_nothing(database: str, tmp_path: Path) -> None:
    run_in_process(request(database, tmp_path))
    before = {path: state_of(path) for path in sorted((tmp_path / "out").rglob("*"))}
    assert run_in_process(request(database, tmp_path)) == []
    assert {path: state_of(path) for path in sorted((tmp_path / "out").rglob("*"))} == before


def test_a_later_run_adds_segments_and_leaves_the_others(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:20]})
    first = run_in_process(request(database, tmp_path))
    before = {each.name: state_of(tmp_path / "out" / each.name) for each in first}
    write_database(tmp_path / "m.db", {MASTER: FACTS[20:], OTHER: [fact(1_000, "new here")]})
    second = run_in_process(request(database, tmp_path, rows=7))
    assert {each.name: state_of(tmp_path / "out" / each.name) for each in first} == before
    assert {each.after for each in second if each.instance == MASTER} >= {first[-1].upto}
    assert chain_lines(tmp_path / "out") == live_lines(FACTS)
    assert chain_lines(tmp_path / "out", OTHER) == live_lines([fact(1_000, "new here")], OTHER)
    chain = [each for each in second if each.instance == OTHER]
    assert (chain[0].after, chain[-1].upto) == (0, 1_000)


def test_a_run_adds_nothing_to_a_folder_that_has_taken_the_place_of_its_own(database: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_in_process(request(database, tmp_path, out="other"))
    before = contents(tmp_path / "other")
    for begun in (False, True):
        with start_run(request(database, tmp_path)) as run:
            receipts = [task.do() for task in run.tasks] if begun else []
            out.rename(tmp_path / f"away-{begun}")
            (tmp_path / "other").rename(out)
            with pytest.raises(StoreError, match="another folder has taken its place since the run began"):
                run.finish(receipts or [task.do() for task in run.tasks])
        assert {name: each for name, each in contents(out).items() if not name.startswith(WORK)} == before
        out.rename(tmp_path / "other")
    assert run_in_process(request(database, tmp_path, out="other")) == []
    assert contents(tmp_path / "other") == before


def test_a_run_whose_work_is_removed_adds_nothing(database: str, tmp_path: Path) -> None:
    """An object store has no lock: a second run removes the work of the first."""
    with start_run(request(database, tmp_path)) as run:
        receipts = [task.do() for task in run.tasks]
        next(each for each in (tmp_path / "out").rglob("0*") if each.is_file()).unlink()
        with pytest.raises(StoreError, match=r"is missing: something else writes to this folder; no segment was added"):
            run.finish(receipts)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)


def test_a_folder_is_locked_during_a_run(database: str, tmp_path: Path) -> None:
    with start_run(request(database, tmp_path)), pytest.raises(StoreError, match="another run writes here"):
        run_in_process(request(database, tmp_path))
    assert run_in_process(request(database, tmp_path))


class Killed(BaseException):
    """Caught by no code under test."""


def kill_at(patch: pytest.MonkeyPatch, operation: int) -> None:
    """Raise Killed at the n-th operation that creates, completes, moves or removes a file."""
    left = [operation]

    def dying(method: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return method(*args)

        return wrapped

    for name in ("create", "move", "remove"):
        patch.setattr(LocalFolder, name, dying(getattr(LocalFolder, name)))
    patch.setattr(Path, "replace", dying(Path.replace))
    patch.setattr(Path, "unlink", lambda *_, **__: None)


def test_after_a_kill_at_any_operation_the_next_run_gives_the_same_bytes(tmp_path: Path) -> None:
    facts = FACTS[:24]
    database = write_database(tmp_path / "m.db", {MASTER: facts[::2], OTHER: facts[1::2]})
    run_in_process(request(database, tmp_path, out="undisturbed"))
    want = contents(tmp_path / "undisturbed")
    operation = 0
    finished = False
    while not finished:
        asked = request(database, tmp_path, out=f"{operation}")
        folder = tmp_path / f"{operation}"
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, operation)
            try:
                run_in_process(asked)
                finished = True
            except Killed:
                pass
        listed = read_manifest(LocalFolder(folder))
        assert listed is None or [fault for _, fault in verify(LocalFolder(folder)) if fault] == []
        run_in_process(asked)
        assert contents(folder) == want
        operation += 1
    assert operation > 30


def test_a_run_adopts_the_tasks_that_an_interrupted_run_has_finished(database: str, tmp_path: Path) -> None:
    asked = request(database, tmp_path)
    with start_run(asked) as run:
        done = random.Random(3).sample(run.tasks, 3)
        for task in done:
            task.do()
    assert not (tmp_path / "out/manifest.json").exists()
    with start_run(asked) as run:
        assert {*run.tasks} & {*done} == set()
        assert len(run.done) == 6
        run.finish([task.do() for task in run.tasks])
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)


def test_only_complete_work_of_the_same_request_is_adopted(database: str, tmp_path: Path) -> None:
    """A task is done again for another database or other options, and if a file is missing or incomplete."""
    run_in_process(request(database, tmp_path, out="undisturbed"))
    with start_run(request(database, tmp_path)) as run:
        receipts = [task.do() for task in run.tasks]
        tasks = len(receipts)
        other = write_database(tmp_path / "other.db", {MASTER: MASTERS_FACTS, OTHER: OTHERS_FACTS})
    for asked in (
        request(other, tmp_path),
        request(database, tmp_path, rows=30),
        ReplayRequest(database, str(tmp_path / "out"), options=SegmentOptions(20, "none")),
        ReplayRequest(database, str(tmp_path / "out"), options=SegmentOptions(20, "gzip", line_limit=9_999)),
    ):
        with start_run(asked) as run:
            assert run.done == []
        with start_run(request(database, tmp_path)) as run:
            assert len(run.tasks) == tasks  # the run between them has removed the work
            for task in run.tasks:
                task.do()
    with start_run(request(database, tmp_path)) as run:
        assert len(run.tasks) == 0
    (first, *_) = (each for each in (tmp_path / "out/.replay").rglob("master/*"))
    first.write_bytes(first.read_bytes()[:-1])
    damaged = sorted({each.receipt for each in plan(database, tmp_path)})
    for receipt, text in zip(damaged, ("{", "[" * 100_000), strict=False):
        (tmp_path / "out" / receipt).write_text(text)
    with start_run(request(database, tmp_path)) as run:
        assert 0 < len(run.tasks) < tasks
        run.finish([task.do() for task in run.tasks])
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("killed", [{"rows": 100, "upto": int(FACTS[14].token)}, {"rows": 7}])
def test_a_task_of_a_killed_run_that_writes_on_does_not_damage_the_next_run(
    tmp_path: Path, killed: dict[str, Any]
) -> None:
    """The executors of a cluster may live on for a while after their driver was killed."""
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:30]})
    with start_run(request(database, tmp_path, **killed)) as run:
        late = run.tasks
    with start_run(request(database, tmp_path, rows=100)) as run:
        receipts = [task.do() for task in run.tasks]
        for each in late:
            each.do()
        run.finish(receipts)
    assert [fault for _, fault in verify(LocalFolder(tmp_path / "out")) if fault] == []
    assert chain_lines(tmp_path / "out") == live_lines(FACTS[:30])


def test_a_receipt_whose_entry_is_wrong_lets_its_task_be_done_again(database: str, tmp_path: Path) -> None:
    with start_run(request(database, tmp_path)) as run:
        for task in run.tasks:
            receipt = json.loads(task.do())
            receipt["segments"][0]["stream"] = "no name"
            (tmp_path / "out" / task.receipt).write_text(json.dumps(receipt))
        tasks = len(run.tasks)
    with start_run(request(database, tmp_path)) as run:
        assert len(run.tasks) == tasks


def plan(database: str, tmp_path: Path) -> list[runs.Task]:
    with start_run(request(database, tmp_path, out="nothing")) as run:
        return run.tasks


def test_a_run_adopts_work_of_an_interrupted_run_although_the_table_has_grown(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:30]})
    asked = request(database, tmp_path)
    with start_run(asked) as run:
        receipts = [task.do() for task in run.tasks]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "write_manifest", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.finish(receipts)  # every segment is in its place, and no manifest lists it
    write_database(tmp_path / "m.db", {MASTER: FACTS[30:]})
    with start_run(asked) as run:
        assert run.done != []
        run.finish([task.do() for task in run.tasks])
    assert chain_lines(tmp_path / "out") == live_lines(FACTS)


def test_tasks_can_be_pickled(database: str, tmp_path: Path) -> None:
    with start_run(request(database, tmp_path)) as run:
        copies: Sequence[runs.Task] = pickle.loads(pickle.dumps(run.tasks))
        assert copies == run.tasks
        assert [each.checksum for each in copies] == [each.checksum for each in run.tasks]
        names = [each.name for each in run.finish([task.do() for task in copies[::-1]])]
        assert names == sorted(names)
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)


def segments_of(folder: Path) -> Sequence[Segment]:
    return [Segment.from_json(each) for each in json.loads((folder / "manifest.json").read_text())["segments"]]


def facts_between(facts: Sequence[Fact], after: int, upto: int) -> list[Fact]:
    return [each for each in facts if after < each.token <= upto]


def test_each_segment_has_exactly_the_facts_of_its_range(database: str, tmp_path: Path) -> None:
    run_in_process(request(database, tmp_path))
    for each in segments_of(tmp_path / "out"):
        inside = facts_between(MASTERS_FACTS if each.instance == MASTER else OTHERS_FACTS, each.after, each.upto)
        assert lines_of(LocalFolder(tmp_path / "out"), each) == live_lines(inside, each.instance)
        assert each.rows == sum(len(fact.texts) for fact in inside)


def test_a_run_over_an_empty_database_writes_a_manifest(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {})
    assert run_in_process(ReplayRequest(url, str(tmp_path / "out"))) == []
    assert list(verify(LocalFolder(tmp_path / "out"))) == []
    stamp = LocalFolder(tmp_path / "out").stamp("manifest.json")
    assert run_in_process(ReplayRequest(url, str(tmp_path / "out"))) == []
    assert LocalFolder(tmp_path / "out").stamp("manifest.json") == stamp


def test_facts_above_a_position_are_left_to_a_later_run(tmp_path: Path) -> None:
    """Above a position, a smaller ID may still be open."""
    database = write_database(tmp_path / "m.db", {MASTER: FACTS}, positions={MASTER: 50})
    run_in_process(request(database, tmp_path))
    written = [each for each in FACTS if each.token <= 50]
    assert chain_lines(tmp_path / "out") == live_lines(written)
    write_database(tmp_path / "m.db", {MASTER: [fact(51, "late")]}, positions={MASTER: 200})
    run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines([*written, fact(51, "late"), *FACTS[len(written) :]])


def test_segments_cover_ids_without_facts(tmp_path: Path) -> None:
    """Rolled-back IDs in the middle and at the end; a stream without facts; a stream without a position."""
    database = write_database(tmp_path / "m.db", {MASTER: [fact(5, "a"), fact(900, "b")]}, positions={MASTER: 950})
    write_database(tmp_path / "m.db", {}, stream="empty", positions={MASTER: 70})
    write_database(tmp_path / "m.db", {}, stream="unused", positions={MASTER: 1})
    write_database(tmp_path / "m.db", {}, stream="missing")
    new = run_in_process(request(database, tmp_path, rows=1))
    assert {(each.stream, each.after, each.upto, each.rows) for each in new} == {
        ("orders", 0, 5, 1),
        ("orders", 5, 950, 1),
        ("empty", 0, 70, 0),
        ("unused", 0, 1, 0),
    }


def test_a_run_can_be_limited_to_streams_and_instances(database: str, tmp_path: Path) -> None:
    write_database(tmp_path / "m.db", {MASTER: [fact(7, "c")]}, stream="caches")
    run_in_process(request(database, tmp_path, streams=["orders"], instances=[OTHER]))
    assert chain_lines(tmp_path / "out", OTHER) == live_lines(OTHERS_FACTS, OTHER)
    assert chain_lines(tmp_path / "out") == chain_lines(tmp_path / "out", stream="caches") == b""
    run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines(MASTERS_FACTS)
    assert chain_lines(tmp_path / "out", stream="caches") == live_lines([fact(7, "c")], stream="caches")


def test_a_range_must_continue_its_chain(database: str, tmp_path: Path) -> None:
    run_in_process(request(database, tmp_path, after=20, upto=100))
    assert chain_lines(tmp_path / "out") == live_lines([each for each in MASTERS_FACTS if 20 < each.token <= 100])
    run_in_process(request(database, tmp_path, after=20, upto=60))
    assert run_in_process(request(database, tmp_path, after=100, upto=100)) == []
    run_in_process(request(database, tmp_path, after=100))
    assert chain_lines(tmp_path / "out") == live_lines([each for each in MASTERS_FACTS if each.token > 20])
    with pytest.raises(ConfigError, match="that is a gap"):
        run_in_process(request(database, tmp_path, after=1_000))


def test_a_negative_position_shows_that_a_table_counts_downwards(tmp_path: Path) -> None:
    down = StreamDefinition(STREAM, negative=True)
    database = write_database(tmp_path / "m.db", {MASTER: FACTS}, stream=down)
    run_in_process(request(database, tmp_path))
    assert chain_lines(tmp_path / "out") == live_lines(FACTS)


def test_an_unknown_stream_is_refused_and_the_known_ones_are_listed(database: str, tmp_path: Path) -> None:
    write_database(tmp_path / "m.db", {}, stream="stock", positions={MASTER: 7})
    with pytest.raises(UnknownStreamError, match=r"no stream 'odrers' in 'sqlite:.*; it has orders, stock: "):
        run_in_process(request(database, tmp_path, streams=["odrers"]))
    empty = write_database(tmp_path / "empty.db", {})
    with pytest.raises(UnknownStreamError, match=r"no stream 'odrers' in 'sqlite:.*; it has none: "):
        run_in_process(request(empty, tmp_path, streams=["odrers"]))


def test_a_writer_of_a_database_without_facts_is_not_looked_for(tmp_path: Path) -> None:
    assert run_in_process(request(write_database(tmp_path / "m.db", {}), tmp_path, instances=["missing"])) == []


def test_a_generic_table_without_a_position_is_replayed_up_to_an_end(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: FACTS})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("DELETE FROM stream_positions")
    run_in_process(request(database, tmp_path, streams=[STREAM], upto=FACTS[-1].token))
    assert chain_lines(tmp_path / "out") == live_lines(FACTS)


def test_a_run_whose_segments_leave_a_gap_adds_nothing(database: str, tmp_path: Path) -> None:
    with start_run(request(database, tmp_path)) as run:
        first, _, *others = [task.do() for task in run.tasks]
        with pytest.raises(StoreError, match=r"leaves a gap after .*; nothing was added$"):
            run.finish([first, *others])
    assert not (tmp_path / "out/manifest.json").exists()


def test_a_position_under_a_name_of_the_application_is_left_out(tmp_path: Path) -> None:
    definition = map_visits(tmp_path / "m.db", [(1, MASTER), (3, MASTER)])
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 3})
    write_database(tmp_path / "m.db", {MASTER: FACTS})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("INSERT INTO stream_positions VALUES ('application', 'master', 9)")
    new = run_in_process(ReplayRequest(database, str(tmp_path / "out"), definitions=[definition]))
    assert {each.stream for each in new} == {"orders", "visits"}


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("sqlite://", ConfigError, "sqlite:///relative"),
        ("mysql://x/y", ConfigError, "sqlite:///relative"),
        ("sqlite:///no/such.db", StoreError, "there is no such file"),
    ],
)
def test_a_url_without_a_database_is_refused(tmp_path: Path, url: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_in_process(request(url, tmp_path))


def test_a_database_without_our_tables_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "x.db").execute("CREATE TABLE a (b)").connection.close()
    cure = r"Start the master once, or name the mapped streams with --config$"
    with pytest.raises(StoreError, match=r"has no table stream_positions: is it a master's database\? " + cure):
        run_in_process(request(f"sqlite:///{tmp_path / 'x.db'}", tmp_path))


def test_segments_of_zero_rows_are_refused(database: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one row"):
        run_in_process(request(database, tmp_path, rows=0))


def test_trap_38_a_restored_database_is_refused(database: str, tmp_path: Path) -> None:
    """Segments with facts that the restored database lacks must not be extended."""
    run_in_process(request(database, tmp_path))
    before = contents(tmp_path / "out")
    write_database(tmp_path / "m.db", {}, positions={MASTER: 40})
    with pytest.raises(StoreError, match=r"position of master in orders is 40, but segments reach .* new folder"):
        run_in_process(request(database, tmp_path))
    assert contents(tmp_path / "out") == before


def test_a_mapped_table_without_a_position_needs_upto(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {})
    with sqlite3.connect(tmp_path / "m.db") as opened:
        opened.execute("CREATE TABLE shop (id INTEGER PRIMARY KEY, state TEXT)")
        opened.executemany("INSERT INTO shop VALUES (?, ?)", [(3, "paid")])
    opened.close()
    shop = StreamDefinition("shop", table="shop", id_column="id", row=("id", "state"))
    cure = "start its master once, or give --upto ID if every ID up to there is complete"
    why = f"^no position of stream 'shop' is stored, so it is not known which IDs are complete: {cure}$"
    with pytest.raises(StoreError, match=why):
        run_in_process(request(database, tmp_path, streams=["shop"], definitions=[shop]))
    run_in_process(request(database, tmp_path, streams=["shop"], definitions=[shop], upto=3))
    assert chain_lines(tmp_path / "out", stream="shop") == live_lines([fact(3, [3, "paid"])], stream="shop")


def test_the_caches_stream_can_be_compacted_without_a_definition(tmp_path: Path) -> None:
    facts = [fact(token, ["get_order", [f"o{token % 3}"], token]) for token in range(2, 60)]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream="caches")
    write_database(tmp_path / "m.db", {MASTER: FACTS})
    asked = ReplayRequest(database, str(tmp_path / "out"), options=SegmentOptions(200, "gzip", compact=True))
    run_in_process(asked)
    assert chain_lines(tmp_path / "out", stream="caches") == live_lines(facts[-3:], stream="caches")
    assert chain_lines(tmp_path / "out") == live_lines(FACTS)
    with pytest.raises(ConfigError, match="--compact: stream 'orders' declares no key"):
        run_in_process(
            ReplayRequest(database, str(tmp_path / "new"), streams=["orders"], options=SegmentOptions(compact=True))
        )


def test_a_position_without_a_table_is_refused_with_the_cure(tmp_path: Path) -> None:
    """A stream of another database, or one in memory, has a position here but no table."""
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("INSERT INTO stream_positions VALUES ('typing', 'master', 7)")
    cure = "declare the stream in a file for --config, or choose other streams with --stream"
    why = f"'typing' has a position in .*no such table.*: {cure}$"
    with pytest.raises(StoreError, match=why):
        run_in_process(ReplayRequest(url, str(tmp_path / "out")))
    busy = StoreError("too many connections", temporary=True)
    with patch.object(runs, "open_table", side_effect=busy), pytest.raises(StoreError, match=r"^too many connections$"):
        run_in_process(ReplayRequest(url, str(tmp_path / "out")))
    typing = StreamDefinition("typing", row=("room_id",), in_memory=True)
    new = run_in_process(ReplayRequest(url, str(tmp_path / "out"), definitions=[typing]))
    assert [each.stream for each in new] == ["orders"]
    with pytest.raises(StoreError, match="'typing' has no history: its writer keeps its facts in memory"):
        run_in_process(ReplayRequest(url, str(tmp_path / "out"), streams=["typing"], definitions=[typing]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"after": -5}, "--from -5: the smallest ID is 0"),
        ({"after": 50, "upto": 10}, "--upto 10: that is before 50"),
        ({"upto": -1}, "--upto -1: that is before 0"),
        ({"after": 2**63}, "--from 9223372036854775808: the largest ID is 9223372036854775807"),
        ({"upto": 2**70}, f"--upto {2**70}: the largest ID is 9223372036854775807"),
        ({"instances": ["missing"]}, "no instance 'missing' has written to this database; there are master, worker2"),
        ({"instances": [MASTER, "missing"], "streams": ["orders"]}, "no instance 'missing'"),
    ],
)
def test_an_impossible_range_or_writer_is_refused(
    database: str, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run_in_process(ReplayRequest(database, str(tmp_path / "out"), **changes))
    assert not (tmp_path / "out/manifest.json").exists()


def test_ranges_cover_every_token_once_and_cut_no_fact(tmp_path: Path) -> None:
    facts = [fact(token, *range(token % 4 + 1)) for token in range(2, 60, 3)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        table = open_table(opened, DEFINITION)
        for rows in range(1, 20):
            found = list(cut_ranges(table, StreamRange.of(DEFINITION, [writer_range(0, 70)]), rows))
            assert [each.after for each in found] == [0, *[each.upto for each in found[:-1]]]
            assert found[-1].upto == 70
            for each in found:
                inside = [len(some.texts) for some in facts if each.after < some.token <= each.upto]
                assert sum(inside) <= rows or len(inside) == 1
                assert each.writers == (writer_range(each.after, each.upto),)


def test_the_end_of_a_large_range_is_estimated_from_its_first_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PROBE", 10)
    facts = [fact(token, token) for token in range(2, 402, 2)]  # 200 rows, every other ID
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        found = list(
            cut_ranges(open_table(opened, DEFINITION), StreamRange.of(DEFINITION, [writer_range(0, 400)]), 100)
        )
    assert [(each.after, each.upto) for each in found] == [(0, 180), (180, 360), (360, 400)]


def test_writers_with_different_ranges_share_tasks(tmp_path: Path) -> None:
    facts = [fact(token, token) for token in range(2, 12)]
    database = write_database(tmp_path / "m.db", {MASTER: facts})
    with closing(open_database(database)) as opened:
        table = open_table(opened, DEFINITION)
        found = list(cut_ranges(table, StreamRange.of(DEFINITION, [writer_range(4, 11), writer_range(0, 6, OTHER)]), 4))
    assert [each.writers for each in found] == [
        (writer_range(4, 5), writer_range(0, 5, OTHER)),
        (writer_range(5, 9), writer_range(5, 6, OTHER)),
        (writer_range(9, 11),),
    ]
    with closing(open_database(database)) as opened:
        table = open_table(opened, DEFINITION)
        found = list(cut_ranges(table, StreamRange.of(DEFINITION, [writer_range(5, 11), writer_range(0, 5, OTHER)]), 4))
    assert [each.writers for each in found] == [
        (writer_range(0, 5, OTHER),),
        (writer_range(5, 9),),
        (writer_range(9, 11),),
    ]


def map_visits(path: Path, rows: Sequence[tuple[int, str | None]]) -> StreamDefinition:
    """Store rows of several writers in a table of an application, and return its stream with two declared writers."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE visits (id INTEGER PRIMARY KEY, writer TEXT, page TEXT)")
        connection.executemany("INSERT INTO visits VALUES (?, ?, '/')", rows)
    options: dict[str, Any] = {"table": "visits", "id_column": "id", "instance_column": "writer", "row": ("page",)}
    return StreamDefinition("visits", writers=(MASTER, OTHER), **options)


def test_rows_of_a_declared_writer_without_a_position_are_not_left_out(tmp_path: Path) -> None:
    definition = map_visits(tmp_path / "m.db", [(1, MASTER), (2, OTHER), (3, MASTER), (4, OTHER)])
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 3})
    asked: dict[str, Any] = {"definitions": [definition], "out": str(tmp_path / "out"), "database": database}
    cure = (
        "start that writer once, give --upto ID if every ID up to there is complete, or choose other writers with "
        "--instance"
    )
    what = f"writer '{OTHER}' of stream 'visits' has rows and no stored position"
    why = f"^{what}, so it is not known which of its IDs are complete: {cure}$"
    with pytest.raises(StoreError, match=why):
        run_in_process(ReplayRequest(**asked))
    new = run_in_process(ReplayRequest(**asked, instances=[MASTER]))
    assert [(each.instance, each.rows) for each in new] == [(MASTER, 2)]
    new = run_in_process(ReplayRequest(**asked, upto=4))
    assert [(each.instance, each.upto, each.rows) for each in new] == [(OTHER, 4, 2)]


@pytest.mark.parametrize("upto", [None, 6])
@pytest.mark.parametrize("joined", [False, True])
def test_rows_of_a_writer_that_is_not_declared_are_named(upto: int | None, joined: bool, tmp_path: Path) -> None:
    rows = [(1, MASTER), (2, "w3"), (3, None), (4, "w3"), (5, "w4"), (6, OTHER), (7, "w3")]
    definition = map_visits(tmp_path / "m.db", rows)
    if joined:
        source = SourceTable(table="visits", id_column="id", instance_column="writer", row=("page",))
        definition = StreamDefinition("visits", writers=definition.writers, row=("page",), tables=[source])
    stored: dict[str, int] = {MASTER: 6, OTHER: 6}
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions=stored)
    asked: dict[str, Any] = {"definitions": [definition], "out": str(tmp_path / "out"), "database": database}
    what = "rows are left out, of writers that are not in its writers and have stored no position"
    new_ids = "give these rows a name and new IDs (replication streams check has the statement)"
    cure = f"add them to writers in the file of --config, or {new_ids}"
    last = "1 of 'w3'"
    with start_run(ReplayRequest(**asked, upto=upto)) as run:
        names = f"{2 if upto else 3} of 'w3', 1 of 'w4'"
        assert run.warnings == [f"stream 'visits': {what}: {names}; {cure}"]
        assert len(run.finish([task.do() for task in run.tasks])) == 2
    with start_run(ReplayRequest(**asked, upto=upto)) as run:  # those above the segments
        assert run.warnings == ([] if upto else [f"stream 'visits': {what}: {last}; {cure}"])
    with start_run(ReplayRequest(**asked, upto=upto, instances=[MASTER])) as run:
        assert run.warnings == []


def test_a_declared_writer_without_rows_needs_no_position(tmp_path: Path) -> None:
    definition = map_visits(tmp_path / "m.db", [(1, MASTER), (3, MASTER)])
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 3})
    (segment,) = run_in_process(ReplayRequest(database, str(tmp_path / "out"), definitions=[definition]))
    assert (segment.instance, segment.rows) == (MASTER, 2)


def test_a_mapped_database_that_no_master_has_used_needs_an_end(tmp_path: Path) -> None:
    definition = map_visits(tmp_path / "m.db", [(1, MASTER), (2, OTHER)])
    asked: dict[str, Any] = {
        "definitions": [definition],
        "out": str(tmp_path / "out"),
        "database": f"sqlite:///{tmp_path}/m.db",
    }
    with pytest.raises(StoreError, match=r"no position of stream 'visits' is stored.*: start its master once, or"):
        run_in_process(ReplayRequest(**asked))
    assert sorted(each.instance for each in run_in_process(ReplayRequest(**asked, upto=2))) == [MASTER, OTHER]


def test_a_table_alone_was_restored(tmp_path: Path) -> None:
    """A master had served the segments' database: so the other one is not that, or has lost its positions."""
    definition = map_visits(tmp_path / "m.db", [(1, MASTER), (2, MASTER)])
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 2})
    with closing(sqlite3.connect(tmp_path / "m.db")) as connection, connection:
        connection.execute(CREATE)
        connection.execute("INSERT INTO stream_histories VALUES ('visits', 'master', '', '[[\"a\",1,1]]')")
    out = str(tmp_path / "out")
    run_in_process(ReplayRequest(database, out, definitions=[definition]))
    before = contents(tmp_path / "out")
    map_visits(tmp_path / "restored.db", [(1, MASTER), (2, MASTER), (3, MASTER)])
    asked = ReplayRequest(f"sqlite:///{tmp_path}/restored.db", out, definitions=[definition], upto=3)
    why = "segments of visits by master reach 2, and the database has neither a position nor a history of them: it was"
    with pytest.raises(StoreError, match=f"^{why} restored in part or exchanged; write to a folder other than .*out$"):
        run_in_process(asked)
    assert contents(tmp_path / "out") == before


def test_a_joined_stream_has_a_declared_writer_without_a_position(tmp_path: Path) -> None:
    mapped = map_visits(tmp_path / "m.db", [(1, MASTER), (2, OTHER)])
    source = SourceTable(table="visits", id_column="id", instance_column="writer", row=("page",))
    definition = StreamDefinition("visits", writers=mapped.writers, row=("page",), tables=[source])
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 3})
    with pytest.raises(StoreError, match=f"writer '{OTHER}' of stream 'visits' has rows and no stored position"):
        run_in_process(ReplayRequest(database, str(tmp_path / "out"), definitions=[definition]))


def test_a_generic_stream_has_a_declared_writer_without_a_position(tmp_path: Path) -> None:
    definition = StreamDefinition(STREAM, writers=(MASTER, OTHER))
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:3]}, stream=definition)
    with closing(sqlite3.connect(tmp_path / "m.db")) as connection, connection:
        connection.execute(f"INSERT INTO stream_{STREAM} VALUES (9999, 0, '{OTHER}', '1')")
    with pytest.raises(StoreError, match=f"writer '{OTHER}' of stream 'orders' has rows and no stored position"):
        run_in_process(ReplayRequest(database, str(tmp_path / "out"), definitions=[definition]))
