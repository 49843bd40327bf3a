"""Missed facts over HTTP: an ICatchUp that asks our own API, or else a Synapse's replication listener."""

from __future__ import annotations

import re
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote, urlencode, urlsplit

import attrs
import msgspec
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectError
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import Agent, HTTPConnectionPool, ResponseDone, ResponseFailed, _HTTP11ClientFactory
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers

from replication.errors import TLS_CURE, CatchUpError, ConfigError
from replication.web.door import bearer
from replication.web.facts import MAX_PAGE_ROWS, BackwardsPageError, read_page
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twisted.internet.interfaces import IReactorTime, ITransport

    from replication.streams.seams import Page
    from replication.wire.grammar import InstanceName, StreamName

PATIENCE: Final = 30.0  # seconds for an answer to begin, and for each further STRIDE of it
STRIDE: Final = 2**16  # bytes
BODY_LIMIT: Final = 256 * 2**20  # bytes; eight times what our own API puts on a page
CONNECT_PATIENCE: Final = 10.0  # seconds
IDLE: Final = 50  # seconds that an unused connection is kept: a little less than Twisted's servers keep theirs


class NotAllowedError(CatchUpError):
    """They do not let us in: to ask again is of no use before somebody changes a secret."""


@attrs.frozen
class _Response:
    url: str
    code: int
    location: bytes
    body: bytes

    def error(self) -> CatchUpError:
        """Return what is wrong, and what to do about it."""
        kind = NotAllowedError if self.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN} else CatchUpError
        return kind(f"{self.url}: HTTP {self.code}: {self._meaning()}")

    def _meaning(self) -> str:
        match self.code, self.decoded():
            case 401, _:
                return "the secret is missing or wrong; both sides must be given the same --secret-file"
            case ((301 | 302 | 303 | 307 | 308), _):
                return f"redirects to {self.location.decode('latin-1')!r:.200}; give the address that answers itself"
            case 500, {"errcode": _}:
                return "an error in that Synapse, or a missing or wrong secret, of which it says no more"
            case _, {"detail": str(text)} | {"error": str(text)}:
                return text[:500]
        return f"not an answer of ours: {self.body[:100]!r}"

    def decoded(self) -> dict[str, object]:
        """Return the body if it is a JSON object, else an empty one."""
        try:
            return msgspec.json.decode(self.body, type=dict[str, object])
        except (msgspec.MsgspecError, RecursionError):
            return {}

    def knows_no_route(self) -> bool:
        """Whether it is the path that is unknown there: our own refusals have a ``detail``."""
        if self.code in {404, 405}:
            return "detail" not in self.decoded()
        return self.code == HTTPStatus.BAD_REQUEST and self.decoded().get("errcode") == "M_UNRECOGNIZED"


