"""Tests of streams as a Spark source: options, offsets and admission by themselves, then batches and queries."""

from __future__ import annotations

import json
import pickle
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import replication.replay
from replication.errors import CatchUpError, ConfigError
from replication.replay import datasource
from replication.replay.datasource import BatchReader, Range, ReplicationDataSource, StreamReader, ranges
from replication.replay.options import Question
from tests.replay.histories import MASTER, OTHER, fact
from tests.replay.served import FakeMaster, served

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from replication.streams.facts import Fact

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
    return StreamReader(Question.read({"http": master.url, "stream": "orders", "patience": "0", **options}), COLUMNS)


def read(source: StreamReader | BatchReader, parts: Sequence[Range]) -> list[tuple[Any, ...]]:
    """Read partitions as an executor does: from a copy of the reader."""
    copy = pickle.loads(pickle.dumps(source))
    return [tuple(row.values()) for part in parts for batch in copy.read(part) for row in batch.to_pylist()]


def test_the_package_offers_it_and_brings_spark_only_then() -> None:
    assert replication.replay.ReplicationDataSource is ReplicationDataSource
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        replication.replay.nothing  # noqa: B018


# ---- ranges


def test_a_range_is_cut_into_partitions_of_some_size_and_some_number() -> None:
    assert ranges({}, {}) == ranges({MASTER: 9}, {MASTER: 9}) == []
    assert ranges({"b": 5}, {"b": 9, "a": 2}) == [Range("a", 0, 2), Range("b", 5, 9)]
    assert [(each.after, each.upto) for each in ranges({}, {"a": 250_000})] == [
        (0, 100_000),
        (100_000, 200_000),
        (200_000, 250_000),
    ]
    many = ranges({"a": 7}, {"a": 10**15})
    assert len(many) == 64
    assert many[0].after == 7
    assert many[-1].upto == 10**15
    assert all(one.upto == two.after for one, two in pairwise(many))


# ---- batches


def batch(master: FakeMaster, **options: str) -> list[tuple[Any, ...]]:
    source = BatchReader(Question.read({"http": master.url, "stream": "orders", **options}), COLUMNS)
    return read(source, source.partitions())


def test_a_batch_has_every_row_as_it_was_written(master: FakeMaster) -> None:
    assert batch(master) == rows_of(MINE) + rows_of(OTHERS, OTHER)


def test_a_batch_may_be_of_one_writer_and_of_a_range(master: FakeMaster) -> None:
    assert batch(master, instance=OTHER) == rows_of(OTHERS, OTHER)
    part = {"from": "10", "upto": "20"}
    assert batch(master, instance=MASTER, **part) == rows_of([each for each in MINE if 10 < each.token <= 20])


def test_an_empty_stream_has_no_partition_and_reading_none_gives_none(master: FakeMaster) -> None:
    master.histories = {}
    assert batch(master) == []
    assert list(BatchReader(Question.read({"stream": "orders"}), COLUMNS).read(InputPartition(None))) == []
    assert list(reader(master).read(InputPartition(None))) == []


def test_a_batch_of_a_master_that_is_not_there_fails_soon(master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasource, "FIRST_PATIENCE", 0.0)
    master.away = 1
    with pytest.raises(CatchUpError, match="the database is restarting"):
        batch(master)


def test_declared_fields_are_columns(master: FakeMaster) -> None:
    source = ReplicationDataSource({"http": master.url, "stream": "orders", "fields": "true"})
    assert source.schema() == "stream string, instance string, token long, `a` string, `b` string, `c` string"
    question = Question.read(source.options)
    found = read(
        BatchReader(question, ["stream", "instance", "token", "a", "b", "c"]), [Range(MASTER, 0, 2), Range(OTHER, 0, 3)]
    )
    assert found == [("orders", MASTER, 2, "é", "2", f'{{"k":{index}}}') for index in range(3)] + [
        ("orders", OTHER, 3, None, "x", "3")
    ]


def test_fields_that_cannot_be_columns_are_refused(master: FakeMaster) -> None:
    source = ReplicationDataSource({"http": master.url, "stream": "orders", "fields": "true"})
    master.row = None
    with pytest.raises(ConfigError, match="option fields: stream 'orders' declares no fields"):
        source.schema()
    master.row = ("a", "token")
    with pytest.raises(ConfigError, match="called like other columns, token"):
        source.schema()


def test_trap_35_a_row_with_more_fields_than_declared_is_read_and_one_with_less_is_not(master: FakeMaster) -> None:
    question = Question.read({"http": master.url, "stream": "orders", "fields": "true"})
    assert read(BatchReader(question, ["stream", "instance", "token", "a"]), [Range(OTHER, 0, 3)]) == [
        ("orders", OTHER, 3, None)
    ]
    with pytest.raises(ConfigError, match="a row without the declared fields"):
        read(BatchReader(question, ["stream", "instance", "token", *"abcd"]), [Range(OTHER, 0, 3)])


