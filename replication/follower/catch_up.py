"""Catch-up: missed facts are fetched in pages from the configured sources, or from the writer's HTTP.

For a large gap, folders of segments are tried first.  While a page is applied, the next page is fetched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
from msgspec.structs import replace
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger, LogLevel

from replication.errors import CatchUpError, ConfigError, FactsGoneError, StoreError
from replication.follower.doubts import FactCount, count_facts
from replication.follower.sources import DatabaseCatchUp, SegmentCatchUp
from replication.logs import TroubleLog
from replication.net.endpoints import default_http_url, is_redis
from replication.streams.facts import count_rows
from replication.streams.history import certain_position
from replication.streams.interfaces import Page
from replication.urls import Url
from replication.web.client import HttpCatchUp, StreamLackingError
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from replication.streams.cursor import CatchUp
    from replication.streams.definitions import StreamDefinition
    from replication.streams.history import History
    from replication.streams.retention import SegmentChain

DATABASES: Final = ("sqlite:", "postgresql:")
HTTP: Final = ("http://", "https://")
OWN_HTTP: Final = "its own HTTP"  # of the writer whose facts are missed
GONE_CURE: Final = (
    "name a folder of segments or another source that has them in catch_up, or start this worker once with "
    "--skip-gone, which leaves out what is gone up to {upto}"
)
SLOW: Final = 1.0  # seconds; a source that takes longer to fail is asked last
PUT_OFF: Final = 30.0  # seconds for which it is asked last
LARGE_GAP: Final = 100_000  # IDs, about twenty pages over HTTP: these take longer than the checksum of a segment


class _NextPage(msgspec.Struct, frozen=True):
    """The page after the one that is applied now, and the step for which it is fetched."""

    endpoint: str | None
    step: CatchUp
    page: Deferred[Page]

    def matches(self, endpoint: str | None, step: CatchUp) -> bool:
        """Whether this page is an answer to ``step``; it may end before ``step.upto``."""
        if step.fresh:
            return False
        fetched = self.step.after, self.step.resets, self.endpoint
        return fetched == (step.after, step.resets, endpoint) and self.step.upto <= step.upto

    def drop(self) -> None:
        """Cancel the fetch."""
        self.page.addErrback(lambda _: None)
        self.page.cancel()


@attrs.define
class _LongCatchUp:
    """The progress of a writer's facts over a large gap, for the log."""

    after: Token
    started: float  # seconds of the reactor
    source: str = ""  # as it was logged
    rows: int = 0


def _urls_of(urls: Sequence[str | Url]) -> list[Url]:
    return [Url(each) for each in urls]


