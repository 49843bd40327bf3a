"""Facts as HTTP carries them: pages out and in again, and additions in.  No I/O.

A row that passes through stays the text that it is: a page is joined from stored texts, and cut up again with its rows
left raw.  Only additions are decoded, because a writer checks them.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from replication.errors import CatchUpError, RemoteProtocolError
from replication.streams.facts import gather, is_ascending, tokens_of
from replication.streams.seams import Page
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replication.streams.facts import Fact
    from replication.streams.since import Since

PAGE_ROWS: Final = 1_000  # if the client does not say
MAX_PAGE_ROWS: Final = 10_000
PAGE_BYTES: Final = 32 * 2**20  # a longer page ends early, so that no client meets one that it will not take

_token_of = itemgetter(0)
_ODD = re.compile(r"[\s\x7f\\]")  # what the one spelling may not have, or not everywhere


_Row = TypeVar("_Row")


class _Updates(msgspec.Struct, Generic[_Row]):
    updates: list[tuple[Token, _Row]]
    upto_token: int
    limited: bool


class _Addition(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    rows: list[Any]


_decode_raw = msgspec.json.Decoder(_Updates[msgspec.Raw]).decode
_decode_addition = msgspec.json.Decoder(_Addition).decode


def spell_page(page: Page, max_bytes: int = PAGE_BYTES) -> bytes:
    """Return ``page`` as ``{"updates": [[token, row], …], "upto_token": n, "limited": bool}`` (protocol E5).

    One whose rows would pass ``max_bytes`` is cut after a whole fact, and says that there is more.
    """
    rows = ",".join([f"[{token},{text}]" for token, texts in page.facts for text in texts])
    if len(rows) > max_bytes and len(page.facts) > 1:
        return spell_page(_first_facts(page.facts, max_bytes), max_bytes)
    limited = "true" if page.limited else "false"
    return f'{{"updates":[{rows}],"upto_token":{page.upto},"limited":{limited}}}'.encode()


def spell_since(since: Since, token: str) -> bytes:
    """Return ``{"updates": [[token, writer, row], …], "upto_token": "…", "limited": bool}``; ask next since that."""
    rows = ",".join(
        [
            f"[{each.fact.token},{grammar.spell_row(each.writer)},{text}]"
            for each in since.written
            for text in each.fact.texts
        ]
    )
    limited = "true" if since.limited else "false"
    return f'{{"updates":[{rows}],"upto_token":"{token}","limited":{limited}}}'.encode()


def _first_facts(facts: Sequence[Fact], max_bytes: int) -> Page:
    """Return the facts that fit, but one at least and not all."""
    reached = accumulate(sum(len(text) + len(f"[{token},],") for text in texts) for token, texts in facts)
    fitting = sum(1 for size in reached if size <= max_bytes)
    first = facts[: min(max(fitting, 1), len(facts) - 1)]
    return Page(first, first[-1].token, limited=True)


class BackwardsPageError(CatchUpError):
    """A limited page in descending order: what it leaves out lies below it, not beyond (trap 12)."""


def read_page(body: bytes, *, after: Token, upto: Token, foreign: bool = False) -> Page:
    """Read what :func:`spell_page` made in answer to a question for ``after < token <= upto``.

    A ``foreign`` page is a Synapse's: its tokens may come in any order (protocol C5) and, of the stream ``caches``, go
    beyond ``upto`` (protocol C4); its rows are spelt anew where they need it.  CatchUpError says what is wrong with a
    page that does not keep its word: nothing of it can be used.
    """
    try:
        answer, spell = _decode_page(body, foreign=foreign)
        updates = answer.updates
        backwards = foreign and answer.limited and bool(updates) and updates[0][0] > updates[-1][0]
        if foreign:
            updates.sort(key=_token_of)
            answer = _cut(answer, upto)
            updates = answer.updates
        facts = gather([token for token, _ in updates], spell([row for _, row in updates]))
    except (msgspec.MsgspecError, RemoteProtocolError, UnicodeDecodeError) as error:
        raise CatchUpError(f"not a page of updates: {error}") from error
    _check_order([after, *tokens_of(facts)], upto)
    if backwards:
        raise BackwardsPageError("a page in descending order, with more to come that can never be asked for")
    if not after <= answer.upto_token <= upto:
        raise CatchUpError(
            f"{after} to {upto} was asked for, the page reaches to {answer.upto_token}: "
            "is that the right instance, is it behind, was its database reset?"
        )
    if facts and facts[-1].token > answer.upto_token:
        raise CatchUpError(f"the page says that it ends at {answer.upto_token}, but has token {facts[-1].token}")
    return Page(facts, Token(answer.upto_token), answer.limited)


def _cut(answer: _Updates[Any], upto: Token) -> _Updates[Any]:
    """Return an answer without its rows beyond ``upto``: those are told, or asked for, in their turn."""
    inside = [update for update in answer.updates if update[0] <= upto]
    # one that goes beyond has left out nothing before
    return answer if len(inside) == len(answer.updates) else _Updates(inside, upto, limited=False)


def _check_order(tokens: Sequence[Token], upto: Token) -> None:
    if not is_ascending(tokens):
        earlier, later = next(pair for pair in pairwise(tokens) if pair[0] >= pair[1])
        raise CatchUpError(f"token {later} comes after {earlier}: out of order, or one fact in two pieces")
    if tokens[-1] > upto:
        raise CatchUpError(f"token {tokens[-1]} is beyond {upto}, which was asked for")


def _decode_page(body: bytes, *, foreign: bool) -> tuple[_Updates[Any], Callable[[list[Any]], list[str]]]:
    """Return a page with rows in some form, and what makes text of rows in that form."""
    try:
        answer = _decode_raw(body)
    except (msgspec.MsgspecError, RecursionError):
        # the standard library has the last word: it takes lone surrogates
        return msgspec.convert(grammar.read_json(body.decode()), _Updates[Any]), grammar.spell_rows
    as_it_lies = not foreign and body.isascii() and b"\x7f" not in body
    return answer, _raw_texts if as_it_lies else _spell_again


def _raw_texts(rows: list[Any]) -> list[str]:
    return list(map(str, rows, repeat("ascii")))


def _spell_again(rows: list[Any]) -> list[str]:
    return [_spell_if_odd(str(raw, "utf-8")) for raw in rows]


def _spell_if_odd(text: str) -> str:
    if text.isascii() and _ODD.search(text) is None:
        return text
    return grammar.spell_row(grammar.read_json(text))


def read_addition(text: bytes) -> list[Any]:
    """Return the rows of one ``{"rows": [row, …]}``, decoded; RemoteProtocolError says what is wrong with it."""
    try:
        return _decode_addition(text).rows
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _read_addition_slowly(text)  # it says more, and takes what only the standard library takes


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


def read_additions(lines: Iterable[bytes], first: int = 1) -> list[list[Any]]:
    """Return the rows of each line that is not blank; an error names the line, counted from ``first``."""
    facts = []
    for number, line in enumerate(lines, first):
        if line.isspace():
            continue
        try:
            facts.append(read_addition(line))
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"line {number}: {error}") from error
    return facts


def line_of(lines: Iterable[bytes], fact: int) -> int:
    """Return the number of the line that held the fact with this index."""
    return [number for number, line in enumerate(lines, 1) if not line.isspace()][fact]
