"""Streams as a Spark source, over a writer's HTTP API: ``spark.read`` and ``spark.readStream.format("replication")``.

``options.py`` lists the options.  A streaming query's offsets are the map of writers to positions.  Rows are read by
the executors, a partition per range of IDs; planning is the driver's.
"""

from __future__ import annotations

from contextlib import closing
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replication.errors import ConfigError
from replication.replay.api import AwayError
from replication.replay.options import PLACE, Question
from replication.web.facts import MAX_PAGE_ROWS
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.replay.api import Api, StreamInfo
    from replication.replay.options import Offsets
    from replication.streams.seams import Page

FIRST_PATIENCE: Final = 10.0  # seconds that a URL has to prove right
PARTITION_IDS: Final = 100_000  # in a partition, at least
PARTITIONS: Final = 64  # of one writer, at most


class ReplicationDataSource(DataSource):
    """Register it with ``spark.dataSource.register(ReplicationDataSource)``."""

    @classmethod
    def name(cls) -> str:
        """Return what ``format()`` calls it."""
        return "replication"

    def schema(self) -> str:
        """Return the columns; a stream's declared fields are texts: a string as it is, anything else as JSON."""
        question = Question.read(self.options)
        columns = question.columns(question.info(FIRST_PATIENCE)) if question.with_fields else ("row",)
        quoted = [each.replace("`", "``") for each in columns]
        return "stream string, instance string, token long, " + ", ".join(f"`{each}` string" for each in quoted)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader of a batch."""
        question = Question.read(self.options).check_batch()
        return BatchReader(question, _names(question, schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        question = Question.read(self.options).check_query()
        return StreamReader(question, _names(question, schema))


def _names(question: Question, schema: Any) -> list[str]:
    """Return the names of the columns; ConfigError if a schema was given that is not ours."""
    names: list[str] = schema.fieldNames()
    kinds = [each.dataType.simpleString() for each in schema]
    rest = names[len(PLACE) :]
    ours = "string", "string", "bigint", *["string"] * len(rest)
    if (*names[: len(PLACE)], *kinds) != (*PLACE, *ours) or not (question.with_fields or rest == ["row"]):
        raise ConfigError(
            "the columns are stream string, instance string, token long, row string: give no other schema"
        )
    return names


@attrs.frozen
class Range(InputPartition):
    """Facts of one writer with ``after < token <= upto``."""

    instance: str
    after: int
    upto: int


def ranges(start: Mapping[str, int], end: Mapping[str, int], otherwise: int = 0) -> list[Range]:
    """Cut what lies between two positions of each writer; one that is new begins after ``otherwise``."""
    found = []
    for instance, upto in sorted(end.items()):
        after = start.get(instance, otherwise)
        width = max(PARTITION_IDS, -(-(upto - after) // PARTITIONS))
        found += [Range(instance, each, min(each + width, upto)) for each in range(after, upto, width)]
    return found


def read_range(question: Question, columns: Sequence[str], part: Range) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, a page a batch."""
    with closing(question.api()) as api:
        for page in api.pages(question.stream, part.instance, after=part.after, upto=part.upto):
            if page.facts:
                yield _batch(question, columns, part.instance, page)


def _batch(question: Question, columns: Sequence[str], instance: str, page: Page) -> pa.RecordBatch:
    rows = [text for fact in page.facts for text in fact.texts]
    tokens = [fact.token for fact in page.facts for _ in fact.texts]
    values = [rows] if not question.with_fields else _fields(question, rows, len(columns) - len(PLACE))
    texts = pa.string()
    return pa.RecordBatch.from_arrays(
        [
            pa.array([question.stream] * len(rows), texts),
            pa.array([instance] * len(rows), texts),
            pa.array(tokens, pa.int64()),
            *[pa.array(each, texts) for each in values],
        ],
        names=list(columns),
    )


