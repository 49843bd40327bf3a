"""The atoms of a line: tokens, names and JSON rows.  The only makers of ``Token``, ``StreamName`` and ``InstanceName``.

A row has one spelling everywhere (wire, tables, HTTP, segments): what ``json.dumps(row, separators=(",", ":"),
ensure_ascii=True, allow_nan=False)`` returns.  Its text is made once, when a fact is written.
"""

from __future__ import annotations

import json
import json.encoder
import re
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, Final, NewType

import msgspec

from replication.errors import RemoteProtocolError, RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

Token = NewType("Token", int)
StreamName = NewType("StreamName", str)
InstanceName = NewType("InstanceName", str)

_TOKEN = re.compile(r"0|-?[1-9][0-9]{0,18}")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]{1,255}")
_INT_DIGITS = 4300  # what the standard library reads as one integer; only a longer text can hold a longer one

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_json = msgspec.json.Decoder().decode
_decode_tokens = msgspec.json.Decoder(list[Annotated[Token, msgspec.Meta(ge=0, le=2**63 - 1)]]).decode
_NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeEncodeError, RecursionError)


def token(text: str) -> Token:
    """Read an integer of at most 64 bits: what ``str`` makes of it, and nothing else that ``int`` takes."""
    if _TOKEN.fullmatch(text) is None or not -(2**63) <= (value := int(text)) < 2**63:
        raise RemoteProtocolError(f"not a plain integer of 64 bits: {text[:40]!r}")
    return Token(value)


def place(text: str) -> Token | None:
    """Read the third field of an RDATA: a token, or None for ``batch``: the next row belongs to the same fact."""
    return None if text == "batch" else token(text)


def places(texts: list[str]) -> Sequence[Token | None]:
    """Read what :func:`place` reads, many at once: the same answers and errors at a tenth of the time."""
    numbers = [text for text in texts if text != "batch"] if "batch" in texts else texts
    digits = "".join(numbers)
    try:
        tokens = _decode_tokens(f"[{','.join(numbers)}]") if digits.isascii() and digits.isdecimal() else []
    except msgspec.MsgspecError:
        tokens = []
    if len(tokens) < len(numbers):  # something is not plain digits: a sign, or a mistake
        return [place(text) for text in texts]
    if numbers is texts:
        return tokens
    ahead = iter(tokens)
    return [None if text == "batch" else next(ahead) for text in texts]


def stream_name(text: str) -> StreamName:
    """Read the name of a stream: no white space, no control character, at most 255 characters."""
    return StreamName(_name(text, "a stream name"))


def instance_name(text: str) -> InstanceName:
    """Read the name of an instance, by the rule of :func:`stream_name`."""
    return InstanceName(_name(text, "an instance name"))


def _name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise RemoteProtocolError(f"not {what}: {text[:40]!r}")
    return text


def row_text(text: str) -> str:
    """Return ``text`` if it is what :func:`read_json` can read; what it says is not kept."""
    row_texts([text])
    return text


def row_texts(texts: list[str]) -> None:
    """Return if each of ``texts`` is one JSON value and nothing else; RemoteProtocolError says what is wrong."""
    try:
        deque(map(_check_json, texts), maxlen=0)
        unsure = max(map(len, texts), default=0) > _INT_DIGITS
    except _NOT_DECODED:
        unsure = True
    if unsure:
        for text in texts:
            read_json(text)


def read_rows(texts: Sequence[str]) -> list[Any]:
    """Decode each of ``texts`` as :func:`read_json` does; one, the usual number, is worth a case of its own."""
    try:
        return [_decode_json(texts[0])] if len(texts) == 1 else [_decode_json(text) for text in texts]
    except _NOT_DECODED:
        return [read_json(text) for text in texts]


def read_json(text: str) -> Any:
    """Decode one JSON value as the standard library does, but refuse NaN and the infinities."""
    try:
        return _decode_json(text)
    except _NOT_DECODED:
        pass  # the standard library has the last word: it takes lone surrogates, and numbers too large for a float
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RemoteProtocolError(f"not JSON: {error.msg} at character {error.pos + 1} of {len(text)}") from error
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse(value: object) -> None:
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def _make_encoder() -> Any:
    """Return json.dumps' own C encoder, made once: the same bytes at a third of the time."""
    make = getattr(json.encoder, "c_make_encoder", None)
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


def spell_rows(rows: Sequence[object]) -> list[str]:
    """Return what :func:`spell_row` does of each, in bulk."""
    encode, join = _encode_json, "".join
    try:
        return [join(encode(row, 0)) for row in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a row must be JSON: {error}") from error
