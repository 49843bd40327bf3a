"""One run of the replay: its plan, its tasks, and the step that makes their segments count (docs/spark.md).

The plan has ranges, from the end of the segments to the stored positions.  Tasks write below ``.replay/``.  Once all
are done, the run moves their files into place and replaces the manifest.  A run that is killed has therefore added
nothing, or everything; the next run adopts the tasks that were finished.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
from msgspec.structs import replace

from replication.errors import ConfigError, StoreError, UnknownStreamError
from replication.segments.compression import check_compression
from replication.segments.databases import open_database, read_positions, resolve_url
from replication.segments.folders import open_folder, read_index
from replication.segments.foreign import foreign_positions, tables_history
from replication.segments.histories import check_histories, check_unchanged, extend_manifest, read_histories, unstored
from replication.segments.kept import check_kept
from replication.segments.manifest import (
    MANIFEST,
    NOT_AN_ENTRY,
    WORK,
    Manifest,
    Segment,
    move_staged,
    read_manifest_to_extend,
    remove_leftovers,
    staged_name,
    write_manifest,
)
from replication.segments.tables import open_table
from replication.storage.contract import MASTER
from replication.storage.joined import JoinedRows
from replication.streams.definitions import CACHES, StreamDefinition
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from replication.segments.databases import Database
    from replication.segments.folders import Folder
    from replication.segments.histories import Histories
    from replication.segments.tables import Table
    from replication.streams.history import Epoch
    from replication.urls import Url

ORIGIN: Final = Token(0)  # the default of --from
LAST: Final = Token(2**63 - 1)
SEGMENT_ROWS: Final = 1_000_000
PROBE: Final = 20_000  # rows that are counted to estimate where a range of more rows ends
FILL: Final = (9, 10)  # the share of a segment that an estimated range fills, so that few need a second segment
SHOWN: Final = 5  # writers in a warning
# The last invalidation of a cache entry replaces all before it (docs/protocol/streams.md C4).
CACHES_DEFINITION: Final = StreamDefinition(
    CACHES, row=("cache_func", "keys", "invalidation_ts"), key=("cache_func", "keys")
)


class SegmentOptions(msgspec.Struct, frozen=True):
    """How segments are written.

    Attributes:
        segment_rows: the most rows in a segment, unless a single fact has more.
        compression: ``none``, ``gzip`` or ``zstd``.
        line_limit: the most bytes in a line, MAX_LINE at most; a fact with a longer line becomes a POSITION.
        compact: of a stream with a key, keep only the last fact of each key within a range.
        access_tokens: keep the access tokens in a Synapse's caches stream (docs/protocol/streams.md C4).

    """

    segment_rows: int = SEGMENT_ROWS
    compression: str = "zstd"
    line_limit: int = LINE_LIMIT
    compact: bool = False
    access_tokens: bool = False


@attrs.frozen
class ReplayRequest:
    """What to replay.

    Attributes:
        database: its URL.
        out: the segments folder, a path or URL.
        streams: names of streams; by default all that the database has a position of, and all mapped ones.
        definitions: the definitions of mapped and joined streams, and of streams with a key.
        instances: names of writers; by default all.
        after: the ID after which new chains begin.
        upto: the last ID; by default the stored positions.

    """

    database: Url = attrs.field(converter=resolve_url)
    out: str
    streams: Sequence[str] = ()
    definitions: Sequence[StreamDefinition] = ()
    instances: Sequence[str] = ()
    after: int = ORIGIN
    upto: int | None = None
    options: SegmentOptions = attrs.field(factory=SegmentOptions)

    def check(self) -> None:
        """Check the options that need no database; ConfigError names the option."""
        check_compression(self.options.compression)
        if self.options.segment_rows < 1:
            raise ConfigError(f"--segment-rows {self.options.segment_rows}: a segment has at least one row")
        if self.after < ORIGIN:
            raise ConfigError(f"--from {self.after}: the smallest ID is {ORIGIN}, also where a table counts downwards")
        for option, value in {"--from": self.after, "--upto": self.upto or ORIGIN}.items():
            if value > LAST:
                raise ConfigError(f"{option} {value}: the largest ID is {LAST}")
        if self.upto is not None and self.upto < self.after:
            raise ConfigError(f"--upto {self.upto}: that is before {self.after}, where the replay begins")


class WriterRange(msgspec.Struct, frozen=True):
    """The facts of one writer with ``after < token <= upto``."""

    instance: InstanceName
    after: Token
    upto: Token


class StreamRange(msgspec.Struct, frozen=True):
    """What one task writes: of the table's rows with ``after < token <= upto``, those of ``writers`` in their ranges.

    ``exclusive`` is set if no other writer has rows in the table.
    """

    definition: StreamDefinition
    after: Token
    upto: Token
    writers: tuple[WriterRange, ...]
    exclusive: bool = True

    @classmethod
    def of(cls, definition: StreamDefinition, writers: Sequence[WriterRange], *, exclusive: bool = True) -> StreamRange:
        """Return the range that has all ranges of ``writers``."""
        after, upto = min(each.after for each in writers), max(each.upto for each in writers)
        return cls(definition, after, upto, tuple(writers), exclusive)


def plan_ranges(
    database: Database, request: ReplayRequest, manifest: Manifest, warnings: list[str]
) -> Iterator[StreamRange]:
    """Yield the ranges to write; add a warning for each stream with rows that none of them has.

    ConfigError or UnknownStreamError if the request cannot be met, StoreError if the database or the folder fails.
    """
    reached = {key: chain[-1].upto for key, chain in manifest.chains().items()}
    streams = list(_requested(database, request, reached))
    writers = {instance for _, positions in streams for instance in positions}
    for each in request.instances:
        if writers and each not in writers:
            raise ConfigError(
                f"no instance {each!r} has written to this database; there are {', '.join(sorted(writers))}"
            )
    for definition, positions in streams:
        if not request.instances and definition.position_name is None:
            ends = [reached.get((definition.name, each), Token(request.after)) for each in positions]
            after = min(ends, default=Token(request.after))
            upto = LAST if request.upto is None else Token(request.upto)
            warnings += _left_out(database, definition, positions, after, upto)
        wanted = [grammar.instance_name(each) for each in request.instances] or [*positions]
        found = [
            _writer_range(request, definition.name, each, positions[each], reached.get((definition.name, each)))
            for each in wanted
            if each in positions
        ]
        parts = [each for each in found if each is not None]
        if parts:
            exclusive = {each.instance for each in parts} == {*positions, *definition.writers}
            whole = StreamRange.of(definition, parts, exclusive=exclusive)
            check_kept(database, whole)
            yield from cut_ranges(open_table(database, definition), whole, request.options.segment_rows)


def _requested(
    database: Database, request: ReplayRequest, reached: Mapping[tuple[StreamName, InstanceName], Token]
) -> Iterator[tuple[StreamDefinition, Mapping[InstanceName, Token]]]:
    """Yield each requested stream with its writers' positions; segments end at ``reached``."""
    stored: dict[StreamName, dict[InstanceName, int]] = {}
    found = read_positions(database)
    if found is None and not request.definitions:
        raise StoreError(
            f"{database.url!r} has no table stream_positions: is it a master's database? Start the master once, or "
            "name the mapped streams with --config"
        )
    names = {each.position_name: each.name for each in request.definitions if each.position_name}
    for stream, instance, stream_id in found or ():
        stored.setdefault(names.get(stream, stream), {})[instance] = stream_id
    defined = {CACHES: CACHES_DEFINITION} | {each.name: each for each in request.definitions}
    dialect = database.dialect
    mapped = [each.name for each in request.definitions if each.maps(dialect) or each.sources(dialect)]
    for name in dict.fromkeys([StreamName(each) for each in request.streams] or [*mapped, *stored]):
        positions = stored.get(name, {})
        negative = min(positions.values(), default=0) < 0
        definition = defined.get(name) or StreamDefinition(name, negative=negative)
        if request.options.compact and name in request.streams and not definition.key:
            raise ConfigError(f"--compact: stream {name!r} declares no key")
        if definition.in_memory and name not in request.streams:
            continue  # only its position is stored
        try:
            table = open_table(database, definition)
            empty = table.is_empty()
        except StoreError as error:
            if error.temporary:
                raise
            if not request.streams and mapped and name not in defined:
                continue  # a position that the application stores under a name of its own
            if positions:
                cure = "declare the stream in a file for --config, or choose other streams with --stream"
                raise StoreError(f"stream {name!r} has a position in {database.url!r}, but {error}: {cure}") from error
            known = ", ".join(stored) or "none"
            raise UnknownStreamError(f"no stream {name!r} in {database.url!r}; it has {known}: {error}") from error
        if definition.position_name is not None and not empty:
            ends = {instance: end for (stream, instance), end in reached.items() if stream == name}
            positions = dict(foreign_positions(database, definition, positions, ends, request.upto))
        if not positions and not empty:
            positions = _positions_by_upto(definition, request.upto)
        elif not empty:
            positions = positions | _unknown_positions(table, definition, positions, request)
        yield definition, {instance: Token(abs(stream_id)) for instance, stream_id in positions.items()}