def test_a_writer_that_is_not_there_is_named_with_those_that_are(master: FakeMaster) -> None:
    why = "option instance: stream 'orders' has no writer 'masted'; it has master, worker2"
    with pytest.raises(ConfigError, match=why):
        batch(master, instance="masted")
    with pytest.raises(ConfigError, match=why):
        reader(master, instance="masted").initialOffset()
    assert reader(master, instance=OTHER).initialOffset() == {}


class Column:
    """One column of a schema, as Spark hands it over."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.dataType = self
        self.simpleString = lambda: kind


class Schema(list[Column]):
    """A schema, likewise."""

    def fieldNames(self) -> list[str]:
        return [each.name for each in self]


def schema_of(text: str) -> Schema:
    return Schema([Column(*each.split(" ")) for each in text.split(", ")])


OURS = "stream string, instance string, token bigint"


def test_a_schema_may_be_given_if_it_is_ours(master: FakeMaster) -> None:
    """So a query of a stream's fields can be started while its master is away."""
    plain = ReplicationDataSource({"stream": "orders"})
    fields = ReplicationDataSource({"stream": "orders", "fields": "true", "http": "http://127.0.0.1:1"})
    assert isinstance(plain.reader(schema_of(f"{OURS}, row string")), BatchReader)
    assert isinstance(fields.streamReader(schema_of(f"{OURS}, a string, b string")), StreamReader)
    for text in (f"{OURS}, row bigint", f"{OURS}, rows string", OURS, f"{OURS}, row string, more string", "row string"):
        with pytest.raises(ConfigError, match=r"the columns are stream string, .* give no other schema"):
            plain.reader(schema_of(text))
    with pytest.raises(ConfigError, match="give no other schema"):
        fields.streamReader(schema_of(f"{OURS}, a bigint"))


def test_options_of_a_batch_and_of_a_query_are_not_mixed_up() -> None:
    for key, value in (("from", "latest"), ("maxRowsPerBatch", "5")):
        source = ReplicationDataSource({"stream": "orders", key: value})
        with pytest.raises(ConfigError, match=f"^option {key}.* for streaming queries"):
            source.reader(schema_of(f"{OURS}, row string"))
        source.streamReader(schema_of(f"{OURS}, row string"))
    source = ReplicationDataSource({"stream": "orders", "upto": "5"})
    with pytest.raises(ConfigError, match=r"^option upto is for batches"):
        source.streamReader(schema_of(f"{OURS}, row string"))


def test_the_secret_of_a_file_is_shown(master: FakeMaster, tmp_path: Path) -> None:
    master.secret = "sésame"
    (tmp_path / "secret").write_text("sésame\n", encoding="utf-8")
    assert len(batch(master, secretFile=str(tmp_path / "secret"))) == len(ALL)
    with pytest.raises(CatchUpError, match="says 401: it wants a secret: give the option secretFile"):
        batch(master)


# ---- queries


def follow(source: StreamReader, start: dict[str, int], limit: Any) -> tuple[dict[str, int], list[tuple[Any, ...]]]:
    """Take one micro-batch."""
    end = json.loads(json.dumps(source.latestOffset(start, limit)))
    return end, read(source, source.partitions(start, end))


def test_offsets_are_the_map_of_writers_to_positions_in_order(master: FakeMaster) -> None:
    source = reader(master)
    assert source.initialOffset() == {}
    end, rows = follow(source, {}, ReadAllAvailable())
    assert json.dumps(end) == '{"master": 58, "worker2": 59}'
    assert rows == rows_of(MINE) + rows_of(OTHERS, OTHER)
    assert source.reportLatestOffset() == end
    assert source.latestOffset(end, ReadAllAvailable()) == end
    assert source.partitions(end, end) == []


def test_a_new_query_may_begin_with_what_is_new_or_after_an_id(master: FakeMaster) -> None:
    assert reader(master, **{"from": "latest"}).initialOffset() == {MASTER: 58, OTHER: 59}
    source = reader(master, **{"from": "50"})
    end, rows = follow(source, source.initialOffset(), ReadAllAvailable())
    assert rows == [row for row in rows_of(MINE) + rows_of(OTHERS, OTHER) if row[2] > 50]
    source = reader(master, **{"from": "100"})
    end, rows = follow(source, source.initialOffset(), ReadAllAvailable())
    assert (end, rows) == ({MASTER: 100, OTHER: 100}, [])


def test_a_writer_that_is_new_is_read_from_its_beginning(master: FakeMaster) -> None:
    del master.histories[OTHER]
    source = reader(master)
    first, _ = follow(source, {}, ReadAllAvailable())
    master.histories[OTHER] = OTHERS
    assert follow(source, first, ReadAllAvailable())[1] == rows_of(OTHERS, OTHER)


def test_trap_3_a_position_that_went_back_takes_no_offset_back(master: FakeMaster) -> None:
    master.reached[MASTER] = 20
    end: dict[str, int] = {MASTER: 58, OTHER: 59}
    assert reader(master).latestOffset(end, ReadAllAvailable()) == end


