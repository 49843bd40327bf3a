"""Facts that a function cannot take: ``/v1/skipped``, ``/v1/streams/NAME/skip`` and ``…/retry`` (docs/http.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from replication.errors import RemoteProtocolError
from replication.web.request import Answer, RequestError, read_limit, read_query
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.skips import SkippedFact
    from replication.web.request import ApiRequest

LISTED: Final = 100  # facts, if the request has no limit


class ISkips(Protocol):
    """What people decide about facts that a function of this process cannot take; each may raise StreamError."""

    async def skip(self, stream: str, writer: str, token: Token) -> SkippedFact:
        """Leave out the fact that fails now."""
        ...

    async def retry(self, stream: str, writer: str, token: Token) -> SkippedFact:
        """Apply a fact that was skipped."""
        ...

    async def skipped(self, stream: str | None, limit: int) -> Sequence[SkippedFact]:
        """Return the facts that were skipped, the latest first."""
        ...


class _Which(msgspec.Struct, forbid_unknown_fields=True):
    instance: str
    token: int


async def list_skipped(request: ApiRequest) -> Answer:
    """Answer with the facts that were skipped, the latest first."""
    query = read_query(request, [], ["stream", "limit"])
    found = await _skips(request).skipped(query.get("stream"), read_limit(query, LISTED))
    return _answer({"skipped": [describe_skipped(each) for each in found]})


async def skip_fact(request: ApiRequest, name: str) -> Answer:
    """Answer once the fact is skipped."""
    read_query(request)
    which = _read_which(request)
    return _answer(describe_skipped(await _skips(request).skip(name, which.instance, Token(which.token))))


async def retry_fact(request: ApiRequest, name: str) -> Answer:
    """Answer once the fact is applied."""
    read_query(request)
    which = _read_which(request)
    return _answer(describe_skipped(await _skips(request).retry(name, which.instance, Token(which.token))))


def describe_skipped(skipped: SkippedFact) -> dict[str, Any]:
    """Return one fact as a JSON object; ``since`` is in seconds since 1970."""
    return {
        "stream": skipped.stream,
        "instance": skipped.writer,
        "token": skipped.fact.token,
        "state": skipped.state.value,
        "since": skipped.changed_at,
        "decided_by": skipped.decided_by,
        "error": skipped.error,
        "rows": [grammar.read_json(text) for text in skipped.fact.texts],
    }


def _answer(value: object) -> Answer:
    """Answer with rows, which may have numbers that are too large for a float."""
    return Answer(200, grammar.encode_again(value).encode())


def _skips(request: ApiRequest) -> ISkips:
    skips = request.api.served.skips
    if skips is None:
        raise RequestError(404, "a master calls no functions: send this to the worker whose function fails")
    return skips


def _read_which(request: ApiRequest) -> _Which:
    try:
        return msgspec.json.decode(request.body(), type=_Which)
    except grammar.NOT_DECODED as error:
        raise RemoteProtocolError(f'the body is not {{"instance": WRITER, "token": N}}: {error}') from error
