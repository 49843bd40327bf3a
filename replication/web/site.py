"""The HTTP API of a master or worker (docs/http.md): it routes requests, checks access and answers errors."""

from __future__ import annotations

import secrets
from collections import Counter
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, cast
from urllib.parse import parse_qs, unquote_to_bytes

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocolNegotiationFactory
from twisted.logger import Logger
from twisted.web.http import HTTPFactory
from zope.interface import implementer

from replication import errors
from replication.net.access import Access
from replication.net.admission import Admission, Bounds
from replication.net.peer_log import PeerLog
from replication.streams.interfaces import Sample
from replication.web.auth import UNAUTHORIZED, AccessPolicy, with_login
from replication.web.bodies import Bodies
from replication.web.channel import Channel
from replication.web.followers import take_report
from replication.web.health import Health
from replication.web.passage import AGAIN, has_passed
from replication.web.request import ApiRequest, RequestError
from replication.web.routes import LIVE_ROUTES, NO_ROOMS, ROOM, ROOM_ROUTES, ROUTES, find_route
from replication.web.turns import PageTurns
from replication.web.unread import MOST_UNREAD, UnreadAnswers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime

    from twisted.internet.interfaces import IAddress, IReactorTime
    from twisted.python.failure import Failure

    from replication.net.access import Rights
    from replication.streams.history import History
    from replication.streams.interfaces import Page, PeerStatus, StreamStatus
    from replication.streams.merged_page import MergedPage
    from replication.streams.retention import SegmentChain
    from replication.web.followers import IFollowers, ReportNote
    from replication.web.line_stream import LineStream
    from replication.web.live.feed import Feed
    from replication.web.rooms import IRooms
    from replication.web.routes import Route
    from replication.web.skips import ISkips
    from replication.web.synapse_requests import SynapseRequests
    from replication.wire.commands import UserIp
    from replication.wire.grammar import InstanceName, Token

MAX_BODY: Final = 64 * 2**20  # bytes
LINES_PATH: Final = b"/append"  # how the path of a call with ``open_lines`` ends
FOUND_ROUTES: Final = 64  # that are remembered; a path has 16 KiB at most
# The first entry that has an error's class gives its status.
STATUSES: Final[Sequence[tuple[tuple[type[errors.ReplicationError], ...], int]]] = (
    ((errors.UnknownStreamError, errors.UnknownRoomError), 404),
    ((errors.NotAWriterError,), 403),
    ((errors.ValueRefusedError,), 400),
    ((errors.RowRefusedError,), 409),
    ((errors.StoreError, errors.CatchUpError, errors.SequenceRegressedError, errors.StoppingError), 503),
    ((errors.StreamError, errors.RemoteProtocolError, errors.RoomError), 400),
    ((errors.ReplicationError,), 500),
)

_log = Logger()


