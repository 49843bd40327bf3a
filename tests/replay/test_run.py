"""Tests of runs: what is taken, what a rerun changes, what an interrupted one leaves; no Spark."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.errors import ConfigError, StoreError, UnknownStreamError
from replication.replay import run as runs
from replication.replay.folders import LocalFolder
from replication.replay.history import Shape
from replication.replay.run import Request, begin, run_here
from replication.replay.segments import Segment, read_manifest, verify
from replication.streams.registry import StreamDefinition
from replication.wire.grammar import InstanceName, StreamName
from tests.replay.histories import (
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

    from replication.streams.facts import Fact

FACTS = [fact(token, *[[token, index] for index in range(token % 3 + 1)]) for token in range(2, 200, 3)]
MINE, OTHERS = FACTS[::2], FACTS[1::2]


@pytest.fixture
def database(tmp_path: Path) -> str:
    return write_database(tmp_path / "m.db", {MASTER: MINE, OTHER: OTHERS})


def request(database: str, tmp_path: Path, rows: int = 20, out: str = "out", **changes: Any) -> Request:
    return Request(database, str(tmp_path / out), shape=Shape(rows, "gzip"), **changes)


def history(folder: Path, writer: str = MASTER, stream: str = STREAM) -> bytes:
    """Return a chain's lines; its manifest and its files agree, and nothing else is there."""
    opened = LocalFolder(folder)
    assert [fault for _, fault in verify(opened) if fault] == []
    manifest = read_manifest(opened)
    assert manifest is not None
    assert opened.names() == sorted(["manifest.json", *[each.name for each in manifest.segments]])
    chains = manifest.chains()
    chain = chains.get((StreamName(stream), InstanceName(writer)), [])
    return b"".join(lines_of(opened, each) for each in chain)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in LocalFolder(folder).names()}


def test_a_run_writes_everything_up_to_the_positions(database: str, tmp_path: Path) -> None:
    new = run_here(request(database, tmp_path))
    assert history(tmp_path / "out") == live_lines(MINE)
    assert history(tmp_path / "out", OTHER) == live_lines(OTHERS, OTHER)
    ends = {each.instance: each.upto for each in new}
    assert ends == {MASTER: MINE[-1].token, OTHER: OTHERS[-1].token}
    assert min(each.after for each in new) == 0
    assert len(new) > 8


def test_nothing_above_a_position_is_written_and_it_comes_with_a_later_run(tmp_path: Path) -> None:
    """What is there above it may have a smaller ID that is still being written."""
    database = write_database(tmp_path / "m.db", {MASTER: FACTS}, positions={MASTER: 50})
    run_here(request(database, tmp_path))
    told = [each for each in FACTS if each.token <= 50]
    assert history(tmp_path / "out") == live_lines(told)
    write_database(tmp_path / "m.db", {MASTER: [fact(51, "late")]}, positions={MASTER: 200})
    run_here(request(database, tmp_path))
    assert history(tmp_path / "out") == live_lines([*told, fact(51, "late"), *FACTS[len(told) :]])


def state_of(path: Path) -> tuple[int, int, int]:
    """What changes when a file is written again: which one it is, how long and since when; not when it was read."""
    stat = path.stat()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def test_a_rerun_changes_nothing(database: str, tmp_path: Path) -> None:
    run_here(request(database, tmp_path))
    before = {path: state_of(path) for path in sorted((tmp_path / "out").rglob("*"))}
    assert run_here(request(database, tmp_path)) == []
    assert {path: state_of(path) for path in sorted((tmp_path / "out").rglob("*"))} == before


def test_a_later_run_adds_segments_and_touches_none(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:20]})
    first = run_here(request(database, tmp_path))
    before = {each.name: state_of(tmp_path / "out" / each.name) for each in first}
    write_database(tmp_path / "m.db", {MASTER: FACTS[20:], OTHER: [fact(1_000, "new here")]})
    second = run_here(request(database, tmp_path, rows=7))
    assert {each.name: state_of(tmp_path / "out" / each.name) for each in first} == before
    assert {each.after for each in second if each.instance == MASTER} >= {first[-1].upto}
    assert history(tmp_path / "out") == live_lines(FACTS)
    assert history(tmp_path / "out", OTHER) == live_lines([fact(1_000, "new here")], OTHER)
    chain = [each for each in second if each.instance == OTHER]
    assert (chain[0].after, chain[-1].upto) == (0, 1_000)


