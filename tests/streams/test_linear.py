"""Several writers as one: whatever is heard when, facts come once, in order, and none above what may be missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from replication.streams.cursor import Apply, CatchUp, Cursor
from replication.streams.facts import Fact
from replication.streams.linear import merge
from replication.streams.seams import Page
from replication.wire.grammar import InstanceName, Token

ONE, TWO, THREE = (InstanceName(each) for each in ("one", "two", "three"))


def fact(token: int) -> Fact:
    return Fact(Token(token), (f"[{token}]",))


def at(prev: int, new: int, link: str = "link") -> Cursor:
    cursor = Cursor(Token(prev))
    cursor.position_heard(link, Token(prev), Token(new))
    return cursor


def hear(cursor: Cursor, *tokens: int) -> None:
    cursor.rows_heard("link", [Token(each) for each in tokens], [f"[{each}]" for each in tokens])


def test_of_nobody_nothing_comes() -> None:
    assert merge({}) is None


def test_protocol_f4_all_wait_for_the_writer_that_has_settled_least() -> None:
    """The example of the reference: first at 3, second at 5."""
    first, second = at(1, 1), at(1, 1)
    cursors = {ONE: first, TWO: second}
    hear(first, 2, 3)
    hear(second, 4, 5)
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
    first.position_heard("link", Token(3), Token(6))
    together = merge(cursors)
    assert together is not None
    assert (together.facts, together.after) == ([fact(4), fact(5)], 3)


def test_nothing_comes_above_what_is_to_be_fetched() -> None:
    behind, ahead = Cursor(Token(1)), at(1, 1)
    behind.position_heard("link", Token(9), Token(9))
    hear(ahead, 4, 8)
    assert merge({ONE: behind, TWO: ahead}) is None
    step = behind.step()
    assert isinstance(step, CatchUp)
    behind.fetched(step, Page([fact(3), fact(5)], Token(5), limited=True))
    together = merge({ONE: behind, TWO: ahead})
    assert together is not None
    assert together.facts == [fact(3), fact(4), fact(5)]


def test_what_one_transaction_takes_is_bounded() -> None:
    many, few = Cursor(Token(1), max_apply_rows=2), at(1, 9)
    many.position_heard("link", Token(1), Token(1))
    hear(many, 2, 4, 6, 9)
    together = merge({ONE: many, TWO: few})
    assert together is not None
    assert {writer: part.upto for writer, part in together.parts.items()} == {ONE: 4, TWO: 4}


def test_a_writer_that_goes_back_is_left_to_do_so_first() -> None:
    back, other = at(5, 5), at(5, 9)
    back.link_lost("link")
    back.position_heard("again", Token(3), Token(3))
    assert merge({ONE: back, TWO: other}) is None


@given(
    owners=st.lists(st.sampled_from([ONE, TWO, THREE]), max_size=40),
    chances=st.lists(st.tuples(st.sampled_from([ONE, TWO, THREE]), st.sampled_from(["rows", "position", "merge"]))),
)
def test_whatever_is_heard_when_facts_come_once_and_in_order(
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
        assert {each.position for each in cursors.values()} == {min(each.announced for each in cursors.values())}

    for writer, what in [*chances, *((each, "rows") for each in cursors for _ in owners)]:
        if what == "rows" and waiting[writer]:
            hear(cursors[writer], waiting[writer].pop(0))
        elif what == "position":
            settled = waiting[writer][0] - 1 if waiting[writer] else last
            cursors[writer].position_heard("link", cursors[writer].announced, Token(settled))
        else:
            take()
        assert [each.token for each in came] == [*range(2, len(came) + 2)]
    for each in cursors.values():
        each.position_heard("link", each.announced, Token(last))
    take()
    assert [each.token for each in came] == [*range(2, last + 1)]
