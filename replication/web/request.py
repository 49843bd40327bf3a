"""One request, its parameters, its body and its answer.

A request is refused as soon as its headers allow, and its body is limited.  An error names the parameter that is wrong.

A body that is too large is answered at once.  What still arrives of it is discarded, up to twice the limit; then the
connection is closed.  A body is stored only if the sender may change something, and if the content
type is one that the API reads.
"""

from __future__ import annotations

import time
from functools import lru_cache
from http import HTTPStatus
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
from twisted.copyright import version
from twisted.web.http import NO_BODY_CODES, NOT_ALLOWED, Request, datetimeToString

from replication.errors import RemoteProtocolError
from replication.net.access import Rights
from replication.web.pages import MAX_PAGE_ROWS
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.python.failure import Failure

    from replication.web.channel import Channel
    from replication.web.line_stream import LineStream
    from replication.web.site import Api
    from replication.wire.grammar import Token

MEDIA_TYPE_OF_LINES: Final = "application/x-ndjson"
BODY_TYPES: Final = ("application/json", MEDIA_TYPE_OF_LINES)
MAX_REPORT: Final = 2**20  # bytes of a body from a peer that may only read streams
KEY_LENGTH: Final = 200  # characters
# What ``twisted.web.server`` sends as Server.  The import of that module would lengthen each start.
SERVER: Final = f"TwistedWeb/{version}".encode()

_ANSWER: Final = (
    b"%b %d %b\r\n%bServer: %b\r\nDate: %b\r\nContent-Length: %d\r\nContent-Type: %b\r\n"
    b"Cache-Control: no-store\r\n\r\n%b"
)