def test_ids_that_nobody_used_are_covered_all_the_same(tmp_path: Path) -> None:
    """Rolled back: a position without facts, in the middle, at the end, and nothing at all."""
    database = write_database(tmp_path / "m.db", {MASTER: [fact(5, "a"), fact(900, "b")]}, positions={MASTER: 950})
    write_database(tmp_path / "m.db", {}, stream="empty", positions={MASTER: 70})
    write_database(tmp_path / "m.db", {}, stream="unused", positions={MASTER: 1})
    write_database(tmp_path / "m.db", {}, stream="nobody")
    new = run_here(request(database, tmp_path, rows=1))
    assert {(each.stream, each.after, each.upto, each.rows) for each in new} == {
        ("orders", 0, 5, 1),
        ("orders", 5, 950, 1),
        ("empty", 0, 70, 0),
        ("unused", 0, 1, 0),
    }


def test_streams_and_instances_can_be_picked_and_the_rest_follows_later(database: str, tmp_path: Path) -> None:
    write_database(tmp_path / "m.db", {MASTER: [fact(7, "c")]}, stream="caches")
    run_here(request(database, tmp_path, streams=["orders"], instances=[OTHER]))
    assert history(tmp_path / "out", OTHER) == live_lines(OTHERS, OTHER)
    assert history(tmp_path / "out") == history(tmp_path / "out", stream="caches") == b""
    run_here(request(database, tmp_path))
    assert history(tmp_path / "out") == live_lines(MINE)
    assert history(tmp_path / "out", stream="caches") == live_lines([fact(7, "c")], stream="caches")


def test_a_range_can_be_picked_and_must_join_on(database: str, tmp_path: Path) -> None:
    run_here(request(database, tmp_path, after=20, upto=100))
    assert history(tmp_path / "out") == live_lines([each for each in MINE if 20 < each.token <= 100])
    run_here(request(database, tmp_path, after=20, upto=60))
    run_here(request(database, tmp_path, after=99))
    assert history(tmp_path / "out") == live_lines([each for each in MINE if each.token > 20])
    with pytest.raises(ConfigError, match="that is a gap"):
        run_here(request(database, tmp_path, after=1_000))


def test_a_table_that_counts_down_is_known_by_its_positions(tmp_path: Path) -> None:
    down = StreamDefinition(STREAM, negative=True)
    database = write_database(tmp_path / "m.db", {MASTER: FACTS}, stream=down)
    run_here(request(database, tmp_path))
    assert history(tmp_path / "out") == live_lines(FACTS)


