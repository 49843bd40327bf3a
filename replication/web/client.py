"""Missed facts over HTTP: an ICatchUp that calls the API of a process, or the replication listener of a Synapse."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from urllib.parse import quote, urlencode

import attrs
import msgspec
from msgspec.structs import replace
from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint, wrapClientTLS
from twisted.internet.error import ConnectError, ConnectingCancelledError, ConnectionClosed
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent, HTTPConnectionPool, ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory, IBodyProducer, IPolicyForHTTPS
from zope.interface import implementer

from replication.errors import TLS_CURE, CatchUpError, FactsGoneError
from replication.net.tls import client_tls, describe_tls_error
from replication.streams.history import Epoch  # noqa: TC001 (msgspec reads the annotations)
from replication.urls import Url, hide_secret
from replication.web.address import bearer, split_url
from replication.web.pages import GROW, MAX_ANSWER, MAX_PAGE_ROWS, SHRINK, BackwardsPageError, NoPageError, read_page
from replication.web.passage import note_passage
from replication.web.response import Response
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from twisted.internet.interfaces import (
        IConsumer,
        IOpenSSLClientConnectionCreator,
        IProtocol,
        IProtocolFactory,
        IReactorTime,
        ITransport,
    )
    from twisted.internet.protocol import Factory

    from replication.streams.history import History
    from replication.streams.interfaces import Page

AGENT: Final = "replication"  # the name that HTTP sends; a report has the version, too
PATIENCE: Final = 30.0  # seconds for an answer to begin, and for each further STRIDE of it
STRIDE: Final = 2**16  # bytes
BODY_LIMIT: Final = MAX_ANSWER  # bytes; eight times PAGE_BYTES
HEAD_LIMIT: Final = 2**16  # bytes of status and headers; the read that passes it, 64 KiB at most, is still parsed
CONNECT_PATIENCE: Final = 10.0  # seconds
# Seconds between attempts at the addresses of a host.  Twisted's 0.3 also delays the answer that nothing listens.
ATTEMPT_DELAY: Final = 0.02
IDLE: Final = 50  # seconds that an unused connection is kept: less than the 60 of Twisted's servers


T = TypeVar("T")


class LostAnswerError(CatchUpError):
    """An answer did not arrive as a whole: a smaller one may."""


class StreamLackingError(FactsGoneError):
    """The process at this URL does not have the stream, and will not have it before its next start."""


class _Epochs(msgspec.Struct):
    epochs: list[Epoch]


class _Reported(msgspec.Struct):
    next: float


class AuditedWriter(msgspec.Struct, frozen=True):
    """A writer of a stream at another process: the fields of ``/v1/streams`` that a follower needs.

    ``audited`` is None if that process does not compare the writer's facts, as before version 0.2.
    """

    instance: InstanceName
    position: Token
    audited: Token | None = None
    late: int = 0
    state: str = ""


class _AuditedStream(msgspec.Struct):
    name: StreamName
    writers: list[AuditedWriter]


class _AuditedStreams(msgspec.Struct):
    streams: list[_AuditedStream]


class _DeclaredStream(msgspec.Struct):
    name: StreamName
    row: list[str] | None = None


class _DeclaredStreams(msgspec.Struct):
    streams: list[_DeclaredStream]


class HttpCatchUp:
    """Fetches facts from one process, over connections that it keeps.

    The API of this package serves the facts of every writer that the process has.  A server without that API is from
    then on called as a Synapse worker calls it (docs/protocol/following.md E5).  Such a server has only the facts of
    the process at ``base_url``, which must be the stream's writer.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        base_url: str | Url,
        secret: str | None = None,
        pool: HTTPConnectionPool | None = None,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        """Fetch from ``base_url``, with ``secret`` if it requires one; ConfigError if either is invalid.

        ``certificate``: two files, a certificate and its private key, that ``https:`` shows.
        """
        split_url(base_url)
        self._base = Url(base_url).reveal().rstrip("/")  # it has no secret
        self._reactor = reactor
        self._secret = secret or ""
        self._headers = Headers({b"user-agent": [AGENT.encode()]})
        if secret is not None:
            self._headers.addRawHeader(b"authorization", bearer(secret))
        if pool is None:
            pool = _QuietPool(reactor)  # type: ignore[no-untyped-call]
            pool.cachedConnectionTimeout = IDLE
        self._pool = pool
        self._agent = Agent.usingEndpointFactory(reactor, _Endpoints(reactor, _Policy(certificate)), pool)
        self._foreign = False
        self._rows: dict[tuple[StreamName, InstanceName], int] = {}  # of the next page, once an answer was lost

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page of facts, as ICatchUp requires; CatchUpError names the URL, the reason and the cure.

        ``limit`` is at most MAX_PAGE_ROWS; a Synapse has its own, 100 rows.  Once an answer was lost, pages are
        smaller, and grow again while they arrive (docs/protocol/following.md E5).
        """
        if not self._foreign:
            rows = max(1, min(limit, MAX_PAGE_ROWS, self._rows.get((stream, writer), MAX_PAGE_ROWS)))
            page = await self._facts(stream, writer, after, upto, rows)
            if page is not None:
                return page
        page = await self._facts_of_synapse(stream, after, upto)
        self._foreign = True
        return page

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs of a writer; empty if the server knows none, as a Synapse or a version 0.1.

        CatchUpError as ``facts``.
        """
        if self._foreign:
            return ()
        response = await self._get(f"/v1/streams/{quote(stream, safe='')}/history", {"instance": writer})
        if response.code in {404, 405} or response.is_unknown_path():
            return ()
        if response.code != HTTPStatus.OK:
            raise response.error()
        return response.read(_Epochs, "a history").epochs

    async def audited(self) -> dict[StreamName, dict[InstanceName, AuditedWriter]] | None:
        """Return the writers of each stream, with what the server compares; None if it is a Synapse.

        CatchUpError as ``facts``.
        """
        if self._foreign:
            return None
        found = await self._streams(_AuditedStreams)
        if found is None:
            return None
        return {each.name: {writer.instance: writer for writer in each.writers} for each in found.streams}

    async def row_names(self) -> dict[str, Sequence[str]]:
        """Return the names of the fields of each stream that declares them; CatchUpError as ``facts``."""
        found = await self._streams(_DeclaredStreams)
        return {each.name: each.row for each in found.streams if each.row} if found is not None else {}

    async def report(
        self,
        name: InstanceName,
        positions: Mapping[StreamName, Mapping[InstanceName, Token]],
        version: str = "",
        streams: Collection[StreamName] | None = None,
    ) -> float | None:
        """Report the applied positions of a process of this version, and return the seconds to the next report.

        ``streams``: those whose positions are replaced; None: all.  Returns None if the server takes no reports, as a
        Synapse, a version 0.1, or a worker that only follows.  Raises CatchUpError as ``facts`` does.
        """
        report = {"positions": positions} if streams is None else {"positions": positions, "streams": sorted(streams)}
        body = msgspec.json.encode(report)
        path, agent = f"/v1/followers/{quote(name, safe='')}", f"{AGENT}/{version}" if version else AGENT
        response = await self._get(path, {}, body, agent)
        if response.code in {404, 405} or response.is_unknown_path():
            return None
        if response.code != HTTPStatus.OK:
            raise response.error()
        return response.read(_Reported, "an answer to a report").next

    async def close(self) -> None:
        """Close the kept connections."""
        await self._pool.closeCachedConnections()

    async def _streams(self, form: type[T]) -> T | None:
        """Return ``/v1/streams`` in a form; None if the server does not have this API."""
        response = await self._get("/v1/streams", {})
        if response.is_unknown_path():
            return None
        if response.code != HTTPStatus.OK:
            raise response.error()
        return response.read(form, "a list of streams")

    async def _facts(
        self, stream: StreamName, writer: InstanceName, after: Token, upto: Token, rows: int
    ) -> Page | None:
        """Request a page of about ``rows`` rows; None if the server does not have this API."""
        query = {"instance": writer, "from": after, "upto": upto, "limit": rows}
        try:
            response = await self._get(f"/v1/streams/{quote(stream, safe='')}/updates", query)
            page = None if response.is_unknown_path() else self._read(response, after, upto, foreign=False)
        except (LostAnswerError, NoPageError):
            self._rows[stream, writer] = rows // SHRINK
            raise
        if (stream, writer) in self._rows:
            self._rows[stream, writer] = rows + rows // GROW + 1
            if rows == MAX_PAGE_ROWS:
                del self._rows[stream, writer]
        return page

    async def _facts_of_synapse(self, stream: StreamName, after: Token, upto: Token) -> Page:
        """Request a page as a Synapse worker does; halve the range until the page is not in descending order."""
        reach = upto
        while True:
            # Synapse caches an answer for 30 minutes under the last word of the path alone: use a new one each time
            path = f"/_synapse/replication/get_repl_stream_updates/{quote(stream, safe='')}/{secrets.token_hex(5)}"
            response = await self._get(path, {"from_token": after, "upto_token": reach})
            try:
                page = self._read(response, after, reach, foreign=True)
            except BackwardsPageError:
                reach = Token(after + (reach - after) // 2)
            else:
                return replace(page, limited=page.limited or reach < upto)

    def _read(self, response: Response, after: Token, upto: Token, *, foreign: bool) -> Page:
        gone = response.decoded().get("gone_upto") if response.code == HTTPStatus.GONE else None
        if isinstance(gone, int) and gone > after:
            raise FactsGoneError(str(response.error()), upto=gone)
        if response.code == HTTPStatus.NOT_FOUND and response.decoded().get("lasting") is True:
            raise StreamLackingError(str(response.error()))
        if response.code != HTTPStatus.OK:
            raise response.error()
        try:
            return read_page(response.body, after=after, upto=upto, foreign=foreign)
        except CatchUpError as error:
            raise type(error)(f"{response.url}: {error}") from error

    async def _get(
        self, path: str, query: Mapping[str, object], put: bytes | None = None, agent: str = AGENT
    ) -> Response:
        """Send GET or, with a body in JSON, PUT."""
        url = f"{self._base}{path.rpartition('/')[0]}"  # for messages: the rest changes with each attempt
        try:
            whole = f"{self._base}{path}?{urlencode(query)}".encode("ascii")
            headers = note_passage(self._headers)
            if put is not None:
                headers = headers.copy()
                headers.addRawHeader(b"content-type", b"application/json")
                headers.setRawHeaders(b"user-agent", [agent.encode()])
            producer = None if put is None else _Producer(put)
            asking = self._agent.request(b"GET" if put is None else b"PUT", whole, headers, producer)
            response = await asking.addTimeout(PATIENCE, self._reactor, onTimeoutCancel=_too_late)
            body = _Body(self._reactor)
            response.deliverBody(body)
            text = await body.whole
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, CancelledError | ConnectingCancelledError):
                raise CancelledError from None  # the caller has cancelled
            tls = describe_tls_error(cause, self._pool)
            is_lost = tls is None and not isinstance(error, (ConnectError, NotImplementedError))
            kind = LostAnswerError if is_lost else CatchUpError
            raise kind(f"{url}: {tls or self._hide(_why(error, cause))}") from error
        location = response.headers.getRawHeaders(b"location", [b""])[0].decode("latin-1")
        return Response(url, response.code, location, text, self._hide)

    def _hide(self, text: str) -> str:
        return hide_secret(text, self._secret)


