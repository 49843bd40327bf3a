"""Tests of the Spark source: offsets, limits, batches and queries."""

from __future__ import annotations

import json
import pickle
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import replication.replay
from replication.errors import ConfigError, StreamError
from replication.spark import datasource
from replication.spark.datasource import BatchReader, ReplicationDataSource, StreamReader, TokenRange, token_ranges
from replication.spark.histories import positions_of
from replication.spark.options import SourceOptions
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import Page
from replication.web.blocking_client import HttpError
from replication.wire.grammar import Token
from tests.segments.histories import MASTER, OTHER, fact
from tests.spark.served import FakeMaster, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

COLUMNS = ["stream", "instance", "token", "row"]
MINE = [fact(token, *[["é", token, {"k": index}] for index in range(token % 3 + 1)]) for token in range(2, 60, 2)]
OTHERS = [fact(token, [None, "x", token]) for token in range(3, 60, 4)]


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    with served(FakeMaster(("a", "b", "c"))) as fake:
        fake.histories = {MASTER: MINE, OTHER: OTHERS}
        yield fake


def rows_of(facts: Sequence[Fact], writer: str = MASTER) -> list[tuple[str, str, int, str]]:
    return [("orders", writer, each.token, text) for each in facts for text in each.texts]


ALL = sorted(rows_of(MINE) + rows_of(OTHERS, OTHER), key=lambda row: (row[2], row[1]))


def reader(master: FakeMaster, **options: str) -> StreamReader:
    return StreamReader(
        SourceOptions.read({"http": master.url, "stream": "orders", "patience": "0", **options}), COLUMNS
    )


def read(source: StreamReader | BatchReader, parts: Sequence[TokenRange]) -> list[tuple[Any, ...]]:
    """Read partitions as an executor does: from a copy of the reader."""
    copy = pickle.loads(pickle.dumps(source))
    return [tuple(row.values()) for part in parts for batch in copy.read(part) for row in batch.to_pylist()]


def test_the_package_exports_the_source() -> None:
    assert replication.replay.ReplicationDataSource is ReplicationDataSource


# ---- ranges


def test_ranges_are_limited_in_size_and_number() -> None:
    assert token_ranges({}, {}) == token_ranges({MASTER: 9}, {MASTER: 9}) == []
    assert token_ranges({"b": 5}, {"b": 9, "a": 2}) == [TokenRange("a", 0, 2), TokenRange("b", 5, 9)]
    assert [(each.after, each.upto) for each in token_ranges({}, {"a": 250_000})] == [
        (0, 100_000),
        (100_000, 200_000),
        (200_000, 250_000),
    ]
    many = token_ranges({"a": 7}, {"a": 10**15})
    assert len(many) == 64
    assert many[0].after == 7
    assert many[-1].upto == 10**15
    assert all(one.upto == two.after for one, two in pairwise(many))


# ---- batches


def batch(master: FakeMaster, **options: str) -> list[tuple[Any, ...]]:
    source = BatchReader(SourceOptions.read({"http": master.url, "stream": "orders", **options}), COLUMNS)
    return read(source, source.partitions())


def test_a_batch_has_every_row_unchanged(master: FakeMaster) -> None:
    assert batch(master) == rows_of(MINE) + rows_of(OTHERS, OTHER)


def test_a_batch_has_access_tokens_only_if_they_are_asked_for() -> None:
    page = Page([fact(2, ["get_user_by_access_token", ["syt_1"], 5])], Token(2), limited=False)
    found = []
    for more in ({}, {"accessTokens": "true"}):
        options = SourceOptions.read({"stream": "caches", **more})
        found += datasource._batch(options, COLUMNS, MASTER, page).column("row").to_pylist()
    assert found == ['["get_user_by_access_token",null,5]', '["get_user_by_access_token",["syt_1"],5]']


def test_a_batch_can_be_limited_to_a_writer_and_a_range(master: FakeMaster) -> None:
    assert batch(master, instance=OTHER) == rows_of(OTHERS, OTHER)
    part = {"from": "10", "upto": "20"}
    assert batch(master, instance=MASTER, **part) == rows_of([each for each in MINE if 10 < each.token <= 20])


def test_an_empty_stream_has_no_partitions_and_no_rows(master: FakeMaster) -> None:
    master.histories = {}
    assert batch(master) == []
    assert list(BatchReader(SourceOptions.read({"stream": "orders"}), COLUMNS).read(InputPartition(None))) == []
    assert list(reader(master).read(InputPartition(None))) == []


