"""Pages of facts, histories and appends: ``/v1/streams/NAME/updates``, ``…/history`` and ``…/facts`` (docs/http.md)."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Final

from twisted.web.http import Request

from replication.errors import NotAWriterError, RowError
from replication.web.line_stream import LineStream
from replication.web.pages import PAGE_ROWS, AddedLines, added_fact, encode_page, encode_since
from replication.web.request import (
    MEDIA_TYPE_OF_LINES,
    Answer,
    RequestError,
    read_key,
    read_limit,
    read_query,
    read_token,
)
from replication.wire import grammar
from replication.wire.grammar import Token

MAX_LINES: Final = 1_000_000  # of a body: short facts take far more memory than their text

if TYPE_CHECKING:
    from replication.web.request import ApiRequest
    from replication.web.site import IServed


async def read_updates(request: ApiRequest, name: str) -> Answer:
    """Answer with a page of one writer's facts or, with ``since``, of all writers' facts."""
    served, turns = request.api.served, request.api.turns
    if b"since" in (request.args or {}):
        query = read_query(request, ["since"], ["limit"])
        since, limit = query["since"], read_limit(query, PAGE_ROWS)
        merged, token = await turns.read(request, name, limit, lambda rows: served.since(name, since, rows))
        body = encode_since(merged, token)
        turns.note(name, [each.fact for each in merged.written], len(body))
        return Answer(200, body)
    query = read_query(request, ["instance", "from", "upto"], ["limit"])
    after, upto = read_token(query, "from"), read_token(query, "upto")
    if upto < after:
        raise RequestError(400, f"upto ({upto}) is less than from ({after})")
    writer = grammar.instance_name(query["instance"])
    limit = read_limit(query, PAGE_ROWS)
    page = await turns.read(
        request, name, limit, lambda rows: served.page(name, writer, after=after, upto=upto, limit=rows)
    )
    if not page.facts and page.upto < upto:
        _check_writer(served, name, writer)
    body = encode_page(page)
    turns.note(name, page.facts, len(body))
    return Answer(200, body)


async def read_history(request: ApiRequest, name: str) -> Answer:
    """Answer with the epochs of one writer."""
    writer = grammar.instance_name(read_query(request, ["instance"])["instance"])
    return Answer.json({"epochs": [*await request.api.served.history(name, writer)]})


def _check_writer(served: IServed, name: str, writer: str) -> None:
    """Raise RequestError if a stream has no such writer here; one that is declared may not have written yet."""
    for status in served.stream_statuses(name):
        writers = {*status.definition.writers, *(each.instance for each in status.writers)}
        if writer not in writers:
            known = ", ".join(sorted(writers)) or "none"
            raise RequestError(404, f"stream {name!r} has no writer {writer!r:.100} here; its writers: {known}")


def open_lines(request: ApiRequest, name: str) -> LineStream:
    """Return what appends the lines of this request while they arrive; RequestError if it cannot be used."""
    query = read_query(request, optional=["after"])
    if request.media_type != MEDIA_TYPE_OF_LINES:
        raise RequestError(415, f"content type {request.media_type!r:.80} is not read here; send {MEDIA_TYPE_OF_LINES}")
    _refuse_rooms(request, name)
    key, after = read_key(request), read_token(query, "after") if "after" in query else Token(0)
    if after and key is None:
        raise RequestError(400, "after: give the Idempotency-Key of the first request, or facts would be stored twice")
    return LineStream(request, name, key, after)


async def append_lines(request: ApiRequest, name: str) -> Answer:
    """Answer with the IDs of the lines that have not been answered, and end the answer."""
    if request.lines is None:
        cure = "a proxy in between must use it, too (nginx: proxy_http_version 1.1)"
        raise RequestError(400, f"lines of {name!r} are taken over HTTP 1.1 only; {cure}")
    await request.lines.end()
    return Answer(200, b"", MEDIA_TYPE_OF_LINES, stream=Request.finish)


def _refuse_rooms(request: ApiRequest, name: str) -> None:
    if name in request.api.streams_of_rooms:
        raise NotAWriterError(f"stream {name!r} has the events of rooms: POST /v1/rooms/ROOM/events")


async def append_facts(request: ApiRequest, name: str) -> Answer:
    """Append one fact, or one of each line, and answer with the IDs."""
    read_query(request)
    _refuse_rooms(request, name)
    key, body = read_key(request), request.body()
    if request.media_type == MEDIA_TYPE_OF_LINES and body.count(b"\n") > MAX_LINES:
        raise RequestError(413, f"more than {MAX_LINES} lines; send them in parts, or to /v1/streams/{name}/append")
    lines = AddedLines(BytesIO(body)) if request.media_type == MEDIA_TYPE_OF_LINES else None
    try:
        facts = added_fact(body) if lines is None else lines
        return Answer.json({"ids": list(await request.api.served.append_texts(name, facts, key))})
    except RowError as error:
        if lines is not None and error.fact is not None:
            raise RequestError(400, f"line {lines.number}: {error}") from error
        raise
