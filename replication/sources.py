"""Where missed facts come from: the sources that the user named, in order, or the HTTP of the writer itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replication.errors import CatchUpError, ConfigError, StoreError
from replication.net.link import http_beside
from replication.storage import open_store
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Page
from replication.web.client import HttpCatchUp
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.streams.cursor import CatchUp
    from replication.streams.seams import IStreamStore
    from replication.wire.grammar import InstanceName, StreamName

DATABASES = ("sqlite:", "postgresql:")


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
        reached = (await self._store.positions(stream)).get(writer, Token(0))
        if reached <= after:
            return Page([], after, limited=True)
        return await self._store.facts(stream, writer, after=after, upto=min(upto, reached), limit=limit)

    async def close(self) -> None:
        """Let go of the database."""
        await self._store.close()


class Sources:
    """All the places to ask, for one worker.

    ``urls`` are ``http://…`` or database URLs; without any, a writer's own HTTP is asked: ``http`` in its entry of
    ``writers``, or what lies beside its endpoint.
    """

    def __init__(
        self, reactor: Any, urls: Sequence[str], writers: Mapping[str, Mapping[str, str]], secret: str | None
    ) -> None:
        self._reactor = reactor
        self._writers = writers
        self._secret = secret
        self._made: dict[str, DatabaseCatchUp | HttpCatchUp] = {}
        for url in urls:  # now, so that a wrong one is found before it is needed
            self._at(self._check(url))
        self._urls = list(urls)

    async def fetch(
        self, endpoint: str | None, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int
    ) -> Page:
        """Return a page from the first source that gets further than ``step.after``; CatchUpError says why none did.

        ``endpoint`` is where the writer was heard.
        """
        failures = []
        for url in self._urls or [self._own(endpoint, writer)]:
            try:
                page = await self._at(url).facts(stream, writer, after=step.after, upto=step.upto, limit=limit)
            except (CatchUpError, StoreError) as error:
                failures.append(str(error))
                continue
            if page.upto > step.after:
                return page
            failures.append(f"{url} has nothing of {writer} after {step.after}")
        raise CatchUpError("; ".join(failures))

    async def close(self) -> None:
        """Let go of every source."""
        for source in self._made.values():
            await source.close()

    def _own(self, endpoint: str | None, writer: InstanceName) -> str:
        url = self._writers.get(writer, {}).get("http") or (endpoint and http_beside(endpoint))
        if not url:
            raise CatchUpError(
                f"no HTTP is known for {writer!r} at {endpoint}: give catch_up, or http in [writers.{writer}]"
            )
        return url

    def _check(self, url: str) -> str:
        if not url.startswith(("http://", "https://", *DATABASES)):
            raise ConfigError(f"cannot catch up from {url!r}: give http://host:port or a database URL")
        return url

    def _at(self, url: str) -> DatabaseCatchUp | HttpCatchUp:
        source = self._made.get(url)
        if source is None:
            if url.startswith(DATABASES):
                source = DatabaseCatchUp(url, self._reactor)
            else:
                source = HttpCatchUp(self._reactor, url, self._secret)
            self._made[url] = source
        return source
