"""A blocking client of the HTTP API, for the command line and for Spark (docs/http.md).  It imports no Twisted."""

from __future__ import annotations

import json
import time
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from socket import socket
from ssl import SSLCertVerificationError, SSLContext, SSLEOFError, SSLError, create_default_context
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import attrs
import msgspec

from replication.errors import ConfigError, ReplicationError
from replication.net.files import refuse_pipes
from replication.net.trust import UNKNOWN_AUTHORITY, password_fault, trust_cure
from replication.session.backoff import Backoff
from replication.streams.history import Epoch
from replication.urls import hide_secret
from replication.web.address import bearer, split_url
from replication.web.bounded_answer import BoundedResponse
from replication.web.pages import GROW, MAX_ANSWER, MAX_PAGE_ROWS, SHRINK, NoPageError, read_page
from replication.wire.grammar import InstanceName, Token, count_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from replication.streams.history import History
    from replication.streams.interfaces import Page

_T = TypeVar("_T")

# Seconds since 1970 in an answer, up to the year 9999: what can be printed as a date.
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=253_402_300_800)]

CONNECT_TIMEOUT: Final = 5.0  # seconds to connect, TLS handshake included: a port without TLS never answers one
TIMEOUT: Final = 60.0  # seconds without a byte of the answer; it also has to be whole in time (bounded_answer)
MOST_VALUES: Final = 4_000_000  # in the JSON of an answer: each takes about 64 bytes of memory
MAX_ERROR: Final = 2**20  # bytes of an answer with an error; a larger one is another program's
FIRST_DELAY: Final = 0.1  # seconds before the first retry; doubled for each further one
MAX_DELAY: Final = 2.0
TEMPORARY: Final = frozenset({408, 429, 502, 503, 504})  # statuses after which a request is sent again
_WIRE: Final = ("SERVER ", "ERROR ", "PING ")  # how the first line of a master's wire begins


class HttpError(ReplicationError):
    """The request failed, and a retry would fail, too: the message names the URL, the reason and the cure.

    ``detail`` is the API's own sentence and ``status`` that of HTTP, if it answered.  ``fields`` are those
    of its answer.  ``is_lost``: the request was sent, and no whole answer has arrived.
    """

    detail: str | None = None
    status: int | None = None
    is_lost: bool = False
    fields: Mapping[str, Any] = MappingProxyType({})


class UnavailableError(HttpError):
    """The request failed, and may succeed later: no process answers at the URL, or the status is temporary."""


class _Writer(TypedDict):
    instance: str
    position: int
    announced: int


class _Stream(TypedDict):
    row: list[str] | None
    writers: list[_Writer]


class _History(TypedDict):
    epochs: list[Epoch]


class StreamInfo(msgspec.Struct, frozen=True):
    """A stream: the names of its ``fields``, if declared, and each writer's position, up to which facts can be read."""

    fields: tuple[str, ...] | None
    positions: Mapping[InstanceName, Token]


