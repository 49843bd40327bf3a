"""One row: whatever the wire accepts is decoded, copied, hidden, printed and published again."""

from __future__ import annotations

import json

from replication.cli.fact_lines import ColouredLines, encode_json, encode_rdata, encode_typed
from replication.errors import RemoteProtocolError, RowError
from replication.streams.access_tokens import CACHE, hide_access_tokens
from replication.streams.definitions import CACHES
from replication.streams.facts import Fact, check_size
from replication.synapse import STREAMS, since_1_64, since_1_159
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token

TYPED = (*STREAMS, *since_1_64.STREAMS, *since_1_159.STREAMS)
MASTER = InstanceName("master")


def check(data: bytes) -> None:
    """Take ``data`` as the text of a row."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return  # a line or a page is refused before
    if "\n" in text:
        return  # no line has it, and no page that was read (the target pages)
    try:
        value = grammar.read_json(text)
    except RemoteProtocolError as error:
        assert str(error)
        value = None
    try:
        grammar.row_text(text)
    except RemoteProtocolError as error:
        assert value is None or "deep" in str(error), error
        return
    standard = json.loads(text)
    assert grammar.encode_again(value) == grammar.encode_again(standard)
    assert same(grammar.read_json(grammar.encode_again(value)), value)
    assert grammar.count_values(text.encode(errors="replace")) >= 0
    check_size([text])
    check_exits(text)


def same(one: object, other: object) -> bool:
    """Return whether two decoded values are the same JSON."""
    return grammar.encode_again(one) == grammar.encode_again(other)


def check_exits(text: str) -> None:
    """Pass a row through everything that facts leave by."""
    names = {"orders", CACHES}
    for typed in TYPED:
        try:
            typed.read_row(text).named()
            names.add(typed.name)
        except RowError as error:
            assert str(error)
    fact = Fact(Token(7), (text,))
    (hidden,) = hide_access_tokens(CACHES, [fact])
    (row,) = hidden.rows
    if isinstance(row, list) and row[:1] == [CACHE]:
        assert row[1:2] in ([None], [])
    for name in names:
        stream = grammar.stream_name(name)
        for encode in (encode_rdata, encode_json, encode_typed, ColouredLines(None)):
            lines = encode(stream, MASTER, [fact])
            assert lines.endswith(b"\n")
            assert lines.count(b"\n") == 1