def test_a_batch_fails_soon_if_the_master_is_unavailable(master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasource, "FIRST_PATIENCE", 0.0)
    master.unavailable = 1
    with pytest.raises(HttpError, match="the database is restarting"):
        batch(master)


def test_a_batch_fails_if_the_writer_is_restored_while_it_is_read(master: FakeMaster) -> None:
    """Else it would have rows that the writer has lost beside later ones."""
    master.epochs = {MASTER: [epoch("a", 1)]}
    source = BatchReader(SourceOptions.read({"http": master.url, "stream": "orders", "patience": "0"}), COLUMNS)
    parts = source.partitions()
    assert sorted(read(source, parts), key=lambda row: (row[2], row[1])) == ALL
    master.epochs[MASTER] += [epoch("b", 58)]  # an ordinary restart
    assert sorted(read(source, parts), key=lambda row: (row[2], row[1])) == ALL
    master.epochs[MASTER][1:] = [epoch("c", 40)]
    with pytest.raises(
        StreamError, match=r"master was restored .* while orders was read up to 58: .*: start the batch again"
    ):
        read(source, parts)
    master.epochs[MASTER] = [epoch("x", 1)]
    with pytest.raises(StreamError, match="emptied or exchanged"):
        read(source, parts)
    assert len(read(source, source.partitions())) == len(ALL)


def test_declared_fields_become_columns(master: FakeMaster) -> None:
    source = ReplicationDataSource({"http": master.url, "stream": "orders", "fields": "true"})
    assert source.schema() == "stream string, instance string, token long, `a` string, `b` string, `c` string"
    options = SourceOptions.read(source.options)
    found = read(
        BatchReader(options, ["stream", "instance", "token", "a", "b", "c"]),
        [TokenRange(MASTER, 0, 2), TokenRange(OTHER, 0, 3)],
    )
    assert found == [("orders", MASTER, 2, "é", "2", f'{{"k":{index}}}') for index in range(3)] + [
        ("orders", OTHER, 3, None, "x", "3")
    ]


def test_a_declared_field_that_no_column_can_hold_is_json() -> None:
    """UTF-8 has no lone surrogates, and such a row may not stop a query: JSON has them, and numbers of any size."""
    options = SourceOptions.read({"stream": "orders", "fields": "true"})
    texts = '["\\ud800",1e999,"é"]', '[["\\udfff"],{"\\ud800":[1E400]},"\\ud83d\\ude00"]'
    page = Page([Fact(Token(2), texts)], Token(2), limited=False)
    found = datasource._batch(options, [*COLUMNS[:3], "a", "b", "c"], MASTER, page).to_pylist()
    assert [[row[name] for name in "abc"] for row in found] == [
        ['"\\ud800"', "1e999", "é"],
        ['["\\udfff"]', '{"\\ud800":[1e999]}', "😀"],
    ]


def test_fields_that_cannot_become_columns_are_refused(master: FakeMaster) -> None:
    source = ReplicationDataSource({"http": master.url, "stream": "orders", "fields": "true"})
    master.row = None
    with pytest.raises(ConfigError, match="option fields: stream 'orders' declares no fields"):
        source.schema()
    master.row = ("a", "token")
    with pytest.raises(ConfigError, match="have the names of other columns, token"):
        source.schema()


def test_trap_35_a_row_may_have_more_fields_than_declared_but_not_fewer(master: FakeMaster) -> None:
    options = SourceOptions.read({"http": master.url, "stream": "orders", "fields": "true"})
    assert read(BatchReader(options, ["stream", "instance", "token", "a"]), [TokenRange(OTHER, 0, 3)]) == [
        ("orders", OTHER, 3, None)
    ]
    with pytest.raises(ConfigError, match="a row without the declared fields"):
        read(BatchReader(options, ["stream", "instance", "token", *"abcd"]), [TokenRange(OTHER, 0, 3)])


def test_an_unknown_writer_is_refused_and_the_known_ones_are_listed(master: FakeMaster) -> None:
    why = "option instance: stream 'orders' has no writer 'masted'; it has master, worker2"
    with pytest.raises(ConfigError, match=why):
        batch(master, instance="masted")
    with pytest.raises(ConfigError, match=why):
        reader(master, instance="masted").initialOffset()
    assert reader(master, instance=OTHER).initialOffset() == {}


