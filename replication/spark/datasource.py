"""The Spark source ``replication``: streams by name, as batches and as streaming queries (docs/spark.md).

The driver plans; executors fetch rows over HTTP, one partition for each writer and range of tokens.
"""

from __future__ import annotations

import re
from contextlib import closing, contextmanager
from http import HTTPStatus
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import attrs
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from replication.errors import ConfigError
from replication.spark.histories import HISTORIES, KEPT, check_histories, check_unchanged, make_offset, positions_of
from replication.spark.options import KEY_COLUMNS, SourceOptions
from replication.streams.access_tokens import hide_access_tokens
from replication.web.blocking_client import HttpError, UnavailableError
from replication.web.pages import MAX_PAGE_ROWS
from replication.wire import grammar
from replication.wire.grammar import StreamName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replication.spark.options import Offsets
    from replication.streams.history import Epoch, History
    from replication.streams.interfaces import Page
    from replication.web.blocking_client import HttpClient, StreamInfo

NO_WRITER: Final = ""
FIRST_PATIENCE: Final = 10.0  # seconds of retries, after which the URL is assumed to be wrong
PARTITION_IDS: Final = 100_000  # the fewest IDs in a partition
PARTITIONS: Final = 64  # the most partitions of one writer

_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class ReplicationDataSource(DataSource):
    """The source; register it with ``spark.dataSource.register(ReplicationDataSource)``."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()``."""
        return "replication"

    def schema(self) -> str:
        """Return the columns; a declared field is a string: a JSON string without quotes, any other as JSON."""
        options = SourceOptions.read(self.options)
        columns = options.columns(options.info(FIRST_PATIENCE)) if options.with_fields else ("row",)
        quoted = [each.replace("`", "``") for each in columns]
        return "stream string, instance string, token long, " + ", ".join(f"`{each}` string" for each in quoted)

    def reader(self, schema: Any) -> DataSourceReader:
        """Return the reader of a batch."""
        options = SourceOptions.read(self.options).check_batch()
        return BatchReader(options, _column_names(options, schema))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of a streaming query."""
        options = SourceOptions.read(self.options).check_query()
        return StreamReader(options, _column_names(options, schema))


def _column_names(options: SourceOptions, schema: Any) -> list[str]:
    """Return the names of the columns; ConfigError if the user has given another schema."""
    names: list[str] = schema.fieldNames()
    kinds = [each.dataType.simpleString() for each in schema]
    rest = names[len(KEY_COLUMNS) :]
    expected = "string", "string", "bigint", *["string"] * len(rest)
    if (*names[: len(KEY_COLUMNS)], *kinds) != (*KEY_COLUMNS, *expected) or not (
        options.with_fields or rest == ["row"]
    ):
        raise ConfigError(
            "the columns are stream string, instance string, token long, row string: give no other schema"
        )
    return names


@attrs.frozen
class TokenRange(InputPartition):
    """The facts of one writer with ``after < token <= upto``; in a batch, with the newest epochs of its history."""

    instance: str
    after: int
    upto: int
    history: tuple[Epoch, ...] = ()


def token_ranges(start: Mapping[str, int], end: Mapping[str, int], origin: int = 0) -> list[TokenRange]:
    """Return the ranges between two positions of each writer; a new writer begins after ``origin``."""
    found = []
    for instance, upto in sorted(end.items()):
        after = start.get(instance, origin)
        width = max(PARTITION_IDS, -(-(upto - after) // PARTITIONS))
        found += [TokenRange(instance, each, min(each + width, upto)) for each in range(after, upto, width)]
    return found


def _batch(options: SourceOptions, columns: Sequence[str], instance: str, page: Page) -> pa.RecordBatch:
    facts = page.facts if options.access_tokens else hide_access_tokens(StreamName(options.stream), page.facts)
    rows = [text for fact in facts for text in fact.texts]
    tokens = [fact.token for fact in facts for _ in fact.texts]
    values = [rows] if not options.with_fields else _fields(options, rows, len(columns) - len(KEY_COLUMNS))
    texts = pa.string()
    return pa.RecordBatch.from_arrays(
        [
            pa.array([options.stream] * len(rows), texts),
            pa.array([instance] * len(rows), texts),
            pa.array(tokens, pa.int64()),
            *[pa.array(each, texts) for each in values],
        ],
        names=list(columns),
    )


def _fields(options: SourceOptions, rows: Sequence[str], count: int) -> list[list[str | None]]:
    decoded = [grammar.read_json(row) for row in rows]
    for row, text in zip(decoded, rows, strict=True):
        if not isinstance(row, list) or len(row) < count:  # newer releases append fields (docs/protocol/traps.md 35)
            raise ConfigError(f"stream {options.stream!r} has a row without the declared fields: {text[:200]}")
    return [[_text(row[place]) for row in decoded] for place in range(count)]


def _text(value: object) -> str | None:
    """Return the value of a column; a text with a lone surrogate as JSON, because UTF-8 cannot hold it."""
    if value is None or (isinstance(value, str) and (value.isascii() or _LONE_SURROGATE.search(value) is None)):
        return value
    return grammar.encode_again(value)


@contextmanager
def _gone_explained(instance: str) -> Iterator[None]:
    """Add the cure to an error about deleted facts: the option from alone leaves out facts of other writers, too."""
    try:
        yield
    except HttpError as error:
        if error.status != HTTPStatus.GONE:
            raise
        raise HttpError(
            f"{error}: give the options instance={instance} and from={error.fields.get('gone_upto')}; a streaming "
            "query needs a new checkpoint for that. Read each other writer with a query of its own: the option from "
            "would leave out facts of the others"
        ) from error


class _Reader:
    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = columns

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range, one batch for each page; without any range Spark passes another class."""
        if not isinstance(partition, TokenRange):
            return
        instance = partition.instance
        with closing(self._options.client()) as client, _gone_explained(instance):
            for page in client.pages(self._options.stream, instance, after=partition.after, upto=partition.upto):
                if page.facts:
                    yield _batch(self._options, self._columns, instance, page)
            if partition.history:
                now = client.history(self._options.stream, instance)
                check_unchanged(self._options.stream, instance, partition.upto, partition.history, now)


