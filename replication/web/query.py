"""What a request asks for, read strictly: a wrong parameter is a refusal that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import RemoteProtocolError
from replication.web.exchange import refuse
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.web.exchange import Exchange
    from replication.wire.grammar import Token

KEY_LENGTH: Final = 200


def read_query(request: Exchange, needed: Sequence[str] = (), optional: Sequence[str] = ()) -> dict[str, str]:
    """Return the query's parameters, each known and given once; Refused names the one that is not."""
    query = {}
    for name, values in request.args.items():
        text = name.decode("utf-8", "backslashreplace")
        if text not in needed and text not in optional:
            known = ", ".join([*needed, *optional]) or "none"
            raise refuse(400, f"unknown parameter {text!r:.60}; known here: {known}")
        if len(values) > 1:
            raise refuse(400, f"parameter {text!r} is given {len(values)} times")
        query[text] = values[0].decode("utf-8", "backslashreplace")
    for name in needed:
        if name not in query:
            raise refuse(400, f"parameter {name!r} is missing")
    return query


def read_token(query: Mapping[str, str], name: str) -> Token:
    """Return the parameter ``name`` as a token; Refused if it is none, or negative."""
    try:
        token = grammar.token(query[name])
    except RemoteProtocolError as error:
        raise refuse(400, f"{name}: {error}") from error
    if token < 0:
        raise refuse(400, f"{name}: {token} is negative; tokens here count upwards, whatever the table does")
    return token


def read_key(request: Exchange) -> str | None:
    """Return the Idempotency-Key, if there is one: what makes an append that is asked again the same append."""
    match request.requestHeaders.getRawHeaders(b"idempotency-key"):
        case None:
            return None
        case [key] if 0 < len(key) <= KEY_LENGTH and key.isascii() and (text := key.decode()).isprintable():
            return text
    raise refuse(400, f"Idempotency-Key: give one key of 1 to {KEY_LENGTH} printable ASCII characters")