def _positions_by_upto(definition: StreamDefinition, upto: int | None) -> dict[InstanceName, int]:
    """Return ``--upto`` as the position of every writer, for a stream without a stored position."""
    if upto is None:
        raise StoreError(
            f"no position of stream {definition.name!r} is stored, so it is not known which IDs are complete: start "
            "its master once, or give --upto ID if every ID up to there is complete"
        )
    return dict.fromkeys(definition.writers or [MASTER], upto)


def _unknown_positions(
    table: Table, definition: StreamDefinition, positions: Mapping[InstanceName, int], request: ReplayRequest
) -> dict[InstanceName, int]:
    """Return ``--upto`` as the position of each declared writer that has rows and has stored no position."""
    columns = [each.instance_column for each in definition.tables] or [definition.instance_column]
    if definition.in_tables and None in columns:
        return {}  # without a column of writers, every row is one of those with a position
    found: dict[InstanceName, int] = {}
    for writer in [each for each in definition.writers if each not in positions]:
        rows = table.columns(StreamRange.of(definition, [WriterRange(writer, ORIGIN, LAST)]))
        if (request.instances and writer not in request.instances) or next(rows, None) is None:
            continue
        if request.upto is None:
            raise StoreError(
                f"writer {writer!r} of stream {definition.name!r} has rows and no stored position, so it is not known "
                "which of its IDs are complete: start that writer once, give --upto ID if every ID up to there is "
                "complete, or choose other writers with --instance"
            )
        found[writer] = request.upto
    return found


