"""IDs of a sequence that transactions of others draw, and end in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.streams.gate import MARKS, PATIENCE, Gate, Holder, Look
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

SLOW, OTHER = Holder("3/17", 4711), Holder("4/2", 4712)
PREPARED = Holder("-1/765", None)


def look(
    drawn: int, oldest: int = 9, number: int = 9, *, numbered: bool = True, holders: AbstractSet[Holder] | None = None
) -> Look:
    return Look(Token(drawn), oldest, numbered, number, holders)


def gate_at(complete: int, **options: Any) -> Gate:
    gate = Gate()
    for _ in range(2):
        gate.see(look(complete, holders=frozenset(), **options), 0.0)
    assert gate.complete == complete
    return gate


def test_trap_36_the_look_after_the_one_that_saw_an_id_tells_who_may_have_drawn_it() -> None:
    gate = Gate()
    gate.see(look(5, oldest=8, number=8), 0.0)
    assert (gate.complete, gate.moves) == (None, True)  # who drew 5 may have begun after this look did
    gate.see(look(6, oldest=8, number=9), 1.0)
    assert (gate.complete, gate.since) == (None, 1.0)  # number 8 is under way
    gate.see(look(6, oldest=10, number=10), 2.0)
    assert (gate.complete, gate.drawn, gate.since, gate.moves) == (6, 6, None, False)


def test_what_was_drawn_later_waits_for_more() -> None:
    gate = gate_at(4)
    gate.see(look(5), 1.0)
    gate.see(look(6, oldest=9, number=11), 1.0)  # 5 waits for 9 and 10
    gate.see(look(6, oldest=10, number=12), 1.0)  # 6 waits for 10 and 11
    assert gate.complete == 4
    gate.see(look(6, oldest=11, number=12), 1.0)
    assert gate.complete == 5
    gate.see(look(6, oldest=12, number=12), 1.0)
    assert gate.complete == 6


def test_transactions_that_need_no_number_before_they_draw_are_told_by_their_locks() -> None:
    """The race: an ID is drawn, and its transaction has no number yet, so numbers alone would let it be passed."""
    gate = gate_at(4, numbered=False)
    gate.see(look(5, numbered=False), 1.0)
    assert gate.wants_holders(1.0)
    gate.see(look(5, numbered=False), 1.0)
    assert gate.complete == 4
    gate.see(look(5, numbered=False, holders={SLOW}), 1.0)
    assert (gate.complete, gate.blockers) == (4, {SLOW})
    gate.see(look(6, numbered=False, holders={OTHER}), 1.0)
    assert (gate.complete, gate.blockers) == (5, frozenset())
    gate.see(look(6, numbered=False, holders={OTHER}), 1.0)
    gate.see(look(6, numbered=False, holders=frozenset()), 1.0)
    assert gate.complete == 6
    assert not gate.wants_holders(1.0)
    assert gate_at(4).numbered


def test_numbers_alone_would_pass_an_id_that_commits_later() -> None:
    """Why the column's default may not be all: with a number before every ID, which is not so here, 5 is passed."""
    gate = gate_at(4)
    gate.see(look(5, holders={SLOW}), 1.0)
    gate.see(look(5, holders={SLOW}), 1.0)  # SLOW has drawn 5, and no number
    assert gate.complete == 5


def test_a_transaction_that_has_nothing_to_do_with_the_sequence_is_not_waited_for_long() -> None:
    gate = gate_at(4)
    for now in (1.0, 2.0):
        gate.see(look(5, oldest=7, number=20), now)
    assert not gate.wants_holders(2.0 + PATIENCE / 2)
    assert gate.wants_holders(2.0 + PATIENCE)
    gate.see(look(5, oldest=7, number=20, holders=frozenset()), 3.0)
    assert gate.complete == 5


def test_a_transaction_that_is_prepared_meanwhile_has_another_name_and_is_waited_for() -> None:
    gate = gate_at(4, numbered=False)
    gate.see(look(5, numbered=False, holders={SLOW}), 1.0)
    gate.see(look(5, numbered=False, holders={SLOW}), 1.0)
    gate.see(look(5, numbered=False, holders={PREPARED}), 1.0)
    assert (gate.complete, gate.blockers) == (4, {PREPARED})
    gate.see(look(5, numbered=False, holders=frozenset()), 1.0)
    assert gate.complete == 5


