"""Lines of the wire: what is accepted can be sent again, and the fast parsers accept exactly what the slow ones do."""

from __future__ import annotations

import json
from itertools import pairwise

from replication.errors import LocalProtocolError, RemoteProtocolError
from replication.session.connection import Rows, read_run
from replication.wire import grammar
from replication.wire.commands import LINE_LIMIT, Rdata, encode_line, parse_line
from replication.wire.lines import LineBuffer

LIMIT = 1_000  # bytes of a line: short enough for lines that are too long


def check(data: bytes) -> None:
    """Parse the lines of ``data``."""
    lines = check_buffer(data)
    texts = [line.decode(errors="replace") for line in lines]
    accepted = [text for text in texts if check_line(text)]
    check_runs(accepted)
    check_places([line.split(" ")[0] for line in texts])


def check_buffer(data: bytes) -> list[bytes]:
    """Feed ``data`` whole and in two parts; return its lines."""
    whole = LineBuffer(LIMIT)
    block = whole.feed(data)
    assert data.startswith(block)
    assert all(len(line) <= LIMIT for line in block.split(b"\n"))
    for cut in {0, 1, len(data) // 3, len(data) - 1}:
        parts = LineBuffer(LIMIT)
        assert parts.feed(data[:cut]) + parts.feed(data[cut:]) == block
        assert parts.overflowed == whole.overflowed
    if not whole.overflowed:
        assert b"\n" not in data[len(block) :]
    return block.split(b"\n")


def check_line(line: str) -> bool:
    """Parse a line, encode it, and parse it again; return whether it is a command."""
    try:
        command = parse_line(line)
    except RemoteProtocolError as error:
        assert str(error)
        return False
    try:
        encoded = encode_line(command, 2 * LINE_LIMIT)
    except LocalProtocolError as error:
        assert line.endswith("\r\r"), error  # a second CR is read, and never sent
        return True
    assert parse_line(encoded.decode().removesuffix("\n")) == command
    return True


def check_runs(lines: list[str]) -> None:
    """Read RDATA together, and compare with one by one."""
    rdata = [line.removesuffix("\r") for line in lines if line.startswith("RDATA ")]
    singles = [parse_line(line) for line in rdata]
    at = 0
    while at < len(rdata):
        rows: Rows = read_run(rdata, at)
        for place, text, single in zip(rows.places, rows.texts, singles[at:], strict=False):
            assert single == Rdata(rows.stream, rows.instance, place, text)
        at += len(rows.texts)
    grammar.row_texts([each.row for each in singles if isinstance(each, Rdata)])


def check_places(texts: list[str]) -> None:
    """Read tokens together, and compare with one by one."""
    for pair in pairwise(texts):
        assert outcome_of_all([*pair]) == [outcome(text) for text in pair] or None in map(outcome, pair)


def outcome(text: str) -> object:
    """Return the place, as JSON, or None if it is none."""
    try:
        return json.dumps(grammar.place(text))
    except RemoteProtocolError:
        return None


def outcome_of_all(texts: list[str]) -> object:
    """Return what ``outcome`` returns for each, or None if one is no place."""
    try:
        return [json.dumps(each) for each in grammar.places(texts)]
    except RemoteProtocolError:
        assert None in map(outcome, texts)
        return None