def _left_out(
    database: Database, definition: StreamDefinition, positions: Collection[InstanceName], after: Token, upto: Token
) -> Iterator[str]:
    """Yield a warning if tables of the application have rows, in a range, of writers without a position."""
    found: Counter[str] = Counter()
    mark = "%s" if database.dialect == "postgresql" else "?"
    tables = JoinedRows[Any](definition, definition.all_sources(database.dialect), mark=mark, order="")
    for query in [each for each in tables.queries if each.source.instance_column is not None]:
        found.update(dict(database.rows(query.counts(after, upto))))
    others = [(writer, rows) for writer, rows in found.most_common() if writer not in positions]
    if others:
        names = ", ".join([f"{rows} of {writer!r}" for writer, rows in others[:SHOWN]])
        more = f", and {len(others) - SHOWN} more writers" if len(others) > SHOWN else ""
        yield (
            f"stream {definition.name!r}: rows are left out, of writers that are not in its writers and have stored no "
            f"position: {names}{more}; add them to writers in the file of --config, or give these rows a name "
            "and new IDs (replication streams check has the statement)"
        )


def _writer_range(
    request: ReplayRequest, stream: StreamName, instance: InstanceName, position: Token, end: Token | None
) -> WriterRange | None:
    """Return what extends a chain, which ends at ``end`` or does not exist; None if there is nothing to add."""
    if end is not None and end > position:
        raise StoreError(
            f"the position of {instance} in {stream} is {position}, but segments reach {end}: if that database was "
            f"restored, {request.out} has facts above {position} that are lost: write to a new folder"
        )
    if end is not None and request.after > end:
        raise ConfigError(f"--from {request.after}: the segments of {stream} by {instance} end at {end}: that is a gap")
    after = Token(request.after) if end is None else end
    upto = position if request.upto is None else Token(min(position, request.upto))
    return WriterRange(instance, after, upto) if after < upto else None