class Column:
    """One column of a schema, as Spark passes it."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.dataType = self
        self.simpleString = lambda: kind


class Schema(list[Column]):
    """A schema, as Spark passes it."""

    def fieldNames(self) -> list[str]:
        return [each.name for each in self]


def schema_of(text: str) -> Schema:
    return Schema([Column(*each.split(" ")) for each in text.split(", ")])


KEY_COLUMNS = "stream string, instance string, token bigint"


def test_only_the_schema_of_the_source_may_be_given(master: FakeMaster) -> None:
    """With a schema, a query with ``fields`` can start while its master is unavailable."""
    plain = ReplicationDataSource({"stream": "orders"})
    fields = ReplicationDataSource({"stream": "orders", "fields": "true", "http": "http://127.0.0.1:1"})
    assert isinstance(plain.reader(schema_of(f"{KEY_COLUMNS}, row string")), BatchReader)
    assert isinstance(fields.streamReader(schema_of(f"{KEY_COLUMNS}, a string, b string")), StreamReader)
    for text in (
        f"{KEY_COLUMNS}, row bigint",
        f"{KEY_COLUMNS}, rows string",
        KEY_COLUMNS,
        f"{KEY_COLUMNS}, row string, more string",
        "row string",
    ):
        with pytest.raises(ConfigError, match=r"the columns are stream string, .* give no other schema"):
            plain.reader(schema_of(text))
    with pytest.raises(ConfigError, match="give no other schema"):
        fields.streamReader(schema_of(f"{KEY_COLUMNS}, a bigint"))


def test_options_of_batches_and_of_queries_are_refused_for_each_other() -> None:
    for key, value in (("from", "latest"), ("maxRowsPerBatch", "5")):
        source = ReplicationDataSource({"stream": "orders", key: value})
        with pytest.raises(ConfigError, match=f"^option {key}.* for streaming queries"):
            source.reader(schema_of(f"{KEY_COLUMNS}, row string"))
        source.streamReader(schema_of(f"{KEY_COLUMNS}, row string"))
    source = ReplicationDataSource({"stream": "orders", "upto": "5"})
    with pytest.raises(ConfigError, match=r"^option upto is for batches"):
        source.streamReader(schema_of(f"{KEY_COLUMNS}, row string"))


def test_the_secret_is_read_from_a_file_and_sent(master: FakeMaster, tmp_path: Path) -> None:
    master.secret = "sésame"
    (tmp_path / "secret").write_text("sésame\n", encoding="utf-8")
    assert len(batch(master, secretFile=str(tmp_path / "secret"))) == len(ALL)
    with pytest.raises(HttpError, match="answers 401: it requires a secret: give the option secretFile"):
        batch(master)


# ---- queries


def follow(source: StreamReader, start: dict[str, Any], limit: Any) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Take one micro-batch."""
    end = json.loads(json.dumps(source.latestOffset(start, limit)))
    return end, read(source, source.partitions(start, end))


def test_offsets_are_the_sorted_map_from_writer_to_position(master: FakeMaster) -> None:
    source = reader(master)
    assert source.initialOffset() == {}
    end, rows = follow(source, {}, ReadAllAvailable())
    assert json.dumps(end) == '{"master": 58, "worker2": 59}'
    assert rows == rows_of(MINE) + rows_of(OTHERS, OTHER)
    assert source.reportLatestOffset() == end
    assert source.latestOffset(end, ReadAllAvailable()) == end
    assert source.partitions(end, end) == []


def test_a_new_query_can_begin_at_the_latest_fact_or_after_an_id(master: FakeMaster) -> None:
    assert reader(master, **{"from": "latest"}).initialOffset() == {MASTER: 58, OTHER: 59}
    source = reader(master, **{"from": "50"})
    end, rows = follow(source, source.initialOffset(), ReadAllAvailable())
    assert rows == [row for row in rows_of(MINE) + rows_of(OTHERS, OTHER) if row[2] > 50]
    source = reader(master, **{"from": "100"})
    end, rows = follow(source, source.initialOffset(), ReadAllAvailable())
    assert (end, rows) == ({}, [])


