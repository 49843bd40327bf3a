"""Settled facts as lines: RDATA, and POSITION where there are no facts (docs/protocol/publishing.md D3).

A fact with a row that no line can hold is published as ``POSITION stream instance T T``, with its own token twice.
That is above every follower's position: each follower has a gap, and fetches the fact.  For the fact with token 1 it is
``POSITION stream instance 2 1``: no follower looks for a fact at or below a first token of 1.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from replication.wire.commands import LINE_LIMIT, Ping, Position, encode_line
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from replication.streams.facts import Fact

FIRST_GAP: Final = Token(2)  # a POSITION with a smaller first token opens no gap (docs/protocol/ids.md F5)
PIECE_BYTES = 256 * 1024  # at which a joined piece ends: for a peer that does not read, whole pieces are queued
FACTS_A_CHUNK = 512  # enough for one system call with common rows, and little in a slow peer's send buffer


class EncodedLines(msgspec.Struct, frozen=True):
    """Encoded lines: their bytes, each with its LF, and their number."""

    data: bytes
    lines: int


def encode_facts(
    stream: StreamName,
    instance: InstanceName,
    facts: Iterable[Fact],
    *,
    after: Token,
    upto: Token,
    line_limit: int = LINE_LIMIT,
) -> Iterator[EncodedLines]:
    """Yield the lines that publish ``facts``: all with ``after < token <= upto``, ascending.

    The last line brings a follower's position to ``upto``.  ``line_limit`` is in bytes without the LF.
    """
    head = f"RDATA {stream} {instance} "
    sent = after
    remaining = iter(facts)
    while chunk := tuple(islice(remaining, FACTS_A_CHUNK)):
        lines = _encode_short_facts(head, chunk)
        text = "".join(lines)
        if max(map(len, lines), default=0) > line_limit + 1 or not text.isascii():
            lines = [line for fact in chunk for line in _encode_long_fact(head, fact, stream, instance, line_limit)]
            text = "".join(lines)
        sent = next((fact.token for fact in reversed(chunk) if fact.texts), sent)
        if lines:
            yield EncodedLines(text.encode(), len(lines))
    if sent < upto:
        yield encode_position(stream, instance, sent, upto)


def encode_only_row(
    stream: StreamName, instance: InstanceName, facts: Sequence[Fact], upto: Token, line_limit: int
) -> EncodedLines | None:
    """Return what ``encode_facts`` yields for one fact of one row at ``upto``, in a fifth of the time; else None.

    None, too, if the row is not ASCII or too long for a line.
    """
    if len(facts) != 1 or facts[0].token != upto or len(facts[0].texts) != 1:
        return None
    line = f"RDATA {stream} {instance} {upto} {facts[0].texts[0]}\n"
    return EncodedLines(line.encode(), 1) if len(line) <= line_limit + 1 and line.isascii() else None


@lru_cache(1_000)  # the answer to REPLICATE is the same for every follower
def encode_position(stream: StreamName, instance: InstanceName, prev: Token, new: Token) -> EncodedLines:
    """Return the POSITION of an instance that has no fact with ``prev < token <= new``."""
    return EncodedLines(encode_line(Position(stream, instance, prev, new)), 1)


def encode_new_epoch(stream: StreamName, instance: InstanceName) -> EncodedLines:
    """Return the PING by which followers of ``stream`` compare the history of ``instance`` once more."""
    return EncodedLines(encode_line(Ping(f"{Ping.HISTORY} {stream} {instance}")), 1)


def encode_withdrawn(stream: StreamName, instance: InstanceName) -> EncodedLines:
    """Return the PING that withdraws the position of ``instance`` at the followers of ``stream``."""
    return EncodedLines(encode_line(Ping(f"{Ping.WITHDRAWN} {stream} {instance}")), 1)


def encode_gap(stream: StreamName, instance: InstanceName, upto: Token) -> EncodedLines:
    """Return the POSITION with which every follower below ``upto`` fetches the facts up to there."""
    return encode_position(stream, instance, max(upto, FIRST_GAP), upto)


def join_lines(
    published: Iterable[tuple[StreamName, EncodedLines]], wanted: Collection[StreamName] | None
) -> Iterator[EncodedLines]:
    """Yield the lines of the streams that are ``wanted``, of all streams if it is None, joined into pieces."""
    pieces: list[bytes] = []
    size = lines = 0
    for stream, chunk in published:
        if wanted is not None and stream not in wanted:
            continue
        pieces.append(chunk.data)
        size += len(chunk.data)
        lines += chunk.lines
        if size >= PIECE_BYTES:
            yield EncodedLines(b"".join(pieces), lines)
            pieces, size, lines = [], 0, 0
    if pieces:
        yield EncodedLines(b"".join(pieces), lines)


def _encode_short_facts(head: str, facts: Sequence[Fact]) -> list[str]:
    try:
        return [f"{head}{token} {text}\n" for token, (text,) in facts]  # the usual case, in half the time
    except ValueError:  # a fact with no row, or with several
        return [line for fact in facts for line in _encode_fact(head, fact)]


def _encode_fact(head: str, fact: Fact) -> Iterable[str]:
    token, texts = fact
    if len(texts) == 1:
        return (f"{head}{token} {texts[0]}\n",)
    lines = [f"{head}batch {text}\n" for text in texts]
    if lines:
        lines[-1] = f"{head}{token} {texts[-1]}\n"
    return lines


def _encode_long_fact(head: str, fact: Fact, stream: StreamName, instance: InstanceName, limit: int) -> Iterable[str]:
    lines = _encode_fact(head, fact)
    if any(len(line.encode()) > limit + 1 for line in lines):
        return (encode_gap(stream, instance, fact.token).data.decode(),)
    return lines
