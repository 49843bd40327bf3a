"""What followers are told: every settled fact once, whole, in order, and how far the writer is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.session.connection import Fault, ReplicationConnection, Role, Rows
from replication.session.feed import FACTS_A_CHUNK, Chunk, spell_facts, spell_position
from replication.streams.cursor import Apply, CatchUp, Cursor, Reset
from replication.streams.facts import Fact
from replication.streams.seams import Page
from replication.wire.commands import LINE_LIMIT, Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies

ORDERS, ME = StreamName("orders"), InstanceName("master")
LIMIT = 60  # bytes; some of the drawn rows are longer


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts)


def spell(facts: list[Fact], after: int, upto: int, line_limit: int = LINE_LIMIT) -> list[Chunk]:
    return list(spell_facts(ORDERS, ME, facts, after=Token(after), upto=Token(upto), line_limit=line_limit))


def lines(chunks: list[Chunk]) -> list[str]:
    return b"".join(chunk.data for chunk in chunks).decode().splitlines()


def follow(
    chunks: list[Chunk], after: int, source: list[Fact], line_limit: int = LINE_LIMIT
) -> tuple[list[Fact], list[CatchUp], Cursor]:
    """Return what a follower at ``after`` applies, and what of it had to be fetched from ``source``."""
    connection, cursor = ReplicationConnection(Role.WORKER, 0.0, line_limit=line_limit), Cursor(Token(after))
    cursor.position_heard("link", Token(after), Token(after))
    applied: list[Fact] = []
    missed: list[CatchUp] = []
    for chunk in chunks:
        for heard in connection.receive_data(chunk.data, 0.0):
            assert not isinstance(heard, Fault), heard
            if isinstance(heard, Rows):
                cursor.rows_heard("link", heard.places, heard.texts)
            elif isinstance(heard, Position):
                cursor.position_heard("link", heard.prev, heard.new)
            while (step := cursor.step()) is not None:
                assert not isinstance(step, Reset)
                if isinstance(step, Apply):
                    applied += step.facts
                    cursor.applied(step)
                else:
                    missed.append(step)
                    page = [each for each in source if each.texts and step.after < each.token <= step.upto]
                    cursor.fetched(step, Page(page, step.upto, limited=False))
    return applied, missed, cursor


def is_too_long(fact: Fact) -> bool:
    places = [*["batch"] * (len(fact.texts) - 1), fact.token]
    return any(
        len(f"RDATA orders master {place} {text}") > LIMIT for place, text in zip(places, fact.texts, strict=False)
    )


def test_a_row_is_a_line_and_the_last_of_a_fact_has_its_token() -> None:
    said = lines(spell([fact(3, "[1]"), fact(4, "[2]", "[3]", "[4]")], 2, 4))
    assert said == [
        "RDATA orders master 3 [1]",
        "RDATA orders master batch [2]",
        "RDATA orders master batch [3]",
        "RDATA orders master 4 [4]",
    ]


def test_trap_18_a_position_follows_the_last_row_if_more_has_settled() -> None:
    assert lines(spell([fact(3, "[1]"), fact(5)], 2, 6))[-1] == "POSITION orders master 3 6"


def test_a_position_says_where_nothing_was_written() -> None:
    assert lines(spell([], 2, 6)) == ["POSITION orders master 2 6"]
    assert lines(spell([fact(3)], 2, 3)) == ["POSITION orders master 2 3"]


def test_nothing_settled_is_nothing_said() -> None:
    assert spell([], 6, 6) == []


def test_trap_5_a_fact_that_no_line_can_hold_is_a_gap_that_followers_see() -> None:
    row = '"' + "x" * LINE_LIMIT + '"'
    said = lines(spell([fact(3, "[1]"), fact(4, "[2]", row, "[3]"), fact(5, "[4]")], 2, 5))
    assert said == ["RDATA orders master 3 [1]", "POSITION orders master 4 4", "RDATA orders master 5 [4]"]


@pytest.mark.parametrize(("size", "fits"), [(LINE_LIMIT, True), (LINE_LIMIT + 1, False)])
def test_a_line_may_have_exactly_the_limit(size: int, fits: bool) -> None:
    row = '"' + "x" * (size - len('RDATA orders master 3 ""')) + '"'
    assert lines(spell([fact(3, row)], 2, 3))[0].startswith("RDATA") is fits


@pytest.mark.parametrize("limit", [36, 37, 38])
def test_the_limit_counts_bytes_not_characters(limit: int) -> None:
    said = lines(spell([fact(3, '"' + "é" * 7 + '"'), fact(4, "[1]")], 2, 4, line_limit=limit))
    assert said[0].startswith("RDATA" if limit == 38 else "POSITION orders master 3 3")
    assert said[1] == "RDATA orders master 4 [1]"


def test_many_facts_come_in_chunks_of_whole_facts() -> None:
    facts = [fact(token, "[1]", "[2]") for token in range(2, 2 + 2 * FACTS_A_CHUNK + 1)]
    chunks = spell(facts, 1, facts[-1].token)
    assert [chunk.lines for chunk in chunks] == [2 * FACTS_A_CHUNK, 2 * FACTS_A_CHUNK, 2]
    assert all(chunk.data.rpartition(b"master ")[2][:1].isdigit() for chunk in chunks)


def test_a_position_is_a_chunk_of_one_line() -> None:
    assert spell_position(ORDERS, ME, Token(1), Token(1)) == Chunk(b"POSITION orders master 1 1\n", 1)


@given(strategies.facts(after=1, max_size=20), st.integers(0, 3))
def test_a_follower_applies_every_fact_once_and_stands_where_the_writer_stands(facts: list[Fact], more: int) -> None:
    upto = max([1, *[each.token for each in facts]]) + more
    applied, missed, cursor = follow(spell(facts, 1, upto), 1, [])
    assert applied == [each for each in facts if each.texts]
    assert missed == []
    assert cursor.position == cursor.announced == upto


@given(strategies.facts(after=1, max_size=20), st.integers(0, 3))
def test_no_line_is_over_the_limit_and_no_fact_is_lost_to_it(facts: list[Fact], more: int) -> None:
    upto = max([1, *[each.token for each in facts]]) + more
    chunks = spell(facts, 1, upto, line_limit=LIMIT)
    assert all(len(line) <= LIMIT for chunk in chunks for line in chunk.data.split(b"\n"))
    assert sum(chunk.lines for chunk in chunks) == sum(chunk.data.count(b"\n") for chunk in chunks)
    applied, missed, cursor = follow(chunks, 1, facts, line_limit=LIMIT)
    assert applied == [each for each in facts if each.texts]
    assert cursor.position == upto
    assert {gap.upto for gap in missed} >= {each.token for each in facts if is_too_long(each)}