def test_a_sequence_that_goes_back_moves_nothing() -> None:
    gate = gate_at(9)
    for _ in range(3):
        gate.see(look(4), 1.0)
    assert (gate.complete, gate.drawn, gate.moves) == (9, 4, False)


def test_marks_that_wait_long_are_bounded_and_the_last_of_them_is_right() -> None:
    gate = gate_at(4)
    for number in range(5, 5 + 10 * MARKS):
        gate.see(look(number, oldest=9, number=9 + number), 1.0)
    last = 4 + 10 * MARKS
    gate.see(look(last, oldest=9 + 5 + MARKS, number=9 + last), 1.0)
    assert gate.complete is not None
    assert 4 + MARKS - 1 <= gate.complete < last - 1
    gate.see(look(last, oldest=9 + last, number=9 + last), 1.0)
    assert gate.complete == last


@attrs.define(eq=False)
class Transaction:
    name: str
    number: int | None = None
    ids: list[int] = attrs.field(factory=list)
    prepared: bool = False


class Database(RuleBasedStateMachine):
    """Transactions draw IDs and end, some with a number from the start, while looks are taken in three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.time = 0.0
        self.numbered = True  # whether the trigger is there
        self.upcoming, self.last, self.names = 10, 1, 0
        self.open: list[Transaction] = []
        self.snapshot: tuple[int, bool, int | None] | None = None
        self.drawn: int | None = None

    def number(self, transaction: Transaction) -> None:
        if transaction.number is None:
            transaction.number, self.upcoming = self.upcoming, self.upcoming + 1

    @rule(count=st.integers(1, 3), data=st.data())
    def draw(self, count: int, data: st.DataObject) -> None:
        self.names += 1
        able = [each for each in self.open if not each.prepared]
        transaction = data.draw(st.sampled_from([*able, Transaction(str(self.names))]))
        if transaction not in self.open:
            self.open.append(transaction)
        if self.numbered:
            self.number(transaction)
        for _ in range(count):
            self.last += 1
            transaction.ids.append(self.last)

    @rule(data=st.data())
    def write_elsewhere(self, data: st.DataObject) -> None:
        self.names += 1
        transaction = data.draw(st.sampled_from([*self.open, Transaction(str(self.names))]))
        if transaction not in self.open:
            self.open.append(transaction)
        self.number(transaction)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        transaction = data.draw(st.sampled_from(self.open))
        self.number(transaction)
        transaction.prepared = True

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.open.remove(data.draw(st.sampled_from(self.open)))

    @precondition(lambda self: not any(each.ids for each in self.open))
    @rule()
    def install_or_remove_the_trigger(self) -> None:
        """Its lock on the table waits for those who have inserted."""
        self.numbered = not self.numbered

    @precondition(lambda self: self.snapshot is None)
    @rule()
    def begin_a_look(self) -> None:
        numbers = [each.number for each in self.open if each.number is not None]
        oldest, number = min([*numbers, self.upcoming]), None
        if self.gate.wants_number:
            number, self.upcoming = self.upcoming, self.upcoming + 1
        self.snapshot = oldest, self.numbered, number

    @precondition(lambda self: self.snapshot is not None and self.drawn is None)
    @rule()
    def read_the_sequence(self) -> None:
        self.drawn = self.last

    @precondition(lambda self: self.drawn is not None)
    @rule(asked=st.booleans(), seconds=st.sampled_from([0.0, PATIENCE]))
    def end_a_look(self, *, asked: bool, seconds: float) -> None:
        self.time += seconds
        assert self.snapshot is not None
        assert self.drawn is not None
        holders = None
        if asked or self.gate.wants_holders(self.time):
            held = [each for each in self.open if each.ids]
            holders = frozenset(
                Holder(f"-1/{each.number}", None) if each.prepared else Holder(each.name, int(each.name))
                for each in held
            )
        self.gate.see(Look(Token(self.drawn), *self.snapshot, holders), self.time)
        self.snapshot = self.drawn = None

    @invariant()
    def nothing_open_is_passed(self) -> None:
        assert all(id_ > (self.gate.complete or 0) for each in self.open for id_ in each.ids)

    def teardown(self) -> None:
        """Once all have ended, so has the waiting."""
        self.open.clear()
        self.snapshot = self.drawn = None
        for _ in range(3):
            self.begin_a_look()
            self.drawn = self.last
            self.end_a_look(asked=False, seconds=PATIENCE)
        assert (self.gate.complete, self.gate.since) == (self.last, None)


TestDatabase = Database.TestCase
