"""The calls below ``/_synapse/replication``, as a Synapse worker sends them (docs/protocol/following.md E5).

A wrong secret is answered 401, as everywhere here; Synapse itself answers 500.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import UnknownStreamError
from replication.web.pages import PAGE_ROWS, encode_page
from replication.web.request import Answer, RequestError, read_token
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.web.request import ApiRequest
    from replication.wire.grammar import Token


class SynapseError(RequestError):
    """Ends a request with the answer ``{"errcode", "error"}``, as Synapse does."""

    def __init__(self, status: int, errcode: str, text: str) -> None:
        super().__init__(status, text)
        self.answer = Answer.json({"errcode": errcode, "error": text}, status)


async def read_updates(request: ApiRequest, name: str, _: str) -> Answer:
    """Answer a page of this instance's facts; at a worker that only follows, of the stream's one writer."""
    after, upto = (_read_token(request, each) for each in ("from_token", "upto_token"))
    try:
        # after a reset a range may end before it begins: Synapse answers it with an empty page
        served = request.api.served
        page = await request.api.turns.read(
            request,
            name,
            PAGE_ROWS,
            lambda rows: served.page(name, None, after=min(after, upto), upto=upto, limit=rows),
        )
    except UnknownStreamError as error:
        raise SynapseError(400, "M_UNKNOWN", "Unknown stream") from error
    body = encode_page(page)
    request.api.turns.note(name, page.facts, len(body))
    return Answer(200, body)


async def answer_request(request: ApiRequest, name: str, words: Sequence[str]) -> Answer:
    """Answer with the application's function.  The worker passes an error on to its user."""
    requests = request.api.served.synapse_requests
    if name not in requests:
        raise SynapseError(404, "M_UNRECOGNIZED", f"no function answers the request {name!r:.60} here")
    grammar.check_values(request.body())
    body = grammar.read_json(request.body().decode("utf-8", "replace"))
    if not isinstance(body, dict):
        raise SynapseError(400, "M_NOT_JSON", "the body of a request is a JSON object")
    return Answer.json(await requests.answer(name, words, body))


def _read_token(request: ApiRequest, name: str) -> Token:
    values = request.args.get(name.encode())
    if not values:
        raise SynapseError(400, "M_MISSING_PARAM", f"Missing integer query parameter {name!r}")
    try:
        return read_token({name: values[0].decode("utf-8", "backslashreplace")}, name)
    except RequestError as error:
        text = f"Query parameter {name!r} must be a non-negative integer"
        raise SynapseError(400, "M_INVALID_PARAM", text) from error
