"""A folder of segments, to which a replay has still to add facts before a retention may delete them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from replication.storage.threads import SerialThread
from replication.urls import Url
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twisted.internet.interfaces import IReactorFromThreads

    from replication.segments.manifest import Manifest
    from replication.streams.retention import SegmentChain
    from replication.wire.grammar import InstanceName, StreamName
    from replication.writer.master import Master


def set_retention(
    master: Master, reactor: IReactorFromThreads, default: str, segments: Url | None, *, force: bool
) -> None:
    """Set what a master deletes: the limits of streams without their own, and the folder that must have the facts.

    With ``force``, also what a known follower lacks.
    """
    master.retention.default = default
    if segments is not None:
        master.retention.needs.append(SegmentNeeds(segments, reactor))
    if force:
        master.retention.needs.remove(master.followers)


@attrs.frozen
class SegmentNeeds:
    """The folder at ``url``: it needs each fact above the end of its segments; ``reactor`` needs ``callFromThread``."""

    _url: Url = attrs.field(converter=Url)
    _reactor: IReactorFromThreads

    async def needed(
        self, streams: Collection[StreamName], writer: InstanceName
    ) -> Mapping[StreamName, Mapping[str, Token]]:
        """Return up to where the segments of each stream reach; CatchUpError if the folder cannot be read."""
        manifest = await self._manifest()
        chains = manifest.chains()
        ends = {name: chains[name, writer][-1].upto for name in streams if (name, writer) in chains}
        return {name: {f"the segments in {self._url}": ends.get(name, Token(0))} for name in streams}

    async def segments(self) -> Sequence[SegmentChain]:
        """Return what the segments have; CatchUpError if the folder cannot be read."""
        return (await self._manifest()).summary(str(self._url))

    async def _manifest(self) -> Manifest:
        from replication.segments.folders import open_folder  # noqa: PLC0415 (few masters know a folder)
        from replication.segments.manifest import Manifest, read_manifest  # noqa: PLC0415 (likewise)

        thread = SerialThread(self._reactor, f"replication {self._url}")
        try:
            return await thread.run(read_manifest, open_folder(self._url)) or Manifest()
        finally:
            await thread.stop()