def test_a_writer_may_start_again_below_the_id_after_which_a_query_began(master: FakeMaster) -> None:
    """Each writer begins its epoch at its own last position, and others may be ahead; nothing was restored."""
    master.epochs = {MASTER: [epoch("a", 1)], OTHER: [epoch("x", 1)]}
    for limit in (ReadAllAvailable(), ReadMaxRows(100)):
        master.histories, master.epochs[OTHER] = {MASTER: MINE, OTHER: OTHERS[:3]}, [epoch("x", 1)]
        source = reader(master, **{"from": "50"})
        end, _ = follow(source, source.initialOffset(), limit)
        assert positions_of(end) == {MASTER: 58}
        master.epochs[OTHER] = [epoch("x", 1), epoch("y", OTHERS[2].token)]
        end, _ = follow(source, end, limit)
        master.histories[OTHER] = OTHERS
        end, rows = follow(source, end, limit)
        assert rows == [row for row in rows_of(OTHERS, OTHER) if row[2] > 50]


def test_a_new_writer_is_read_from_its_beginning(master: FakeMaster) -> None:
    del master.histories[OTHER]
    source = reader(master)
    first, _ = follow(source, {}, ReadAllAvailable())
    master.histories[OTHER] = OTHERS
    assert follow(source, first, ReadAllAvailable())[1] == rows_of(OTHERS, OTHER)


def test_offsets_never_decrease(master: FakeMaster) -> None:
    master.reached[MASTER] = 20
    end: dict[str, int] = {MASTER: 58, OTHER: 59}
    assert reader(master).latestOffset(end, ReadAllAvailable()) == end


def epoch(name: str, start: int) -> Epoch:
    return Epoch(name, Token(start), Token(start))


def test_a_restored_writer_ends_a_query(master: FakeMaster) -> None:
    """Its rows above the backup are in the sink, and are not the writer's any more."""
    master.epochs = {MASTER: [epoch("a", 1)], OTHER: [epoch("x", 1)]}
    source = reader(master)
    end, _ = follow(source, {}, ReadAllAvailable())
    assert end == {MASTER: 58, OTHER: 59, "histories of writers": {MASTER: [["a", 1, 1]], OTHER: [["x", 1, 1]]}}
    master.epochs[MASTER] += [epoch("b", 58)]  # an ordinary restart
    again, rows = follow(source, end, ReadAllAvailable())
    assert (again["histories of writers"][MASTER], rows) == ([["a", 1, 1], ["b", 58, 58]], [])
    master.epochs[MASTER][-1] = epoch("c", 50)
    for since in (end, again):
        for limit in (ReadAllAvailable(), ReadMaxRows(5)):
            with pytest.raises(StreamError, match="master of orders was restored from a backup: its rows above 50 are"):
                reader(master).latestOffset(since, limit)


def test_a_batch_of_an_earlier_run_is_not_read_from_a_restored_writer(master: FakeMaster) -> None:
    """Spark reads it before it asks for the next offset; its facts may not exist any more."""
    master.epochs = {MASTER: [epoch("a", 1)]}
    end, _ = follow(reader(master), {}, ReadAllAvailable())
    again = reader(master)
    assert again.partitions({}, end)
    master.epochs[MASTER] += [epoch("c", 40)]
    with pytest.raises(StreamError, match=r"rows above 40 are lost.*begin a new checkpoint"):
        reader(master).partitions({}, end)


def test_a_writer_with_another_history_ends_a_query(master: FakeMaster) -> None:
    master.epochs = {MASTER: [epoch("a", 1)]}
    end, _ = follow(reader(master), {}, ReadAllAvailable())
    master.epochs = {MASTER: [epoch("b", 1)]}
    with pytest.raises(StreamError, match="the history of orders at master is not the one"):
        reader(master).latestOffset(end, ReadAllAvailable())


def test_a_checkpoint_without_histories_goes_on_and_gets_them(master: FakeMaster) -> None:
    """It is of an earlier version, or the process had no history then; a process without one is trusted."""
    start: dict[str, Any] = {MASTER: 58, OTHER: 59}
    assert reader(master).latestOffset(start, ReadAllAvailable()) == start
    master.epochs = {MASTER: [epoch(name, 1 + place) for place, name in enumerate("abcde")]}
    end = reader(master).latestOffset(start, ReadAllAvailable())
    assert end["histories of writers"] == {MASTER: [[name, 1 + place, 1 + place] for place, name in enumerate("abcde")]}
    assert list(end) == ["histories of writers", MASTER, OTHER]
    master.epochs = {}
    assert reader(master).latestOffset(end, ReadAllAvailable()) == end


