"""One run of the batch, but for who does the work: what is to be written, what an earlier run has left, what counts.

A run takes the positions of its streams once, cuts what no segment covers yet into spans, has each written below
``.replay/``, and only then moves all of it into its place and replaces the manifest.  Whoever is killed, that is done
or not done; the next run takes over the spans that were finished.
"""

from __future__ import annotations

import hashlib
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from replication.errors import ConfigError, StoreError, UnknownStreamError
from replication.replay.databases import open_database, read_positions, resolve_url
from replication.replay.folders import open_folder
from replication.replay.history import Shape, Span, Window, plan_spans, staged_name, write_span
from replication.replay.segments import (
    MANIFEST,
    WORK,
    Manifest,
    Segment,
    check_compression,
    check_folder,
    sweep,
    write_manifest,
)
from replication.replay.tables import open_table
from replication.storage.mapped import MASTER
from replication.streams.registry import CACHES, StreamDefinition
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replication.replay.databases import IDatabase
    from replication.replay.folders import IFolder

ORIGIN: Final = Token(0)  # where a chain begins if nobody says where
# An invalidation that comes twice is harmless, so the last one of an entry does for all before it (protocol C4).
CACHES_DEFINITION: Final = StreamDefinition(
    CACHES, row=("cache_func", "keys", "invalidation_ts"), key=("cache_func", "keys")
)


@attrs.frozen
class Request:
    """What is asked for.

    ``streams`` are definitions, for mapped tables, or names; without any all are taken that the database knows, and
    ``definitions`` says how those are kept that are mapped.  ``instances`` limits the writers.  ``after`` is where new
    chains begin, ``upto`` where they end at the latest.
    """

    database: str = attrs.field(converter=resolve_url)
    out: str
    streams: Sequence[str] = ()
    definitions: Sequence[StreamDefinition] = ()
    instances: Sequence[str] = ()
    after: int = ORIGIN
    upto: int | None = None
    shape: Shape = attrs.field(factory=Shape)


@attrs.frozen
class Task:
    """What one worker does, in plain values: a span into segments, and a receipt for them."""

    database: str
    out: str
    span: Span
    shape: Shape

    @property
    def receipt(self) -> str:
        """Where the receipt lies."""
        return f"{WORK}/{self.span.definition.name}/{self.span.after:020}-{self.span.upto:020}.json"

    @property
    def sum(self) -> str:
        """What tells this task from every other."""
        return hashlib.sha256(repr((self.database, self.span, self.shape)).encode()).hexdigest()

    def do(self) -> bytes:
        """Write the segments, then the receipt, and return it; StoreError, and there is none."""
        folder = open_folder(self.out)
        segments = write_span(self.database, folder, self.span, self.shape)
        receipt = msgspec.json.encode({"task": self.sum, "segments": [each.describe() for each in segments]})
        with folder.create(self.receipt) as sink:
            sink.write(receipt)
        return receipt


def read_receipt(receipt: bytes) -> list[Segment]:
    """Return the segments that a task has written."""
    return [Segment.read(each) for each in msgspec.json.decode(receipt)["segments"]]


class Run:
    """A run that has been planned: ``tasks`` are still to be done, ``done`` was by an interrupted run before."""

    def __init__(self, folder: IFolder, manifest: Manifest, tasks: Sequence[Task]) -> None:
        self.manifest = manifest
        self._folder = folder
        adopted = {task: self._adopted(task) for task in tasks}
        self.tasks = [task for task, segments in adopted.items() if segments is None]
        self.done = [each for segments in adopted.values() if segments is not None for each in segments]
        keep = [*[each.name for each in self.done], *[_staged(each) for each in self.done], *[t.receipt for t in tasks]]
        sweep(folder, manifest, keep)

    def finish(self, receipts: Iterable[bytes]) -> list[Segment]:
        """Let what was written count; returns the new segments."""
        new = [*self.done, *[segment for receipt in receipts for segment in read_receipt(receipt)]]
        manifest = Manifest([*self.manifest.segments, *new])
        if faults := manifest.faults():
            raise StoreError(f"{self._folder.url}: {faults[0]}; nothing was added")
        for each in new:
            if self._folder.size(_staged(each)) is not None:  # else we were killed in the midst of this before
                self._folder.move(_staged(each), each.name)
        self._folder.flush([each.name for each in new])
        if new or self._folder.size(MANIFEST) is None:
            write_manifest(self._folder, manifest)
        self._folder.remove(WORK)
        self.manifest = manifest
        return sorted(new, key=lambda each: each.name)

    def _adopted(self, task: Task) -> list[Segment] | None:
        """Return what an interrupted run has written for ``task``, if all of it is there."""
        try:
            with self._folder.open(task.receipt) as source:
                said = msgspec.json.decode(source.read())
            if said["task"] != task.sum:
                return None
            segments = [Segment.read(each) for each in said["segments"]]
        except (OSError, msgspec.MsgspecError, ValueError, TypeError, KeyError):
            return None  # it is simply done again
        sizes = [self._folder.size(_staged(each)) or self._folder.size(each.name) for each in segments]
        return segments if sizes == [each.stored_size for each in segments] else None


