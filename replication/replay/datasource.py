"""Streams as a Spark source, over a writer's HTTP API: ``spark.read`` and ``spark.readStream.format("replication")``.

Options: ``http`` (the URL of a master, or of a worker that keeps a copy), ``stream``, ``secretFile``; ``from`` (an ID,
``beginning`` or, for a new streaming query, ``latest``), ``upto`` (an ID; batch only), ``instance`` (one writer only),
``fields`` (``true``: a column per declared field instead of ``row``), ``maxRowsPerBatch`` (rows in a micro-batch),
``patience`` (seconds for which a master may be away while rows are being read).

A streaming query's offsets are the map of writers to positions.  Rows are read by the executors, a partition per range
of IDs; planning is the driver's.
"""

from __future__ import annotations

from contextlib import closing
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replication.errors import ConfigError
from replication.replay.api import Api, AwayError, StreamInfo
from replication.web.facts import MAX_PAGE_ROWS
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.streams.seams import Page

DEFAULT_URL: Final = "http://127.0.0.1:9093"
PATIENCE: Final = 300.0  # seconds
FIRST_PATIENCE: Final = 10.0  # seconds that a URL has to prove right
PARTITION_IDS: Final = 100_000  # in a partition, at least
PARTITIONS: Final = 64  # of one writer, at most
PLACE: Final = ("stream", "instance", "token")
KNOWN: Final = ("http", "stream", "secretfile", "from", "upto", "instance", "fields", "maxrowsperbatch", "patience")
Offsets = dict[str, int]


@attrs.frozen
class Question:
    """What is asked for, in plain values, for whoever reads."""

    http: str
    stream: str
    secret: str | None
    start: int
    latest: bool
    upto: int | None
    instance: str | None
    with_fields: bool
    max_rows: int | None
    patience: float

    def api(self, most: float = inf) -> Api:
        """Return a connection to the API, which may be away for ``most`` seconds if the option does not say less."""
        return Api(self.http, self.secret, min(self.patience, most))

    def info(self, most: float = inf) -> StreamInfo:
        """Ask how the stream stands."""
        with closing(self.api(most)) as api:
            return api.stream(self.stream)

    def positions(self, info: StreamInfo) -> Offsets:
        """Return how far the writers are that are asked for."""
        wanted = {name: token for name, token in info.positions.items() if self.instance in (None, name)}
        return dict(sorted(wanted.items()))  # offsets are compared as text

    def columns(self, info: StreamInfo) -> tuple[str, ...]:
        """Return the names of the columns after PLACE; ConfigError if the stream cannot have them."""
        if not self.with_fields:
            return ("row",)
        if info.fields is None:
            raise ConfigError(f"stream {self.stream!r} declares no fields: leave the option fields out")
        if clash := {*info.fields} & {*PLACE}:
            raise ConfigError(f"stream {self.stream!r} has fields that are called like columns: {', '.join(clash)}")
        return info.fields


def read_options(options: Mapping[str, str]) -> Question:
    """Return what Spark's options ask for; ConfigError names one that cannot be."""
    given = {key.lower(): value for key, value in options.items()}
    for key in given:
        if key not in KNOWN and key != "path":
            raise ConfigError(f"unknown option {key!r}; known are {', '.join(KNOWN)}")
    if not given.get("stream"):
        raise ConfigError("the option stream says which one to read")
    start = given.get("from", "beginning")
    secret_file = given.get("secretfile")
    return Question(
        given.get("http", DEFAULT_URL),
        given["stream"],
        None if secret_file is None else _read_secret(secret_file),
        0 if start in ("beginning", "latest") else _number("from", start),
        start == "latest",
        _number("upto", given["upto"]) if "upto" in given else None,
        given.get("instance"),
        given.get("fields", "false").lower() == "true",
        _number("maxRowsPerBatch", given["maxrowsperbatch"], 1) if "maxrowsperbatch" in given else None,
        float(given.get("patience", PATIENCE)),
    )


def _read_secret(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret file {path}: {error}") from error


def _number(key: str, text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"option {key}: {text!r} is no whole number from {least} on")
    return int(text)


class ReplicationDataSource(DataSource):
    """Register it with ``spark.dataSource.register(ReplicationDataSource)``."""

    @classmethod
    def name(cls) -> str:
        """Return what ``format()`` calls it."""
        return "replication"

    def schema(self) -> str:
        """Return the columns; a stream's declared fields are texts: a string as it is, anything else as JSON."""
        question = read_options(self.options)
        columns: Sequence[str] = ("row",)
        if question.with_fields:
            columns = question.columns(question.info(FIRST_PATIENCE))
        return "stream string, instance string, token long, " + ", ".join(f"`{each}` string" for each in columns)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader of a batch."""
        return BatchReader(read_options(self.options), schema.fieldNames())

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of a stream."""
        return StreamReader(read_options(self.options), schema.fieldNames())


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
        end = question.positions(question.info(FIRST_PATIENCE))
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
        reached = self._note(self._question.info(FIRST_PATIENCE))
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