class IServed(Protocol):
    """What the API requires of a process: facts, status, users and metrics; ``role`` is master or worker."""

    role: str
    server_name: str
    instance_name: InstanceName
    synapse_requests: SynapseRequests
    skips: ISkips | None  # None if no function is called here

    @property
    def followers(self) -> IFollowers | None:
        """What takes the reports of followers; None if no stream is written here."""
        ...

    def stores(self, stream: str) -> bool:
        """Whether ``page`` reads the facts of ``stream`` from this process's database, not from another process."""
        ...

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer, at most up to its published or applied position (see ``ICatchUp``).

        ``writer`` None is this instance.  Raises UnknownStreamError, StreamError or StoreError; FactsGoneError if facts
        above ``after`` were deleted.
        """
        ...

    async def shown_page(self, stream: str, writer: str, *, after: int, upto: int, limit: int) -> Page:
        """Return facts for a viewer as ``page`` does; a follower without a copy fetches them, also those to come.

        Raises as ``page``; CatchUpError if no source has them.
        """
        ...

    async def history(self, stream: str, writer: str) -> History:
        """Return the epochs of one writer; empty if none are known here.  Raises as ``page``."""
        ...

    async def since(self, stream: str, token: str, limit: int) -> tuple[MergedPage, str]:
        """Return about ``limit`` rows of all writers after ``token``, and the token that follows them.

        Raises StreamError if ``token`` is not one; else as ``page``.
        """
        ...

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts, each a list of decoded rows, and return their tokens once all are durable.

        With a ``key`` that was used before, append nothing and return the tokens of that append.  Raises
        UnknownStreamError, NotAWriterError, RowError (with the index of the ``fact``) or StoreError: then nothing was
        appended.
        """
        ...

    def stream_statuses(self, only: str | None = None) -> Sequence[StreamStatus]:
        """Return the status of every stream, or of the stream named ``only``, if there is one."""
        ...

    async def segments(self) -> Sequence[SegmentChain]:
        """Return what the folders of segments have that this process knows; CatchUpError: one cannot be read."""
        ...

    def peer_statuses(self) -> Sequence[PeerStatus]:
        """Return the status of every connection."""
        ...

    def unreachable_writers(self) -> Sequence[str]:
        """Return every followed writer that has not sent SERVER on an open connection: its endpoint, and why."""
        ...

    def absent_writers(self) -> Sequence[str]:
        """Return a sentence for each followed writer that is not where the configuration places it."""
        ...

    def failed_tasks(self) -> Sequence[str]:
        """Return the names of tasks of this process that have ended with an error: only a restart begins them again."""
        ...

    async def check(self) -> None:
        """Return if the store answers and can be written, else raise StoreError or StreamError."""
        ...

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by instance ID, each user that syncs there, with the time of the last sync in ms."""
        ...

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen, the latest first; StoreError or NotAWriterError if that is not stored here."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Return the present values of the metrics."""
        ...


@implementer(IProtocolNegotiationFactory)
class ApiSite(HTTPFactory):
    """Makes the connections of an API.

    It has no access log, and no timer for its dates: the API counts answers and logs failures.
    """

    noisy = False
    protocol = cast("Any", Channel)  # the annotation has a private class that chooses HTTP 2

    def __init__(self, api: Api, reactor: IReactorTime) -> None:
        super().__init__(reactor=reactor)
        self.resource = api
        self.unread = UnreadAnswers(api.answer_unread)
        self.in_parts = 0  # connections of which a read is processed in parts

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """Return the protocol of a connection; None if it is refused."""
        if not self.resource.admission.enter(addr):
            return None
        channel = cast("Channel", super().buildProtocol(addr))
        channel.requestFactory, channel.site = ApiRequest, self
        return channel

    def acceptableProtocols(self) -> list[bytes]:
        """Return the protocols that a client may choose in TLS."""
        return [b"http/1.1"]

    def startFactory(self) -> None:
        """Start neither an access log nor a timer."""

    def stopFactory(self) -> None:
        """Stop the timers of the health checks and of the live page."""
        self.resource.health.stop()
        if self.resource.feed is not None:
            self.resource.feed.stop()

    def logPrefix(self) -> str:
        """Return what Twisted's log lines call this factory."""
        return "HTTP"


def make_site(
    served: IServed,
    *,
    secret: str | None,
    certified: bool = False,
    max_body: int = MAX_BODY,
    reactor: IReactorTime | None = None,
    rooms: IRooms | None = None,
    bounds: Bounds | None = None,
    access: Access | None = None,
    expires: Callable[[], Mapping[str, datetime]] = dict,
    live_page: bool = True,
) -> ApiSite:
    """Return the factory that serves the HTTP API of ``served``; ConfigError if ``secret`` is invalid.

    With a secret every call needs it, apart from those of ``/health``.  Without one only peers on this
    machine are answered, and no page of another site.  With ``certified`` the endpoint demands client
    certificates; peers on other machines are then answered without a secret, too.  The body of a request may have
    ``max_body`` bytes.  With ``rooms`` there is ``/v1/rooms``.  ``bounds`` are those of connections and requests.
    ``access`` has further secrets, and the rights of secrets and certificates (docs/security.md, Rights).  ``expires``
    returns when the certificates of this process expire, by file, for ``/metrics``.  With ``live_page`` a browser is
    shown a page at ``/``.
    """
    clock = reactor or cast("IReactorTime", import_module("twisted.internet.reactor"))  # importing it installs it
    api = Api(
        served,
        AccessPolicy(secret, certified, access or Access()),
        max_body,
        clock,
        rooms=rooms,
        bounds=bounds or Bounds(),
        expires=expires,
        live_page=live_page,
    )
    return ApiSite(api, clock)


