"""The fields of a line: tokens, names and JSON rows (docs/protocol/wire.md A2, A3).

Only this module makes a ``Token``, ``StreamName`` or ``InstanceName``.  A row has one text everywhere (wire, tables,
HTTP, segments): what ``json.dumps(row, separators=(",", ":"), ensure_ascii=True, allow_nan=False)`` returns.  The text
is made once, when the row is written.  Arrays and objects of a row are at most ``MAX_NESTING`` deep, so every process
can decode it, whatever its interpreter allows (docs/configuration.md, Fixed limits).
"""

from __future__ import annotations

import json
import json.encoder
import re
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Final, NewType

import msgspec

from replication.errors import RemoteProtocolError, RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

Token = NewType("Token", int)
StreamName = NewType("StreamName", str)
InstanceName = NewType("InstanceName", str)

MAX_NESTING: Final = 128  # arrays and objects of a row, one in the other

MAX_VALUES: Final = 1_000_000  # of one fact: no other request is answered while they are decoded
EXPONENT_VALUES: Final = 4  # what a number with an exponent counts as in a fact: encoding 1.5e-300 takes long
MAX_DIGITS: Final = 400  # in a row, in a JSON body of more than MAX_VALUES bytes: decoding time grows with their square

_TOKEN = re.compile(r"0|-?[1-9][0-9]{0,18}")
_NAME = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]{1,255}")
_INT_DIGITS = 4300  # the standard library reads no integer with more digits; a row of fewer characters has none

_check_json = msgspec.json.Decoder(msgspec.Raw).decode
# By itself, msgspec takes 8 microseconds for a number such as 5e-324: a million of them would block a reactor.
_decode_json = msgspec.json.Decoder(float_hook=float).decode
_decode_tokens = msgspec.json.Decoder(list[Annotated[Token, msgspec.Meta(ge=0, le=2**63 - 1)]]).decode
_SHALLOW: Final = 2 * MAX_NESTING + 1  # a text of so many characters is not too deep: each level takes two
_LONG_NUMBER: Final = b"0" * (MAX_DIGITS + 1)  # where each digit is 0
_STRIDE: Final = 50  # of the characters that are looked at first: a long number has _LONG_SAMPLE of them
_LONG_SAMPLE: Final = b"0" * (MAX_DIGITS // _STRIDE)
_TO_ZEROS: Final = bytes(ord("0") if chr(each).isdigit() else each for each in range(128)) + bytes(range(128, 256))
_TO_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and, as a signed byte, -1
_NO_BRACKETS: Final = bytes({*range(256)} - {*b"[]{}"})
_NO_MARKS: Final = bytes({*range(256)} - {*b",[{eE"})
_INFINITY: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|Infinity')
# What msgspec raises for a text or for bytes: it leaves wrong UTF-8 and lone surrogates to Python.
NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)


def token(text: str) -> Token:
    """Return ``text`` as an integer of 64 bits; RemoteProtocolError unless it is written as ``str`` writes it."""
    if _TOKEN.fullmatch(text) is None or not -(2**63) <= (value := int(text)) < 2**63:
        raise RemoteProtocolError(f"not a plain integer of 64 bits: {text[:40]!r}")
    return Token(value)


def place(text: str) -> Token | None:
    """Return the token in the third field of RDATA; None for ``batch``: the next row is of the same fact."""
    return None if text == "batch" else token(text)


def places(texts: list[str]) -> Sequence[Token | None]:
    """Return :func:`place` of each of ``texts``, or raise its error, in a tenth of the time."""
    numbers = [text for text in texts if text != "batch"] if "batch" in texts else texts
    digits = "".join(numbers)
    try:
        tokens = _decode_tokens(f"[{','.join(numbers)}]") if digits.isascii() and digits.isdecimal() else []
    except msgspec.MsgspecError:
        tokens = []
    if len(tokens) < len(numbers):  # one has a sign, or is wrong
        return [place(text) for text in texts]
    if numbers is texts:
        return tokens
    ahead = iter(tokens)
    return [None if text == "batch" else next(ahead) for text in texts]


def stream_name(text: str) -> StreamName:
    """Return ``text`` as the name of a stream: 1 to 255 characters, no white space, no control characters.

    RemoteProtocolError if it breaks this rule.
    """
    return StreamName(_name(text, "a stream name"))


def instance_name(text: str) -> InstanceName:
    """Return ``text`` as the name of an instance, by the rule of :func:`stream_name`."""
    return InstanceName(_name(text, "an instance name"))


