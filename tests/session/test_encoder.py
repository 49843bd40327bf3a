"""Facts as lines: every settled fact once, whole and in order, and the published position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.session import encoder as module
from replication.session.connection import Fault, ReplicationConnection, Role, Rows
from replication.session.encoder import (
    FACTS_A_CHUNK,
    EncodedLines,
    encode_facts,
    encode_new_epoch,
    encode_only_row,
    encode_position,
    encode_withdrawn,
    join_lines,
)
from replication.streams.cursor import Apply, CatchUp, Check, Cursor, Reset
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.commands import LINE_LIMIT, Position
from replication.wire.grammar import InstanceName, StreamName, Token
from tests import strategies

ORDERS, ME = StreamName("orders"), InstanceName("master")
LIMIT = 60  # bytes; some of the generated rows are longer


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts)


def encode(facts: list[Fact], after: int, upto: int, line_limit: int = LINE_LIMIT) -> list[EncodedLines]:
    return list(encode_facts(ORDERS, ME, facts, after=Token(after), upto=Token(upto), line_limit=line_limit))


def lines(chunks: list[EncodedLines]) -> list[str]:
    return b"".join(chunk.data for chunk in chunks).decode().splitlines()


def follow(
    chunks: list[EncodedLines], after: int, source: list[Fact], line_limit: int = LINE_LIMIT
) -> tuple[list[Fact], list[CatchUp], Cursor]:
    """Return the facts that a follower at ``after`` applies, and the pages that it fetched from ``source``."""
    connection, cursor = ReplicationConnection(Role.WORKER, 0.0, line_limit=line_limit), Cursor(Token(after))
    cursor.position_received("link", Token(after), Token(after))
    applied: list[Fact] = []
    fetched: list[CatchUp] = []
    for chunk in chunks:
        for received in connection.receive_data(chunk.data, 0.0):
            assert not isinstance(received, Fault), received
            if isinstance(received, Rows):
                cursor.rows_received("link", received.places, received.texts)
            elif isinstance(received, Position):
                cursor.position_received("link", received.prev, received.new)
            while (step := cursor.step()) is not None:
                assert not isinstance(step, Check | Reset)
                if isinstance(step, Apply):
                    applied += step.facts
                    cursor.applied(step)
                else:
                    fetched.append(step)
                    page = [each for each in source if each.texts and step.after < each.token <= step.upto]
                    cursor.fetched(step, Page(page, step.upto, limited=False))
    return applied, fetched, cursor


def is_too_long(fact: Fact) -> bool:
    places = [*["batch"] * (len(fact.texts) - 1), fact.token]
    return any(
        len(f"RDATA orders master {place} {text}") > LIMIT for place, text in zip(places, fact.texts, strict=False)
    )


def test_each_row_is_a_line_and_the_last_of_a_fact_has_the_token() -> None:
    sent = lines(encode([fact(3, "[1]"), fact(4, "[2]", "[3]", "[4]")], 2, 4))
    assert sent == [
        "RDATA orders master 3 [1]",
        "RDATA orders master batch [2]",
        "RDATA orders master batch [3]",
        "RDATA orders master 4 [4]",
    ]


def test_trap_18_a_position_follows_the_last_row_if_more_has_settled() -> None:
    assert lines(encode([fact(3, "[1]"), fact(5)], 2, 6))[-1] == "POSITION orders master 3 6"


def test_position_covers_ids_without_facts() -> None:
    assert lines(encode([], 2, 6)) == ["POSITION orders master 2 6"]
    assert lines(encode([fact(3)], 2, 3)) == ["POSITION orders master 2 3"]


def test_without_a_newly_settled_id_nothing_is_encoded() -> None:
    assert encode([], 6, 6) == []


def test_trap_5_a_fact_that_no_line_can_hold_is_published_as_a_gap() -> None:
    row = '"' + "x" * LINE_LIMIT + '"'
    sent = lines(encode([fact(3, "[1]"), fact(4, "[2]", row, "[3]"), fact(5, "[4]")], 2, 5))
    assert sent == ["RDATA orders master 3 [1]", "POSITION orders master 4 4", "RDATA orders master 5 [4]"]


@pytest.mark.parametrize(("size", "fits"), [(LINE_LIMIT, True), (LINE_LIMIT + 1, False)])
def test_a_line_may_have_exactly_the_limit(size: int, fits: bool) -> None:
    row = '"' + "x" * (size - len('RDATA orders master 3 ""')) + '"'
    assert lines(encode([fact(3, row)], 2, 3))[0].startswith("RDATA") is fits


@pytest.mark.parametrize("limit", [36, 37, 38])
def test_the_limit_counts_bytes_not_characters(limit: int) -> None:
    sent = lines(encode([fact(3, '"' + "é" * 7 + '"'), fact(4, "[1]")], 2, 4, line_limit=limit))
    assert sent[0].startswith("RDATA" if limit == 38 else "POSITION orders master 3 3")
    assert sent[1] == "RDATA orders master 4 [1]"


def test_many_facts_come_in_chunks_of_whole_facts() -> None:
    facts = [fact(token, "[1]", "[2]") for token in range(2, 2 + 2 * FACTS_A_CHUNK + 1)]
    chunks = encode(facts, 1, facts[-1].token)
    assert [chunk.lines for chunk in chunks] == [2 * FACTS_A_CHUNK, 2 * FACTS_A_CHUNK, 2]
    assert all(chunk.data.rpartition(b"master ")[2][:1].isdigit() for chunk in chunks)


def test_a_position_is_a_chunk_of_one_line() -> None:
    assert encode_position(ORDERS, ME, Token(1), Token(1)) == EncodedLines(b"POSITION orders master 1 1\n", 1)


def test_a_new_epoch_is_announced_by_a_ping() -> None:
    assert encode_new_epoch(ORDERS, ME) == EncodedLines(b"PING history orders master\n", 1)


def test_a_position_is_withdrawn_by_a_ping() -> None:
    assert encode_withdrawn(ORDERS, ME) == EncodedLines(b"PING withdrawn orders master\n", 1)


@given(strategies.facts(after=1, max_size=20), st.integers(0, 3))
def test_a_follower_applies_every_fact_once_and_stands_where_the_writer_stands(facts: list[Fact], more: int) -> None:
    upto = max([1, *[each.token for each in facts]]) + more
    applied, fetched, cursor = follow(encode(facts, 1, upto), 1, [])
    assert applied == [each for each in facts if each.texts]
    assert fetched == []
    assert cursor.position == cursor.published == upto


@given(strategies.facts(after=1, max_size=20), st.integers(0, 3))
def test_no_line_is_over_the_limit_and_no_fact_is_lost_to_it(facts: list[Fact], more: int) -> None:
    upto = max([1, *[each.token for each in facts]]) + more
    chunks = encode(facts, 1, upto, line_limit=LIMIT)
    assert all(len(line) <= LIMIT for chunk in chunks for line in chunk.data.split(b"\n"))
    assert sum(chunk.lines for chunk in chunks) == sum(chunk.data.count(b"\n") for chunk in chunks)
    applied, fetched, cursor = follow(chunks, 1, facts, line_limit=LIMIT)
    assert applied == [each for each in facts if each.texts]
    assert cursor.position == upto
    assert {gap.upto for gap in fetched} >= {each.token for each in facts if is_too_long(each)}


def test_a_first_fact_that_no_line_can_hold_is_fetched() -> None:
    """A POSITION that begins at 1 or below opens no gap (docs/protocol/ids.md F5)."""
    facts = [fact(1, '"' + "x" * LINE_LIMIT + '"'), fact(2, '"b"')]
    chunks = encode(facts, 0, 2)
    assert lines(chunks) == ["POSITION orders master 2 1", 'RDATA orders master 2 "b"']
    applied, fetched, cursor = follow(chunks, 0, facts)
    assert (applied, [(each.after, each.upto) for each in fetched], cursor.position) == (facts, [(0, 1)], 2)


def test_lines_within_the_limit_are_encoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_encode_long_fact")
    facts = [fact(5, "1"), fact(6, "2", "33")]
    expected = ["RDATA orders master 5 1", "RDATA orders master batch 2", "RDATA orders master 6 33"]
    assert lines(encode(facts, 4, 6, line_limit=max(map(len, expected)))) == expected


TEXTS = st.sampled_from(['"a"', '["a", 1]', '"é"', f'"{"a" * LIMIT}"', f'"{"a" * (LIMIT - 25)}"'])


@given(st.lists(st.lists(TEXTS, max_size=2), max_size=2), st.integers(0, 1), st.integers(LIMIT - 30, LIMIT))
def test_an_only_row_is_encoded_as_all_facts_are(rows: list[list[str]], more: int, limit: int) -> None:
    facts = [fact(token, *texts) for token, texts in enumerate(rows, start=5)]
    upto = 4 + len(facts) + more
    only = encode_only_row(ORDERS, ME, facts, Token(upto), limit)
    if only is not None:
        assert [only] == encode(facts, 4, upto, limit)


def test_only_one_short_row_of_ascii_at_the_end_is_an_only_row() -> None:
    def is_only(*facts: Fact, upto: int = 5) -> bool:
        return encode_only_row(ORDERS, ME, facts, Token(upto), LIMIT) is not None

    assert is_only(fact(5, '"a"'))
    others = [fact(5, '"é"'), fact(5, f'"{"a" * LIMIT}"'), fact(5), fact(5, '"a"', '"b"'), fact(4, '"a"')]
    assert not any(is_only(each) for each in others)
    assert not is_only()
    assert not is_only(fact(4, '"a"'), fact(5, '"a"'))


def test_the_lines_of_the_wanted_streams_are_joined_in_order() -> None:
    caches = StreamName("caches")
    published = [
        (ORDERS, EncodedLines(b"1\n2\n", 2)),
        (caches, EncodedLines(b"3\n", 1)),
        (ORDERS, EncodedLines(b"4\n", 1)),
    ]
    assert list(join_lines(published, None)) == [EncodedLines(b"1\n2\n3\n4\n", 4)]
    assert list(join_lines(published, {ORDERS})) == [EncodedLines(b"1\n2\n4\n", 3)]
    assert list(join_lines(published, {caches})) == [EncodedLines(b"3\n", 1)]
    assert list(join_lines(published, ())) == []


def test_a_joined_piece_ends_once_it_has_the_bytes_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 6)
    published = [(ORDERS, EncodedLines(data, data.count(b"\n"))) for data in (b"1\n2\n", b"3\n", b"4\n", b"5\n6\n7\n")]
    assert list(join_lines(published, None)) == [EncodedLines(b"1\n2\n3\n", 3), EncodedLines(b"4\n5\n6\n7\n", 4)]