@attrs.define(eq=False, slots=False)
class HttpClient:
    """Calls the HTTP API at ``url``, one request at a time, over a connection that it keeps.

    An UnavailableError is retried for ``patience`` seconds, with ``on_retry`` called before each retry.  With
    ``stream_exists`` that includes 404: a process that has just started may not have received the stream yet.
    ``unauthorized_hint`` is the advice given if the API requires a secret and ``secret`` is None.

    ``timeout``: seconds without a byte of the answer, after which a request fails.  An answer also has so many seconds
    in all, and one more for each 16 KiB.

    ``page_rows``: the most rows of the next page; they become fewer once an answer was lost.

    ``certificate``: two files, a certificate and its private key, that ``https:`` shows.

    ConfigError if ``url``, ``secret`` or ``certificate`` is invalid.
    """

    url: str
    secret: str | None = attrs.field(default=None, repr=False)
    patience: float = attrs.field(default=0.0, kw_only=True)
    timeout: float = attrs.field(default=TIMEOUT, kw_only=True)
    stream_exists: bool = attrs.field(default=False, kw_only=True)
    certificate: tuple[str, str] | None = attrs.field(default=None, kw_only=True)
    unauthorized_hint: str = attrs.field(default="give --secret-file FILE", kw_only=True)
    on_retry: Callable[[UnavailableError], object] = attrs.field(default=lambda _: None, kw_only=True)
    page_rows: int = attrs.field(default=MAX_PAGE_ROWS, kw_only=True)
    clock: Callable[[], float] = attrs.field(default=time.monotonic, kw_only=True)
    sleep: Callable[[float], None] = attrs.field(default=time.sleep, kw_only=True)

    posts: int = attrs.field(init=False, default=0)  # requests that were sent, or begun
    server_time: float | None = attrs.field(init=False, default=None)  # of the last answer, in seconds

    def __attrs_post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        parts = split_url(self.url)
        host, timeout = parts.hostname or "", min(CONNECT_TIMEOUT, self.timeout)
        if parts.scheme == "https":
            self._connection: HTTPConnection = HTTPSConnection(
                host, parts.port, timeout=timeout, context=tls_context(self.certificate)
            )
        else:
            self._connection = HTTPConnection(host, parts.port, timeout=timeout)
        self._connection.response_class = BoundedResponse
        self._prefix = parts.path
        self._headers: dict[str, str | bytes] = {} if self.secret is None else {"Authorization": bearer(self.secret)}

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._connection.close()

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        form: Any = Any,
    ) -> Any:
        """Return the decoded JSON of the answer; HttpError if there is none, or if it is not of this type."""
        return self.decode(self.retry(lambda: self.request(method, path, body, headers)), form)

    def decode(self, text: bytes, form: Any) -> Any:
        """Return the decoded JSON of an answer; HttpError if it is not of this type."""
        if len(text) > MOST_VALUES and count_values(text) > MOST_VALUES:
            raise HttpError(
                f"{self.url} answers JSON with more than {MOST_VALUES} values; is that a replication daemon?"
            )
        try:
            answer = json.loads(text)
            msgspec.convert(answer, form)
        except msgspec.ValidationError as error:
            what = f"{self.url} answers other JSON than a replication daemon"
            raise HttpError(f"{what}: {error}; is that URL right?") from error
        except (ValueError, RecursionError) as error:
            raise HttpError(f"{self.url} answers without JSON; is that a replication daemon?") from error
        return answer

    def stream(self, name: str) -> StreamInfo:
        """Return a stream's fields and positions; HttpError if there is no such stream."""
        found = self.call("GET", f"/v1/streams/{quote(name, safe='')}", form=_Stream)
        positions = {each["instance"]: Token(min(each["position"], each["announced"])) for each in found["writers"]}
        return StreamInfo(None if found["row"] is None else tuple(found["row"]), positions)

    def page(self, stream: str, writer: str, *, after: int, upto: int, limit: int = MAX_PAGE_ROWS) -> Page:
        """Return a page of facts with ``after < token <= upto``; it reaches beyond ``after``.

        Once an answer was lost, pages have fewer rows, and grow again while they arrive.
        """
        path = f"/v1/streams/{quote(stream, safe='')}/updates"

        def fetch() -> Page:
            rows = min(limit, self.page_rows)
            query = urlencode({"instance": writer, "from": after, "upto": upto, "limit": rows})
            try:
                page = read_page(self.request("GET", f"{path}?{query}"), after=Token(after), upto=Token(upto))
            except HttpError as error:
                if error.is_lost:
                    self.page_rows = max(1, rows // SHRINK)
                raise
            except NoPageError as error:  # a smaller one may arrive whole
                self.page_rows = max(1, rows // SHRINK)
                if rows == 1:
                    raise
                raise UnavailableError(f"{self.url}: {error}") from error
            self.page_rows = min(MAX_PAGE_ROWS, self.page_rows + self.page_rows // GROW + 1)
            if page.upto <= after:
                raise UnavailableError(f"{self.url} has no facts of {writer} after {after} yet")
            return page

        return self.retry(fetch)

    def history(self, stream: str, writer: str) -> History:
        """Return the history of a writer; it is empty if this process has none."""
        path = f"/v1/streams/{quote(stream, safe='')}/history?{urlencode({'instance': writer})}"

        def fetch() -> History:
            try:
                answer = self.decode(self.request("GET", path), _History)
            except HttpError as error:
                if error.status == HTTPStatus.NOT_FOUND:
                    return ()
                raise
            return [Epoch(*each) for each in answer["epochs"]]

        return self.retry(fetch)

    def pages(self, stream: str, writer: str, *, after: int, upto: int) -> Iterator[Page]:
        """Yield pages until ``upto``."""
        while after < upto:
            page = self.page(stream, writer, after=after, upto=upto)
            yield page
            after = page.upto

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send one request, without retries, and return the body of the answer; HttpError unless its status is 200."""
        connection, is_sent = self._connection, False
        try:
            if connection.sock is None:
                connection.connect()
            connection.sock.settimeout(self.timeout)
            self.posts += method == "POST"
            connection.request(method, self._prefix + path, body, {**self._headers, **(headers or {})})
            is_sent = True
            with connection.getresponse() as response:  # it may have the socket alone
                self.server_time = _read_date(response.getheader("Date"))
                answer = response.read(MAX_ANSWER + 1)
                if len(answer) > MAX_ANSWER:
                    connection.close()
                    raise HttpError(f"{self.url} answers with more than {MAX_ANSWER} bytes: request fewer rows")
                if response.length:
                    raise IncompleteRead(answer, response.length)
        except (OSError, HTTPException) as error:
            in_handshake = isinstance(connection, HTTPSConnection) and type(connection.sock) is socket
            connection.close()
            failure = self.failure(error, in_handshake=in_handshake)
            failure.is_lost = is_sent
            raise failure from error
        if response.status == HTTPStatus.OK:
            return answer
        raise self.refusal(response.status, response.reason, answer)

    def open(self, path: str, headers: Mapping[str, str]) -> socket:
        """Send the headers of a POST whose body follows, over a new connection, and return its socket."""
        connection = self._connection
        connection.close()
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
            self.posts += 1
            connection.putrequest("POST", self._prefix + path, skip_accept_encoding=True)
            for name, text in {**self._headers, **headers}.items():
                connection.putheader(name, text)
            connection.endheaders()
        except (OSError, HTTPException) as error:
            in_handshake = isinstance(connection, HTTPSConnection) and type(connection.sock) is socket
            connection.close()
            raise self.failure(error, in_handshake=in_handshake) from error
        return connection.sock

    def refusal(self, status: int, reason: str, answer: bytes) -> HttpError:
        """Return the error for an answer with another status than 200."""
        is_temporary = status in TEMPORARY or (self.stream_exists and status == HTTPStatus.NOT_FOUND)
        kind = UnavailableError if is_temporary else HttpError
        fields = _fields(answer)
        detail = self._detail(status, fields)
        text = f"{self.url} answers {status}: {detail or self._hide(reason)}"
        return kind(text, detail=detail, status=status, fields=fields)

    def failure(self, error: Exception, *, in_handshake: bool = False) -> HttpError:
        """Return the error for a connection that failed; ``in_handshake``: before its TLS was there."""
        if isinstance(error, BadStatusLine):
            if str(error).lstrip("'").startswith(_WIRE):
                return HttpError(f"{self.url} is a wire port, not HTTP; the HTTP port is usually the next one")
            what = f"{self.url} closed the connection without an HTTP answer"
            tls = f"; if that port has TLS, write https{self.url.removeprefix('http')}"
            return UnavailableError(what if self.url.startswith("https") else f"{what}{tls}")
        if isinstance(error, SSLCertVerificationError):
            cure = f"; {trust_cure()}" if error.verify_code in UNKNOWN_AUTHORITY else ""
            return HttpError(f"{self.url}: {error.verify_message}{cure}")
        if isinstance(error, SSLError) and "ALERT" in (getattr(error, "reason", None) or ""):
            return HttpError(f"{self.url} refuses {self._shown()} ({error.reason.lower().replace('_', ' ')})")
        if (
            isinstance(error, BrokenPipeError | ConnectionResetError | SSLEOFError)
            and self.url.startswith("https")
            and not in_handshake
        ):
            return UnavailableError(f"{self.url} closed the connection: perhaps it refuses {self._shown()}")
        reason = getattr(error, "strerror", None) or self._hide(str(error)) or type(error).__name__
        if in_handshake:
            plain = f"http{self.url.removeprefix('https')}"
            return UnavailableError(f"no TLS at {self.url}: {reason}; if that port has no TLS, write {plain}")
        if isinstance(error, TimeoutError):
            why = "the process there hangs or is suspended, or the network drops what is sent"
            return UnavailableError(f"{self.url} did not answer in time: {why}")
        return UnavailableError(f"cannot reach {self.url}: {reason}; is the daemon running there?")

    def _shown(self) -> str:
        if self.certificate is None:
            return "a client without a certificate: give --certificate FILE and --private-key FILE"
        return f"the certificate in {self.certificate[0]}; its log has the reason"

    def _detail(self, status: int, fields: Mapping[str, Any]) -> str | None:
        if status == HTTPStatus.UNAUTHORIZED and not self._headers:
            return f"it requires a secret: {self.unauthorized_hint}"
        text = fields.get("detail") or fields.get("error")
        return text if text is None else self._hide(str(text))

    def _hide(self, text: str) -> str:
        """Return a text of the server without the secret: a proxy may print the headers that it received."""
        return hide_secret(text, self.secret or "")

    def retry(self, request: Callable[[], _T], progress: Callable[[], float] | None = None) -> _T:
        """Return what ``request`` returns; call it again after an UnavailableError, until the patience is over.

        The patience begins now, or at the time that ``progress`` returns, which later progress changes.
        """
        begin = self.clock() if progress is None else progress()
        backoff = Backoff(FIRST_DELAY, MAX_DELAY)
        while True:
            try:
                return request()
            except UnavailableError as error:
                if progress is not None and progress() != begin:
                    begin, backoff = progress(), Backoff(FIRST_DELAY, MAX_DELAY)
                left = begin + self.patience - self.clock()
                if left <= 0:
                    raise
                self.on_retry(error)
            self.sleep(min(backoff.next(), left))


def tls_context(certificate: tuple[str, str] | None) -> SSLContext:
    """Return what checks a server, and shows the certificate and key in two files; ConfigError if it cannot."""
    context = create_default_context()
    if certificate is not None:

        def refuse_password() -> str:
            raise ConfigError(password_fault(certificate[1]))

        try:
            refuse_pipes(*certificate)
            context.load_cert_chain(*certificate, refuse_password)
        except (OSError, SSLError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot use {' and '.join(certificate)}, a certificate and its key: {why}") from error
    return context


def _fields(answer: bytes) -> Mapping[str, Any]:
    """Return the fields of an error; none if another program answers."""
    if len(answer) > MAX_ERROR:
        return {}
    try:
        error = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}


def _read_date(text: str | None) -> float | None:
    """Return the time in the header Date of an answer, in seconds; None if it has none."""
    try:
        return None if text is None else parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
