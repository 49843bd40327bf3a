"""Where missed facts come from: the sources that the user named, in order, or the HTTP of the writer itself.

Large gaps are what segments are for: they are asked first for those, wherever the user named them.  While a page is
being applied, the next one is read.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import CatchUpError, ConfigError, StoreError
from replication.net.link import http_beside
from replication.replay.archive import Archive
from replication.replay.databases import name_of
from replication.replay.folders import open_folder
from replication.storage import open_store
from replication.storage.threads import Lane
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Page
from replication.web.client import HttpCatchUp
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.cursor import CatchUp
    from replication.streams.seams import IStreamStore
    from replication.wire.grammar import InstanceName, StreamName

DATABASES: Final = ("sqlite:", "postgresql:")
HTTP: Final = ("http://", "https://")
LARGE_GAP: Final = 100_000  # IDs: some twenty pages over HTTP, and less than it takes to check a segment's sum


class DatabaseCatchUp:
    """Reads what was missed from a database: the writer's own, or a copy that another worker keeps."""

    def __init__(self, url: str, reactor: Any) -> None:
        self._store: IStreamStore = open_store(url, reactor, read_only=True)
        self._declared: set[StreamName] = set()
        self._opened = False

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts as far as this database has them: a copy may be behind."""
        if not self._opened:
            await self._store.open()
            self._opened = True
        if stream not in self._declared:
            await self._store.declare(StreamDefinition(stream))
            self._declared.add(stream)
        if upto - after > limit:
            page = await self._store.facts(stream, writer, after=after, upto=upto, limit=limit)
            if page.limited:  # a full page: there is no question how far this database has come
                return page
        reached = (await self._store.positions(stream)).get(writer, Token(0))
        if reached <= after:
            return Page([], after, limited=True)
        return await self._store.facts(stream, writer, after=after, upto=min(upto, reached), limit=limit)

    async def close(self) -> None:
        """Let go of the database."""
        await self._store.close()


class SegmentCatchUp:
    """Reads what was missed from a folder of segments, on a thread of its own."""

    def __init__(self, url: str, reactor: Any) -> None:
        self._archive = Archive(open_folder(url))
        self._lane = Lane(reactor, f"replication {url}")

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts as far as segments have them; CatchUpError names one that is damaged or missing."""
        return await self._lane.run(self._archive.page, stream, writer, after=after, upto=upto, limit=limit)

    async def close(self) -> None:
        """Close files and end the thread."""
        await self._lane.run(self._archive.close)
        await self._lane.stop()


@attrs.frozen
class _Ahead:
    """The page that will be asked for next, most likely."""

    endpoint: str | None
    step: CatchUp
    page: Deferred[Page]

    def answers(self, endpoint: str | None, step: CatchUp) -> bool:
        """Whether it is what is asked for now, of the same epoch; it may reach less far."""
        if step.fresh:
            return False
        asked = self.step.after, self.step.epoch, self.endpoint
        return asked == (step.after, step.epoch, endpoint) and self.step.upto <= step.upto

    def drop(self) -> None:
        """Nobody will ask for it."""
        self.page.addErrback(lambda _: None)
        self.page.cancel()


