"""The HTTP API of a master or a worker (``interfaces``, section 3), and the form of a Synapse (protocol E5)."""

from __future__ import annotations

from collections import Counter
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Protocol

from twisted.internet.defer import Deferred, TimeoutError  # noqa: A004 - Twisted's name
from twisted.internet.task import deferLater
from twisted.logger import Logger
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET, Site

from replication.errors import (
    NotAWriterError,
    RemoteProtocolError,
    ReplicationError,
    RoomError,
    RowError,
    SequenceRegressedError,
    StoppingError,
    StoreError,
    StreamError,
    UnknownRoomError,
    UnknownStreamError,
    ValueRefusedError,
)
from replication.streams.seams import Sample
from replication.web import metrics
from replication.web.door import Door
from replication.web.exchange import Answer, Exchange, Refused, refuse, say
from replication.web.facts import (
    MAX_PAGE_ROWS,
    PAGE_ROWS,
    line_of,
    read_addition,
    read_additions,
    spell_page,
    spell_since,
)
from replication.web.query import read_key, read_query, read_token
from replication.web.rooms import RoomCalls
from replication.web.status import describe_peer, describe_stream
from replication.web.users import IUsers, answer_user, answer_users
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from twisted.internet.interfaces import IReactorTime

    from replication.streams.seams import Page, PeerStatus, StreamStatus
    from replication.streams.since import Since
    from replication.web.calls import Calls
    from replication.web.rooms import IRooms
    from replication.wire.grammar import InstanceName, Token

    Call = Callable[[Exchange], Coroutine[Any, Any, Answer]]

MAX_BODY: Final = 64 * 2**20  # bytes
HEALTH_PATIENCE: Final = 5.0  # seconds; who asks for it does not wait much longer either
SLICE: Final = 2**20  # bytes of additions that are read in one reactor turn: about 10 ms

_log = Logger()


class IServed(IUsers, Protocol):
    """What the API shows: a Master or a Worker."""

    role: str
    server_name: str
    instance_name: InstanceName
    calls: Calls

    def stream_statuses(self) -> Sequence[StreamStatus]:
        """Return how every stream stands."""
        ...

    def peer_statuses(self) -> Sequence[PeerStatus]:
        """Return every connection."""
        ...

    def samples(self) -> Iterable[Sample]:
        """Return the figures of this moment."""
        ...

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts as an ICatchUp does, none above what is settled or applied here.

        ``writer`` None is this instance.  UnknownStreamError, StreamError or StoreError.
        """
        ...

    async def since(self, stream: str, token: str, limit: int) -> tuple[Since, str]:
        """Return what all writers have written since a token, about ``limit`` rows, and the text of the next token.

        StreamError if ``token`` is none; else as ``page``.
        """
        ...

    async def append_texts(self, stream: str, facts: Sequence[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts (perhaps none), each a list of decoded rows, and return their tokens once all are durable.

        A ``key`` that was used before returns what it returned then.  UnknownStreamError, NotAWriterError, RowError
        (its ``fact`` is the culprit's index) or StoreError: nothing was appended.
        """
        ...

    async def check(self) -> None:
        """Return if the store answers, else StoreError or StreamError."""
        ...


def make_site(
    served: IServed,
    *,
    secret: str | None,
    max_body: int = MAX_BODY,
    reactor: IReactorTime | None = None,
    rooms: IRooms | None = None,
) -> Site:
    """Return the factory that serves ``served``; ConfigError if ``secret`` cannot be one.

    With a secret every call but ``/health`` needs it; without one only peers on this machine are served.  A request's
    body may have ``max_body`` bytes.  ``rooms`` are served too, if there are any.
    """
    api = Api(served, Door(secret), max_body, rooms)
    site = _QuietSite(api, requestFactory=Exchange, reactor=reactor)  # type: ignore[no-untyped-call]
    api.clock = site.reactor
    return site


class _QuietSite(Site):
    """A Site that keeps no access log, and no timer for its dates: answers are counted, failures are logged."""

    noisy = False

    def startFactory(self) -> None:
        """Start nothing."""


