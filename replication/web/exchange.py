"""One request and its answer: refused at the header if it is to be, its body bounded while it arrives."""

from __future__ import annotations

from http import HTTPStatus
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import attrs
from twisted.web import server

from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twisted.python.failure import Failure

BODY_TYPES: Final = ("application/json", "application/x-ndjson")


@attrs.frozen
class Answer:
    """What to say: a status, a body, and headers beside those that every answer has."""

    code: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = attrs.field(factory=dict)


class Refused(Exception):  # noqa: N818  it is an answer, not an error
    """Ends a call with another answer than the one asked for."""

    def __init__(self, answer: Answer) -> None:
        """Keep the answer."""
        super().__init__(answer.code)
        self.answer = answer


def say(value: object, code: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return ``value`` as a JSON answer."""
    return Answer(code, grammar.spell_row(value).encode(), headers=headers or {})


def refuse(code: int, detail: str, headers: Mapping[str, str] | None = None) -> Refused:
    """Return a refusal ``{"error", "detail"}``; ``detail`` is a sentence that names the culprit."""
    return Refused(say({"error": HTTPStatus(code).phrase, "detail": detail}, code, headers))


class IAdmission(Protocol):
    """What a request asks of its site's resource before its body comes."""

    max_body: int

    def stranger(self, request: Exchange) -> Refused | None:
        """Return why the sender of ``request`` must stay out, or None."""
        ...


class Exchange(server.Request):
    """A request whose body is bounded, and kept only where it may be wanted.

    A body that is too large is answered as soon as that is known; what comes nevertheless is thrown away, as much again
    as a body may have, before we hang up.
    """

    refused: Refused | None = None  # what has been said already
    gone = False
    media_type = ""
    _kept = False
    _received = 0

    def gotLength(self, length: int | None) -> None:
        """Decide, now that all headers are here, what to do with a body of ``length`` bytes (None: unknown)."""
        api: IAdmission = cast("Any", self.channel).site.resource
        content_type = self.requestHeaders.getRawHeaders(b"content-type", [b""])[0].decode("latin-1")
        self.media_type = content_type.partition(";")[0].strip().lower()
        self.content = self._body = BytesIO()
        self._limit = api.max_body
        self._kept = self.media_type in BODY_TYPES and api.stranger(self) is None
        self._check_size(length or 0)

    def handleContentChunk(self, data: bytes) -> None:
        """Keep a part of the body, or not: Twisted reads forms into memory by itself, if it finds any."""
        self._received += len(data)
        self._check_size(self._received)
        if self._kept:
            self._body.write(data)
        elif self._received > 2 * self._limit:
            self.channel.loseConnection()

    def _check_size(self, size: int) -> None:
        if size <= self._limit or self.refused is not None:
            return
        self.refused = refuse(413, f"a body of more than {self._limit} bytes; send it in parts")
        self._kept = False
        self.content = self._body = BytesIO()
        self.clientproto = b"HTTP/1.1"  # Twisted tells a request its version only with its last byte
        self.requestHeaders.removeHeader(b"expect")  # or Twisted would say 100 Continue after our refusal
        self.channel.persistent = False
        _write(self, self.refused.answer, {"connection": "close"})

    def body(self) -> bytes:
        """Return the body; Refused if it is not of a type that is read here."""
        if self.media_type not in BODY_TYPES:
            raise refuse(415, f"content type {self.media_type!r:.80} is not read here; send {' or '.join(BODY_TYPES)}")
        return self._body.getvalue()

    def connectionLost(self, reason: Failure) -> None:
        """Remember that nobody listens any more."""
        self.gone = True
        server.Request.connectionLost(self, reason)

    def conclude(self, answer: Answer) -> None:
        """Say it, unless something has been said already or nobody listens."""
        if self.gone:
            return
        if self.refused is None:
            _write(self, answer, answer.headers)
        server.Request.finish(self)


def _write(request: server.Request, answer: Answer, headers: Mapping[str, str]) -> None:
    request.setResponseCode(answer.code)
    request.setHeader("content-type", answer.content_type)
    request.setHeader("content-length", str(len(answer.body)))
    request.setHeader("cache-control", "no-store")
    for name, text in headers.items():
        request.setHeader(name, text)
    request.write(answer.body)