class Api:
    """Every call of the API.  A function of the routing table reads these attributes, through its request."""

    def __init__(
        self,
        served: IServed,
        access: AccessPolicy,
        max_body: int,
        clock: IReactorTime,
        *,
        rooms: IRooms | None,
        bounds: Bounds,
        expires: Callable[[], Mapping[str, datetime]] = dict,
        live_page: bool = True,
    ) -> None:
        self.served = served
        self.max_body = max_body
        self.clock = clock
        self.turns = PageTurns()
        self.health = Health(served, clock)
        self.rooms = cast("IRooms", rooms)  # without rooms, NO_ROOMS answers
        self.keeps_rooms = rooms is not None
        self.streams_of_rooms: Collection[str] = () if rooms is None else rooms.streams
        self.answers: Counter[tuple[str, int]] = Counter()  # by the call's name and the status
        self.routes = (
            *ROUTES,
            *(NO_ROOMS if rooms is None else ROOM_ROUTES),
            *(LIVE_ROUTES if live_page else ()),
        )
        self._find_route = lru_cache(FOUND_ROUTES)(self._split_and_find)  # clients repeat their paths
        self.feed: Feed | None = None  # of the live page, from its first request on
        self._name = secrets.token_hex(8).encode()  # for ``passage``
        self.report_notes: dict[str, ReportNote] = {}  # by follower, the oldest first
        self.bounds = bounds
        self.bodies = Bodies()
        self.admission = Admission("http", bounds, clock)
        self._access = access
        self._expires = expires
        self._tls_failures = 0
        self._timeouts: Counter[str] = Counter()  # by what was late
        self._peer_log = PeerLog(clock)

    def tls_failed(self, channel: Channel, error: str) -> None:
        """Note that a connection failed in TLS."""
        self._tls_failures += 1
        self.admission.faulted(channel.peer_address)
        self._peer_log.error(channel, "HTTP: {name} ({address}): {error}", error)

    def request_late(self, channel: Channel, part: str) -> None:
        """Note that a part of a request did not arrive in its time."""
        self._timeouts[part] += 1
        text = f"the {part} of a request took too long"
        self._peer_log.error(channel, "HTTP: closing {name} ({address}): {error}", text)

    def answer_unread(self, channel: Channel) -> None:
        """Note that a client has not read its answer, and others need the memory."""
        self._timeouts["answer"] += 1
        text = f"clients have not read {MOST_UNREAD} bytes of answers, and this client has waited longest"
        self._peer_log.error(channel, "HTTP: closing {name} ({address}): {error}", text)

    def body_refused(self, channel: Channel, error: str) -> None:
        """Note that a body was refused, because others need the memory."""
        self._peer_log.error(channel, "HTTP: refusing a body of {name} ({address}): {error}", error)

    def samples(self) -> Iterable[Sample]:
        """Yield the metrics of the API."""
        for (call, status), count in self.answers.items():
            yield Sample("http_answers_total", count, {"call": call, "status": str(status)})
        if self._tls_failures:
            yield Sample("tls_failures_total", self._tls_failures, {"socket": "http"})
        for file, when in self._expires().items():
            yield Sample("certificate_expires_seconds", when.timestamp(), {"file": file})
        yield Sample("http_body_bytes", self.bodies.total)
        yield Sample("http_bodies_refused_total", self.bodies.refused)
        yield Sample("http_connections", self.admission.open)
        for part, count in self._timeouts.items():
            yield Sample("http_timeouts_total", count, {"part": part})
        yield from self.admission.samples()

    @property
    def access_number(self) -> int:
        """The number of times that secrets and rights were replaced."""
        return self._access.access.replaced

    def rights(self, request: ApiRequest) -> Rights:
        """Return what the sender of ``request`` may do; RequestError if it has no access."""
        return self._access.rights(request.client, request.requestHeaders, request.channel.transport)

    def render(self, request: ApiRequest) -> None:
        """Answer later."""
        answering = Deferred.fromCoroutine(self._answer(request))
        answering.addErrback(self._give_up, request)

    def _give_up(self, failure: Failure, request: ApiRequest) -> None:
        _log.failure("{uri} could not be answered", failure, uri=request.uri)
        if not request.disconnected:
            cast("Any", request.channel.transport).abortConnection()

    async def _answer(self, request: ApiRequest) -> None:
        route, parameters = self._find_route(request.method, request.path)
        try:
            self._check(request, route, parameters)
            self._note_passage(request, route)
            answer = await route.answer(request, *parameters)
        except RequestError as error:
            answer = error.answer
        except errors.ReplicationError as error:
            answer = self.refusal(error).answer
        except Exception:  # noqa: BLE001 - it is logged, and the daemon goes on unless it has no memory left
            _log.failure("{method} {uri} failed", method=request.method, uri=request.uri)
            answer = RequestError(500, "an error on this side; the log has the traceback").answer
        self.answers[route.label, answer.status] += 1
        request.send(answer)

    def _split_and_find(self, method: bytes, path: bytes) -> tuple[Route, Sequence[Any]]:
        quoted = path[1:].split(b"/") if path.startswith(b"/") else [path]  # no route has a part such as the second
        parts = [unquote_to_bytes(part).decode("utf-8", "backslashreplace") for part in quoted]
        return find_route(self.routes, method.decode("latin-1"), parts)

    @staticmethod
    def refusal(error: errors.ReplicationError) -> RequestError:
        """Return the answer for an error."""
        more: dict[str, Any] = {}
        if isinstance(error, errors.FactsGoneError):
            begin = {"instance": error.writer, "since": error.since}
            more = {name: value for name, value in begin.items() if value is not None}
            return RequestError(410, str(error), gone_upto=error.upto, **more)
        status = next(status for classes, status in STATUSES if isinstance(error, classes))
        if isinstance(error, errors.UnknownStreamError) and error.lasting:
            more = {"lasting": True}
        return RequestError(status, str(error), **more)

    def open_lines(self, request: ApiRequest) -> LineStream | None:
        """Return what takes the body of a request whose headers have arrived; None if it is stored.

        RequestError: the sender may not make this call.
        """
        command, target, version = cast("Channel", request.channel).first_line
        path, _, query = target.partition(b"?")
        if (command, version) != (b"POST", b"HTTP/1.1") or not path.endswith(LINES_PATH):
            return None
        route, parameters = self._find_route(command, path)
        if route.open_lines is None:
            return None
        request.args = parse_qs(query, keep_blank_values=True)
        try:
            self._check(request, route, parameters)
            return route.open_lines(request, *parameters)
        except errors.ReplicationError as error:
            raise self.refusal(error) from error

    def check_again(self, request: ApiRequest) -> None:
        """Raise RequestError if the sender may no longer make the call of a request that runs on."""
        command, target, _ = cast("Channel", request.channel).first_line
        self._check(request, *self._find_route(command, target.partition(b"?")[0]))

    def _note_passage(self, request: ApiRequest, route: Route) -> None:
        """Raise RequestError if this process would pass a request on again; a report is then answered at once."""
        request.has_passed = has_passed(request.requestHeaders, self._name)
        if request.has_passed and route.answer is not take_report:
            raise RequestError(508, AGAIN)

    def _check(self, request: ApiRequest, route: Route, parameters: Sequence[str]) -> None:
        """Raise RequestError if the sender has no access, or not the right that the call needs."""
        if request.early_error is not None:
            raise request.early_error
        if not (route.public and self._access.has_secrets) and request.access_error is not None:
            error = request.access_error
            if error.answer.status == UNAUTHORIZED and request.requestHeaders.hasHeader("authorization"):
                self.admission.faulted(request.client)
                request.channel.persistent = False  # the next guess needs a new connection, which may be refused
            raise with_login(error) if route.browser else error
        if route.right is not None:
            streams = self.streams_of_rooms if route.path.startswith(ROOM) else parameters[:1]
            if why := request.rights.missing(route.right, streams):
                raise RequestError(403, why)