class Sources:
    """All the places to ask, for one worker.

    ``urls`` are ``http://…``, database URLs or folders of segments.  Segments end somewhere, and no database has what a
    writer keeps in memory: where there is no ``http://…`` among them, a writer's own HTTP comes last, ``http`` in its
    entry of ``writers``, or what lies beside its endpoint.
    """

    log = Logger()

    def __init__(
        self, reactor: Any, urls: Sequence[str], writers: Mapping[str, Mapping[str, str]], secret: str | None
    ) -> None:
        self._reactor = reactor
        self._writers = writers
        self._secret = secret
        self._made: dict[str, DatabaseCatchUp | HttpCatchUp | SegmentCatchUp] = {}
        self._ahead: dict[tuple[StreamName, InstanceName], _Ahead] = {}
        self._failing: set[tuple[str, StreamName, InstanceName]] = set()
        self._going: dict[tuple[StreamName, InstanceName], str] = {}  # the sources of long ways
        for url in urls:  # now, so that a wrong one is found before it is needed
            self._at(check_source(url))
        self._urls = list(urls)

    async def fetch(
        self, endpoint: str | None, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int
    ) -> Page:
        """Return a page from the first source that gets further than ``step.after``; CatchUpError says why none did.

        ``endpoint`` is where the writer was heard.
        """
        ahead = self._ahead.pop((stream, writer), None)
        page = None
        if ahead is not None and ahead.answers(endpoint, step):
            with suppress(CatchUpError):  # that was then
                page = await ahead.page
        elif ahead is not None:
            ahead.drop()
        if page is None:
            page = await self._fetch(endpoint, stream, writer, step, limit)
        if page.limited and page.facts and page.upto < step.upto and not step.fresh:
            following = attrs.evolve(step, after=page.upto)
            reading = Deferred.fromCoroutine(self._fetch(endpoint, stream, writer, following, limit))
            self._ahead[stream, writer] = _Ahead(endpoint, following, reading)
        return page

    async def _fetch(
        self, endpoint: str | None, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int
    ) -> Page:
        failures: list[str] = []
        for url in self._in_order(step):
            try:
                source = self._at(url or self._own(endpoint, writer))
                page = await source.facts(stream, writer, after=step.after, upto=step.upto, limit=limit)
            except (CatchUpError, StoreError) as error:
                failures.append(str(error))
                self._failed((url, stream, writer), error)
                continue
            self._failing.discard((url, stream, writer))
            if page.upto > step.after:
                self._say_who_tells((stream, writer), url, step)
                return page
            failures.append(f"{url} has nothing of {writer} after {step.after}")
        raise CatchUpError("; ".join(failures))

    async def close(self) -> None:
        """Let go of every source."""
        for ahead in self._ahead.values():
            ahead.drop()
        for source in self._made.values():
            await source.close()

    def _in_order(self, step: CatchUp) -> list[str]:
        """Return the URLs to try; an empty one is the writer's own HTTP."""
        folders = [url for url in self._urls if is_folder(url)]
        others = [url for url in self._urls if url not in folders]
        own = [] if any(url.startswith(HTTP) for url in others) else [""]
        in_order = [*folders, *others] if step.upto - step.after > LARGE_GAP else self._urls
        return [*in_order, *own]

    def _failed(self, where: tuple[str, StreamName, InstanceName], error: Exception) -> None:
        """Log why a source is passed over, once until it answers again: the next one would hide that it is broken."""
        if where not in self._failing:
            self._failing.add(where)
            self.log.warn("a source of missed facts fails: {text}", text=str(error))

    def _say_who_tells(self, key: tuple[StreamName, InstanceName], url: str, step: CatchUp) -> None:
        """Log which source tells of a long way, once until that is another one."""
        if step.upto - step.after <= LARGE_GAP:
            self._going.pop(key, None)
        elif self._going.get(key) != url:
            self._going[key] = url
            text = "fetching {stream} of {writer} from {source}: {count} IDs to go"
            source, count = name_of(url) or "its own HTTP", step.upto - step.after
            self.log.info(text, stream=key[0], writer=key[1], source=source, count=count)

    def _own(self, endpoint: str | None, writer: InstanceName) -> str:
        here = [each for each in self._writers.values() if endpoint and each.get("connect") == endpoint]
        places = [self._writers.get(writer, {}), *here]  # of a writer that is gone, somebody else tells us
        url = next((each["http"] for each in places if each.get("http")), None) or (endpoint and http_beside(endpoint))
        if not url:
            raise CatchUpError(
                f"no HTTP is known for {writer!r} at {endpoint}: give catch_up, or http in [writers.{writer}]"
            )
        return url

    def _at(self, url: str) -> DatabaseCatchUp | HttpCatchUp | SegmentCatchUp:
        source = self._made.get(url)
        if source is None:
            if url.startswith(DATABASES):
                source = DatabaseCatchUp(url, self._reactor)
            elif url.startswith(HTTP):
                source = HttpCatchUp(self._reactor, url, self._secret)
            else:
                source = SegmentCatchUp(url, self._reactor)
            self._made[url] = source
        return source


def is_folder(url: str) -> bool:
    """Whether a source is a folder of segments, on this machine or in an object store."""
    return not url.startswith((*HTTP, *DATABASES))


def check_source(url: str) -> str:
    """Return ``url`` if something can be asked there; else ConfigError."""
    if is_folder(url) and "://" not in url and not Path(url).is_dir():
        raise ConfigError(
            f"cannot catch up from {url!r}: there is no such folder; give http://host:port, a database URL, or a folder"
            " of segments"
        )
    return url