def _fields(question: Question, rows: Sequence[str], count: int) -> list[list[str | None]]:
    decoded = [grammar.read_json(row) for row in rows]
    for row, text in zip(decoded, rows, strict=True):
        if not isinstance(row, list) or len(row) < count:  # more is a newer release's (trap 35)
            raise ConfigError(f"stream {question.stream!r} has a row without the declared fields: {text[:200]}")
    return [[_text(row[place]) for row in decoded] for place in range(count)]


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else grammar.spell_row(value)


class BatchReader(DataSourceReader):
    """Reads what is there now."""

    def __init__(self, question: Question, columns: Sequence[str]) -> None:
        self._question = question
        self._columns = columns

    def partitions(self) -> list[Range]:
        """Take the positions once, and cut what they cover."""
        question = self._question
        info = question.info(FIRST_PATIENCE)
        question.check_instance(info)
        end = question.positions(info)
        if question.upto is not None:
            end = {instance: min(position, question.upto) for instance, position in end.items()}
        return ranges({}, end, question.start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range; Spark asks for another kind of partition if there is none."""
        return read_range(self._question, self._columns, partition) if isinstance(partition, Range) else iter(())


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on.  A batch that is planned again has the same offsets, so it has the same rows."""

    def __init__(self, question: Question, columns: Sequence[str]) -> None:
        self._question = question
        self._columns = columns
        self._goal: Offsets | None = None
        self._newest: Offsets | None = None
        self._heard = monotonic()

    def initialOffset(self) -> Offsets:
        """Return where a new query begins; whatever is wrong with the options is said now."""
        info = self._question.info(FIRST_PATIENCE)
        self._question.check_instance(info)
        reached = self._note(info)
        return reached if self._question.latest else {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how many rows a micro-batch may have."""
        most = self._question.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Return where the next micro-batch ends: where it begins, while a master is away and nobody waits for it."""
        question = self._question
        api = question.api(0.0 if self._goal is None else inf)
        try:
            reached = self._note(api.stream(question.stream)) if self._goal is None else self._goal
            end = {name: max(position, start.get(name, question.start)) for name, position in reached.items()}
            if isinstance(limit, ReadMaxRows):
                end = self._admit(api, start, end, limit.max_rows)
        except AwayError:
            if self._goal is not None or monotonic() - self._heard > question.patience:
                raise
            return start
        finally:
            api.close()
        return dict(sorted({**start, **end}.items()))

    def prepareForTriggerAvailableNow(self) -> None:
        """Take the positions of this moment as the goal."""
        self._goal = self._note(self._question.info())

    def reportLatestOffset(self) -> Offsets | None:
        """Return the newest positions heard, for whoever looks at the query's progress."""
        return self._newest

    def partitions(self, start: Offsets, end: Offsets) -> list[Range]:
        """Cut what lies between."""
        return ranges(start, end, self._question.start)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read one range."""
        return read_range(self._question, self._columns, partition) if isinstance(partition, Range) else iter(())

    def _note(self, info: StreamInfo) -> Offsets:
        self._newest = self._question.positions(info)
        self._heard = monotonic()
        return self._newest

    def _admit(self, api: Api, start: Offsets, end: Offsets, rows: int) -> Offsets:
        """Return how far ``rows`` rows reach, the writers taking turns; a fact that is larger comes alone."""
        name, begun = self._question.stream, self._question.start
        reached = {instance: start.get(instance, begun) for instance in end}
        left = rows
        waiting = [instance for instance in end if reached[instance] < end[instance]]
        while waiting and left > 0:
            instance = waiting.pop(0)
            limit = min(left, MAX_PAGE_ROWS)
            page = api.page(name, instance, after=reached[instance], upto=end[instance], limit=limit)
            size = sum(len(fact.texts) for fact in page.facts)
            if size > left and left < rows:
                continue  # it begins the next micro-batch
            left -= size
            reached[instance] = page.upto
            if page.upto < end[instance]:
                waiting.append(instance)
        return reached
