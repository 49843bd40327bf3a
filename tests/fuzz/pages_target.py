"""JSON of HTTP: the pages and histories that a follower reads, and the facts that a writer takes."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from replication.errors import CatchUpError, RemoteProtocolError, RowError
from replication.streams.facts import check_size, texts_of, tokens_of
from replication.streams.history import Epoch, common_position, encode_history, read_history
from replication.web.pages import BLANK, PAUSE, AddedLines, encode_page, read_addition, read_form, read_page
from replication.wire import grammar
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from replication.streams.interfaces import Page

AFTER, UPTO = Token(5), Token(100_000)


def check(data: bytes) -> None:
    """Read ``data`` as each of the forms."""
    for foreign in (False, True):
        check_page(data, foreign=foreign)
    check_facts(data)
    try:
        history = read_form(data, list[Epoch], "a history")
    except CatchUpError as error:
        assert str(error)
        return
    assert read_history(encode_history(history)) == history
    common_position(history, history[1:], Token(7))


def check_page(data: bytes, *, foreign: bool) -> None:
    """Read a page; its facts are in the range and their rows decode."""
    try:
        page: Page = read_page(data, after=AFTER, upto=UPTO, foreign=foreign)
    except CatchUpError as error:
        assert str(error)
        return
    assert AFTER <= page.upto <= UPTO
    tokens = tokens_of(page.facts)
    assert tokens == sorted(set(tokens))
    assert all(AFTER < each <= page.upto for each in tokens)
    grammar.read_rows(texts_of(page.facts))
    assert not any("\n" in text or "\r" in text for text in texts_of(page.facts))  # a relay makes lines of them
    again = read_page(encode_page(page), after=AFTER, upto=UPTO)
    assert (again.upto, again.limited, tokens_of(again.facts)) == (page.upto, page.limited, tokens)
    assert [*map(grammar.read_json, texts_of(again.facts))] == [*map(grammar.read_json, texts_of(page.facts))]


def check_facts(data: bytes) -> None:
    """Read one fact, and one of each line, as an append does."""
    try:
        check_rows(read_addition(data))
    except RemoteProtocolError as error:
        assert str(error)
    lines = AddedLines(BytesIO(data))
    try:
        for rows in lines:
            if rows not in (BLANK, PAUSE):
                check_rows(rows)
    except RemoteProtocolError as error:
        assert str(error).startswith(f"line {lines.number}: ")


def check_rows(rows: list[object]) -> None:
    """Encode the rows of an append, which followers will decode; RowError is an answer."""
    try:
        texts = grammar.encode_rows(rows)
        check_size(texts)
    except RowError:
        return
    assert grammar.encode_rows(grammar.read_rows(texts)) == texts
