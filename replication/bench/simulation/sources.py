"""The catch-up sources of a simulated worker: the HTTP of masters and relays, and segments."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred, succeed

from replication.bench.simulation.host import PORT
from replication.bench.simulation.writing import MasterHost
from replication.errors import CatchUpError, FactsGoneError, ReplicationError, UnknownStreamError
from replication.follower.doubts import FactCount, count_facts
from replication.streams.facts import fact_bytes
from replication.web.pages import encode_page, read_page

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from twisted.python.failure import Failure

    from replication.bench.simulation.following import WorkerHost
    from replication.bench.simulation.host import Host
    from replication.follower.reports import Positions
    from replication.streams.cursor import CatchUp
    from replication.streams.history import History
    from replication.streams.interfaces import Page
    from replication.web.client import HttpCatchUp
    from replication.web.site import IServed
    from replication.wire.grammar import InstanceName, StreamName, Token

T = TypeVar("T")


class PageRequest:
    """A request for a page, or a report of positions, in progress."""

    def __init__(self, asked: Host, by: WorkerHost) -> None:
        self.asked = asked
        self.by = by
        self.answer: Deferred[Any] = Deferred()
        self.page: Page | float | None = None  # the answer of the master or relay
        self.error: CatchUpError | None = None
        by.world.page_requests.append(self)
        self.answer.addBoth(self._forget)

    @property
    def waiting(self) -> bool:
        """Whether the worker still runs and waits for the answer."""
        return self in self.by.world.page_requests

    def fail(self, why: str | CatchUpError) -> None:
        """Answer with an error."""
        if self.waiting:
            self.answer.errback(CatchUpError(why) if isinstance(why, str) else why)

    def deliver_answer(self) -> None:
        """Deliver the answer, if there is one."""
        if self.error is not None:
            self.fail(self.error)
        elif self.page is not None and self.waiting:
            self.answer.callback(self.page)

    def _forget(self, result: T) -> T:
        self.by.world.page_requests.remove(self)
        return result


class SimulatedSources:
    """A fake of ``CatchUpSources`` that calls ``page`` of the master, or of the relay, as its HTTP API does.

    A page passes through the bytes of its answer; requests and headers are left out.  A worker that has segments reads
    a page from them first, as a worker with such a folder in ``catch_up`` does.  Positions are reported if the masters
    have a retention.
    """

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        segments = host.world.segments if host.name in host.world.read_segments else None
        self._archive = None if segments is None else segments.open()
        self._processes: dict[str, ReportedProcess] = {}

    def foreign_database(self) -> None:
        """Return None: no other program writes the database."""

    def over_http(self, _endpoint: str) -> list[HttpCatchUp]:
        """Return none: nothing is compared here."""
        return []

    def over_http_of(self, endpoints: Iterable[str]) -> list[ReportedProcess]:
        """Return what positions are reported to: nothing unless the masters have a retention."""
        if not self._host.world.retention:
            return []
        return [self._processes.setdefault(each, ReportedProcess(self, each)) for each in dict.fromkeys(endpoints)]

    def connection_lost(self) -> None:
        """Do nothing: no history is kept here."""

    def source_of(self, *_: object) -> None:
        """Return None: no catch-up is long here."""

    async def fetch(
        self,
        endpoint: str | None,
        stream: StreamName,
        writer: InstanceName,
        step: CatchUp,
        limit: int,
        *,
        followed: History = (),
    ) -> Page:
        """Return a page of at most ``page_rows`` rows; while ``pages_held``, it waits."""
        host = self._host
        limit = min(limit, host.page_rows)
        found = self._in_segments(stream, writer, step, limit)
        if found is None:
            asked, served = self._asked(endpoint)
            request = PageRequest(asked, host)
            page = Deferred.fromCoroutine(served.page(stream, writer, after=step.after, upto=step.upto, limit=limit))
        else:
            request, page = PageRequest(host, host), succeed(found)

        def answered(page: Page) -> None:
            history = host.world.masters[writer].histories[stream]
            if not host.world.restores:
                history.check_page(page, step.after, step.upto)
            elif isinstance(request.asked, MasterHost):  # a relay may have what is lost
                history.publish(request.asked.published(stream))  # perhaps while no follower was connected
                history.check_page(page, step.after, step.upto)
            host.largest_page = max(host.largest_page, fact_bytes(page.facts))
            request.page = read_page(encode_page(page), after=step.after, upto=step.upto)

        fetched: Page = await self._answer(request, page.addCallback(answered))
        return fetched

    page = fetch

    async def report(
        self, endpoint: str, name: InstanceName, positions: Positions, streams: Collection[StreamName] | None
    ) -> float:
        """Report positions to the master or relay, as to its HTTP API; return the seconds to the next report."""
        asked, served = self._asked(endpoint)
        request = PageRequest(asked, self._host)
        assert served.followers is not None
        reporting = Deferred.fromCoroutine(served.followers.report(name, positions, streams))
        following: float = await self._answer(request, reporting.addCallback(partial(setattr, request, "page")))
        if name == self._host.name:
            self._host.reported = True
        return following

    async def _answer(self, request: PageRequest, answering: Deferred[None]) -> Any:
        """Return the answer to a request; while ``pages_held``, it waits."""
        host = self._host

        def failed(failure: Failure) -> None:
            failure.trap(ReplicationError)
            error = failure.value
            request.error = error if isinstance(error, FactsGoneError) else CatchUpError(failure.getErrorMessage())

        def deliver_answer() -> None:
            if not host.pages_held:
                request.deliver_answer()

        # An answer needs a turn of the reactor: hundreds of pages in one call would be too deep a recursion.
        answering.addErrback(failed).addCallback(lambda _: host.reactor.callLater(0, deliver_answer))
        answering.addErrback(host.world.broken)
        return await request.answer

    def _in_segments(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page | None:
        """Return a page of segments; None if they have no fact after ``step.after``."""
        if self._archive is None:
            return None
        try:
            page = self._archive.page(stream, writer, after=step.after, upto=step.upto, limit=limit)
        except CatchUpError:  # no replay has written this stream yet
            return None
        return page if page.upto > step.after else None

    async def history(self, endpoint: str | None, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs that the master or relay has, as its HTTP API does."""
        asked, served = self._asked(endpoint)
        if isinstance(asked, MasterHost) and not asked.master._opened:
            raise CatchUpError("no answer")
        try:
            return await served.history(stream, writer)
        except UnknownStreamError as error:
            raise CatchUpError(str(error)) from error

    async def count(
        self,
        endpoint: str | None,
        stream: StreamName,
        writer: InstanceName,
        history: History,
        *,
        after: Token,
        upto: Token,
    ) -> FactCount | None:
        """Return the count of facts of the master or relay, as pages of its HTTP API do; None if some are gone."""
        _, served = self._asked(endpoint)
        same = [*await self.history(endpoint, stream, writer)] == [*history]
        try:
            count = await count_facts(served.page, stream, writer, after=after, upto=upto)
        except FactsGoneError:
            return None
        if not same:
            raise CatchUpError("it does not have what the writer has")
        return count

    def _asked(self, endpoint: str | None) -> tuple[Host, IServed]:
        """Return the master or relay that listens at ``endpoint``, and what its HTTP API serves."""
        host, world = self._host, self._host.world
        senders: Iterable[MasterHost | WorkerHost] = (
            [world.workers[host.relay]] if host.relay else world.masters.values()
        )
        (asked,) = [each for each in senders if endpoint == f"tcp:{each}:{PORT}"]
        if host.pages_fail or not asked.running or {host.name, asked.name} & world.network.unplugged:
            raise CatchUpError("no answer")
        return asked, asked.master.served if isinstance(asked, MasterHost) else asked.worker.served

    async def close(self) -> None:
        """Fail the requests in progress."""
        for request in [each for each in self._host.world.page_requests if each.by is self._host]:
            request.fail("closing")


class ReportedProcess:
    """The HTTP of a master or relay, of which only the call for reports is used."""

    def __init__(self, sources: SimulatedSources, endpoint: str) -> None:
        self._sources = sources
        self._endpoint = endpoint

    async def report(
        self,
        name: InstanceName,
        positions: Positions,
        _version: str = "",
        streams: Collection[StreamName] | None = None,
    ) -> float:
        """Report the positions of a process."""
        return await self._sources.report(self._endpoint, name, positions, streams)
