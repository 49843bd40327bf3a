"""Facts to RDATA lines: from rows as Python objects, and from rows that are JSON text, as a writer publishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.bench.daemons import ROWS, STREAM, WRITER
from replication.bench.series import Stopwatch, rates
from replication.session.encoder import encode_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, encode_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.series import BenchOptions, Sample, Series

TURN: Final = 1_000  # facts that settle together


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each length of rows, one row per fact."""
    turns = options.size(300, 2)
    for shape, make_row in ROWS.items():
        rows = [make_row(number) for number in range(TURN)]
        yield from rates(f"rows, {shape}", "lines", options, _encode_rows, rows, turns)
        facts = _facts(rows)
        yield from rates(f"JSON texts, {shape}", "lines", options, _encode_facts, facts, turns)


def _encode_rows(rows: Sequence[object], turns: int) -> Sample:
    watch = Stopwatch()
    return watch.sample(sum(_lines(_facts(rows)) for _ in range(turns)))


def _encode_facts(facts: Sequence[Fact], turns: int) -> Sample:
    watch = Stopwatch()
    return watch.sample(sum(_lines(facts) for _ in range(turns)))


def _facts(rows: Sequence[object]) -> list[Fact]:
    return [Fact(Token(number), (encode_row(row),)) for number, row in enumerate(rows, 2)]


def _lines(facts: Sequence[Fact]) -> int:
    chunks = encode_facts(STREAM, WRITER, facts, after=Token(1), upto=facts[-1].token)
    return sum(chunk.lines for chunk in chunks)