def test_a_removed_writer_keeps_its_offset(master: FakeMaster) -> None:
    del master.histories[OTHER]
    start: dict[str, int] = {MASTER: 2, OTHER: 9}
    assert reader(master).latestOffset(start, ReadAllAvailable()) == {MASTER: 58, OTHER: 9}


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 50, 1_000])
def test_a_micro_batch_keeps_its_row_limit_unless_one_fact_is_larger(master: FakeMaster, most: int) -> None:
    source = reader(master, maxRowsPerBatch=str(most))
    limit = source.getDefaultReadLimit()
    assert limit == ReadMaxRows(most)
    found: list[tuple[Any, ...]] = []
    start = source.initialOffset()
    while (step := follow(source, start, limit))[0] != start:
        start, rows = step
        assert 0 < len(rows) <= max(most, 3)
        assert len(rows) <= most or len({row[1:3] for row in rows}) == 1
        found += rows
    assert sorted(found, key=lambda row: (row[2], row[1])) == ALL


def test_a_writer_that_is_far_ahead_delays_no_other_writer(master: FakeMaster) -> None:
    """It may append as fast as micro-batches read."""
    end, _ = follow(reader(master, maxRowsPerBatch="6"), {}, ReadMaxRows(6))
    assert end[OTHER] >= OTHERS[0].token
    assert end[MASTER] >= MINE[0].token


def test_a_large_fact_does_not_wait_until_another_writer_has_nothing_more(master: FakeMaster) -> None:
    master.histories[OTHER] = [fact(3, *[["x"]] * 9)]
    source = reader(master, maxRowsPerBatch="10")
    end: dict[str, int] = {}
    for _ in range(2):
        end = source.latestOffset(end, ReadMaxRows(10))
    assert end[OTHER] == 3
    assert end[MASTER] < 58


def test_a_limit_of_one_row_reaches_every_writer(master: FakeMaster) -> None:
    source = reader(master, maxRowsPerBatch="1")
    end: dict[str, int] = {}
    for _ in range(2):
        end = source.latestOffset(end, ReadMaxRows(1))
    assert all(end[each] > 1 for each in (MASTER, OTHER))


def test_spark_may_ask_for_all_rows_although_a_limit_is_set(master: FakeMaster) -> None:
    assert reader(master).getDefaultReadLimit() == ReadAllAvailable()
    assert follow(reader(master, maxRowsPerBatch="1"), {}, ReadAllAvailable())[0] == {MASTER: 58, OTHER: 59}


class Clock:
    """Replaces the clock of the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(datasource, "monotonic", lambda: self.now)


def test_a_query_waits_for_an_unavailable_master_until_patience_ends(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    source = reader(master, patience="60")
    start: dict[str, int] = {MASTER: 10}
    master.unavailable = 2
    for limit in (ReadAllAvailable(), ReadMaxRows(5)):
        assert source.latestOffset(start, limit) == start
    assert source.latestOffset(start, ReadAllAvailable()) == {MASTER: 58, OTHER: 59}
    for wait in (61, 59):  # one trigger may be ten minutes after the other: patience begins with a failure
        clock.now += wait
        master.unavailable = 1
        assert source.latestOffset(start, ReadAllAvailable()) == start
    clock.now += 1
    master.unavailable = 1
    with pytest.raises(HttpError, match="the database is restarting"):
        source.latestOffset(start, ReadAllAvailable())


def test_patience_ends_for_one_writer_while_the_others_go_on(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a row that cannot be read would stop that writer without a message."""
    clock, answer = Clock(monkeypatch), master.answer
    master.answer = lambda path, authorization: (  # type: ignore[method-assign]
        (503, b'{"detail": "no JSON at ID 3"}')
        if f"instance={OTHER}" in path and "/updates" in path
        else answer(path, authorization)
    )
    source = reader(master, maxRowsPerBatch="4", patience="60")
    start: dict[str, int] = {}
    for _ in range(3):
        clock.now += 20
        end = source.latestOffset(start, ReadMaxRows(4))
        assert OTHER not in end or end[OTHER] <= 1
        start = end
    assert start[MASTER] > 2
    clock.now += 20
    with pytest.raises(HttpError, match="no JSON at ID 3"):
        for _ in range(2):
            start = source.latestOffset(start, ReadMaxRows(4))


