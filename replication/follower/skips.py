"""What people decide about facts that a function cannot take: skip one, take one up again, list them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec.structs import replace
from twisted.internet.defer import CancelledError

from replication.errors import StoppingError, StreamError, UnknownStreamError, did_you_mean
from replication.follower.stream import FollowMode, StreamFollower
from replication.streams.skips import COPIED, SkippedFact, SkipState
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.internet.defer import Deferred

    from replication.follower.streams import FollowedStreams
    from replication.streams.interfaces import IStreamStore
    from replication.wire.grammar import InstanceName, Token


@attrs.frozen(eq=False)
class FollowedSkips:
    """The skipped facts of a worker, for ``web.skips``."""

    _instance_name: InstanceName
    _store: IStreamStore
    _followed: FollowedStreams

    async def skip(self, stream: str, writer: str, token: Token) -> SkippedFact:
        """Leave out the fact that fails now, and return what is stored of it.

        A fact that was skipped before stays so.  StreamError: it does not fail, or the stream has no function.
        """
        follower, source = self._follower(stream), grammar.instance_name(writer)
        async with follower.lock:  # nothing is applied until the request is noted, so what is read holds
            found = await self._find(follower, source, token)
            if found is not None and found.state is SkipState.SKIPPED:
                return found
            if source not in follower.cursors:
                near = (
                    did_you_mean(writer, follower.cursors)
                    or f"; known: {', '.join(sorted(follower.cursors)) or 'none'}"
                )
                raise StreamError(f"no writer {writer[:100]!r} of stream {stream!r} is followed here{near}")
            done = follower.application.failing.request_skip(source, token)
        await self._wait(follower, done)
        found = await self._find(follower, source, token)
        assert found is not None  # noqa: S101 - the skip stored it
        return found

    async def retry(self, stream: str, writer: str, token: Token) -> SkippedFact:
        """Apply a fact that was skipped, and return what is stored of it.

        One that was applied before stays so.  StreamError: it was not skipped, or the function raises again.
        """
        follower, source = self._follower(stream), grammar.instance_name(writer)
        async with follower.lock:  # as in ``skip``
            found = await self._find(follower, source, token)
            if found is None or found.state in {SkipState.SKIP_REQUESTED, SkipState.DROPPED}:
                raise StreamError(f"fact {token} of stream {stream!r} by {writer!r} was not skipped here")
            if found.state is SkipState.APPLIED:
                return found
            if source not in follower.cursors:
                raise StreamError(
                    f"no position of {writer!r} was received since the start: try again once it is connected"
                )
            done = follower.application.failing.request_retry(found)
        await self._wait(follower, done)
        return replace(found, state=SkipState.APPLIED)

    async def skipped(self, stream: str | None, limit: int) -> Sequence[SkippedFact]:
        """Return the facts that were skipped, the latest first."""
        name = None if stream is None else grammar.stream_name(stream)
        return await self._store.skipped_facts(self._instance_name, name, limit=limit)

    # ---- inside

    def _follower(self, stream: str) -> StreamFollower:
        follower = self._followed.get(stream)
        if follower is None:
            raise UnknownStreamError(f"stream {stream[:100]!r} is not followed here", stream=stream)
        if follower.mode is FollowMode.COPIED:
            raise StreamError(COPIED.format(stream=stream))
        if follower.mode is FollowMode.POSITION_ONLY:
            raise StreamError(f"stream {stream!r} has no function here, so no fact of it can fail")
        return follower

    async def _find(self, follower: StreamFollower, writer: InstanceName, token: Token) -> SkippedFact | None:
        found = await self._store.skipped_facts(self._instance_name, follower.name, (writer, token), limit=1)
        return found[0] if found else None

    async def _wait(self, follower: StreamFollower, done: Deferred[None]) -> None:
        """Wait until a request is done; StoppingError if this process stops before."""
        follower.application.failing.wake()
        follower.resume()
        try:
            await done
        except CancelledError:
            raise StoppingError(f"{self._instance_name!r} is stopping", instance=self._instance_name) from None