def _staged(segment: Segment) -> str:
    return staged_name(segment.stream, segment.instance, segment.after)


@contextmanager
def begin(request: Request) -> Iterator[Run]:
    """Plan a run, and keep others from the folder until the block is left.

    ConfigError or UnknownStreamError for what cannot be asked, StoreError for what the database or the folder refuses.
    """
    check_compression(request.shape.compression)
    if request.shape.segment_rows < 1:
        raise ConfigError(f"--segment-rows {request.shape.segment_rows}: a segment has one row at least")
    if request.after < ORIGIN:
        raise ConfigError(f"--from {request.after}: IDs are counted from {ORIGIN} up, also where a table counts down")
    if request.upto is not None and request.upto < request.after:
        raise ConfigError(f"--upto {request.upto}: that is before {request.after}, where it begins")
    folder = open_folder(request.out)
    with folder.alone():
        manifest = check_folder(folder)
        with closing(open_database(request.database)) as database:
            spans = list(_plan(database, request, manifest))
        yield Run(folder, manifest, [Task(request.database, folder.url, span, request.shape) for span in spans])


def _plan(database: IDatabase, request: Request, manifest: Manifest) -> Iterator[Span]:
    reached = {key: chain[-1].upto for key, chain in manifest.chains().items()}
    found = list(_wanted(database, request))
    writers = {instance for _, positions in found for instance in positions}
    for each in request.instances:
        if writers and each not in writers:
            raise ConfigError(f"no instance {each!r} has written here: there are {', '.join(sorted(writers))}")
    for definition, positions in found:
        wanted = [grammar.instance_name(each) for each in request.instances] or [*positions]
        windows = [
            window
            for instance in wanted
            if instance in positions
            and (window := _window(request, definition.name, instance, positions[instance], reached)) is not None
        ]
        if windows:
            table = open_table(database, definition)
            everybody = {each.instance for each in windows} == {*positions}
            yield from plan_spans(table, definition, windows, request.shape.segment_rows, everybody=everybody)


def _wanted(database: IDatabase, request: Request) -> Iterator[tuple[StreamDefinition, Mapping[InstanceName, Token]]]:
    """Yield each stream that is asked for, with how far its writers are."""
    stored: dict[StreamName, dict[InstanceName, int]] = {}
    for stream, instance, place in read_positions(database):
        stored.setdefault(stream, {})[instance] = place
    defined = {CACHES: CACHES_DEFINITION} | {each.name: each for each in request.definitions}
    dialect = database.dialect
    mapped = [each.name for each in request.definitions if each.maps(dialect) or each.sources(dialect)]
    for name in dict.fromkeys([StreamName(each) for each in request.streams] or [*mapped, *stored]):
        positions = stored.get(name, {})
        negative = min(positions.values(), default=0) < 0
        definition = defined.get(name) or StreamDefinition(name, negative=negative)
        if request.shape.compact and name in request.streams and not definition.key:
            raise ConfigError(f"--compact: stream {name!r} declares no key, by which a fact could replace another")
        if definition.in_memory and name not in request.streams:
            continue  # its position alone is stored
        try:
            empty = open_table(database, definition).is_empty()
        except StoreError as error:
            if not request.streams and mapped and name not in defined:
                continue  # a position of the application's, which has other names for what it maps
            if positions:
                cure = "say by --config how it is kept, or name other streams by --stream"
                raise StoreError(f"stream {name!r} has a position in {database.name!r}, but {error}: {cure}") from error
            known = ", ".join(stored) or "none"
            raise UnknownStreamError(f"no stream {name!r} in {database.name!r}; it has {known}: {error}") from error
        if not positions and not empty:
            positions = _vouched(definition, request.upto)
        yield definition, {instance: Token(abs(place)) for instance, place in positions.items()}


def _vouched(definition: StreamDefinition, upto: int | None) -> dict[InstanceName, int]:
    """Return positions for a stream of which none is stored: up to where the user says that nothing is unfinished."""
    if upto is None:
        raise StoreError(
            f"no position of stream {definition.name!r} is stored, so nobody knows which IDs are still open: let its "
            "master write a fact, or say --upto ID if everything up to there is complete"
        )
    return dict.fromkeys(definition.writers or [MASTER], upto)


def _window(
    request: Request,
    stream: StreamName,
    instance: InstanceName,
    position: Token,
    reached: Mapping[tuple[StreamName, InstanceName], Token],
) -> Window | None:
    """Return what is to be added to a chain, None if nothing is."""
    end = reached.get((stream, instance))
    if end is not None and end > position:
        raise StoreError(
            f"{stream} of {instance} is at {position}, but segments reach {end}: if that database was restored, what "
            f"is above {position} in {request.out} never happened: begin another folder"
        )
    if end is not None and request.after > end:
        raise ConfigError(f"--from {request.after}: the segments of {stream} of {instance} end at {end}: that is a gap")
    after = Token(request.after) if end is None else end
    upto = position if request.upto is None else Token(min(position, request.upto))
    return Window(instance, after, upto) if after < upto else None


def run_here(request: Request) -> list[Segment]:
    """Do a whole run in this process: as good as Spark for what takes less time than starting it."""
    with begin(request) as run:
        return run.finish([task.do() for task in run.tasks])
