"""Facts to wire lines: from rows as Python objects, and from spelt rows, as a writer has them when it announces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.bench.rows import SHAPES, STREAM, WRITER
from replication.bench.series import Stopwatch, rates
from replication.session.feed import spell_facts
from replication.streams.facts import Fact
from replication.wire.grammar import Token, spell_row

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.bench.series import Effort, Lap, Series

TURN: Final = 1_000  # facts that settle together


def measure(effort: Effort) -> Iterator[Series]:
    """Measure each shape of rows, a row a fact."""
    turns = effort.size(300, 2)
    for shape, make_row in SHAPES.items():
        rows = [make_row(number) for number in range(TURN)]
        yield from rates(f"rows, {shape}", "lines", [_spell_rows(rows, turns) for _ in range(effort.rounds)])
        facts = [Fact(Token(number), (spell_row(row),)) for number, row in enumerate(rows, 2)]
        yield from rates(f"spelt rows, {shape}", "lines", [_spell_facts(facts, turns) for _ in range(effort.rounds)])


def _spell_rows(rows: Sequence[object], turns: int) -> Lap:
    watch = Stopwatch.start()
    lines = 0
    for _ in range(turns):
        lines += _lines([Fact(Token(number), (spell_row(row),)) for number, row in enumerate(rows, 2)])
    return watch.lap(lines)


def _spell_facts(facts: Sequence[Fact], turns: int) -> Lap:
    watch = Stopwatch.start()
    lines = 0
    for _ in range(turns):
        lines += _lines(facts)
    return watch.lap(lines)


def _lines(facts: Sequence[Fact]) -> int:
    chunks = spell_facts(STREAM, WRITER, facts, after=Token(1), upto=facts[-1].token)
    return sum(chunk.lines for chunk in chunks)