@implementer(IAgentEndpointFactory)
@attrs.frozen
class _Endpoints:
    """Makes endpoints as Twisted's Agent does, but tries the addresses of a host sooner after each other.

    An address that refuses is reported at once.
    """

    reactor: Any
    policy: IPolicyForHTTPS

    def endpointForURI(self, uri: URI) -> IStreamClientEndpoint:
        """Return an endpoint for the host and the port of a URL."""
        host = uri.host.decode("ascii")
        endpoint: IStreamClientEndpoint
        if isIPAddress(host):
            endpoint = TCP4ClientEndpoint(self.reactor, host, uri.port, timeout=CONNECT_PATIENCE)
        elif isIPv6Address(host):
            endpoint = TCP6ClientEndpoint(self.reactor, host, uri.port, timeout=CONNECT_PATIENCE)
        else:
            endpoint = HostnameEndpoint(self.reactor, host, uri.port, CONNECT_PATIENCE, attemptDelay=ATTEMPT_DELAY)
        if uri.scheme == b"http":
            return endpoint
        return wrapClientTLS(self.policy.creatorForNetloc(uri.host, uri.port), endpoint)


@implementer(IBodyProducer)
class _Producer:
    """The body of a request, which is short."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.length = len(body)

    def startProducing(self, consumer: IConsumer) -> Deferred[None]:
        consumer.write(self._body)
        return succeed(None)

    def pauseProducing(self) -> None:
        """Do nothing: all is written."""

    def resumeProducing(self) -> None:
        """Do nothing: all is written."""

    def stopProducing(self) -> None:
        """Do nothing: all is written."""


@implementer(IPolicyForHTTPS)
@attrs.frozen
class _Policy:
    """Checks the server's certificate, and shows one if there are ``files``, which are read for each request."""

    files: tuple[str, str] | None

    def creatorForNetloc(self, hostname: bytes, port: int) -> IOpenSSLClientConnectionCreator:  # noqa: ARG002 (Twisted's)
        return client_tls(hostname.decode("ascii"), self.files)


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _QuietEndpoint:
    """An endpoint whose factory does not log each connection; it is passed to ``connected``."""

    endpoint: IStreamClientEndpoint
    connected: Callable[[Any], Any]

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803 (Twisted's name)
        cast("Factory", protocolFactory).noisy = False
        return self.endpoint.connect(protocolFactory).addCallback(self.connected)


class _QuietPool(HTTPConnectionPool):
    """A pool that does not log each connection."""

    _handle: object = None

    def getHandle(self) -> object:
        """Return the handle of the newest connection, which may be lost: a socket, or pyOpenSSL's connection."""
        return self._handle

    def getConnection(self, key: object, endpoint: IStreamClientEndpoint) -> Any:
        return super().getConnection(key, _QuietEndpoint(endpoint, self._connected))

    def _connected(self, protocol: Any) -> Any:
        self._handle = getattr(protocol.transport, "getHandle", lambda: None)()
        _limit_heads(protocol)
        return protocol


def _limit_heads(protocol: Any) -> None:
    """Let a connection of Twisted's Agent abort each answer whose status and headers have no end.

    Twisted keeps all headers, and logs each answer 1xx.
    """
    receive, send = protocol.dataReceived, protocol.request
    size: int | None = None  # of the head so far; None while no head is awaited

    def request(what: object) -> Deferred[Any]:
        nonlocal size
        size = 0
        return cast("Deferred[Any]", send(what)).addBoth(head_ended)

    def head_ended(result: object) -> object:
        nonlocal size
        is_endless, size = size is not None and size > HEAD_LIMIT and isinstance(result, Failure), None
        return (
            Failure(
                CatchUpError(f"the answer has more than {HEAD_LIMIT} bytes of headers: is this the HTTP of a writer?")
            )
            if is_endless
            else result
        )

    def data_received(data: bytes) -> None:
        nonlocal size
        if size is not None and size > HEAD_LIMIT:
            protocol.transport.abortConnection()
            return
        size = None if size is None else size + len(data)
        receive(data)

    protocol.request, protocol.dataReceived = request, data_received


class _Body(Protocol):
    """Collects an answer; fails if its bytes stop arriving or are too many."""

    def __init__(self, reactor: IReactorTime) -> None:
        self.whole: Deferred[bytes] = Deferred(lambda _: self._give_up(None))
        self._reactor = reactor
        self._chunks: list[bytes] = []
        self._size = self._due = 0

    def connectionMade(self) -> None:
        """Start the timer."""
        self._alarm = self._reactor.callLater(
            PATIENCE, self._give_up, CatchUpError(f"the answer stopped: less than {STRIDE} bytes in {PATIENCE:.0f} s")
        )

    def dataReceived(self, data: bytes) -> None:
        """Store a part; restart the timer once STRIDE bytes have arrived."""
        self._chunks.append(data)
        self._size += len(data)
        if self._size > BODY_LIMIT:
            self._give_up(CatchUpError(f"the answer has more than {BODY_LIMIT} bytes; request fewer rows"))
        elif self._size > self._due:
            self._due = self._size + STRIDE
            self._alarm.reset(PATIENCE)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Return the body, or the reason why it is not complete."""
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


def _too_late(_: object, seconds: float) -> Failure:
    return Failure(CatchUpError(f"no answer within {seconds:.0f} s"))


def _cause(error: BaseException) -> BaseException:
    """Return the exception that Twisted has wrapped, often more than once."""
    reasons = getattr(error, "reasons", None)
    return _cause(reasons[0].value) if reasons else error


def _why(error: BaseException, cause: BaseException) -> str:
    text = str(cause) or type(cause).__name__
    match error:
        case ConnectError():
            return f"{text} Is the process running, with --http on that port?"
        case ResponseFailed() if isinstance(cause, ConnectionClosed):
            return "cut off, or not HTTP: the connection was closed"  # cleanly or not: both happen by turns
        case ResponseFailed():
            return f"cut off, or not HTTP: {text}"
        case NotImplementedError():
            return f"{text}: {TLS_CURE}"
    return text