def test_an_unknown_stream_is_named_with_those_that_there_are(database: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownStreamError, match=r"no stream 'odrers' in 'sqlite:.*; it has orders"):
        run_here(request(database, tmp_path, streams=["odrers"]))


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("sqlite://", ConfigError, "sqlite:///relative"),
        ("mysql://x/y", ConfigError, "sqlite:///relative"),
        ("sqlite:///no/such.db", StoreError, "there is no such file"),
    ],
)
def test_a_database_that_is_none_is_refused(tmp_path: Path, url: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        run_here(request(url, tmp_path))


def test_a_database_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    import sqlite3

    sqlite3.connect(tmp_path / "x.db").execute("CREATE TABLE a (b)").connection.close()
    with pytest.raises(StoreError, match="stream_positions"):
        run_here(request(f"sqlite:///{tmp_path / 'x.db'}", tmp_path))


def test_a_segment_without_rows_is_refused(database: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one row at least"):
        run_here(request(database, tmp_path, rows=0))


def test_trap_38_a_restored_database_is_noticed(database: str, tmp_path: Path) -> None:
    """Segments that tell what a restored writer has forgotten must not be joined on to (fault F16)."""
    run_here(request(database, tmp_path))
    before = contents(tmp_path / "out")
    write_database(tmp_path / "m.db", {}, positions={MASTER: 40})
    with pytest.raises(StoreError, match=r"orders of master is at 40, but segments reach .* begin another folder"):
        run_here(request(database, tmp_path))
    assert contents(tmp_path / "out") == before


def test_two_runs_do_not_write_into_one_folder(database: str, tmp_path: Path) -> None:
    with begin(request(database, tmp_path)), pytest.raises(StoreError, match="another run writes here"):
        run_here(request(database, tmp_path))
    assert run_here(request(database, tmp_path))


class Killed(BaseException):
    """Nothing of ours catches it."""


def kill_at(patch: pytest.MonkeyPatch, operation: int) -> None:
    """Die at the n-th time that a file is begun, finished, moved or removed; what is begun then stays."""
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


def test_killed_at_any_operation_the_next_run_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    facts = FACTS[:24]
    database = write_database(tmp_path / "m.db", {MASTER: facts[::2], OTHER: facts[1::2]})
    run_here(request(database, tmp_path, out="undisturbed"))
    want = contents(tmp_path / "undisturbed")
    operation = 0
    finished = False
    while not finished:
        asked = request(database, tmp_path, out=f"{operation}")
        folder = tmp_path / f"{operation}"
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, operation)
            try:
                run_here(asked)
                finished = True
            except Killed:
                pass
        listed = read_manifest(LocalFolder(folder))
        assert listed is None or [fault for _, fault in verify(LocalFolder(folder)) if fault] == []
        run_here(asked)
        assert contents(folder) == want
        operation += 1
    assert operation > 30


def test_what_an_interrupted_run_has_finished_is_not_done_again(database: str, tmp_path: Path) -> None:
    asked = request(database, tmp_path)
    with begin(asked) as run:
        done = random.Random(3).sample(run.tasks, 3)
        for task in done:
            task.do()
    assert not (tmp_path / "out/manifest.json").exists()
    with begin(asked) as run:
        assert {*run.tasks} & {*done} == set()
        assert len(run.done) == 6
        run.finish([task.do() for task in run.tasks])
    assert history(tmp_path / "out") == live_lines(MINE)


def test_what_an_interrupted_run_has_left_is_not_taken_for_something_else(database: str, tmp_path: Path) -> None:
    """Another database, compression, size, or a file that is not there or not whole: it is done again."""
    run_here(request(database, tmp_path, out="undisturbed"))
    with begin(request(database, tmp_path)) as run:
        receipts = [task.do() for task in run.tasks]
        tasks = len(receipts)
        other = write_database(tmp_path / "other.db", {MASTER: MINE, OTHER: OTHERS})
    for asked in (
        request(other, tmp_path),
        request(database, tmp_path, rows=30),
        Request(database, str(tmp_path / "out"), shape=Shape(20, "none")),
        Request(database, str(tmp_path / "out"), shape=Shape(20, "gzip", line_limit=9_999)),
    ):
        with begin(asked) as run:
            assert run.done == []
    with begin(request(database, tmp_path)) as run:
        assert len(run.tasks) == 0
    (first, *_) = (each for each in (tmp_path / "out/.replay/orders/master").iterdir() if each.is_file())
    first.write_bytes(first.read_bytes()[:-1])
    (tmp_path / "out" / max(each.receipt for each in plan(database, tmp_path))).write_text("{")
    with begin(request(database, tmp_path)) as run:
        assert 0 < len(run.tasks) < tasks
        run.finish([task.do() for task in run.tasks])
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")


def plan(database: str, tmp_path: Path) -> list[runs.Task]:
    with begin(request(database, tmp_path, out="nothing")) as run:
        return run.tasks


def test_an_interrupted_run_of_a_table_that_has_grown_since(tmp_path: Path) -> None:
    database = write_database(tmp_path / "m.db", {MASTER: FACTS[:30]})
    asked = request(database, tmp_path)
    with begin(asked) as run:
        receipts = [task.do() for task in run.tasks]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runs, "write_manifest", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.finish(receipts)  # every segment is in its place, and no manifest lists it
    write_database(tmp_path / "m.db", {MASTER: FACTS[30:]})
    with begin(asked) as run:
        assert run.done != []
        run.finish([task.do() for task in run.tasks])
    assert history(tmp_path / "out") == live_lines(FACTS)


def test_tasks_are_plain_values_that_another_process_can_take(database: str, tmp_path: Path) -> None:
    import pickle

    with begin(request(database, tmp_path)) as run:
        copies: Sequence[runs.Task] = pickle.loads(pickle.dumps(run.tasks))
        assert copies == run.tasks
        assert [each.sum for each in copies] == [each.sum for each in run.tasks]
        run.finish([task.do() for task in copies[::-1]])
    assert history(tmp_path / "out") == live_lines(MINE)


def test_a_mapped_table_without_a_position_says_how_to_go_on(tmp_path: Path) -> None:
    import sqlite3

    database = write_database(tmp_path / "m.db", {})
    with sqlite3.connect(tmp_path / "m.db") as opened:
        opened.execute("CREATE TABLE shop (id INTEGER PRIMARY KEY, state TEXT)")
        opened.executemany("INSERT INTO shop VALUES (?, ?)", [(3, "paid")])
    opened.close()
    shop = StreamDefinition("shop", table="shop", id_column="id", row=("id", "state"))
    with pytest.raises(StoreError, match=r"no position of stream 'shop' is stored.*--upto"):
        run_here(request(database, tmp_path, streams=["shop"], definitions=[shop]))
    run_here(request(database, tmp_path, streams=["shop"], definitions=[shop], upto=3))
    assert history(tmp_path / "out", stream="shop") == live_lines([fact(3, [3, "paid"])], stream="shop")


def segments_of(folder: Path) -> Sequence[Segment]:
    return [Segment.read(each) for each in json.loads((folder / "manifest.json").read_text())["segments"]]


def facts_between(facts: Sequence[Fact], after: int, upto: int) -> list[Fact]:
    return [each for each in facts if after < each.token <= upto]


def test_each_segment_tells_what_its_range_says(database: str, tmp_path: Path) -> None:
    run_here(request(database, tmp_path))
    for each in segments_of(tmp_path / "out"):
        inside = facts_between(MINE if each.instance == MASTER else OTHERS, each.after, each.upto)
        assert lines_of(LocalFolder(tmp_path / "out"), each) == live_lines(inside, each.instance)
        assert each.rows == sum(len(fact.texts) for fact in inside)


def test_invalidations_can_be_compacted_without_being_declared(tmp_path: Path) -> None:
    facts = [fact(token, ["get_order", [f"o{token % 3}"], token]) for token in range(2, 60)]
    database = write_database(tmp_path / "m.db", {MASTER: facts}, stream="caches")
    write_database(tmp_path / "m.db", {MASTER: FACTS})
    asked = Request(database, str(tmp_path / "out"), shape=Shape(200, "gzip", compact=True))
    run_here(asked)
    assert history(tmp_path / "out", stream="caches") == live_lines(facts[-3:], stream="caches")
    assert history(tmp_path / "out") == live_lines(FACTS)
    with pytest.raises(ConfigError, match="--compact: stream 'orders' declares no key"):
        run_here(Request(database, str(tmp_path / "new"), streams=["orders"], shape=Shape(compact=True)))


def test_a_position_without_a_table_says_what_is_missing(tmp_path: Path) -> None:
    """A stream that is kept elsewhere, or in memory, leaves its position in the database, and no table."""
    url = write_database(tmp_path / "m.db", {MASTER: [fact(2, "a")]})
    with closing(sqlite3.connect(tmp_path / "m.db")) as opened, opened:
        opened.execute("INSERT INTO stream_positions VALUES ('typing', 'master', 7)")
    with pytest.raises(StoreError, match=r"'typing' has a position in .*no such table.*--config.*--stream"):
        run_here(Request(url, str(tmp_path / "out")))
    typing = StreamDefinition("typing", row=("room_id",), in_memory=True)
    new = run_here(Request(url, str(tmp_path / "out"), definitions=[typing]))
    assert [each.stream for each in new] == ["orders"]
    with pytest.raises(StoreError, match="'typing' has no history: its facts are in the memory of their writer"):
        run_here(Request(url, str(tmp_path / "out"), streams=["typing"], definitions=[typing]))


def test_a_run_that_finds_nothing_has_finished_all_the_same(tmp_path: Path) -> None:
    url = write_database(tmp_path / "m.db", {})
    assert run_here(Request(url, str(tmp_path / "out"))) == []
    assert list(verify(LocalFolder(tmp_path / "out"))) == []
    stamp = LocalFolder(tmp_path / "out").stamp("manifest.json")
    assert run_here(Request(url, str(tmp_path / "out"))) == []
    assert LocalFolder(tmp_path / "out").stamp("manifest.json") == stamp


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"after": -5}, "--from -5: IDs are counted from 0 up"),
        ({"after": 50, "upto": 10}, "--upto 10: that is before 50"),
        ({"upto": -1}, "--upto -1: that is before 0"),
        ({"instances": ["nobody"]}, "no instance 'nobody' has written here: there are master, worker2"),
        ({"instances": [MASTER, "nobody"], "streams": ["orders"]}, "no instance 'nobody'"),
    ],
)
def test_a_range_or_a_writer_that_cannot_be_meant_is_named(
    database: str, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run_here(Request(database, str(tmp_path / "out"), **changes))
    assert not (tmp_path / "out/manifest.json").exists()
