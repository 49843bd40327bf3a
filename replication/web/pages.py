"""Facts in the JSON of HTTP: encode and read pages, read appends.  No I/O.

The rows of a page are never decoded: a page is joined from stored texts, and read as raw JSON texts.  The rows of an
append are decoded, because the writer checks them.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import accumulate, pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from replication.errors import CatchUpError, RemoteProtocolError, StoreError
from replication.streams.facts import gather, is_ascending, tokens_of
from replication.streams.interfaces import Page
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from replication.streams.facts import Fact
    from replication.streams.merged_page import MergedPage

PAGE_ROWS: Final = 1_000  # rows, if the request has no limit
MAX_PAGE_ROWS: Final = 10_000
PAGE_BYTES: Final = 32 * 2**20  # a larger page ends early: clients have a limit of their own
SHRINK: Final = 8  # a page whose answer was lost is requested again with so many times fewer rows
GROW: Final = 4  # and each page that arrives lets the next one have a quarter more
MAX_ANSWER: Final = 256 * 2**20  # bytes that a client reads; a fact has less (MAX_FACT_BYTES), unless it is older

BLANK: Final = object()  # stands for a line without a fact
PAUSE: Final = object()  # stands before a fact whose text has more than PAUSE_BYTES: let the reactor do other work
PAUSE_BYTES: Final = 2**20

_FRAME: Final = 100  # bytes of a page beside its rows

_token_of = itemgetter(0)
_ODD = re.compile(r"[\s\x7f\\]")  # what canonical JSON does not have, or not everywhere
# msgspec refuses lone surrogates.  In a page without characters for private use, these stand for them while it reads.
_SURROGATE = re.compile(rb"\\ud([89a-f])")
_PRIVATE = re.compile(rb"\\u[eE][0-7]|\\uD|\\ud[A-F]")
_AS_PRIVATE = re.compile(r"\\ue([0-7])")


_Row = TypeVar("_Row")
_Form = TypeVar("_Form")


class _Updates(msgspec.Struct, Generic[_Row]):
    updates: list[tuple[Token, _Row]]
    upto_token: int
    limited: bool


class _Addition(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    rows: list[Any]


_decode_raw = msgspec.json.Decoder(_Updates[msgspec.Raw]).decode
_decode_addition = msgspec.json.Decoder(_Addition, float_hook=float).decode


def encode_page(page: Page, max_bytes: int = PAGE_BYTES) -> bytes:
    """Return ``page`` as ``{"updates": [[token, row], …], "upto_token": n, "limited": bool}``.

    A page whose rows have more than ``max_bytes`` is cut after a whole fact, and ``limited`` is then true
    (docs/protocol/following.md E5).  StoreError: the first fact alone is more than a client reads.
    """
    rows = ",".join([f"[{token},{text}]" for token, texts in page.facts for text in texts])
    if len(rows) > max_bytes and len(page.facts) > 1:
        return encode_page(_first_facts(page.facts, max_bytes), max_bytes)
    if len(rows) > MAX_ANSWER - _FRAME:
        raise StoreError(
            f"fact {page.facts[0].token} takes {len(rows)} bytes in a page, and a page has {MAX_ANSWER} at most: let "
            "the follower catch up from the database or from segments, or delete the fact's rows"
        )
    return _encode_updates(rows, str(page.upto), limited=page.limited)


def encode_since(since: MergedPage, token: str) -> bytes:
    """Return ``{"updates": [[token, writer, row], …], "upto_token": "…", "limited": bool}`` (docs/http.md)."""
    heads = [(f"[{each.fact.token},{grammar.encode_row(each.writer)}", each.fact.texts) for each in since.written]
    rows = ",".join([f"{head},{text}]" for head, texts in heads for text in texts])
    return _encode_updates(rows, f'"{token}"', limited=since.limited)


def _encode_updates(rows: str, upto: str, *, limited: bool) -> bytes:
    return f'{{"updates":[{rows}],"upto_token":{upto},"limited":{"true" if limited else "false"}}}'.encode()


def _first_facts(facts: Sequence[Fact], max_bytes: int) -> Page:
    """Return the facts that fit: at least one, and not all."""
    reached = accumulate(sum(len(text) + len(f"[{token},],") for text in texts) for token, texts in facts)
    fitting = sum(1 for size in reached if size <= max_bytes)
    first = facts[: min(max(fitting, 1), len(facts) - 1)]
    return Page(first, first[-1].token, limited=True)


class NoPageError(CatchUpError):
    """The answer is not a page.  It may be the beginning of one: without a length, only the JSON shows that."""


class BackwardsPageError(CatchUpError):
    """A limited page in descending order: the rows that it leaves out are below it (docs/protocol/traps.md 12)."""


def read_page(body: bytes, *, after: Token, upto: Token, foreign: bool = False) -> Page:
    """Return the page in the answer to a request for ``after < token <= upto``; CatchUpError if it breaks the rules.

    A ``foreign`` page is a Synapse's.  Its tokens may be in any order (docs/protocol/streams.md C5) and, of the stream
    ``caches``, beyond ``upto`` (docs/protocol/streams.md C4).  Its rows are encoded again where their JSON is not
    canonical.
    """
    try:
        answer, encode = _decode_page(body, foreign=foreign)
        updates = answer.updates
        backwards = foreign and answer.limited and bool(updates) and updates[0][0] > updates[-1][0]
        if foreign:
            updates.sort(key=_token_of)
            answer = _cut(answer, upto)
            updates = answer.updates
        facts = gather([token for token, _ in updates], encode([row for _, row in updates]))
    except (*grammar.NOT_DECODED, RemoteProtocolError) as error:
        raise NoPageError(f"not a page of updates: {error}") from error
    _check_order([after, *tokens_of(facts)], upto)
    if backwards:
        raise BackwardsPageError("a limited page in descending order: the rows that it leaves out cannot be requested")
    if not after <= answer.upto_token <= upto:
        raise CatchUpError(
            f"({after}, {upto}] was requested, the page ends at {answer.upto_token}: "
            "is that the right instance, is it behind, was its database reset?"
        )
    if facts and facts[-1].token > answer.upto_token:
        raise CatchUpError(f"the page ends at {answer.upto_token}, but has token {facts[-1].token}")
    return Page(facts, Token(answer.upto_token), answer.limited)


def read_form(body: bytes, form: type[_Form], what: str) -> _Form:
    """Return an answer that is ``what``, in a form of msgspec; CatchUpError if it has another one."""
    try:
        return msgspec.json.decode(body, type=form)
    except grammar.NOT_DECODED as error:
        raise CatchUpError(f"not {what}: {error}") from error


def _cut(answer: _Updates[Any], upto: Token) -> _Updates[Any]:
    """Return an answer without its rows beyond ``upto``: they are received or requested later."""
    inside = [update for update in answer.updates if update[0] <= upto]
    # an answer with rows beyond ``upto`` has all rows up to there
    return answer if len(inside) == len(answer.updates) else _Updates(inside, upto, limited=False)


def _check_order(tokens: Sequence[Token], upto: Token) -> None:
    if not is_ascending(tokens):
        earlier, later = next(pair for pair in pairwise(tokens) if pair[0] >= pair[1])
        raise CatchUpError(f"token {later} comes after {earlier}: out of order, or one fact in two parts")
    if tokens[-1] > upto:
        raise CatchUpError(f"token {tokens[-1]} is beyond {upto}, the end of the range")


def _decode_page(body: bytes, *, foreign: bool) -> tuple[_Updates[Any], Callable[[list[Any]], list[str]]]:
    """Return a page, its rows in some form, and the function that makes texts from rows of that form."""
    # A line feed can only be white space between values; in a row, it would end the line that a relay sends.
    is_canonical = not foreign and body.isascii() and not any(each in body for each in (b"\x7f", b"\n", b"\r"))
    try:
        answer = _decode_raw(body)
    except grammar.NOT_DECODED:
        if is_canonical and _PRIVATE.search(body) is None:
            with suppress(*grammar.NOT_DECODED):
                return _decode_raw(_SURROGATE.sub(_to_private, body)), _raw_texts_with_surrogates
        # the standard library accepts more: lone surrogates
        return msgspec.convert(grammar.read_json(body.decode()), _Updates[Any]), _encode_decoded
    return answer, _raw_texts if is_canonical else _encode_again


def _raw_texts(rows: list[Any]) -> list[str]:
    return list(map(str, rows, repeat("ascii")))


def _to_private(found: re.Match[bytes]) -> bytes:
    return b"\\ue%x" % (int(found[1], 16) - 8)


def _raw_texts_with_surrogates(rows: list[Any]) -> list[str]:
    """Return the texts of a page in which characters for private use stand for surrogates."""
    return [_AS_PRIVATE.sub(lambda found: f"\\ud{int(found[1]) + 8:x}", text) for text in _raw_texts(rows)]


def _encode_decoded(rows: list[Any]) -> list[str]:
    return list(map(grammar.encode_again, rows))


def _encode_again(rows: list[Any]) -> list[str]:
    texts = [str(raw, "utf-8") for raw in rows]
    return [
        text if text.isascii() and _ODD.search(text) is None else grammar.encode_again(grammar.read_json(text))
        for text in texts
    ]


def read_addition(text: bytes) -> list[Any]:
    """Return the decoded rows of one ``{"rows": [row, …]}``; RemoteProtocolError if it has another form.

    What has too many values is refused before it is decoded, which would take seconds and most of the memory.
    """
    grammar.check_values(text)
    try:
        return _decode_addition(text).rows
    except grammar.NOT_DECODED:
        return _read_addition_slowly(text)  # better errors; and the standard library accepts more


def _read_addition_slowly(text: bytes) -> list[Any]:
    try:
        addition = grammar.read_json(text.decode())
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"not UTF-8: byte {error.start + 1} is 0x{text[error.start]:02x}") from error
    match addition:
        case {"rows": list(rows), **others} if not others:
            return rows
        case {"rows": list(), **others}:
            raise RemoteProtocolError(f'unknown key {next(iter(others))!r:.40}: only "rows" is known')
        case {"rows": _}:
            raise RemoteProtocolError('"rows" must be a list')
        case dict():
            raise RemoteProtocolError('the list "rows" is missing')
    raise RemoteProtocolError('not an object {"rows": [row, …]}')


def added_fact(text: bytes) -> list[Any]:
    """Return the fact of :func:`read_addition` for an append, with PAUSE before a large one."""
    rows = read_addition(text)
    return [PAUSE, rows] if len(text) > PAUSE_BYTES else [rows]


class AddedLines:
    """The facts of ``application/x-ndjson``, one per line, each parsed when it is reached; BLANK for a blank line.

    PAUSE comes before a large fact, between its decoding and its encoding.

    ``number`` is the number of the line that was reached last, ``before`` that of the line before the first one.
    RemoteProtocolError names a wrong line.
    """

    def __init__(self, lines: Iterable[bytes], before: int = 0) -> None:
        self._lines = lines
        self._before = self.number = before

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of each line."""
        self.number = self._before
        for line in self._lines:
            self.number += 1
            if line.isspace():
                yield BLANK
                continue
            try:
                fact = added_fact(line)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"line {self.number}: {error}") from error
            yield from fact