def _name(text: str, what: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise RemoteProtocolError(f"not {what}: {text[:40]!r}")
    return text


def row_text(text: str) -> str:
    """Return ``text`` if it is a row; RemoteProtocolError if not."""
    row_texts([text])
    return text


def row_texts(texts: list[str]) -> None:
    """Check that each of ``texts`` is one JSON value, not too deep, and nothing else; RemoteProtocolError if not."""
    if json_texts(texts) > _SHALLOW:
        try:
            check_nesting(texts)
        except RowError as error:
            raise RemoteProtocolError(str(error)) from error


def check_nesting(texts: Sequence[str]) -> None:
    """Raise RowError if one of ``texts``, which are JSON, has arrays and objects deeper than ``MAX_NESTING``."""
    if max(map(len, texts), default=0) <= _SHALLOW:
        return
    for text in texts:
        if len(text) > _SHALLOW and text.count("[") + text.count("{") > MAX_NESTING:
            steps = _without_texts(text.encode()).translate(_TO_STEPS, _NO_BRACKETS)
            depth = max(accumulate(memoryview(steps).cast("b")), default=0)
            if depth > MAX_NESTING:
                raise RowError(
                    f"arrays and objects of a row may be {MAX_NESTING} levels deep, but this one has {depth} levels"
                )


def _without_texts(text: bytes) -> bytes:
    """Return JSON without what is in its texts: a regular expression takes ten times as long for a long text."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(text.split(b'"')[::2])


def count_values(text: bytes, exponent: int = 1) -> int:
    """Return about how many values a JSON text has: those that begin a list or an object, or come after another one.

    A number with an exponent counts as ``exponent`` values.  A count of at most ``MAX_VALUES`` may be too high.
    """
    count = _count_marks(text.translate(None, _NO_MARKS), exponent)  # in a fifth of the time for a long text
    if count > MAX_VALUES:  # some of these may be inside texts, or an ``e`` of true or false
        outside = _without_texts(text)
        count = _count_marks(outside, exponent)
        count -= (exponent - 1) * (outside.count(b"true") + outside.count(b"false"))
    return count


def _count_marks(text: bytes, exponent: int) -> int:
    """Return how many values ``text`` has at most, where each ``e`` is an exponent."""
    count = text.count(b",") + text.count(b"[") + text.count(b"{")
    return count if exponent == 1 else count + (exponent - 1) * (text.count(b"e") + text.count(b"E"))


def check_values(text: bytes) -> None:
    """Raise RemoteProtocolError if a JSON text has too many values, or too long a number, to decode it at once."""
    if len(text) <= MAX_VALUES:
        return
    if count_values(text, EXPONENT_VALUES) > MAX_VALUES:
        raise RemoteProtocolError(f"JSON with more than {MAX_VALUES} values; send it in parts")
    if _has_long_number(text) and _has_long_number(_without_texts(text)):
        raise RemoteProtocolError(f"JSON of {len(text)} bytes with a number of more than {MAX_DIGITS} digits")


def _has_long_number(text: bytes) -> bool:
    """Return whether there are more than MAX_DIGITS digits in a row: a regular expression takes 30 times as long."""
    if _LONG_SAMPLE not in text[::_STRIDE].translate(_TO_ZEROS):
        return False
    return _LONG_NUMBER in text.translate(_TO_ZEROS)


def json_texts(texts: list[str]) -> int:
    """Check that each of ``texts`` is one JSON value and nothing else; RemoteProtocolError if not.

    Returns the length of the longest.
    """
    longest = max(map(len, texts), default=0)
    unsure = longest > _INT_DIGITS
    try:
        deque(map(_check_json, texts), maxlen=0)
    except NOT_DECODED:
        unsure = True
    if unsure:
        for text in texts:
            read_json(text)
    return longest


def read_rows(texts: Sequence[str]) -> list[Any]:
    """Return each of ``texts`` decoded as :func:`read_json` does; a single text, the usual case, is fastest."""
    try:
        return [_decode_json(texts[0])] if len(texts) == 1 else [_decode_json(text) for text in texts]
    except NOT_DECODED:
        return [read_json(text) for text in texts]


def read_json(text: str) -> Any:
    """Return one JSON value, decoded as the standard library does.

    RemoteProtocolError if ``text`` is not JSON; NaN and infinities are not.
    """
    try:
        return _decode_json(text)
    except NOT_DECODED:
        pass  # the standard library also accepts lone surrogates, and numbers too large for a float
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise RemoteProtocolError(f"not JSON: {error.msg} at character {error.pos + 1} of {len(text)}") from error
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not JSON: {error}") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _refuse(value: object) -> None:
    raise TypeError(f"JSON has no {type(value).__name__}")


def _make_encoder() -> Any:
    """Return the C encoder of json.dumps, made once: the same text in a third of the time."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return json.JSONEncoder(separators=(",", ":"), allow_nan=False).iterencode
    ascii_string = json.encoder.encode_basestring_ascii
    return make(None, _refuse, ascii_string, None, ":", ",", False, False, False)


_encode_json = _make_encoder()


def encode_row(row: object) -> str:
    """Return the text of ``row``; RowError if JSON cannot hold it (NaN, a set, a date, a cycle) or it is too deep."""
    try:
        text = "".join(_encode_json(row, 0))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a row must be JSON: {error}") from error
    if len(text) > _SHALLOW:
        check_nesting([text])
    return text


def encode_rows(rows: Sequence[object]) -> list[str]:
    """Return what :func:`encode_row` returns for each of ``rows``, faster."""
    encode, join = _encode_json, "".join
    try:
        texts = [join(encode(row, 0)) for row in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a row must be JSON: {error}") from error
    check_nesting(texts)
    return texts


def encode_json(value: object) -> str:
    """Return the text of a value of any depth, in the form of a row; RowError if JSON cannot hold it."""
    try:
        return "".join(_encode_json(value, 0))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"a row must be JSON: {error}") from error


def encode_again(value: object) -> str:
    """Return the text of a value that was decoded from JSON.

    A number that was too large for a float is an infinity now, and becomes ``1e999``, which reads as the same.
    """
    try:
        return encode_json(value)
    except RowError:
        text = json.dumps(value, separators=(",", ":"))
        return _INFINITY.sub(lambda found: "1e999" if found[0] == "Infinity" else found[0], text)