class HttpCatchUp:
    """Fetches facts from one process, over connections that it keeps.

    Our own API is asked first, and serves any writer whose facts it has.  Where it is not known, the Synapse form is
    used from then on (protocol E5); that always answers with the rows of the process asked, so ``base_url`` must be the
    stream's writer.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        base_url: str,
        secret: str | None = None,
        pool: HTTPConnectionPool | None = None,
    ) -> None:
        """Fetch from ``base_url``, showing ``secret``; ConfigError if either cannot be one."""
        if not _is_address(base_url):
            raise ConfigError(f"not an address to catch up from: {base_url!r:.200}; write http://HOST:PORT")
        self._base = base_url.rstrip("/")
        self._reactor = reactor
        self._headers = Headers({b"user-agent": [b"replication"]})
        if secret is not None:
            self._headers.addRawHeader(b"authorization", bearer(secret))
        if pool is None:
            pool = _QuietPool(reactor)  # type: ignore[no-untyped-call]
            pool.cachedConnectionTimeout = IDLE
        self._pool = pool
        self._agent = Agent(reactor, pool=pool, connectTimeout=CONNECT_PATIENCE)
        self._foreign = False

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts as ICatchUp says; CatchUpError names the URL, what was wrong with the answer, and the cure.

        ``limit`` is at most MAX_PAGE_ROWS; a Synapse has its own, 100.
        """
        if not self._foreign:
            asked = {"instance": writer, "from": after, "upto": upto, "limit": max(1, min(limit, MAX_PAGE_ROWS))}
            response = await self._get(f"/v1/streams/{quote(stream, safe='')}/updates", asked)
            if not response.knows_no_route():
                return self._read(response, after, upto, foreign=False)
        page = await self._facts_of_synapse(stream, after, upto)
        self._foreign = True
        return page

    async def close(self) -> None:
        """Close the connections that are kept."""
        await self._pool.closeCachedConnections()

    async def _facts_of_synapse(self, stream: StreamName, after: Token, upto: Token) -> Page:
        """Ask in Synapse's form, for half as much as often as a page comes backwards."""
        reach = upto
        while True:
            # an answer is remembered by the path's last word alone, for half an hour: a new one each time
            path = f"/_synapse/replication/get_repl_stream_updates/{quote(stream, safe='')}/{secrets.token_hex(5)}"
            response = await self._get(path, {"from_token": after, "upto_token": reach})
            try:
                page = self._read(response, after, reach, foreign=True)
            except BackwardsPageError:
                reach = Token(after + (reach - after) // 2)
            else:
                return attrs.evolve(page, limited=page.limited or reach < upto)

    def _read(self, response: _Response, after: Token, upto: Token, *, foreign: bool) -> Page:
        if response.code != HTTPStatus.OK:
            raise response.error()
        try:
            return read_page(response.body, after=after, upto=upto, foreign=foreign)
        except CatchUpError as error:
            raise type(error)(f"{response.url}: {error}") from error

    async def _get(self, path: str, query: Mapping[str, object]) -> _Response:
        url = f"{self._base}{path}?{urlencode(query)}"
        try:
            asking = self._agent.request(b"GET", url.encode("ascii"), self._headers)
            response = await asking.addTimeout(PATIENCE, self._reactor, onTimeoutCancel=_too_late)
            body = _Body(self._reactor)
            response.deliverBody(body)
            text = await body.whole
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, CancelledError):
                raise cause from None  # the caller's wish
            raise CatchUpError(f"{url}: {_why(error, cause)}") from error
        return _Response(url, response.code, response.headers.getRawHeaders(b"location", [b""])[0], text)


class _QuietFactory(_HTTP11ClientFactory):
    """A factory that does not log each of its connections."""

    noisy = False


class _QuietPool(HTTPConnectionPool):
    _factory = _QuietFactory


class _Body(Protocol):
    """Collects a response that must keep coming and must end."""

    def __init__(self, reactor: IReactorTime) -> None:
        self.whole: Deferred[bytes] = Deferred(lambda _: self._give_up(None))
        self._reactor = reactor
        self._chunks: list[bytes] = []
        self._size = self._due = 0

    def connectionMade(self) -> None:
        """Begin to wait."""
        self._alarm = self._reactor.callLater(
            PATIENCE, self._give_up, CatchUpError(f"the answer stopped, or all but, for {PATIENCE:.0f} s")
        )

    def dataReceived(self, data: bytes) -> None:
        """Keep a part, and wait on if it is more than a trickle."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > BODY_LIMIT:
            self._give_up(CatchUpError(f"the answer has more than {BODY_LIMIT} bytes; ask for fewer rows"))
        elif self._size > self._due:
            self._due = self._size + STRIDE
            self._alarm.reset(PATIENCE)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Hand over what came, or why it did not come whole."""
        if self._alarm.active():
            self._alarm.cancel()
        if self.whole.called:
            return
        if reason.check(ResponseDone, PotentialDataLoss):
            self.whole.callback(b"".join(self._chunks))
        else:
            self.whole.errback(reason)

    def _give_up(self, error: CatchUpError | None) -> None:
        if self._alarm.active():
            self._alarm.cancel()
        self._chunks.clear()
        if error is not None:
            self.whole.errback(error)
        cast("ITransport", self.transport).loseConnection()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        plain = parts.port != 0 and not (parts.username or parts.query or parts.fragment)
    except ValueError:
        return False
    return plain and parts.scheme in {"http", "https"} and bool(parts.hostname) and re.search(r"[^!-~]", url) is None


def _too_late(_: object, seconds: float) -> Failure:
    return Failure(CatchUpError(f"no answer within {seconds:.0f} s"))


def _cause(error: BaseException) -> BaseException:
    """Return what Twisted has wrapped, often more than once."""
    reasons = getattr(error, "reasons", None)
    return _cause(reasons[0].value) if reasons else error


def _why(error: BaseException, cause: BaseException) -> str:
    text = str(cause) or type(cause).__name__
    match error:
        case ConnectError():
            return f"{text} Is the process up, with --http on that port?"
        case ResponseFailed():
            return f"cut off, or not HTTP: {text}"
        case NotImplementedError():
            return f"{text}: {TLS_CURE}"
    return text
