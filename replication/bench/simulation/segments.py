"""A folder of segments in memory, to which the facts of the masters' disks are replayed.

The lines, the manifest and the checksums are those of real segments, and ``Archive`` reads them.  The database of a
replay and the files of its folder are left out.
"""

from __future__ import annotations

from contextlib import contextmanager
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from replication.bench.simulation.disk import finish
from replication.segments.archive import Archive
from replication.segments.files import SegmentWriter
from replication.segments.manifest import Manifest, Segment, write_manifest
from replication.session.encoder import encode_facts
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.storage.memory import MemoryStore
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, StreamName

COMMITS_A_REPLAY: Final = 3  # of all masters
FACTS_A_SEGMENT: Final = 2
LINE_LIMIT: Final = 256  # bytes; a longer fact becomes a POSITION


class MemoryFolder:
    """The parts of a segments folder that a manifest and an ``Archive`` use."""

    url = "memory:segments"

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._stamps: dict[str, int] = {}
        self._numbers = count(1)

    @contextmanager
    def create(self, name: str) -> Iterator[BytesIO]:
        """Write a file, which is replaced when the block is left without an exception."""
        with BytesIO() as sink:
            yield sink
            self._files[name] = sink.getvalue()
        self._stamps[name] = next(self._numbers)

    def flush(self, _names: Sequence[str]) -> None:
        """Do nothing: there is no disk."""

    def open(self, name: str) -> BytesIO:
        """Open a file for reading; FileNotFoundError if there is none."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return BytesIO(self._files[name])

    def stamp(self, name: str) -> int | None:
        """Return a number that changes when the file is replaced, None if there is no file."""
        return self._stamps.get(name)

    def stamp_of(self, _source: BytesIO, name: str) -> int | None:
        """Return the stamp of a file that is open; one that is replaced meanwhile counts as changed."""
        return self.stamp(name)


class SimulatedSegments:
    """The segments of all masters; every few commits, a replay extends them up to the stored positions."""

    def __init__(self) -> None:
        self._folder: Any = MemoryFolder()
        self._manifest = Manifest()
        self._commits = 0

    def open(self) -> Archive:
        """Return what one process reads the folder with."""
        return Archive(self._folder)

    def committed(self, disk: MemoryStore, writer: InstanceName) -> None:
        """Count a commit of a master; replay its disk if it is time."""
        self._commits += 1
        if self._commits % COMMITS_A_REPLAY == 0:
            self.replay(disk, writer)

    def replay(self, disk: MemoryStore, writer: InstanceName) -> None:
        """Add segments of each stream of a writer, up to its stored position."""
        ends = {key: chain[-1].upto for key, chain in self._manifest.chains().items()}
        new: list[Segment] = []
        for stream, positions in finish(disk.stored_positions()).items():
            after, upto = ends.get((stream, writer), Token(0)), positions.get(writer, Token(0))
            if after < upto:
                page = finish(disk.facts(stream, writer, after=after, upto=upto, limit=10**6))
                new += self._write(stream, writer, page.facts, after, upto)
        self._manifest = Manifest([*self._manifest.segments, *new])
        write_manifest(self._folder, self._manifest)

    def _write(
        self, stream: StreamName, writer: InstanceName, facts: Sequence[Fact], after: Token, upto: Token
    ) -> Iterator[Segment]:
        parts = [facts[at : at + FACTS_A_SEGMENT] for at in range(0, len(facts), FACTS_A_SEGMENT)] or [()]
        for part in parts:
            end = upto if part is parts[-1] else part[-1].token
            with BytesIO() as sink:
                file = SegmentWriter(cast("Any", sink))
                for lines in encode_facts(stream, writer, part, after=after, upto=after, line_limit=LINE_LIMIT):
                    rows = sum(line.startswith(b"RDATA ") for line in lines.data.split(b"\n"))
                    file.write(b"\n" + lines.data[:-1], rows, part[0].token, part[-1].token)
                file.end()
                segment = Segment(stream, writer, after, end, *file.summary(), file.size, "none")
                with self._folder.create(segment.name) as stored:
                    stored.write(sink.getvalue())
            yield segment
            after = end