def cut_ranges(table: Table, whole: StreamRange, segment_rows: int) -> Iterator[StreamRange]:
    """Cut a range into ranges of about ``segment_rows`` rows, all writers together.

    Up to PROBE rows are counted.  The end of a longer range is estimated from the tokens that PROBE rows span.
    """
    after = whole.after
    while after < whole.upto:
        upto = min(_end_of_rows(table, after, segment_rows) or whole.upto, whole.upto)
        parts = [
            WriterRange(each.instance, max(after, each.after), min(upto, each.upto))
            for each in whole.writers
            if each.after < upto and after < each.upto
        ]
        if parts:
            yield replace(whole, after=after, upto=upto, writers=tuple(parts))
        after = upto


def _end_of_rows(table: Table, after: Token, rows: int) -> Token | None:
    probe = min(rows, PROBE)
    reached = table.reach(after, probe)
    if reached is None or probe == rows:
        return reached
    part, whole = FILL
    return Token(after + (reached - after) * rows * part // (probe * whole))


class Task(msgspec.Struct, frozen=True):
    """One range to write, as plain values that another machine can take; with the histories of its writers."""

    database: Url
    out: str
    range: StreamRange
    options: SegmentOptions
    histories: tuple[tuple[Epoch, ...], ...]

    @property
    def work(self) -> str:
        """The folder of its files.  No other task has it: a task of a killed run may write for some time on."""
        return _work_of(self.checksum)

    @property
    def receipt(self) -> str:
        """The path of the receipt, which lists the segments that were written."""
        return f"{self.work}/receipt.json"

    @property
    def checksum(self) -> str:
        """A SHA-256 of all values: a receipt with another one belongs to another task."""
        return hashlib.sha256(repr((str(self.database), self.range, self.options, self.histories)).encode()).hexdigest()

    def do(self) -> bytes:
        """Write the segments, then the receipt, and return the receipt; after a StoreError there is no receipt."""
        from replication.segments.export import export_range  # noqa: PLC0415 (needs an extra)

        folder = open_folder(self.out)
        segments = export_range(self.database, folder, self.range, self.options, self.work)
        with closing(open_database(self.database)) as database:
            check_unchanged(database, self.range, self.histories)
        receipt = msgspec.json.encode({"task": self.checksum, "segments": [each.to_json() for each in segments]})
        with folder.create(self.receipt) as sink:
            sink.write(receipt)
        return receipt


def _task(request: ReplayRequest, folder: Folder, part: StreamRange, histories: Histories) -> Task:
    of_writers = tuple([tuple(histories.get((part.definition.name, each.instance), ())) for each in part.writers])
    return Task(request.database, folder.address, part, request.options, of_writers)


def _work_of(checksum: str) -> str:
    return f"{WORK}/{checksum}"


def read_receipt(receipt: bytes) -> list[Segment]:
    """Return the segments that a task has written; one of the errors of ``NOT_AN_ENTRY`` if it is no receipt."""
    return [Segment.from_json(each) for each in msgspec.json.decode(receipt)["segments"]]


def find_left_out(segments: Iterable[Segment]) -> list[str]:
    """Return a sentence for each stream and writer of which facts have rows that no line can hold."""
    counts, first = Counter[tuple[StreamName, InstanceName]](), dict[tuple[StreamName, InstanceName], Token]()
    for each in segments:
        if each.left_out:
            place = each.stream, each.instance
            counts[place] += each.left_out
            first[place] = min(first.get(place, each.left_out_from), each.left_out_from)
    return [
        f"stream {stream!r}: facts of {writer!r} that are left out, because a row is longer than line_limit: {count}, "
        f"the first is {first[stream, writer]}; a worker fetches them from its next source; to have them here, replay "
        "into a new folder, with a higher line_limit in --config"
        for (stream, writer), count in sorted(counts.items())
    ]


class Run:
    """A planned run.

    Attributes:
        tasks: what is to be done.
        done: the segments of tasks that an interrupted run has finished.
        warnings: about rows that are left out.

    """

    def __init__(self, folder: Folder, manifest: Manifest, tasks: Sequence[Task], warnings: Sequence[str] = ()) -> None:
        self.manifest, self.warnings = manifest, warnings
        self._folder = folder
        self._staged: dict[str, str] = {}  # by the names of segments, where tasks have written them
        adopted = {task: self._adopt(task) for task in tasks}
        self.tasks = [task for task, segments in adopted.items() if segments is None]
        self.done = [each for segments in adopted.values() if segments is not None for each in segments]
        begins = {
            (task.range.definition.name, each.instance): each.after
            for task in reversed(tasks)  # of a chain, the first range counts
            for each in task.range.writers
        }
        remove_leftovers(folder, manifest, begins, [each.name for each in self.done])
        for work in {"/".join(name.split("/")[:2]) for name in folder.names(WORK)} - {task.work for task in tasks}:
            folder.remove(work)

    def finish(self, receipts: Iterable[bytes]) -> list[Segment]:
        """Move the segments into place, replace the manifest, and return the new segments."""
        new = [*self.done, *[segment for receipt in receipts for segment in self._read(receipt)]]
        manifest = extend_manifest(self._folder, self.manifest, new)
        if faults := manifest.faults():
            raise StoreError(f"{self._folder.url}: {faults[0]}; nothing was added")
        for each in new:
            move_staged(self._folder, self._staged[each.name], each)
        self._folder.flush([each.name for each in new])
        if new or self._folder.size(MANIFEST) is None:
            write_manifest(self._folder, manifest)
        self._folder.remove(WORK)
        self.manifest = manifest
        return sorted(new, key=lambda each: each.name)

    def _adopt(self, task: Task) -> list[Segment] | None:
        """Return the segments that an interrupted run has written for ``task``, None if any of them is missing."""
        try:
            receipt = read_index(self._folder, task.receipt)
            if msgspec.json.decode(receipt)["task"] != task.checksum:
                return None
            segments = self._read(receipt)
        except (OSError, *NOT_AN_ENTRY):
            return None  # the task is done again
        sizes = [self._folder.size(self._staged[each.name]) or self._folder.size(each.name) for each in segments]
        return segments if sizes == [each.stored_size for each in segments] else None

    def _read(self, receipt: bytes) -> list[Segment]:
        """Return the segments of a receipt, and note where they are."""
        segments, work = read_receipt(receipt), _work_of(msgspec.json.decode(receipt)["task"])
        self._staged |= {each.name: staged_name(work, each.instance, each.after) for each in segments}
        return segments


@contextmanager
def start_run(request: ReplayRequest) -> Iterator[Run]:
    """Plan a run, and lock the folder until the block is left.

    ConfigError or UnknownStreamError if the request cannot be met, StoreError if the database or the folder fails.
    """
    request.check()
    folder = open_folder(request.out)
    with folder.locked():
        manifest = read_manifest_to_extend(folder)
        with closing(open_database(request.database)) as database:
            ranges, histories, warnings = _plan(database, request, manifest)
            check_histories(folder, manifest, histories, unstored(database, ranges))
        tasks = [_task(request, folder, each, histories) for each in ranges]
        yield Run(folder, manifest, tasks, warnings)


def _plan(
    database: Database, request: ReplayRequest, manifest: Manifest
) -> tuple[list[StreamRange], Histories, list[str]]:
    """Return the ranges to replay, the histories of the writers at that time, and warnings.

    If a writer starts meanwhile, or the database is restored, the positions may be of another history: plan again.
    """
    while True:
        histories = read_histories(database)
        warnings: list[str] = []
        ranges = list(plan_ranges(database, request, manifest, warnings))
        if read_histories(database) == histories:
            foreign = {
                (part.definition.name, writer.instance): tables_history(database, part.definition)
                for part in ranges
                if part.definition.position_name is not None
                for writer in part.writers
            }
            return ranges, {**histories, **{key: history for key, history in foreign.items() if history}}, warnings


def run_in_process(request: ReplayRequest) -> list[Segment]:
    """Do a whole run in this process; up to some ten million rows that is as quick as with Spark."""
    with start_run(request) as run:
        return run.finish([task.do() for task in run.tasks])
