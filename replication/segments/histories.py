"""The histories of the writers whose facts a segments folder has (docs/protocol/following.md E7)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from replication.errors import StoreError
from replication.segments.folders import read_index, write_index
from replication.segments.manifest import NOT_DECODED, WORK, write_manifest
from replication.storage.tables.histories import ALL, EXISTS
from replication.streams.history import certain_position, encode_history, read_history
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from replication.segments.databases import Database
    from replication.segments.folders import Folder
    from replication.segments.manifest import Manifest, Segment
    from replication.segments.run import StreamRange
    from replication.streams.history import History

    Histories = Mapping[tuple[StreamName, InstanceName], History]

HISTORIES: Final = "histories.json"
CURE: Final = "if this folder is a copy, copy it again; else restore the file, or write to another folder"
KEPT: Final = 100  # checksums of former histories in a manifest; a copy may have one of these histories
TABLES: Final = "tables "  # begins the name of an epoch that stands for the tables of another program


def read_histories(database: Database) -> Histories:
    """Return the histories in a database; none in one of version 0.1.  StoreError if one cannot be read."""
    if not database.rows(EXISTS[database.dialect]):
        return {}
    rows = database.rows(ALL)
    try:
        return {(StreamName(stream), InstanceName(writer)): read_history(epochs) for stream, writer, epochs in rows}
    except msgspec.MsgspecError as error:
        raise StoreError(f"the table stream_histories in {database.url!r} cannot be read: {error}") from error


def unstored(database: Database, ranges: Iterable[StreamRange]) -> set[tuple[StreamName, InstanceName]]:
    """Return the stream and the writer of all ranges that end with ``--upto``, because no position is stored."""
    from replication.segments.databases import read_positions  # noqa: PLC0415 (a worker reads histories, no database)

    stored = {(stream, writer) for stream, writer, _ in read_positions(database) or ()}
    own = [part for part in ranges if part.definition.position_name is None]
    return {(part.definition.name, each.instance) for part in own for each in part.writers} - stored


def check_histories(
    folder: Folder,
    manifest: Manifest,
    histories: Histories,
    unstored: Collection[tuple[StreamName, InstanceName]] = (),
) -> None:
    """Store the histories in a folder to which facts of a database will be added.

    The folder may have segments of other databases: their histories stay.  StoreError if the segments have facts of
    another history, or facts of ``unstored`` writers would be added to segments with one: a writer that has a history
    has stored its position, too.  What an interrupted run has left behind is removed if it may have other facts.
    """
    known, chains = stored_histories(folder, manifest), manifest.chains()
    for key, chain in chains.items():
        end = chain[-1].upto
        if key in known and key not in histories and key in unstored:
            stream, writer = key
            raise StoreError(
                f"segments of {stream} by {writer} reach {end}, and the database has neither a position nor a history "
                f"of them: it was restored in part or exchanged; write to a folder other than {folder.url}"
            )
        if key not in known or key not in histories:
            continue
        common = certain_position(known[key], histories[key], end)
        if common != end:
            stream, writer = key
            raise StoreError(
                f"segments of {stream} by {writer} reach {end}, but the database has other facts above "
                f"{common or Token(0)}: it was restored or exchanged; write to a folder other than {folder.url}"
            )
    found = {**{key: known[key] for key in chains if key in known}, **histories}
    if found != known:
        folder.remove(WORK)
        content = _encode(found)
        if manifest.has_histories:  # first, so that it lists the histories beside it whenever the run is killed
            former = manifest.of_histories or [_checksum(read_index(folder, HISTORIES))]
            write_manifest(folder, _beside(manifest, [*former, _checksum(content)]))
        write_index(folder, HISTORIES, content)


def extend_manifest(folder: Folder, manifest: Manifest, new: Sequence[Segment]) -> Manifest:
    """Return the manifest with new segments, beside the histories that ``check_histories`` has stored."""
    extended = attrs.evolve(manifest, segments=[*manifest.segments, *new])
    if folder.size(HISTORIES) is None:
        return attrs.evolve(extended, has_histories=False)
    try:
        return _beside(extended, [*manifest.of_histories, _checksum(read_index(folder, HISTORIES))])
    except OSError as error:
        raise StoreError(f"{folder.url}/{HISTORIES} cannot be read: {error.strerror or error}") from error


def _beside(manifest: Manifest, checksums: Iterable[str]) -> Manifest:
    known = [*dict.fromkeys(reversed([*checksums]))]  # each once, where it came last
    return attrs.evolve(manifest, has_histories=True, of_histories=[*reversed(known[:KEPT])])


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_unchanged(database: Database, part: StreamRange, planned: Sequence[History]) -> None:
    """Raise StoreError if the database was restored after the histories of a range's writers were read.

    What was read of the range may then lack facts, or have others.
    """
    from replication.segments.databases import read_positions  # noqa: PLC0415 (likewise)
    from replication.segments.foreign import tables_history  # noqa: PLC0415 (likewise)

    definition, foreign = part.definition, part.definition.position_name is not None
    of_tables = tables_history(database, definition) if foreign else ()
    now = {} if foreign else read_histories(database)
    stored = {(stream, writer): abs(stream_id) for stream, writer, stream_id in read_positions(database) or ()}
    for each, history in zip(part.writers, planned, strict=True):
        key = definition.name, each.instance
        common = certain_position(history, of_tables if foreign else now.get(key, ()), each.upto)
        if history and (common != each.upto or (not foreign and stored.get(key, 0) < each.upto)):
            raise StoreError(
                f"{database.url!r} was restored or exchanged while {part.definition.name} by {each.instance} was read "
                f"up to {each.upto}; nothing was added: start its master, then run the same command again"
            )


def _encode(histories: Histories) -> bytes:
    return msgspec.json.encode([[*key, encode_history(history)] for key, history in sorted(histories.items())])


def is_of_tables(history: History) -> bool:
    """Whether a history only names tables: no writer has it."""
    return any(epoch.name.startswith(TABLES) for epoch in history)


def stored_histories(folder: Folder, manifest: Manifest) -> Histories:
    """Return the histories in a folder; none in one of version 0.1.

    StoreError if they cannot be read, or if the manifest has been written with histories, and they are missing or
    of other segments.
    """
    if folder.size(HISTORIES) is None:
        if manifest.has_histories:
            raise StoreError(
                f"{folder.url}/{HISTORIES} is missing, and the segments may be older than a restore: {CURE}"
            )
        return {}
    try:
        content = read_index(folder, HISTORIES)
        rows = msgspec.json.decode(content, type=list[tuple[str, str, str]])
        found = {(StreamName(stream), InstanceName(writer)): read_history(text) for stream, writer, text in rows}
    except (OSError, *NOT_DECODED) as error:
        raise StoreError(f"{folder.url}/{HISTORIES} cannot be read: {error}: {CURE}") from error
    if manifest.of_histories and _checksum(content) not in manifest.of_histories:
        raise StoreError(
            f"{folder.url}/{HISTORIES} is of other segments than the manifest, which may have lost facts: {CURE}"
        )
    return found
