"""A process's HTTP API, as Spark's workers call it: blocking, over a connection that is kept, and patient if asked."""

from __future__ import annotations

import http.client
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import attrs
import msgspec

from replication.errors import CatchUpError, ConfigError
from replication.web.facts import MAX_PAGE_ROWS, read_page
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from replication.streams.seams import Page

_T = TypeVar("_T")

TIMEOUT: Final = 60.0  # seconds for an answer
FIRST_DELAY: Final = 0.1  # seconds until it is tried again; doubled at each failure in a row
LAST_DELAY: Final = 2.0
_PASSING: Final[frozenset[int]] = frozenset({408, 429, 500, 502, 503, 504})  # statuses that may be different next time


@attrs.frozen
class StreamInfo:
    """What the API says of a stream: its declared ``fields``, and how far each writer can be read."""

    fields: tuple[str, ...] | None
    positions: Mapping[InstanceName, Token]


class AwayError(CatchUpError):
    """The API does not answer, or not yet; it may do so later."""


class Api:
    """The API at ``url``, which wants ``secret``; one that is away is asked again for ``patience`` seconds.

    If the stream is ``known`` to be there, a process that says otherwise has not come so far yet: it is away, too.
    ``now`` and ``sleep`` are the clock's.
    """

    def __init__(
        self,
        url: str,
        secret: str | None = None,
        patience: float = 0.0,
        *,
        known: bool = False,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if not host or parts.scheme not in {"http", "https"} or parts.username is not None:
            raise ConfigError(f"not the URL of an HTTP API: {url!r}; it looks like http://127.0.0.1:9093")
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.url = url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._connection = connect(host, port, timeout=TIMEOUT)
        self._headers = {} if secret is None else {"Authorization": b"Bearer " + secret.encode()}
        self._patience = patience
        self._passing = _PASSING | ({HTTPStatus.NOT_FOUND} if known else set())
        self._now = now
        self._sleep = sleep

    def close(self) -> None:
        """Close the connection; another call opens it again."""
        self._connection.close()

    def stream(self, name: str) -> StreamInfo:
        """Return how a stream stands; CatchUpError if there is none, AwayError if nobody says."""
        path = f"/v1/streams/{quote(name, safe='')}"
        said: Any = self._patiently(lambda: msgspec.json.decode(self._get(path)))
        positions = {each["instance"]: Token(min(each["position"], each["announced"])) for each in said["writers"]}
        return StreamInfo(None if said["row"] is None else tuple(said["row"]), positions)

    def page(self, stream: str, writer: str, *, after: int, upto: int, limit: int = MAX_PAGE_ROWS) -> Page:
        """Return a page of facts with ``after < token <= upto``, which reaches beyond ``after``."""
        asked = {"instance": writer, "from": after, "upto": upto, "limit": limit}
        path = f"/v1/streams/{quote(stream, safe='')}/updates?{urlencode(asked)}"

        def ask() -> Page:
            page = read_page(self._get(path), after=Token(after), upto=Token(upto))
            if page.upto <= after:
                raise AwayError(f"{self.url} has nothing of {writer} after {after} yet")
            return page

        return self._patiently(ask)

    def pages(self, stream: str, writer: str, *, after: int, upto: int) -> Iterator[Page]:
        """Yield pages until ``upto``."""
        while after < upto:
            page = self.page(stream, writer, after=after, upto=upto)
            yield page
            after = page.upto

    def _patiently(self, ask: Callable[[], _T]) -> _T:
        deadline, delay = self._now() + self._patience, FIRST_DELAY
        while True:
            try:
                return ask()
            except AwayError:
                if self._now() + delay > deadline:
                    raise
            self._sleep(delay)
            delay = min(delay * 2, LAST_DELAY)

    def _get(self, path: str) -> bytes:
        try:
            self._connection.request("GET", self._prefix + path, headers=self._headers)
            response = self._connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise AwayError(f"cannot reach {self.url}: {why}; is the daemon running there?") from error
        if response.status == HTTPStatus.OK:
            return body
        kind = AwayError if response.status in self._passing else CatchUpError
        detail = _detail(body) or response.reason
        if response.status == HTTPStatus.UNAUTHORIZED and not self._headers:
            detail = "it wants a secret: give the option secretFile, a file with what its --secret-file has"
        raise kind(f"{self.url} says {response.status}: {detail}")


def _detail(body: bytes) -> str | None:
    try:
        said = msgspec.json.decode(body, type=dict[str, object])
    except msgspec.MsgspecError:
        return None
    detail = said.get("detail") or said.get("error")
    return None if detail is None else str(detail)
