"""What a writer tells its followers: settled facts become RDATA, and POSITION where there is nothing to tell.

Protocol D3, newest rules.  A fact with a row that no line can hold is announced as ``POSITION stream instance T T``:
its own token as both ends is ahead of what any follower has, so each sees a gap and fetches the fact elsewhere.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import attrs

from replication.wire.commands import LINE_LIMIT, Position, encode_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, StreamName, Token

FACTS_A_CHUNK = (
    512  # some 64 KiB of common rows: large enough for one system call, small enough for a slow peer's queue
)


@attrs.frozen
class Chunk:
    """Whole lines as they go out, and how many."""

    data: bytes
    lines: int


def spell_facts(
    stream: StreamName,
    instance: InstanceName,
    facts: Iterable[Fact],
    *,
    after: Token,
    upto: Token,
    line_limit: int = LINE_LIMIT,
) -> Iterator[Chunk]:
    """Yield the lines that take a follower from ``after`` to ``upto``, given all facts between them, ascending."""
    head = f"RDATA {stream} {instance} "
    told = after
    remaining = iter(facts)
    while some := tuple(islice(remaining, FACTS_A_CHUNK)):
        lines = [line for fact in some for line in _spell_fact(head, fact)]
        data = "".join(lines).encode()
        if max(map(len, lines), default=0) > line_limit + 1 or len(data) != sum(map(len, lines)):
            lines = [line for fact in some for line in _spell_long_fact(head, fact, stream, instance, line_limit)]
            data = "".join(lines).encode()
        told = next((fact.token for fact in reversed(some) if fact.texts), told)
        if lines:
            yield Chunk(data, len(lines))
    if told < upto:
        yield spell_position(stream, instance, told, upto)


def spell_position(stream: StreamName, instance: InstanceName, prev: Token, new: Token) -> Chunk:
    """Return the line that says: nothing of mine lies in (prev, new]."""
    return Chunk(encode_line(Position(stream, instance, prev, new)), 1)


def _spell_fact(head: str, fact: Fact) -> Iterable[str]:
    token, texts = fact
    if len(texts) == 1:
        return (f"{head}{token} {texts[0]}\n",)
    lines = [f"{head}batch {text}\n" for text in texts]
    if lines:
        lines[-1] = f"{head}{token} {texts[-1]}\n"
    return lines


def _spell_long_fact(head: str, fact: Fact, stream: StreamName, instance: InstanceName, limit: int) -> Iterable[str]:
    lines = _spell_fact(head, fact)
    if any(len(line.encode()) > limit + 1 for line in lines):
        return (f"POSITION {stream} {instance} {fact.token} {fact.token}\n",)
    return lines