def test_a_micro_batch_with_a_limit_goes_on_with_smaller_pages_if_answers_are_lost(master: FakeMaster) -> None:
    """A proxy may cut off long answers each time."""
    answer = master.answer

    def cut(path: str, authorization: str | None) -> tuple[int, bytes]:
        status, body = answer(path, authorization)
        return status, body[:500] if "/updates" in path else body

    master.answer = cut  # type: ignore[method-assign]
    source = reader(master, maxRowsPerBatch="1000", patience="60")
    start: dict[str, int] = {}
    for _ in range(20):
        if (end := source.latestOffset(start, ReadMaxRows(1000))) != start:
            break
    assert end != start


def test_patience_ends_if_positions_arrive_and_pages_do_not(
    master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, answer = Clock(monkeypatch), master.answer
    master.answer = lambda path, authorization: (  # type: ignore[method-assign]
        (502, b"{}") if "/updates" in path else answer(path, authorization)
    )
    source = reader(master, patience="60")
    assert source.latestOffset({}, ReadMaxRows(5)) == {}
    clock.now += 61
    with pytest.raises(HttpError, match="answers 502"):
        source.latestOffset({}, ReadMaxRows(5))


def test_a_query_waits_for_a_stream_that_the_process_does_not_have_yet(master: FakeMaster) -> None:
    """A worker that has just started receives it from its master."""
    source = reader(master, patience="60")
    start = source.latestOffset({}, ReadAllAvailable())
    master.unknown = 3
    assert source.latestOffset(start, ReadAllAvailable()) == start
    assert read(source, source.partitions({}, start)) == rows_of(MINE) + rows_of(OTHERS, OTHER)
    assert not master.unknown
    master.unknown = 1
    with pytest.raises(HttpError, match="no such stream"):
        batch(master)


def test_a_new_query_of_an_unknown_stream_fails_at_once(master: FakeMaster) -> None:
    source = StreamReader(SourceOptions.read({"http": master.url, "stream": "odrers", "patience": "0"}), COLUMNS)
    with pytest.raises(HttpError, match="no such stream"):
        source.initialOffset()


def test_the_cure_for_deleted_facts_leaves_out_no_fact_of_another_writer(master: FakeMaster) -> None:
    """The other writer has facts below that ID, which the option from alone would leave out."""
    answer = master.answer
    gone = b'{"detail": "facts of orders by master up to 40 are gone: begin after 40", "gone_upto": 40}'
    master.answer = lambda path, authorization: (  # type: ignore[method-assign]
        (410, gone) if "/updates" in path and "from=0&" in path else answer(path, authorization)
    )
    source, cure = reader(master, maxRowsPerBatch="5"), "give the options instance=master and from=40"
    for read_facts in (
        lambda: source.latestOffset({}, ReadMaxRows(5)),
        lambda: read(source, source.partitions({}, source.latestOffset({}, ReadAllAvailable()))),
        lambda: batch(master),
    ):
        with pytest.raises(HttpError, match=f"begin after 40: {cure}; .* new checkpoint.*with a query of its own"):
            read_facts()


def test_available_now_ends_at_the_positions_of_its_start(master: FakeMaster) -> None:
    source = reader(master)
    source.prepareForTriggerAvailableNow()
    master.histories[MASTER] = [*MINE, fact(90, "late")]
    goal: dict[str, int] = {MASTER: 58, OTHER: 59}
    assert source.latestOffset({}, ReadAllAvailable()) == goal
    assert source.latestOffset(goal, ReadAllAvailable()) == goal
    found: list[tuple[Any, ...]] = []
    start: dict[str, int] = {}
    while (step := follow(source, start, ReadMaxRows(10)))[0] != start:
        start, rows = step
        found += rows
    assert start == goal
    assert sorted(found, key=lambda row: (row[2], row[1])) == ALL


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(10)])
def test_available_now_ends_with_an_error_if_the_writer_is_restored_meanwhile(master: FakeMaster, limit: Any) -> None:
    """Spark asks for the next offset after the last micro-batch, too; no later query may follow, which would notice."""
    master.epochs = {MASTER: [epoch("a", 1)]}
    source = reader(master)
    source.prepareForTriggerAvailableNow()
    start: dict[str, Any] = {}
    while (step := follow(source, start, limit)[0]) != start:
        start = step
    master.epochs[MASTER] += [epoch("b", 58)]  # an ordinary restart
    assert source.latestOffset(start, limit) == start
    master.epochs[MASTER][-1] = epoch("c", 40)
    with pytest.raises(StreamError, match=r"rows above 40 are lost.*begin a new checkpoint"):
        source.latestOffset(start, limit)


