"""What all viewers of the live page share: one sampler, and server-sent events.

The sampler runs while a page is open, and for a minute after the last request.  After a sample, what has changed is
rendered once for all viewers who are shown the same, some rows in each turn of the reactor.  It is written in one piece
to each of them, to a few every few milliseconds: all viewers together receive at most 250 writes a second.  So a fact
costs nothing here, and followers do not wait.

What is read from a database is read one after the other, and facts are read only after a position has changed.  A
viewer that does not read misses events, and is sent the whole page after it has read: nothing is queued for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import deferLater
from twisted.logger import Logger

from replication.deferreds import share
from replication.web.live import tables, words
from replication.web.live.audience import Audience, Shown, Viewer, html_of
from replication.web.live.curves import Curves, Sample
from replication.web.live.facts import facts_section
from replication.web.live.followers import followers_section

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime
    from twisted.python.failure import Failure

    from replication.net.access import Rights
    from replication.streams.interfaces import StreamStatus
    from replication.web.followers import ReportNote
    from replication.web.health import Health
    from replication.web.live.audience import Part
    from replication.web.request import ApiRequest
    from replication.web.site import IServed

    _Followed = tuple[Rights, str, str]  # rights, stream, text in a row

INTERVAL: Final = 2.0  # seconds between two samples
SHARE: Final = 20  # what takes a second is done only every 20 seconds
READ_SHARE: Final = 5  # reading from a database that takes a second begins only 5 seconds later again
READ_PATIENCE: Final = 0.5  # seconds that the news wait for what is being read
PATIENCE: Final = 60.0  # seconds until the sampler ends, after the last request
WRITES: Final = 5  # viewers that are written to in one turn of the reactor
PAUSE: Final = 0.02  # seconds between two such turns: with 1,000 viewers, each is written to every four seconds
SECTION_PATIENCE: Final = 2.0  # seconds that the page waits for a part of it
CHECK_INTERVAL: Final = 10.0  # seconds between two proofs that the store can be written, and two lists of followers
RETRY: Final = 5_000  # ms until a browser connects again; those of many browsers differ by as much

_log = Logger()


@attrs.define(eq=False, repr=False)
class Feed:
    """The samples of a process, and the viewers of its page."""

    _served: IServed
    _clock: IReactorTime
    _health: Health
    _notes: Mapping[str, ReportNote]
    curves: Curves = attrs.field(init=False, factory=Curves)
    _audiences: dict[Shown, Audience] = attrs.field(init=False, factory=dict)
    _opened: int = attrs.field(init=False, default=0)  # pages, so far
    _making: dict[Hashable, Deferred[str]] = attrs.field(init=False, factory=dict)  # sections in progress
    _state: str = attrs.field(init=False, default="")
    _followers: dict[Rights, str] = attrs.field(init=False, factory=dict)
    _facts: dict[_Followed, tuple[Sequence[int], str]] = attrs.field(init=False, factory=dict)  # with the positions
    _store_fault: str | None = attrs.field(init=False, default=None)
    _checked_at: float = attrs.field(init=False, default=-CHECK_INTERVAL)
    _followers_at: float = attrs.field(init=False, default=-CHECK_INTERVAL)
    _looked_at: float = attrs.field(init=False, default=0.0)
    _timer: IDelayedCall | None = attrs.field(init=False, default=None)  # of the next sample
    _reading: Deferred[None] | None = attrs.field(init=False, default=None)
    _read_after: float = attrs.field(init=False, default=0.0)
    _sending: Deferred[None] | None = attrs.field(init=False, default=None)
    _send_after: float = attrs.field(init=False, default=0.0)

    @property
    def viewers(self) -> int:
        """The number of open pages that receive events."""
        return sum(len(each.viewers) for each in self._audiences.values())

    def look(self) -> None:
        """Note that the page was requested: sample from now on."""
        self._looked_at = self._clock.seconds()
        if self._timer is None:
            self._sample()

    async def tables(self, rights: Rights, find: str) -> dict[str, str]:
        """Return the HTML of the tables that a viewer with these rights may see, and of what needs attention."""
        found = await self._tables(self._served.stream_statuses(), rights, find, self._turn)
        return {name: html_of(part) for name, part in found.items()}

    async def state(self, check_after: float = 0.0, statuses: Sequence[StreamStatus] | None = None) -> str:
        """Return whether the process is ready, or why not, as HTML; the store is checked again after some seconds."""
        now = self._clock.seconds()
        if now - self._checked_at >= check_after:
            self._checked_at = now
            self._store_fault = await self._health.store_fault()
        faults = [*([] if self._store_fault is None else [self._store_fault]), *self._health.stream_faults(statuses)]
        if not faults:
            return f'<span class="live">{words.READY}</span>'
        return f'<span class="stopped">{tables.text(words.not_ready("; ".join(faults)))}</span>'

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
        shown = Shown(request.rights, find, stream, has)
        viewer, audience = Viewer(request), self._audiences.setdefault(shown, Audience(shown))
        audience.viewers[viewer] = None
        request.registerProducer(viewer, True)  # type: ignore[no-untyped-call]
        request.notifyFinish().addBoth(lambda _: self._closed(audience, viewer))
        self._opened += 1
        request.write(b"retry: %d\n\n" % (RETRY + self._opened * 37 % RETRY))  # type: ignore[no-untyped-call]
        self.look()

    def stop(self) -> None:
        """End the sampler, at the end of the process."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for each in (self._sending, self._reading):
            if each is not None:
                each.cancel()

    # ---- inside

    def _made(self, result: str | Failure, key: Hashable) -> str | Failure:
        self._making.pop(key, None)
        return result

    def _closed(self, audience: Audience, viewer: Viewer) -> None:
        del audience.viewers[viewer]
        if not audience.viewers:
            del self._audiences[audience.shown]

    def _sample(self) -> None:
        began = self._clock.seconds()
        if not self._audiences and began - self._looked_at > PATIENCE:
            self._timer, self.curves, self._facts = None, Curves(), {}
            return
        statuses = self._served.stream_statuses()
        self.curves.add(_samples(statuses, began))
        if self._audiences and self._sending is None and began >= self._send_after:
            self._sending = self._start(self._send(statuses))
            self._sending.addBoth(self._sent)
        took = self._clock.seconds() - began
        self._timer = self._clock.callLater(max(INTERVAL, SHARE * took), self._sample)

    def _start(self, work: Coroutine[Deferred[Any], Any, None]) -> Deferred[None]:
        started = Deferred.fromCoroutine(work)
        return started.addErrback(_log_unless_cancelled)

    async def _send(self, statuses: Sequence[StreamStatus]) -> None:
        """Send to all viewers what has changed."""
        await self._wait_for_reading(statuses)
        slices = _Slices(self._clock)
        made: dict[tuple[Rights, str], dict[str, Part]] = {}
        for audience in [*self._audiences.values()]:
            if self._clock.seconds() >= audience.due:
                shown = audience.shown
                if (key := (shown.rights, shown.find)) not in made:
                    if made:
                        await slices.breathe()
                    made[key] = await self._tables(statuses, *key, slices.breathe)
                audience.update(self._read_parts(shown) | made[key], self._clock.seconds())
        slices.end()
        self._send_after = self._clock.seconds() + SHARE * slices.worked
        await self._write()

    async def _write(self) -> None:
        """Write to the viewers that lack something: to a few in one turn of the reactor, so followers come between."""
        now = self._clock.seconds()
        waiting = [(each, viewer) for each in self._audiences.values() for viewer in each.waiting(now)]
        for start in range(0, len(waiting), WRITES):
            if start:
                await deferLater(self._clock, PAUSE)
            for audience, viewer in waiting[start : start + WRITES]:
                audience.send(viewer, now)

    def _sent(self, _: object) -> None:
        self._sending = None

    async def _tables(
        self, statuses: Sequence[StreamStatus], rights: Rights, find: str, breathe: Callable[[], Awaitable[None]]
    ) -> dict[str, Part]:
        seen = [each for each in statuses if rights.may_see(each.definition.name)]
        peers = self._served.peer_statuses()
        return {
            "trouble": tables.troubles_list(
                seen, peers, self._served.unreachable_writers(), self._served.absent_writers(), rights
            ),
            "streams": await tables.streams_table(seen, self.curves, find, breathe),
            "connections": tables.connections_table(peers),
        }

    async def _turn(self) -> None:
        """Let the reactor do other work."""
        await deferLater(self._clock, 0.0)

    # ---- what a database may have to be read for

    def _read_parts(self, shown: Shown) -> dict[str, Part]:
        """Return what was read last for some viewers."""
        _, facts = self._facts.get((shown.rights, shown.stream, shown.has), (None, None))
        found = {"state": self._state, "followers": self._followers.get(shown.rights), "facts": facts}
        return {name: html for name, html in found.items() if html}

    async def _wait_for_reading(self, statuses: Sequence[StreamStatus]) -> None:
        """Read, if that is due, and wait a little for it; viewers are sent what is there by then."""
        if self._reading is None and self._clock.seconds() >= self._read_after:
            self._reading = self._start(self._read(statuses))
            self._reading.addBoth(self._was_read, self._clock.seconds())
        if self._reading is not None:
            await share(self._reading).addTimeout(READ_PATIENCE, self._clock, lambda *_: None)

    async def _read(self, statuses: Sequence[StreamStatus]) -> None:
        """Read one part after the other."""
        self._state = await self.state(CHECK_INTERVAL, statuses)
        if (now := self._clock.seconds()) - self._followers_at >= CHECK_INTERVAL:
            self._followers_at = now
            every = dict.fromkeys(each.rights for each in self._audiences)
            self._followers = {rights: await self.followers(rights) for rights in every}
        followed = dict.fromkeys((each.rights, each.stream, each.has) for each in self._audiences if each.stream)
        self._facts = {key: kept for key, kept in self._facts.items() if key in followed}
        for key in followed:
            await self._read_facts(*key)

    async def _read_facts(self, rights: Rights, stream: str, has: str) -> None:
        """Read the latest facts of a stream, if a position has changed."""
        key, making = (rights, stream, has), ("facts", rights, stream, None, has)
        found = self._served.stream_statuses(stream)
        positions = [writer.position for each in found for writer in each.writers]
        known, _ = self._facts.get(key, (None, ""))
        if known == positions or making in self._making:
            return
        self._facts[key] = (), await self.facts(rights, stream, None, has)
        if making in self._making:  # they come later
            self._making[making].addCallback(self._keep_facts, key, positions)
        else:
            self._facts[key] = positions, self._facts[key][1]

    def _keep_facts(self, html: str, key: _Followed, positions: Sequence[int]) -> str:
        self._facts[key] = positions, html
        return html

    def _was_read(self, _: object, began: float) -> None:
        now = self._clock.seconds()
        self._reading, self._read_after = None, now + READ_SHARE * (now - began)


class _Slices:
    """Work in several turns of the reactor, and the seconds that it took in all."""

    def __init__(self, clock: IReactorTime) -> None:
        """Begin with the first turn."""
        self.worked = 0.0
        self._clock = clock
        self._began = clock.seconds()

    async def breathe(self) -> None:
        """Let the reactor do other work."""
        self.end()
        await deferLater(self._clock, 0.0)
        self._began = self._clock.seconds()

    def end(self) -> None:
        """End a turn."""
        self.worked += self._clock.seconds() - self._began


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("the live page", failure)


def _samples(statuses: Sequence[StreamStatus], now: float) -> dict[tuple[str, str], Sample]:
    return {
        (stream.definition.name, writer.instance): Sample(now, writer.position, writer.lag)
        for stream in statuses
        for writer in stream.writers
    }