def test_a_writer_that_is_gone_keeps_its_offset(master: FakeMaster) -> None:
    del master.histories[OTHER]
    start: dict[str, int] = {MASTER: 2, OTHER: 9}
    assert reader(master).latestOffset(start, ReadAllAvailable()) == {MASTER: 58, OTHER: 9}


@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 50, 1_000])
def test_a_micro_batch_has_at_most_so_many_rows_unless_it_is_one_fact(master: FakeMaster, most: int) -> None:
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


def test_without_a_limit_all_is_taken_even_if_one_is_set(master: FakeMaster) -> None:
    assert reader(master).getDefaultReadLimit() == ReadAllAvailable()
    assert follow(reader(master, maxRowsPerBatch="1"), {}, ReadAllAvailable())[0] == {MASTER: 58, OTHER: 59}


def test_while_a_master_is_away_a_query_waits_and_it_fails_if_that_lasts(master: FakeMaster) -> None:
    source = reader(master, patience="60")
    start: dict[str, int] = {MASTER: 10}
    master.away = 2
    for limit in (ReadAllAvailable(), ReadMaxRows(5)):
        assert source.latestOffset(start, limit) == start
    assert source.latestOffset(start, ReadAllAvailable()) == {MASTER: 58, OTHER: 59}
    source._heard -= 61
    master.away = 1
    with pytest.raises(CatchUpError, match="the database is restarting"):
        source.latestOffset(start, ReadAllAvailable())


def test_a_stream_that_a_process_does_not_know_yet_is_waited_for(master: FakeMaster) -> None:
    """A worker that has just been started hears of it from its master."""
    source = reader(master, patience="60")
    start = source.latestOffset({}, ReadAllAvailable())
    master.ignorant = 3
    assert source.latestOffset(start, ReadAllAvailable()) == start
    assert read(source, source.partitions({}, start)) == rows_of(MINE) + rows_of(OTHERS, OTHER)
    assert not master.ignorant
    master.ignorant = 1
    with pytest.raises(CatchUpError, match="no such stream"):
        batch(master)


def test_a_new_query_of_what_is_not_there_fails_at_once(master: FakeMaster) -> None:
    source = StreamReader(Question.read({"http": master.url, "stream": "odrers", "patience": "0"}), COLUMNS)
    with pytest.raises(CatchUpError, match="no such stream"):
        source.initialOffset()


def test_what_is_available_now_is_what_was_there_then(master: FakeMaster) -> None:
    source = reader(master)
    source.prepareForTriggerAvailableNow()
    master.histories[MASTER] = [*MINE, fact(90, "late")]
    goal: dict[str, int] = {MASTER: 58, OTHER: 59}
    asked = len(master.asked)
    assert source.latestOffset({}, ReadAllAvailable()) == goal
    assert source.latestOffset(goal, ReadAllAvailable()) == goal
    assert len(master.asked) == asked, "nobody has to be asked"
    found: list[tuple[Any, ...]] = []
    start: dict[str, int] = {}
    while (step := follow(source, start, ReadMaxRows(10)))[0] != start:
        start, rows = step
        found += rows
    assert start == goal
    assert sorted(found, key=lambda row: (row[2], row[1])) == ALL


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


def test_spark_reads_a_stream_by_name(spark: Any, source: Any) -> None:
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


def test_spark_passes_on_what_is_wrong_with_an_option(spark: Any, source: Any, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="ConfigError: unknown option 'steam'; did you mean stream"):
        source(spark.read, steam="orders").load()
    with pytest.raises(PySparkException, match="ConfigError: option instance: stream 'orders' has no writer 'x'"):
        source(spark.read, instance="x").load().collect()
    with pytest.raises(PySparkException, match="ConfigError: option upto is for batches"):
        writing = source(spark.readStream, upto="5").load().writeStream.format("noop")
        writing.option("checkpointLocation", str(tmp_path)).start().awaitTermination(120)


def test_spark_reads_what_is_not_there_as_nothing(spark: Any, source: Any, master: FakeMaster) -> None:
    master.histories = {}
    assert source(spark.read).load().collect() == []


def test_a_query_has_every_row_once_over_restarts_and_a_master_that_is_away(
    spark: Any, source: Any, master: FakeMaster, tmp_path: Path
) -> None:
    """Sink and checkpoint are files: what one query has begun, the next one ends."""

    def start(**trigger: Any) -> Any:
        writing = source(spark.readStream, maxRowsPerBatch="9", patience="60").load().writeStream.format("json")
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
    master.away = 6
    master.reached = {MASTER: 40}
    while len(rows()) < 40 and time.monotonic() < deadline:
        time.sleep(0.05)
    query.stop()  # in the midst of something
    master.away = 3
    master.reached = {}
    query = start(availableNow=True)
    assert query.awaitTermination(120)
    assert rows() == ALL
    assert query.exception() is None