def test_a_batch_that_is_planned_again_has_the_same_rows(master: FakeMaster) -> None:
    source = reader(master)
    end = source.latestOffset({}, ReadMaxRows(20))
    again = pickle.loads(pickle.dumps(reader(master)))
    master.histories[MASTER] = [*MINE, fact(90, "late")]
    assert read(source, source.partitions({}, end)) == read(again, again.partitions({}, end))


# ---- on Spark


@pytest.fixture
def source(spark: Any, master: FakeMaster) -> Any:
    """Yield what loads the stream: ``source(spark.read)``."""
    spark.dataSource.register(ReplicationDataSource)
    return lambda what, **options: (
        what.format("replication").option("http", master.url).option("stream", "orders").options(**options)
    )


def test_spark_reads_a_stream_by_its_name(spark: Any, source: Any) -> None:
    frame = source(spark.read).load()
    assert [(each.name, each.dataType.simpleString()) for each in frame.schema] == [
        ("stream", "string"),
        ("instance", "string"),
        ("token", "bigint"),
        ("row", "string"),
    ]
    assert sorted(map(tuple, frame.collect()), key=lambda row: (row[2], row[1])) == ALL
    assert source(spark.read, fields="true").load().where("a = 'é' AND b > 50").count() == sum(
        len(each.texts) for each in MINE if each.token > 50
    )


def test_spark_shows_the_error_of_an_option(spark: Any, source: Any, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="ConfigError: unknown option 'steam'; did you mean stream"):
        source(spark.read, steam="orders").load()
    with pytest.raises(PySparkException, match="ConfigError: option instance: stream 'orders' has no writer 'x'"):
        source(spark.read, instance="x").load().collect()
    with pytest.raises(PySparkException, match="ConfigError: option upto is for batches"):
        writing = source(spark.readStream, upto="5").load().writeStream.format("noop")
        writing.option("checkpointLocation", str(tmp_path)).start().awaitTermination(120)


def test_spark_reads_an_empty_stream(spark: Any, source: Any, master: FakeMaster) -> None:
    master.histories = {}
    assert source(spark.read).load().collect() == []


def test_a_query_has_every_row_once_despite_restarts_and_an_unavailable_master(
    spark: Any, source: Any, master: FakeMaster, tmp_path: Path
) -> None:
    """Sink and checkpoint are files: what one query has begun, the next one ends."""

    def start(**trigger: Any) -> Any:
        writing = source(spark.readStream, maxRowsPerBatch="18", patience="60").load().writeStream.format("json")
        writing = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(**trigger)
        return writing.start(str(tmp_path / "out"))

    def rows() -> list[tuple[Any, ...]]:
        if not (tmp_path / "out/_spark_metadata").exists():
            return []
        frame = spark.read.schema("stream string, instance string, token long, row string").json(str(tmp_path / "out"))
        return sorted(map(tuple, frame.collect()), key=lambda row: (row[2], row[1]))

    master.reached = {MASTER: 20, OTHER: 11}
    query = start(availableNow=True)
    assert query.awaitTermination(120)
    assert rows() == [row for row in ALL if row[2] <= master.reached[row[1]]]
    query = start(processingTime="0 seconds")
    deadline = time.monotonic() + 120
    master.unavailable = 6
    master.reached = {MASTER: 40}
    while len(rows()) < 40 and time.monotonic() < deadline:
        time.sleep(0.5)  # each look is a query
    query.stop()  # in the midst of something
    master.unavailable = 3
    master.reached = {}
    master.epochs = {MASTER: [epoch("a", 1)]}  # the checkpoint has no histories until now
    query = start(availableNow=True)
    assert query.awaitTermination(120)
    assert rows() == ALL
    assert query.exception() is None
    master.epochs = {MASTER: [epoch("a", 1), epoch("b", 50)]}
    with pytest.raises(StreamingQueryException, match="restored from a backup: its rows above 50 are lost"):
        start(availableNow=True).awaitTermination(120)
    assert rows() == ALL