@attrs.define(eq=False, repr=False)
class CatchUpSources:
    """The catch-up sources of a worker.

    The HTTP of the writer itself is the last source, unless an ``http://…`` is configured.  Only the writer's HTTP has
    the newest facts, and the facts of in-memory streams.  If no HTTP is known, some missed facts are skipped: those of
    streams that ``definitions`` describe as in-memory and, over Redis, those of streams that are not in
    ``definitions``, because a newer Synapse has added them.

    Args:
        reactor: for connections, threads and the time.
        urls: the configured sources in order: ``http://…``, a database URL, or a folder of segments.
        writers: for a writer by name, its ``connect`` and ``http``; by default ``http`` is the port after ``connect``.
        secret: the secret that the writers' HTTP requires.
        definitions: of streams that a database has in tables of an application.
        certificate: files with the certificate and the private key that ``https:`` sources are shown.
        server_name: of the homeserver whose database is read.

    Raises:
        ConfigError: a source is invalid.

    """

    log = Logger()

    _reactor: Any
    _urls: Sequence[Url] = attrs.field(converter=_urls_of)
    _writers: Mapping[str, Mapping[str, str]]
    _secret: str | None
    _definitions: Sequence[StreamDefinition] = ()
    _certificate: tuple[str, str] | None = None
    _server_name: str | None = None
    _sources: dict[Url, DatabaseCatchUp | HttpCatchUp | SegmentCatchUp] = attrs.field(init=False, factory=dict)
    _next_pages: dict[tuple[StreamName, InstanceName], _NextPage] = attrs.field(init=False, factory=dict)
    _troubles: dict[tuple[Url | None, StreamName, InstanceName], TroubleLog] = attrs.field(
        init=False, factory=lambda: defaultdict(lambda: TroubleLog(CatchUpSources.log, LogLevel.warn))
    )
    _long: dict[tuple[StreamName, InstanceName], _LongCatchUp] = attrs.field(init=False, factory=dict)
    # Of each writer, since the last connection was lost: a writer whose database is restored closes its connections.
    _histories: dict[tuple[StreamName, InstanceName], History] = attrs.field(init=False, factory=dict)
    _in_memory: set[StreamName] = attrs.field(init=False)
    _put_off: dict[Url, float] = attrs.field(init=False, factory=dict)  # slow sources, and until when

    # What ``FollowedLinks.history`` returns over the connection.
    sent_history: Callable[[StreamName, InstanceName], Awaitable[History | None]] = attrs.field(
        init=False, default=lambda _stream, _writer: succeed(())
    )

    def __attrs_post_init__(self) -> None:
        """Check the sources."""
        self._in_memory = {each.name for each in self._definitions if each.in_memory}
        for url in self._urls:
            if is_folder(url) and "://" not in url.reveal() and (why := _no_folder(url)):
                what = "give http://host:port, a database URL, or a folder of segments"
                raise ConfigError(f"cannot catch up from {url!r}: {why}; {what}")
            self._source(url)

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
        """Return a page from the first source that has facts of the writer after ``step.after``.

        Args:
            endpoint: which sent the writer's POSITION; None if unknown.
            stream: the stream.
            writer: whose facts.
            step: which facts.
            limit: rows of the page, about.
            followed: the history of the writer; empty if it is not known.

        Raises:
            CatchUpError: no source has any; the message has the reason of each.
            FactsGoneError: no source has any, and none will have them later.

        """
        fetched = self._next_pages.pop((stream, writer), None)
        page = None
        if fetched is not None and fetched.matches(endpoint, step):
            with suppress(CatchUpError):  # it is fetched again
                page = await fetched.page
        elif fetched is not None:
            fetched.drop()
        if page is None:
            page = await self.page(endpoint, stream, writer, step, limit, followed=followed)
        self._log_end(stream, writer, step, page)
        if page.limited and page.facts and page.upto < step.upto and not step.fresh:
            following = replace(step, after=page.upto)
            fetching = Deferred.fromCoroutine(self.page(endpoint, stream, writer, following, limit, followed=followed))
            self._next_pages[stream, writer] = _NextPage(endpoint, following, fetching)
        return page

    async def page(
        self,
        endpoint: str | None,
        stream: StreamName,
        writer: InstanceName,
        step: CatchUp,
        limit: int,
        *,
        followed: History = (),
    ) -> Page:
        """Return a page as ``fetch`` does, without a fetch of the page after it."""
        urls, failures, gone, lacking = self._in_order(step), [], list[int](), list[int]()
        if stream in self._in_memory or self._is_new(endpoint, stream):
            urls = [url for url in urls if url is None or url.startswith(HTTP)]
            if urls == [None] and self._http_of(endpoint, writer) is None:
                return self._skip(stream, writer, step)
        behind = may_have = False  # may_have: a source that fails now may have the facts later
        from_synapse = endpoint is not None and is_redis(endpoint)  # which has no histories
        for url in urls:
            if url is None and self._http_of(endpoint, writer) is None:
                failures.append(_no_http(endpoint, writer))
                continue
            began = self._reactor.seconds()
            try:
                source = self._source(url or self._writer_http(endpoint, writer))
                of_writer = url is None or from_synapse
                theirs = () if of_writer else await source.history(stream, writer)  # before the facts
                page = await source.facts(stream, writer, after=step.after, upto=step.upto, limit=limit)
                if theirs and page.upto > step.after:
                    ours = followed or await self._writer_history(endpoint, stream, writer)
                    page = _only_common(page, step.after, theirs, ours, f"{url}: facts of {stream} by {writer}")
            except (CatchUpError, StoreError) as error:
                failures.append(str(error))
                if url is not None and self._reactor.seconds() - began > SLOW:
                    self._put_off[url] = self._reactor.seconds() + PUT_OFF
                gone += [error.upto] if isinstance(error, FactsGoneError) and error.upto is not None else []
                may_have = may_have or not isinstance(error, FactsGoneError)
                if isinstance(error, StreamLackingError):  # of several writers, each has its own streams
                    continue
                self._troubles[url, stream, writer].report("a source of missed facts fails: {error}", error=error)
                continue
            self._troubles[url, stream, writer].end()
            if page.upto > step.after:
                self._log_source(stream, writer, url, step)
                return page
            lacking += [page.lacking] if page.lacking else []
            nothing = f"{url or OWN_HTTP} has nothing of {writer} after {step.after}"
            lacks = f"{url} lacks fact {page.lacking}: a row of it is too long for a line"
            failures.append(lacks if page.lacking else nothing)
            behind = behind or (url is not None and url.startswith(DATABASES))
            may_have = may_have or url is None or not is_folder(url)
        if gone and not may_have:
            upto = min(gone + lacking)  # segments may have the facts after one that they lack
            cure, text = GONE_CURE.format(upto=upto), "; ".join(failures)
            if cure not in text:  # a relay has it in its answer
                text = f"{text}; {cure}"
            raise FactsGoneError(text, stream=stream, writer=writer, upto=upto)
        raise CatchUpError("; ".join(failures), behind=behind)

    def _is_new(self, endpoint: str | None, stream: StreamName) -> bool:
        """Whether a Synapse has a stream that ``definitions`` lack, although they describe the streams of a Synapse."""
        described = {each.name for each in self._definitions}
        return bool(described) and endpoint is not None and is_redis(endpoint) and stream not in described

    def _skip(self, stream: StreamName, writer: InstanceName, step: CatchUp) -> Page:
        """Return an empty page for facts that no source has, and warn once."""
        what = "they are in its memory" if stream in self._in_memory else "no definition has this stream"
        why = f"the HTTP of {writer} is not known, and {what}; give http in [writers.{writer}]"
        self._troubles[None, stream, writer].report("{error}", error=f"missed facts of {stream} are skipped: {why}")
        return Page((), step.upto, limited=False)

    async def history(self, endpoint: str | None, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs of a writer; empty if it has none.

        The process that sends the writer's POSITION sends its history over the connection.  A source may be older than
        a restore of the writer's database: a history without the newest epoch of that process is not used.  If no
        source has this epoch, the history of that process is used (docs/protocol/following.md E7).  If it sends none,
        as a version 0.1, or is not connected, any history is used.  Segments are left out.

        CatchUpError: that process cannot read its history now; or it sends none, no source has any, and one failed.
        """
        return await self._history_with(await self.sent_history(stream, writer) or (), endpoint, stream, writer)

    async def _history_with(
        self, sent: History, endpoint: str | None, stream: StreamName, writer: InstanceName
    ) -> History:
        """Return the first history that has the newest epoch of ``sent``; if there is none, ``sent``."""
        if endpoint is not None and is_redis(endpoint):
            return ()  # a Synapse has none
        failures: list[str] = []
        for url in [*self._http_for_history(endpoint, writer), *self._databases()]:
            try:
                found = await self._source(url or self._writer_http(endpoint, writer)).history(stream, writer)
            except (CatchUpError, StoreError) as error:
                failures.append(str(error))
                continue
            if found and (not sent or sent[-1].name in [each.name for each in found]):
                return found
        if failures and not sent:
            raise CatchUpError("; ".join(failures))
        return sent

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
        """Return the count of a writer's facts in a range, from a source with its ``history``.

        None: some facts are gone, or no source is known.  CatchUpError: no source has this history and all of the
        range; the message has the reason of each.
        """
        failures = []
        urls = [*self._http_for_history(endpoint, writer), *self._databases()]
        if urls == [None] and self._http_of(endpoint, writer) is None:
            return None
        for url in urls:
            try:
                source = self._source(url or self._writer_http(endpoint, writer))
                if [*await source.history(stream, writer)] == [*history]:
                    count = await count_facts(source.facts, stream, writer, after=after, upto=upto)
                    if [*await source.history(stream, writer)] == [*history]:
                        return count
                failures.append(f"{url or OWN_HTTP} does not have what {writer} has of {stream} up to {upto}")
            except FactsGoneError:
                return None
            except (CatchUpError, StoreError) as error:
                failures.append(str(error))
        raise CatchUpError("; ".join(failures))

    async def _writer_history(self, endpoint: str | None, stream: StreamName, writer: InstanceName) -> History:
        """Return what ``history`` returned on this connection to the writer; CatchUpError if no source answers."""
        histories = self._histories
        if (stream, writer) in histories:
            return histories[stream, writer]
        try:
            sent = await self.sent_history(stream, writer)
            history = await self._history_with(sent or (), endpoint, stream, writer)
        except CatchUpError as error:
            raise CatchUpError(f"the history of {writer} is needed, and not known: {error}") from error
        if sent is not None:
            histories[stream, writer] = history
        return history

    def connection_lost(self) -> None:
        """Forget what the sources had of the writers' histories: a writer may come back with a restored database."""
        self._histories = {}

    def over_http(self, endpoint: str) -> list[HttpCatchUp]:
        """Return the HTTP sources: those that are configured, or that of the process at an endpoint."""
        own = self._http_of(endpoint, InstanceName(""))
        urls = [url for url in self._urls if url.startswith(HTTP)] or ([own] if own else [])
        return [each for each in map(self._source, urls) if isinstance(each, HttpCatchUp)]

    def over_http_of(self, endpoints: Iterable[str]) -> list[HttpCatchUp]:
        """Return the HTTP sources of the processes at several endpoints, each once; a Redis has none."""
        wires = sorted({each for each in endpoints if not is_redis(each)})
        return [*dict.fromkeys(http for each in wires for http in self.over_http(each))]

    async def segments(self) -> list[SegmentChain]:
        """Return what the folders of segments have; CatchUpError if one cannot be read."""
        sources = [(str(url), self._source(url)) for url in self._urls if not url.startswith((*HTTP, *DATABASES))]
        found = [(url, await each.manifest()) for url, each in sources if isinstance(each, SegmentCatchUp)]
        return [chain for url, manifest in found for chain in manifest.summary(url)]

    def foreign_database(self) -> DatabaseCatchUp | None:
        """Return the first source that is the database of another program; None if none is."""
        databases = [each for each in self._sources.values() if isinstance(each, DatabaseCatchUp)]
        return next((each for each in databases if each.foreign), None)

    async def close(self) -> None:
        """Cancel what is being fetched, and close every source."""
        for each in self._next_pages.values():
            each.drop()
        for source in self._sources.values():
            await source.close()

    def source_of(self, stream: StreamName, writer: InstanceName) -> str | None:
        """Return where a long catch-up fetches facts from; None if there is none."""
        long = self._long.get((stream, writer))
        return None if long is None else long.source

    def _in_order(self, step: CatchUp) -> list[Url | None]:
        """Return the URLs of the sources to try; None is the writer's HTTP."""
        folders = [url for url in self._urls if is_folder(url)]
        others = [url for url in self._urls if url not in folders]
        in_order = [*folders, *others] if step.upto - step.after > LARGE_GAP else self._urls
        now = self._reactor.seconds()
        return sorted([*in_order, *self._own()], key=lambda url: url is not None and self._put_off.get(url, now) > now)

    def _http_for_history(self, endpoint: str | None, writer: InstanceName) -> list[Url | None]:
        """Return the URLs of the HTTP sources that may know the newest history; None, the writer's own, is the last.

        Beside an ``https:`` source, the default URL of the writer is not used: it would send the secret in plain text.
        """
        own = self._http_of(endpoint, writer)
        others = [url for url in self._urls if url.startswith(HTTP) and url != own]
        plain = any(url.startswith("https:") for url in others) and not self._has_given_http(endpoint, writer)
        return [*others] if others and (own is None or plain) else [*others, None]

    def _has_given_http(self, endpoint: str | None, writer: InstanceName) -> bool:
        """Whether the URL of a writer's HTTP is given, so it does not follow from the endpoint of its wire."""
        own = self._http_of(endpoint, writer)
        return own is not None and (endpoint is None or own.reveal() != default_http_url(endpoint))

    def _databases(self) -> list[Url]:
        return [url for url in self._urls if url.startswith(DATABASES)]

    def _own(self) -> list[None]:
        """Return None, for the writer's HTTP, unless an HTTP source is configured."""
        return [] if any(url.startswith(HTTP) for url in self._urls) else [None]

    def _log_source(self, stream: StreamName, writer: InstanceName, url: Url | None, step: CatchUp) -> None:
        """Log the source of a long catch-up, once until another source is used."""
        count = step.upto - step.after
        if count <= LARGE_GAP:
            return
        long = self._long.setdefault((stream, writer), _LongCatchUp(step.after, self._reactor.seconds()))
        source = str(url or OWN_HTTP)
        if long.source != source:
            long.source = source
            self.log.info(
                "fetching {stream} of {writer} from {source}: {count} IDs to go",
                stream=stream,
                writer=writer,
                source=source,
                count=count,
            )

    def _log_end(self, stream: StreamName, writer: InstanceName, step: CatchUp, page: Page) -> None:
        """Log that the last page of a long catch-up is fetched."""
        long = self._long.get((stream, writer))
        if long is None:
            return
        long.rows += count_rows(page.facts)
        if page.upto >= step.upto:
            del self._long[stream, writer]
            self.log.info(
                "fetched {stream} of {writer} up to {upto}: {rows} rows of {count} IDs in {seconds:.1f} s",
                stream=stream,
                writer=writer,
                upto=page.upto,
                rows=long.rows,
                count=page.upto - long.after,
                seconds=self._reactor.seconds() - long.started,
            )

    def _writer_http(self, endpoint: str | None, writer: InstanceName) -> Url:
        url = self._http_of(endpoint, writer)
        if url is None:
            raise CatchUpError(_no_http(endpoint, writer))
        return url

    def _http_of(self, endpoint: str | None, writer: InstanceName) -> Url | None:
        """Return the URL of a writer's HTTP, or of the process that sends the position of a former writer."""
        own = self._writers.get(writer, {})
        sender = [each for each in self._writers.values() if endpoint and each.get("connect") == endpoint]
        known = [each["http"] for each in sender if each.get("http")]
        found = [*known, endpoint and default_http_url(endpoint)]
        of_another = own.get("connect", endpoint) != endpoint  # of a former writer, whose own HTTP may not answer
        in_order = [*found, own.get("http")] if of_another else [own.get("http"), *found]
        url = next((each for each in in_order if each), None)
        return Url(url) if url else None

    def _source(self, url: Url) -> DatabaseCatchUp | HttpCatchUp | SegmentCatchUp:
        if url not in self._sources and url.startswith(HTTP):
            self._sources[url] = HttpCatchUp(self._reactor, url, self._secret, certificate=self._certificate)
        elif url not in self._sources:
            self._sources[url] = (
                DatabaseCatchUp(url, self._reactor, self._definitions, self._server_name)
                if url.startswith(DATABASES)
                else SegmentCatchUp(url, self._reactor)
            )
        return self._sources[url]


def _no_http(endpoint: str | None, writer: InstanceName) -> str:
    return f"no HTTP is known for {writer!r} at {endpoint}: give catch_up, or http in [writers.{writer}]"


def _no_folder(path: Url) -> str:
    """Return why there is no folder; empty if there is one."""
    try:
        return "" if Path(path.reveal()).is_dir() else "there is no such folder"
    except OSError as error:  # of a folder above it
        return str(error.strerror)


def _only_common(page: Page, after: Token, theirs: History, ours: History, what: str) -> Page:
    """Return the facts of a page that are of the writer's history ``ours``, given the history of the source.

    The source may be older than a restore of the writer's database, and have facts that the writer has lost.
    FactsGoneError: it has no fact of the writer above ``after``, or may lack facts that a lost fact has replaced.
    """
    if not ours:
        return page
    common = certain_position(theirs, ours, max(page.upto, page.replaced_upto)) or Token(0)
    if common <= after:
        why = "the source is older than a restore of that database, or of another database"
        raise FactsGoneError(f"{what} above {common} are not those that the writer has: {why}")
    if common < page.replaced_upto:
        why = f"so facts below may be missing, because the segments are compacted up to {page.replaced_upto}"
        raise FactsGoneError(f"{what} above {common} are not those that the writer has, {why}")
    if common >= page.upto:
        return page
    return Page(page.facts[: bisect_right(page.facts, common, key=itemgetter(0))], common, limited=True)


def is_folder(url: Url) -> bool:
    """Whether a source is a folder of segments, on this machine or in an object store."""
    return not url.startswith((*HTTP, *DATABASES))
