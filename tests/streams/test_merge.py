"""Linear order: facts of several writers are applied once, in order, and none above a gap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.errors import StreamError
from replication.streams.cursor import Apply, CatchUp, Cursor
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.streams.merge import ApplyMerged, merge
from replication.wire.grammar import InstanceName, Token

ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


def fact(token: int) -> Fact:
    return Fact(Token(token), (f"[{token}]",))


def apply(*tokens: int) -> Apply:
    return Apply([fact(token) for token in tokens], Token(1), Token(4))


def at(prev: int, new: int, link: str = "link") -> Cursor:
    cursor = Cursor(Token(prev))
    cursor.position_received(link, Token(prev), Token(new))
    return cursor


def receive(cursor: Cursor, *tokens: int) -> None:
    cursor.rows_received("link", [Token(each) for each in tokens], [f"[{each}]" for each in tokens])


def test_without_writers_there_is_no_step() -> None:
    assert merge({}) is None


def test_protocol_f4_all_wait_for_the_writer_with_the_lowest_position() -> None:
    """The example of docs/protocol/ids.md: the first writer at 3, the second at 5."""
    first, second = at(1, 1), at(1, 1)
    cursors = {ONE: first, TWO: second}
    receive(first, 2, 3)
    receive(second, 4, 5)
    together = merge(cursors)
    assert together is not None
    assert together.facts == [fact(2), fact(3)]
    assert together.parts == {
        ONE: Apply([fact(2), fact(3)], Token(1), Token(3)),
        TWO: Apply([], Token(1), Token(3)),
    }
    for writer, part in together.parts.items():
        cursors[writer].applied(part)
    assert merge(cursors) is None
    first.position_received("link", Token(3), Token(6))
    together = merge(cursors)
    assert together is not None
    assert (together.facts, together.after) == ([fact(4), fact(5)], 3)


def test_two_writers_with_a_fact_of_one_id_do_not_share_a_sequence() -> None:
    step = ApplyMerged({ONE: apply(2, 3), TWO: apply(3), THREE: apply()}, [fact(2), fact(3), fact(3)])
    with pytest.raises(StreamError, match=r"fact 3 of two has the ID of a fact of one: linear=True is for writers"):
        step.check()
    ApplyMerged({ONE: apply(2, 4), TWO: apply(3)}, [fact(2), fact(3), fact(4)]).check()


def test_no_fact_is_applied_above_a_gap() -> None:
    behind, ahead = Cursor(Token(1)), at(1, 1)
    behind.position_received("link", Token(9), Token(9))
    receive(ahead, 4, 8)
    assert merge({ONE: behind, TWO: ahead}) is None
    step = behind.step()
    assert isinstance(step, CatchUp)
    behind.fetched(step, Page([fact(3), fact(5)], Token(5), limited=True))
    together = merge({ONE: behind, TWO: ahead})
    assert together is not None
    assert together.facts == [fact(3), fact(4), fact(5)]


def test_the_rows_of_one_transaction_are_limited() -> None:
    many, few = Cursor(Token(1), max_apply_rows=2), at(1, 9)
    many.position_received("link", Token(1), Token(1))
    receive(many, 2, 4, 6, 9)
    together = merge({ONE: many, TWO: few})
    assert together is not None
    assert {writer: part.upto for writer, part in together.parts.items()} == {ONE: 4, TWO: 4}


def test_a_part_belongs_to_the_resets_of_its_writer() -> None:
    cursor = at(5, 5)
    receive(cursor, 6)
    cursor.link_lost("link")
    cursor.position_received("link", Token(5), Token(5))
    receive(cursor, 8)
    together = merge({ONE: cursor})
    assert together is not None
    assert together.parts == {ONE: Apply([fact(8)], Token(5), Token(8), 1)}


def test_facts_that_came_late_are_applied_by_themselves() -> None:
    late, other = at(5, 5), at(5, 20)
    receive(late, 9)
    receive(late, 8)
    cursors = {ONE: late, TWO: other}
    together = merge(cursors)
    assert together is not None
    for writer, part in together.parts.items():
        cursors[writer].applied(part)
    step = late.step()
    assert isinstance(step, CatchUp)
    late.fetched(step, Page([fact(8), fact(9)], Token(9), limited=False))
    together = merge(cursors)
    assert together is not None
    assert (together.facts, together.parts) == ([fact(8)], {ONE: Apply([fact(8)], Token(9), Token(9))})
    late.applied(together.parts[ONE])
    assert (late.live, merge(cursors)) == (True, None)


def test_a_writer_that_is_reset_is_left_out() -> None:
    back, other = at(5, 5), at(5, 9)
    back.link_lost("link")
    back.position_received("again", Token(3), Token(3))
    assert merge({ONE: back, TWO: other}) is None


@given(
    owners=st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=40),
    chances=st.lists(st.tuples(st.sampled_from([ONE, TWO, THREE]), st.sampled_from(["rows", "position", "merge"]))),
)
def test_facts_are_applied_once_and_in_order_however_they_are_received(
    owners: list[InstanceName], chances: list[tuple[InstanceName, str]]
) -> None:
    cursors = {each: at(1, 1) for each in (ONE, TWO, THREE)}
    waiting = {each: [n for n, owner in enumerate(owners, 2) if owner == each] for each in cursors}
    last = len(owners) + 1
    came: list[Fact] = []

    def take() -> None:
        together = merge(cursors)
        if together is None:
            return
        for writer, part in together.parts.items():
            assert [*part.facts] == [each for each in together.facts if owners[each.token - 2] == writer]
            cursors[writer].applied(part)
        came.extend(together.facts)
        assert {each.position for each in cursors.values()} == {min(each.published for each in cursors.values())}

    for writer, what in [*chances, *((each, "rows") for each in cursors for _ in owners)]:
        if what == "rows" and waiting[writer]:
            receive(cursors[writer], waiting[writer].pop(0))
        elif what == "position":
            settled = waiting[writer][0] - 1 if waiting[writer] else last
            cursors[writer].position_received("link", cursors[writer].published, Token(settled))
        else:
            take()
        assert [each.token for each in came] == [*range(2, len(came) + 2)]
    for each in cursors.values():
        each.position_received("link", each.published, Token(last))
    take()
    assert [each.token for each in came] == [*range(2, last + 1)]


def test_the_first_facts_of_a_step_move_each_writer_no_further() -> None:
    first, second = at(1, 1), at(1, 1)
    receive(first, 2, 5)
    receive(second, 3, 4, 6)
    together = merge({ONE: first, TWO: second})
    assert together is not None
    assert together.first(9) is together
    part = together.first(2)
    assert part.facts == [fact(2), fact(3)]
    assert part.parts == {
        ONE: Apply([fact(2)], Token(1), Token(3)),
        TWO: Apply([fact(3)], Token(1), Token(3)),
    }


def test_the_first_of_late_facts_move_no_position() -> None:
    cursor = at(9, 9)
    assert cursor.found_late([fact(3), fact(4), fact(5)])
    late = merge({ONE: cursor})
    assert late is not None
    part = late.first(2)
    assert part.facts == [fact(3), fact(4)]
    assert {writer: (each.facts, each.after, each.upto) for writer, each in part.parts.items()} == {
        ONE: ([fact(3), fact(4)], 9, 9)
    }
