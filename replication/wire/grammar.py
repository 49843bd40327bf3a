"""The atoms of a line: tokens, names and JSON rows.  The only makers of ``Token``, ``StreamName`` and ``InstanceName``.

A row has one spelling everywhere (wire, tables, HTTP, segments): what ``json.dumps(row, separators=(",", ":"),
ensure_ascii=True, allow_nan=False)`` returns.  Its text is made once, when a fact is written.
"""

from __future__ import annotations

import json
import json.encoder
import re
from typing import Any, NewType

import msgspec

from replication.errors import RemoteProtocolError, RowError

Token = NewType("Token", int)
StreamName = NewType("StreamName", str)
InstanceName = NewType("InstanceName", str)

_TOKEN = re.compile(r"-?(?:0|[1-9][0-9]{0,18})", re.ASCII)
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,255}")

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_json = msgspec.json.Decoder().decode


def token(text: str) -> Token:
    """Read a plain decimal integer of at most 64 bits; no sign but a minus, no leading zero, no underscore."""
    if _TOKEN.fullmatch(text) is None or not -(2**63) <= (value := int(text)) < 2**63:
        raise RemoteProtocolError(f"not an integer: {text[:40]!r}")
    return Token(value)


def stream_name(text: str) -> StreamName:
    """Read the name of a stream: no white space, no control character, at most 255 characters."""
    return StreamName(_name(text, "stream name"))


def instance_name(text: str) -> InstanceName:
    """Read the name of an instance, by the rule of :func:`stream_name`."""
    return InstanceName(_name(text, "instance name"))


def _name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise RemoteProtocolError(f"not a {what}: {text[:40]!r}")
    return text


def row_text(text: str) -> str:
    """Return ``text`` if it is one JSON value and nothing else; what it says is not decoded."""
    try:
        _check_json(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        read_json(text)  # the standard library has the last word: it takes lone surrogates
    return text


def read_json(text: str) -> Any:
    """Decode one JSON value as the standard library does, but refuse NaN and the infinities."""
    try:
        return _decode_json(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        pass
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse(value: object) -> None:
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def _make_encoder() -> Any:
    """Return json.dumps' own C encoder, made once: the same bytes at a third of the time."""
    make = json.encoder.c_make_encoder
    if make is None:
        return json.JSONEncoder(separators=(",", ":"), allow_nan=False).iterencode
    ascii_string = json.encoder.encode_basestring_ascii
    return make(None, _refuse, ascii_string, None, ":", ",", False, False, False)


_encode_json = _make_encoder()


def spell_row(row: object) -> str:
    """Return the one spelling of ``row``; RowError if it has none (NaN, a set, a date, a cycle)."""
    try:
        return "".join(_encode_json(row, 0))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a row must be JSON: {error}") from error