class Api(Resource):
    """Every call; what is wrong with one is said in a sentence."""

    isLeaf = True  # noqa: N815  Twisted's name
    clock: IReactorTime

    def __init__(self, served: IServed, door: Door, max_body: int, rooms: IRooms | None = None) -> None:
        """Serve ``served`` to whom ``door`` lets in."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.max_body = max_body
        self._served = served
        self._rooms = None if rooms is None else RoomCalls(rooms)
        self._door = door
        self._answers: Counter[tuple[str, int]] = Counter()

    def stranger(self, request: Exchange) -> Refused | None:
        """Return why the sender of ``request`` must stay out, or None."""
        return self._door.refusal(request.client, request.requestHeaders.getRawHeaders(b"authorization", []))

    def render(self, request: Exchange) -> int:
        """Answer in due course."""
        answering = Deferred.fromCoroutine(self._serve(request))
        answering.addErrback(lambda failure: _log.failure("{uri} could not be answered", failure, uri=request.uri))
        return NOT_DONE_YET

    async def _serve(self, request: Exchange) -> None:
        label = "none"
        try:
            path = [part.decode("utf-8", "backslashreplace") for part in request.postpath or ()]
            label, method, call = self._find(path, request.method.decode("latin-1"))
            self._admit(request, label, method)
            answer = await call(request)
        except Refused as refused:
            answer = refused.answer
        except ReplicationError as error:
            answer = refuse(_status(error), str(error)).answer
        except Exception:  # noqa: BLE001  whatever it is, it is logged, and the daemon lives
            _log.failure("{method} {uri} failed", method=request.method, uri=request.uri)
            answer = refuse(500, "an error on this side; the log says more").answer
        self._answers[label, answer.code] += 1
        request.conclude(answer)

    def _find(self, path: Sequence[str], asked: str) -> tuple[str, str, Call]:
        """Return what a path is called in metrics, which method it takes, and what answers it."""
        match path:
            case ["v1", "streams"]:
                return "streams", "GET", self._streams
            case ["v1", "streams", name]:
                return "stream", "GET", partial(self._stream, name)
            case ["v1", "streams", name, "updates"]:
                return "updates", "GET", partial(self._updates, name)
            case ["v1", "streams", name, "facts"]:
                return "facts", "POST", partial(self._append, name)
            case ["v1", "rooms", *rest] if self._rooms is not None and (found := self._rooms.find(rest, asked)):
                return found
            case ["v1", "connections"]:
                return "connections", "GET", self._connections
            case ["v1", "users"]:
                return "users", "GET", lambda _: answer_users(self._served)
            case ["v1", "users", user]:
                return "user", "GET", lambda _: answer_user(self._served, user)
            case ["health"]:
                return "health", "GET", self._health
            case ["metrics"]:
                return "metrics", "GET", self._metrics
            case ["_synapse", "replication", "get_repl_stream_updates", name, _]:
                return "synapse", "GET", partial(self._synapse_updates, name)
            case ["_synapse", "replication", name, *words]:
                return "synapse call", "POST", partial(self._synapse_call, name, words)
        return "none", "GET", partial(self._nothing, "/".join(path))

    def _admit(self, request: Exchange, label: str, method: str) -> None:
        if request.refused is not None:
            raise request.refused
        if not (label == "health" and self._door.has_lock) and (stranger := self.stranger(request)):
            raise stranger
        asked = "GET" if request.method == b"HEAD" else request.method.decode("latin-1")
        if asked != method and label != "none":
            raise refuse(405, f"{asked!r:.40} is not for here; use {method}", {"Allow": method})

    async def _nothing(self, path: str, _: Exchange) -> Answer:
        raise refuse(404, f"nothing is called {path!r:.100}; try /v1/streams, /v1/connections, /health or /metrics")

    async def _streams(self, _: Exchange) -> Answer:
        return say({"streams": [describe_stream(each) for each in self._served.stream_statuses()]})

    async def _stream(self, name: str, _: Exchange) -> Answer:
        found = self._find_stream(name)
        if found is None:
            await self._served.check()  # one that has not started yet knows none
            found = self._find_stream(name)
        if found is not None:
            return say(describe_stream(found))
        raise refuse(404, f"no stream {name!r:.100} here; GET /v1/streams lists all")

    def _find_stream(self, name: str) -> StreamStatus | None:
        return next((each for each in self._served.stream_statuses() if each.definition.name == name), None)

    async def _updates(self, name: str, request: Exchange) -> Answer:
        if b"since" in (request.args or {}):
            query = read_query(request, ["since"], ["limit"])
            return Answer(200, spell_since(*await self._served.since(name, query["since"], read_limit(query))))
        query = read_query(request, ["instance", "from", "upto"], ["limit"])
        after, upto = read_token(query, "from"), read_token(query, "upto")
        if upto < after:
            raise refuse(400, f"upto ({upto}) is less than from ({after})")
        limit = read_limit(query)
        writer = grammar.instance_name(query["instance"])
        page = await self._served.page(name, writer, after=after, upto=upto, limit=limit)
        return Answer(200, spell_page(page))

    async def _synapse_updates(self, name: str, request: Exchange) -> Answer:
        """Answer a Synapse worker, with rows of this instance; a wrong secret is a 401 to us, a 500 to Synapse."""
        after, upto = (_synapse_token(request, each) for each in ("from_token", "upto_token"))
        try:
            # a range that ends before it begins is an empty one to Synapse, as it is after a reset
            page = await self._served.page(
                name, self._served.instance_name, after=min(after, upto), upto=upto, limit=PAGE_ROWS
            )
        except UnknownStreamError as error:
            raise _synapse_error("M_UNKNOWN", "Unknown stream") from error
        return Answer(200, spell_page(page))

    async def _synapse_call(self, name: str, words: Sequence[str], request: Exchange) -> Answer:
        """Let the application answer what a Synapse worker has us do; what is refused, that worker tells its user."""
        if name not in self._served.calls:
            raise _synapse_error("M_UNRECOGNIZED", f"nobody here answers the call {name!r:.60}", 404)
        body = grammar.read_json(request.body().decode("utf-8", "replace"))
        if not isinstance(body, dict):
            raise _synapse_error("M_NOT_JSON", "the body of a call is a JSON object")
        return say(await self._served.calls.ask(name, words, body))

    async def _append(self, name: str, request: Exchange) -> Answer:
        read_query(request)
        if self._rooms is not None and name in self._rooms.streams:
            raise refuse(403, f"stream {name!r} has the events of rooms: POST /v1/rooms/ROOM/events")
        key, body = read_key(request), request.body()
        by_line = request.media_type == "application/x-ndjson"
        facts = await self._read_lines(body) if by_line else [read_addition(body)]
        try:
            return say({"ids": list(await self._served.append_texts(name, facts, key))})
        except RowError as error:
            if by_line and error.fact is not None:
                raise refuse(400, f"line {line_of(BytesIO(body), error.fact)}: {error}") from error
            raise

    async def _read_lines(self, body: bytes) -> list[list[Any]]:
        """Read additions, a line each, with a reactor turn between slices."""
        facts: list[list[Any]] = []
        content, count = BytesIO(body), 0
        while lines := content.readlines(SLICE):
            if count:
                await deferLater(self.clock, 0)
            facts += read_additions(lines, count + 1)
            count += len(lines)
        return facts

    async def _connections(self, _: Exchange) -> Answer:
        return say({"connections": [describe_peer(each) for each in self._served.peer_statuses()]})

    async def _health(self, _: Exchange) -> Answer:
        try:
            checking = Deferred.fromCoroutine(self._served.check())
            await checking.addTimeout(HEALTH_PATIENCE, self.clock)
        except (StoreError, StreamError) as error:
            raise refuse(503, str(error)) from error
        except TimeoutError as error:
            raise refuse(503, f"the store has not answered for {HEALTH_PATIENCE:.0f} s") from error
        served = self._served
        identity = {"role": served.role, "server_name": served.server_name, "instance_name": served.instance_name}
        return say({"status": "ok", **identity})

    async def _metrics(self, _: Exchange) -> Answer:
        try:
            text = metrics.render([*self._served.samples(), *self._samples()])
        except ImportError as error:
            raise refuse(501, "metrics need prometheus_client: pip install prometheus-client") from error
        return Answer(200, text, metrics.CONTENT_TYPE)

    def _samples(self) -> Iterable[Sample]:
        for (call, code), count in self._answers.items():
            labels = {"call": call, "status": str(code)}
            yield Sample("http_answers", "counter", "Answers given over HTTP, by call and status.", count, labels)


def _status(error: ReplicationError) -> int:
    match error:
        case UnknownStreamError():
            return 404
        case UnknownRoomError():
            return 404
        case NotAWriterError():
            return 403
        case ValueRefusedError():
            return 400
        case StoreError() | SequenceRegressedError() | StoppingError():
            return 503
        case StreamError() | RemoteProtocolError() | RoomError():
            return 400
    return 500


def read_limit(query: Mapping[str, str]) -> int:
    """Return how many rows an answer may have; Refused if that is too many."""
    limit = read_token(query, "limit") if "limit" in query else PAGE_ROWS
    if not 1 <= limit <= MAX_PAGE_ROWS:
        raise refuse(400, f"limit: {limit} is not between 1 and {MAX_PAGE_ROWS}")
    return limit


def _synapse_error(code: str, text: str, status: int = 400) -> Refused:
    return Refused(say({"errcode": code, "error": text}, status))


def _synapse_token(request: Exchange, name: str) -> Token:
    values = request.args.get(name.encode())
    if not values:
        raise _synapse_error("M_MISSING_PARAM", f"Missing integer query parameter {name!r}")
    try:
        return read_token({name: values[0].decode("utf-8", "backslashreplace")}, name)
    except Refused as refused:
        raise _synapse_error("M_INVALID_PARAM", f"Query parameter {name!r} must be a non-negative integer") from refused