class BatchReader(_Reader, DataSourceReader):
    """Reads the facts up to the current positions."""

    def partitions(self) -> list[TokenRange]:
        """Read the positions once, and return the ranges up to them.

        No later micro-batch notices that a writer was restored, so each range has what its reader compares.
        """
        options = self._options
        info = options.info(FIRST_PATIENCE)
        options.check_instance(info)
        end = options.positions(info)
        if options.upto is not None:
            end = {instance: min(position, options.upto) for instance, position in end.items()}
        ranges = token_ranges({}, end, options.start)
        with closing(options.client(FIRST_PATIENCE)) as client:
            writers = {each.instance for each in ranges}
            histories = {name: tuple(client.history(options.stream, name)[-KEPT:]) for name in writers}
        return [attrs.evolve(each, history=histories[each.instance]) for each in ranges]


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads micro-batches.  A batch that is planned again has the same offsets, and therefore the same rows."""

    def __init__(self, options: SourceOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._goal: tuple[Offsets, Mapping[str, History]] | None = None
        self._newest: Offsets | None = None
        self._planned: dict[str, Any] | None = None  # the last offset, whose histories were compared
        self._failing: dict[str, float] = {}  # when the first failure of each writer was; NO_WRITER: of a whole request
        self._page_rows = MAX_PAGE_ROWS  # of the next page, also of the next micro-batch
        self._batches = 0  # micro-batches with a limit

    def initialOffset(self) -> Offsets:
        """Return where a new query begins; an invalid option is an error now."""
        info = self._options.info(FIRST_PATIENCE)
        self._options.check_instance(info)
        reached = self._note(info)
        return reached if self._options.latest else {}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the most rows of a micro-batch."""
        limit = self._options.max_rows
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; it is empty while the HTTP API is unavailable, up to ``patience``.

        StreamError if the rows up to ``start`` are not those of the writers any more: a database was restored.
        """
        options = self._options
        client = options.client(0.0 if self._goal is None else inf, page_rows=self._page_rows)
        try:
            reached, histories = self._reached(client) if self._goal is None else self._goal
            # Spark calls this after the last micro-batch, too: no later one would show that this one has lost rows.
            now = histories if self._goal is None else self._histories(client, reached)
            check_histories(options.stream, start, now)
            begin = positions_of(start)
            end = {
                name: max(position, begin.get(name, 0))
                for name, position in reached.items()
                if name in begin or position > options.start  # a lower position may be that of its next epoch
            }
            if isinstance(limit, ReadMaxRows):
                end = self._admit(client, begin, end, limit.max_rows)
        except UnavailableError:
            if self._goal is not None or not self._may_wait(NO_WRITER):
                raise
            return start
        finally:
            self._page_rows = client.page_rows
            client.close()
        self._failing.pop(NO_WRITER, None)
        self._planned = make_offset({**begin, **end}, start, histories)
        return self._planned

    def prepareForTriggerAvailableNow(self) -> None:
        """End the query at the current positions."""
        with closing(self._options.client(stream_exists=False)) as client:
            self._goal = self._reached(client)

    def reportLatestOffset(self) -> Offsets | None:
        """Return the newest known positions, which Spark shows in the query's progress."""
        return self._newest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[TokenRange]:
        """Return the ranges between two offsets; StreamError if these are of an earlier run, and rows are lost."""
        if end != self._planned:
            with closing(self._options.client()) as client:
                check_histories(self._options.stream, end, self._histories(client, end.get(HISTORIES, {})))
        return token_ranges(positions_of(start), positions_of(end), self._options.start)

    def _reached(self, client: HttpClient) -> tuple[Offsets, Mapping[str, History]]:
        """Return the positions of the writers, and their histories, which are read after them."""
        reached = self._note(client.stream(self._options.stream))
        return reached, self._histories(client, reached)

    def _histories(self, client: HttpClient, writers: Iterable[str]) -> Mapping[str, History]:
        return {name: client.history(self._options.stream, name) for name in writers}

    def _may_wait(self, writer: str) -> bool:
        """Note that a request has failed; returns whether it is within the patience since the first one that did."""
        now = monotonic()
        return now - self._failing.setdefault(writer, now) < self._options.patience

    def _note(self, info: StreamInfo) -> Offsets:
        self._newest = self._options.positions(info)
        return self._newest

    def _admit(self, client: HttpClient, start: Offsets, end: Offsets, rows: int) -> Offsets:
        """Return the offsets that ``rows`` rows reach, page by page of each writer; a larger fact comes alone.

        Each writer has the same share.  A fact that is larger than what is left waits until its writer comes first:
        each micro-batch begins with the next writer.  If a page does not arrive, the pages before it are a micro-batch.
        """
        name, begun = self._options.stream, self._options.start
        reached = {instance: start.get(instance, begun) for instance in end}
        left = rows
        waiting = [instance for instance in end if reached[instance] < end[instance]]
        if waiting:
            turn = self._batches % len(waiting)
            waiting = [*waiting[turn:], *waiting[:turn]]
        self._batches += 1
        self._failing = {each: since for each, since in self._failing.items() if each in (NO_WRITER, *waiting)}
        share = max(rows // max(len(waiting), 1), 1)
        while waiting and left > 0:
            instance = waiting.pop(0)
            limit = min(left, share, MAX_PAGE_ROWS)
            try:
                with _gone_explained(instance):
                    page = client.page(name, instance, after=reached[instance], upto=end[instance], limit=limit)
            except UnavailableError as error:
                if not self._may_wait(instance):
                    raise HttpError(str(error)) from error
                if left == rows:
                    raise
                break
            self._failing.pop(instance, None)
            size = sum(len(fact.texts) for fact in page.facts)
            if size > left and left < rows:
                continue  # left to the next micro-batch
            left -= size
            reached[instance] = page.upto
            if page.upto < end[instance]:
                waiting.append(instance)
        return reached