class Answer(msgspec.Struct, frozen=True):
    """A status, a body, and additional headers.

    ``stream`` is for a body without an end: it is called with the request, and sends the body.
    """

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    stream: Callable[[ApiRequest], None] | None = None

    @classmethod
    def json(cls, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Return ``value`` as JSON."""
        return cls(status, grammar.encode_json(value).encode(), headers=headers or {})


class RequestError(Exception):
    """Ends a request with the answer ``{"error", "detail"}`` (docs/http.md, Errors)."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None, **more: object) -> None:
        """Make the answer; ``detail`` is a sentence that names what is wrong, and ``more`` are further fields."""
        super().__init__(status, detail)
        self.fields = {"error": HTTPStatus(status).phrase, "detail": detail, **more}
        self.answer = Answer.json(self.fields, status, headers)

    def line(self) -> bytes:
        """Return the last line of an answer whose status was sent before: the fields, and the status."""
        return grammar.encode_json({**self.fields, "status": self.answer.status}).encode() + b"\n"


class ApiRequest(Request):
    """A request whose body is limited.

    ``api`` is what answers it, ``access_error`` why the sender has no access, and ``rights`` what it may do; they are
    known once all headers have arrived.  ``early_error`` is an error that was answered before the body's end.
    ``received`` counts its bytes.  ``lines`` is what takes a body of any size, of a call that answers while it arrives.
    """

    api: Api
    access_error: RequestError | None = None
    rights = Rights()
    _access_number = -1  # of the rights that were read
    early_error: RequestError | None = None
    disconnected = False
    has_passed = False  # whether this process has passed it on already, see ``passage``
    media_type = ""
    arrives = False  # whether a part of the body is missing, and it is not refused
    received = 0
    lines: LineStream | None = None
    _stores_body = False

    def gotLength(self, length: int | None) -> None:
        """Decide what to do with a body of ``length`` bytes (None: unknown), now that all headers are here."""
        self.api = cast("Any", self.channel).site.resource
        content_type = self.requestHeaders.getRawHeaders(b"content-type", [b""])[0].decode("latin-1")
        self.media_type = content_type.partition(";")[0].strip().lower()
        self.content, self._body = BytesIO(), BytesIO()  # Twisted looks for a form in `content`, which stays empty
        self.arrives = True
        self.update_rights()
        self._limit = self.api.max_body
        reports = bool(self.rights.read) and not self.rights.may_change  # all that it may send is a report
        if reports:
            self._limit = min(self._limit, MAX_REPORT)
        self._stores_body = self.media_type in BODY_TYPES and (reports or self.rights.may_change)
        try:
            self.lines = self.api.open_lines(self)
        except RequestError as error:
            self.refuse(error)
        if self.lines is None:
            self._check_size(length or 0)
        else:
            cast("Any", self.channel).wait_for_lines()

    def update_rights(self) -> bool:
        """Read what the sender may do, unless it is known; return whether that has changed, as after SIGHUP."""
        if self._access_number == self.api.access_number:
            return False
        before = self.rights, self.access_error is None
        self.rights, self.access_error, self._access_number = Rights(), None, self.api.access_number
        try:
            self.rights = self.api.rights(self)
        except RequestError as error:
            self.access_error = error
        return before != (self.rights, self.access_error is None)

    def handleContentChunk(self, data: bytes) -> None:
        """Store or discard a part of the body.  Twisted's own method parses forms into memory."""
        if self.lines is not None and self.early_error is None:
            self.lines.received(data)
            return
        self.received += len(data)
        self._check_size(self.received)
        if self._stores_body:
            self._body.write(data)
            self.api.bodies.keep(self, self.received)
        elif self.received > 2 * self._limit:
            self.channel.loseConnection()

    def _check_size(self, size: int) -> None:
        if size > self._limit and self.early_error is None:
            self.refuse(RequestError(413, f"a body of more than {self._limit} bytes; send it in parts"))

    def refuse(self, error: RequestError) -> None:
        """Answer with an error before the body's end, as a last line if parts were sent; discard the rest."""
        self.early_error = error
        self.arrives = self._stores_body = False
        self._drop_body()
        self.requestHeaders.removeHeader(b"expect")  # or Twisted sends 100 Continue after our answer
        self.channel.persistent = False
        if self.disconnected:
            return
        if self.startedWriting:
            self.write(error.line())  # type: ignore[no-untyped-call]
        else:
            self.clientproto = b"HTTP/1.1"  # Twisted sets it only with the last byte of a request
            _write(self, error.answer, {"connection": "close"})

    def refuse_body(self, text: str) -> None:
        """Refuse what arrives: the bodies of all requests together are too large, see ``text``."""
        self.api.body_refused(cast("Channel", self.channel), text)
        error = RequestError(503, f"{text}; send it later, or in parts")
        if self.lines is None:
            self.refuse(error)
        else:
            self.lines.fail(error)

    def _drop_body(self) -> None:
        self._body = BytesIO()
        if self.lines is None:
            self.api.bodies.keep(self, 0)

    def send_part(self, data: bytes, content_type: str) -> None:
        """Send a part of an answer whose length is not known, before the body's end; status 200."""
        if not self.startedWriting:
            self.clientproto, self.method = b"HTTP/1.1", b"POST"  # as in ``refuse``
            _set_headers(self, Answer(200, b"", content_type), {"connection": "close"})
        self.write(data)  # type: ignore[no-untyped-call]

    def body(self) -> bytes:
        """Return the body; RequestError if the API does not read its content type."""
        if self.media_type not in BODY_TYPES:
            raise RequestError(
                415, f"content type {self.media_type!r:.80} is not read here; send {' or '.join(BODY_TYPES)}"
            )
        return self._body.getvalue()

    def process(self) -> None:
        """Answer, as Twisted does for a site with one resource and without encodings."""
        self.arrives = False
        if self.path == b"*":
            self._answer_for_server()
        else:
            self.api.render(self)

    def _answer_for_server(self) -> None:
        """Answer OPTIONS for the server as a whole."""
        self._drop_body()
        set_header = self.responseHeaders.setRawHeaders
        set_header("server", [SERVER])
        set_header("date", [_date(int(time.time()))])
        if self.method != b"OPTIONS":
            self.setResponseCode(NOT_ALLOWED)
            set_header("allow", ["OPTIONS"])
        set_header("content-length", ["0"])
        self.finish()  # type: ignore[no-untyped-call]

    def connectionLost(self, reason: Failure) -> None:
        """Note that no answer can be sent any more."""
        self.disconnected = True
        if self.arrives:
            self.arrives = False
            self._drop_body()
            if self.lines is not None:
                self.lines.drop()
        super().connectionLost(reason)  # type: ignore[no-untyped-call]

    def send(self, answer: Answer) -> None:
        """Send ``answer``, unless an early error was sent or the client has disconnected."""
        self._drop_body()
        if self.disconnected:
            return
        if self.early_error is None and answer.stream is not None and self.method != b"HEAD":
            _set_headers(self, answer, answer.headers)
            answer.stream(self)
            return
        if self.early_error is None:
            _write(self, answer, answer.headers)
        self.finish()  # type: ignore[no-untyped-call]


def _write(request: Request, answer: Answer, headers: Mapping[str, str]) -> None:
    """Send a whole answer at once.  It has the lines and the order of what ``_set_headers`` lets Twisted send."""
    for name, text in headers.items():
        request.setHeader(name, text)
    request.setResponseCode(answer.status)
    others = [b"%b: %b\r\n" % (name, text) for name, [text] in request.responseHeaders.getAllRawHeaders()]
    has_body = request.method != b"HEAD" and answer.status not in NO_BODY_CODES
    request.startedWriting = 1
    whole = _ANSWER % (
        request.clientproto,
        request.code,
        request.code_message,
        b"".join(others),
        SERVER,
        _date(int(time.time())),
        len(answer.body),
        answer.content_type.encode(),
        answer.body if has_body else b"",
    )
    cast("Channel", request.channel).send(whole)


def _set_headers(request: Request, answer: Answer, headers: Mapping[str, str]) -> None:
    """Set the headers of an answer that is sent in parts; a proxy must pass each part on at once."""
    for name, text in headers.items():
        request.setHeader(name, text)
    request.setResponseCode(answer.status)
    request.setHeader("server", SERVER)
    request.setHeader("date", _date(int(time.time())))
    request.setHeader("content-type", answer.content_type)
    request.setHeader("cache-control", "no-store")
    request.setHeader("x-accel-buffering", "no")  # nginx would wait for 8 KiB


@lru_cache(1)
def _date(seconds: int) -> bytes:
    """Return the header ``Date``, which changes once a second."""
    return cast("bytes", datetimeToString(seconds))


def read_query(request: ApiRequest, needed: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, str]:
    """Return the parameters; RequestError if one is unknown, missing, without a value, or given twice."""
    query = {}
    for part in request.uri.partition(b"?")[2].split(b"&"):  # ``args`` lacks what has no "="
        if part and b"=" not in part:
            raise RequestError(400, f"parameter {part.decode('latin-1')!r:.60} has no value")
    for name, values in request.args.items():
        text = name.decode("utf-8", "backslashreplace")
        if text not in needed and text not in optional:
            known = ", ".join([*needed, *optional]) or "none"
            raise RequestError(400, f"unknown parameter {text!r:.60}; known here: {known}")
        if len(values) > 1:
            raise RequestError(400, f"parameter {text!r} is given {len(values)} times")
        query[text] = values[0].decode("utf-8", "backslashreplace")
    for name in needed:
        if name not in query:
            raise RequestError(400, f"parameter {name!r} is missing")
    return query


def read_token(query: Mapping[str, str], name: str) -> Token:
    """Return the parameter ``name`` as a token, 0 or more; RequestError if it is not one."""
    try:
        token = grammar.token(query[name])
    except RemoteProtocolError as error:
        raise RequestError(400, f"{name}: {error}") from error
    if token < 0:
        raise RequestError(400, f"{name}: {token} is negative; tokens here count upwards, whatever the table does")
    return token


def read_limit(query: Mapping[str, str], default: int) -> int:
    """Return the parameter ``limit``: 1 to MAX_PAGE_ROWS rows or events; RequestError if it is not one."""
    limit = read_token(query, "limit") if "limit" in query else default
    if not 1 <= limit <= MAX_PAGE_ROWS:
        raise RequestError(400, f"limit: {limit} is not between 1 and {MAX_PAGE_ROWS}")
    return limit


def read_key(request: ApiRequest) -> str | None:
    """Return the Idempotency-Key, if there is one (docs/http.md, Idempotency keys)."""
    match request.requestHeaders.getRawHeaders(b"idempotency-key"):
        case None:
            return None
        case [key] if 0 < len(key) <= KEY_LENGTH and key.isascii() and (text := key.decode()).isprintable():
            return text
    raise RequestError(400, f"Idempotency-Key: give one key of 1 to {KEY_LENGTH} printable ASCII characters")
