"""What all viewers of the live page share: one sampler, and server-sent events.

The sampler runs while a page is open, and for a minute after the last request.  An event has one part of the page: the
state, the tables, the followers or the latest facts.  A part is rendered once for all viewers who may see the same.
What is read from a database is read one after the other, and facts are read only after a position has changed.  A
viewer that does not read misses events, and gets the next one after it has read: nothing is queued for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IPushProducer
from twisted.logger import Logger
from zope.interface import implementer

from replication.deferreds import share
from replication.web.live import tables
from replication.web.live.curves import Curves, Sample
from replication.web.live.facts import facts_section
from replication.web.live.followers import followers_section

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime
    from twisted.python.failure import Failure

    from replication.net.access import Rights
    from replication.streams.interfaces import StreamStatus
    from replication.web.followers import ReportNote
    from replication.web.health import Health
    from replication.web.request import ApiRequest
    from replication.web.site import IServed

INTERVAL: Final = 2.0  # seconds between two samples
SHARE: Final = 20  # a sample that takes a second is taken only every 20 seconds
PATIENCE: Final = 60.0  # seconds until the sampler ends, after the last request
WRITES: Final = 10  # events that are written in one turn of the reactor
SECTION_PATIENCE: Final = 2.0  # seconds that the page waits for a part of it
BYTES_PER_SECOND: Final = 4_096  # of events, for one viewer
CHECK_INTERVAL: Final = 10.0  # seconds between two proofs that the store can be written, and two lists of followers

_log = Logger()
_Followed = tuple["Rights", str, str]  # rights, stream, text in a row
_Key = TypeVar("_Key", bound="Hashable")


@implementer(IPushProducer)
@attrs.define(eq=False)
class _Viewer:
    """One open page.

    ``find`` is its search.  ``stream`` is the one whose latest facts it follows, with the text ``has``; or empty.
    ``due`` is when it may receive the next events; ``sent`` are the last ones, by name.
    """

    request: ApiRequest
    find: str
    stream: str
    has: str
    due: float = 0.0
    sent: dict[str, str] = attrs.field(factory=dict)
    paused: bool = False

    @property
    def followed(self) -> _Followed:
        """What decides which facts it shows."""
        return self.request.rights, self.stream, self.has

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
    _health: Health
    _notes: Mapping[str, ReportNote]
    curves: Curves = attrs.field(init=False, factory=Curves)
    _viewers: dict[_Viewer, None] = attrs.field(init=False, factory=dict)  # a set, in the order of arrival
    _making: dict[Hashable, Deferred[str]] = attrs.field(init=False, factory=dict)  # sections in progress
    _facts: dict[_Followed, tuple[Sequence[int], str]] = attrs.field(init=False, factory=dict)  # with the positions
    _refreshing: bool = attrs.field(init=False, default=False)
    _store_fault: str | None = attrs.field(init=False, default=None)
    _checked_at: float = attrs.field(init=False, default=-CHECK_INTERVAL)
    _followers_at: float = attrs.field(init=False, default=-CHECK_INTERVAL)
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
                tables.troubles_list(seen, peers, self._served.unreachable_writers(), rights),
                tables.streams_table(seen, self.curves, find),
                tables.followers_table(peers),
            ]
        )

    async def state(self, check_after: float = 0.0) -> str:
        """Return whether the process is ready, or why not, as HTML; the store is checked again after some seconds."""
        now = self._clock.seconds()
        if now - self._checked_at >= check_after:
            self._checked_at = now
            self._store_fault = await self._health.store_fault()
        faults = [*([] if self._store_fault is None else [self._store_fault]), *self._health.stream_faults()]
        if not faults:
            return '<span class="live">ready</span>'
        return f'<span class="stopped">not ready: {tables.text("; ".join(faults))}</span>'

    async def followers(self, rights: Rights) -> str:
        """Return the followers that report."""
        return await self.section(
            ("followers", rights),
            lambda: followers_section(self._served, rights, self._notes, self.curves, self._clock.seconds()),
        )

    async def facts(self, rights: Rights, stream: str, token: int | None, has: str) -> str:
        """Return one fact, or the latest of a stream."""
        key = "facts", rights, stream, token, has
        return await self.section(key, lambda: facts_section(self._served, rights, stream, token, has))

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

    def follow(self, request: ApiRequest, find: str, stream: str = "", has: str = "") -> None:
        """Send events to a page until it is closed; with ``stream`` also its latest facts."""
        viewer = _Viewer(request, find, stream, has)
        request.registerProducer(viewer, True)  # type: ignore[no-untyped-call]
        request.notifyFinish().addBoth(lambda _: self._viewers.pop(viewer))
        self._viewers[viewer] = None
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
            self._timer, self.curves, self._facts = None, Curves(), {}
            return
        self.curves.add(_samples(self._served.stream_statuses(), began))
        viewers = [each for each in self._viewers if not each.paused and began >= each.due]
        for (rights, find), some in _grouped(viewers, lambda each: (each.request.rights, each.find)).items():
            self._send("tables", self.tables(rights, find), some)
        if viewers and not self._refreshing:
            self._refreshing = True
            refreshing = Deferred.fromCoroutine(self._refresh(viewers))
            refreshing.addErrback(lambda failure: _log.failure("the live page", failure)).addBoth(self._refreshed)
        took = self._clock.seconds() - began
        self._timer = self._clock.callLater(max(INTERVAL, SHARE * took), self._sample)

    async def _refresh(self, viewers: Sequence[_Viewer]) -> None:
        """Send what a database may have to be read for, one part after the other."""
        self._send("state", await self.state(CHECK_INTERVAL), viewers)
        if (now := self._clock.seconds()) - self._followers_at >= CHECK_INTERVAL:
            self._followers_at = now
            for rights, some in _grouped(viewers, lambda each: each.request.rights).items():
                self._send("followers", await self.followers(rights), some)
        followed = {each.followed for each in self._viewers}
        self._facts = {key: kept for key, kept in self._facts.items() if key in followed}
        following = [each for each in viewers if each.stream]
        for key, some in _grouped(following, lambda each: each.followed).items():
            self._send("facts", await self._latest(key), some)

    def _refreshed(self, _: object) -> None:
        self._refreshing = False

    async def _latest(self, key: _Followed) -> str:
        """Return the latest facts of a stream; they are read only if a position has changed."""
        rights, stream, has = key
        found = self._served.stream_statuses(stream)
        positions = [writer.position for each in found for writer in each.writers]
        known, shown = self._facts.get(key, (None, ""))
        if known != positions:
            shown = await self.facts(rights, stream, None, has)
            if ("facts", rights, stream, None, has) not in self._making:  # else this is no answer
                self._facts[key] = positions, shown
        return shown

    def _send(self, name: str, html: str, viewers: Iterable[_Viewer]) -> None:
        """Send an event to those that have not received the same before."""
        event = f"event: {name}\ndata: {json.dumps(html)}\n\n".encode()
        receivers = [each for each in viewers if each.sent.get(name, "") != html and not each.paused]
        for viewer in receivers:
            viewer.sent[name] = html
            viewer.due = max(viewer.due, self._clock.seconds()) + len(event) / BYTES_PER_SECOND
        self._write(event, receivers)

    def _write(self, event: bytes, receivers: Sequence[_Viewer]) -> None:
        """Write an event to a few viewers, and to the others in later turns of the reactor: followers come between."""
        for viewer in receivers[:WRITES]:
            if viewer in self._viewers:
                viewer.request.write(event)  # type: ignore[no-untyped-call]
        if len(receivers) > WRITES:
            self._clock.callLater(0.0, self._write, event, receivers[WRITES:])


def _grouped(viewers: Iterable[_Viewer], key: Callable[[_Viewer], _Key]) -> dict[_Key, list[_Viewer]]:
    groups: dict[_Key, list[_Viewer]] = {}
    for each in viewers:
        groups.setdefault(key(each), []).append(each)
    return groups


def _samples(statuses: Sequence[StreamStatus], now: float) -> dict[tuple[str, str], Sample]:
    return {
        (stream.definition.name, writer.instance): Sample(now, writer.position, writer.lag)
        for stream in statuses
        for writer in stream.writers
    }
