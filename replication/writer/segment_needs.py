"""A folder of segments, to which a replay has still to add facts before a retention may delete them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar

import attrs
import msgspec

from replication.errors import CatchUpError
from replication.storage.threads import SerialThread
from replication.streams.history import certain_position
from replication.urls import Url
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.segments.folders import Folder
    from replication.segments.manifest import Segment
    from replication.streams.history import History
    from replication.streams.interfaces import IStreamStore
    from replication.streams.retention import SegmentChain
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.master import Master

P = ParamSpec("P")
T = TypeVar("T")

LONG_CURE: Final = "replay it into a new folder, with a line_limit above its longest line"
NO_FACTS: Final = Token(1)  # the first ID of a generic table is 2
ROWS_AT_ONCE: Final = 1_000_000  # of segments, which one round of a retention reads and may then delete


class _Reach(msgspec.Struct, frozen=True):
    """Up to where a folder has facts, and why not further; ``why`` is empty where the segments end."""

    upto: Token
    why: str = ""


def set_retention(
    master: Master, reactor: IReactorFromThreads, default: str, segments: Url | None, *, force: bool
) -> None:
    """Set what a master deletes: the limits of streams without their own, and the folder that must have the facts.

    With ``force``, also what a known follower lacks.
    """
    master.retention.default = default
    if segments is not None:
        master.retention.needs.append(SegmentNeeds(segments, reactor, master.store))
    if force:
        master.retention.needs.remove(master.followers)


@attrs.frozen
class SegmentNeeds:
    """The folder at ``url``: it needs each fact that its segments lack; ``reactor`` needs ``callFromThread``.

    After a retention, the segments may have the only copy of a fact.  So each segment is read once before it counts.
    Files may be missing or damaged.  Segments lack a row that is too long for a line.  A new history has other facts.
    """

    _url: Url = attrs.field(converter=Url)
    _reactor: IReactorFromThreads
    _store: IStreamStore = attrs.field(eq=False)
    _read: dict[str, tuple[object, _Reach]] = attrs.field(init=False, eq=False, factory=dict)  # by file, with its stamp

    async def needed(
        self, streams: Collection[StreamName], writer: InstanceName
    ) -> Mapping[StreamName, Mapping[str, Token]]:
        """Return up to where the segments of each stream have the facts; ReplicationError if that cannot be read."""
        ours = await self._store.histories(writer)
        gone = {name: (await self._store.gone(name)).get(writer, Token(0)) for name in streams}
        found = await self._run(self._reaches, writer, gone, ours)
        return {name: {f"the segments in {self._url}{reach.why}": reach.upto} for name, reach in found.items()}

    async def segments(self) -> Sequence[SegmentChain]:
        """Return what the segments have; CatchUpError if the folder cannot be read."""
        from replication.segments.manifest import Manifest, read_manifest  # noqa: PLC0415 (few masters know a folder)

        manifest = await self._run(lambda folder: read_manifest(folder) or Manifest())
        return manifest.summary(str(self._url))

    # ---- inside

    async def _run(self, function: Callable[Concatenate[Folder, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function with the folder, on a thread."""
        from replication.segments.folders import open_folder  # noqa: PLC0415 (few masters know a folder)

        thread = SerialThread(self._reactor, f"replication {self._url}")
        try:
            return await thread.run(function, open_folder(self._url), *args, **kwargs)
        finally:
            await thread.stop()

    def _reaches(
        self,
        folder: Folder,
        writer: InstanceName,
        gone: Mapping[StreamName, Token],
        ours: Mapping[StreamName, History],
    ) -> dict[StreamName, _Reach]:
        from replication.segments.histories import stored_histories  # noqa: PLC0415 (few masters know a folder)
        from replication.segments.manifest import Manifest, read_manifest  # noqa: PLC0415 (likewise)

        manifest = read_manifest(folder) or Manifest()
        if faults := manifest.faults():
            raise CatchUpError(f"{folder.url}: {faults[0]}")
        chains, theirs = manifest.chains(), stored_histories(folder, manifest)
        found = {}
        for name, upto in gone.items():
            reach = self._reach(folder, chains.get((name, writer), ()), upto)
            history = theirs.get((name, writer), ())
            if history and ours.get(name):
                common = certain_position(history, ours[name], reach.upto) or Token(0)
                if common < reach.upto:
                    reach = _Reach(common, f", which have facts of another history above {common}")
            found[name] = reach
        return found

    def _reach(self, folder: Folder, chain: Sequence[Segment], gone: Token) -> _Reach:
        """Return up to where a chain has all facts above ``gone``; look at about ROWS_AT_ONCE rows."""
        if not chain:
            return _Reach(Token(0))
        if chain[0].after > max(gone, NO_FACTS):
            return _Reach(gone, f", which begin after {chain[0].after}")
        reach, rows = _Reach(gone), 0
        for segment in chain:
            if segment.upto <= gone:
                continue
            if rows > ROWS_AT_ONCE:
                break
            rows += segment.rows
            stamp, reach = self._read.get(segment.name, (None, reach))
            now = folder.stamp(segment.name)
            if now is None or stamp != now:
                reach = _read_segment(folder, segment)
                self._read[segment.name] = now, reach
            if reach.why:
                break
        return reach


def _read_segment(folder: Folder, segment: Segment) -> _Reach:
    """Return up to where a segment has all its facts."""
    from replication.segments.files import SegmentReader  # noqa: PLC0415 (few masters know a folder)

    try:
        with closing(SegmentReader(folder, segment)) as reader:
            for facts in reader.facts():
                for token, texts in facts:
                    if not texts:
                        return _Reach(Token(token - 1), f", which lack the rows of fact {token}: {LONG_CURE}")
    except CatchUpError as error:
        return _Reach(segment.after, f", where a segment cannot be used: {error}")
    return _Reach(segment.upto)
