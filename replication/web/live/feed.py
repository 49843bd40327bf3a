"""What all viewers of the live page share: one sampler, and server-sent events.

The sampler runs while a page is open, and for a minute after the last request.  An event has the tables of the page.
They are rendered once for all viewers with the same rights.  A viewer that does not read misses events, and gets
the next one after it has read: nothing is queued for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from replication.deferreds import share
from replication.web.live import tables
from replication.web.live.curves import Curves, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime
    from twisted.python.failure import Failure

    from replication.net.access import Rights
    from replication.streams.interfaces import StreamStatus
    from replication.web.request import ApiRequest
    from replication.web.site import IServed

INTERVAL: Final = 2.0  # seconds between two samples
SHARE: Final = 20  # a sample that takes a second is taken only every 20 seconds
PATIENCE: Final = 60.0  # seconds until the sampler ends, after the last request
SECTION_PATIENCE: Final = 2.0  # seconds that the page waits for a part of it
BYTES_PER_SECOND: Final = 4_096  # of events, for one viewer


@implementer(IPushProducer)
@attrs.define(eq=False)
class _Viewer:
    """One open page.  ``find`` is its search; ``due`` is when it may receive the next event."""

    request: ApiRequest
    find: str
    due: float = 0.0
    sent: str = ""
    paused: bool = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False

    def stopProducing(self) -> None:
        """Do nothing: ``notifyFinish`` follows."""


@attrs.define(eq=False, repr=False)
class Feed:
    """The samples of a process, and the viewers of its page."""

    _served: IServed
    _clock: IReactorTime
    curves: Curves = attrs.field(init=False, factory=Curves)
    _viewers: list[_Viewer] = attrs.field(init=False, factory=list)
    _making: dict[Hashable, Deferred[str]] = attrs.field(init=False, factory=dict)  # sections in progress
    _looked_at: float = attrs.field(init=False, default=0.0)
    _timer: IDelayedCall | None = attrs.field(init=False, default=None)

    @property
    def viewers(self) -> int:
        """The number of open pages that receive events."""
        return len(self._viewers)

    def look(self) -> None:
        """Note that the page was requested: sample from now on."""
        self._looked_at = self._clock.seconds()
        if self._timer is None:
            self._sample()

    def tables(self, rights: Rights, find: str) -> str:
        """Return the tables that a viewer with these rights may see, as HTML."""
        seen = [each for each in self._served.stream_statuses() if rights.may_see(each.definition.name)]
        peers = self._served.peer_statuses()
        return "".join(
            [
                tables.troubles_list(seen, peers, rights),
                tables.streams_table(seen, self.curves, find),
                tables.followers_table(peers),
            ]
        )

    async def section(self, key: Hashable, make: Callable[[], Coroutine[Deferred[Any], Any, str]]) -> str:
        """Return the HTML that ``make`` returns, or a sentence if that takes longer than SECTION_PATIENCE.

        So the page is shown while a database or a folder does not answer.  While a call for ``key`` is in progress,
        no second one is started.
        """
        if key not in self._making:
            self._making[key] = making = Deferred.fromCoroutine(make())
            making.addBoth(self._made, key)
        else:
            making = self._making[key]
        late = f"<p>A database or a folder has not answered for {SECTION_PATIENCE:g} s.</p>"
        return await share(making).addTimeout(SECTION_PATIENCE, self._clock, lambda _result, _seconds: late)

    def follow(self, request: ApiRequest, find: str) -> None:
        """Send events to a page until it is closed."""
        viewer = _Viewer(request, find)
        request.registerProducer(viewer, True)  # type: ignore[no-untyped-call]
        request.notifyFinish().addBoth(lambda _: self._viewers.remove(viewer))
        self._viewers.append(viewer)
        self.look()
        request.write(b"retry: 5000\n\n")  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End the sampler, at the end of the process."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ---- inside

    def _made(self, result: str | Failure, key: Hashable) -> str | Failure:
        self._making.pop(key, None)
        return result

    def _sample(self) -> None:
        began = self._clock.seconds()
        if not self._viewers and began - self._looked_at > PATIENCE:
            self._timer, self.curves = None, Curves()
            return
        self.curves.add(_samples(self._served.stream_statuses(), began))
        self._send(began)
        took = self._clock.seconds() - began
        self._timer = self._clock.callLater(max(INTERVAL, SHARE * took), self._sample)

    def _send(self, now: float) -> None:
        rendered: dict[tuple[Rights, str], str] = {}
        for viewer in [*self._viewers]:
            if viewer.paused or now < viewer.due:
                continue
            key = viewer.request.rights, viewer.find
            if key not in rendered:
                rendered[key] = self.tables(*key)
            if rendered[key] != viewer.sent:
                viewer.sent = rendered[key]
                event = f"data: {json.dumps(viewer.sent)}\n\n".encode()
                viewer.due = now + len(event) / BYTES_PER_SECOND
                viewer.request.write(event)  # type: ignore[no-untyped-call]


def _samples(statuses: Sequence[StreamStatus], now: float) -> dict[tuple[str, str], Sample]:
    return {
        (stream.definition.name, writer.instance): Sample(now, writer.position, writer.lag)
        for stream in statuses
        for writer in stream.writers
    }
