"""IDs of a sequence that transactions of others draw, and end in any order."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.streams.gate import MARKS, PATIENCE, Gate, Holder, Look
from replication.wire.grammar import Token

SLOW, OTHER = Holder("3/17", 4711), Holder("4/2", 4712)
PREPARED = Holder("-1/765", None)


def look(drawn: int, oldest: int = 9, number: int | None = 9, *, numbered: bool = True) -> Look:
    return Look(Token(drawn), oldest, numbered, number)


def gate_at(complete: int) -> Gate:
    gate = Gate()
    gate.see(look(complete), 0.0)
    assert gate.complete == complete
    return gate


def test_trap_36_what_was_drawn_waits_for_all_who_were_under_way_then() -> None:
    gate = Gate()
    gate.see(look(5, oldest=8, number=9), 1.0)
    assert (gate.complete, gate.drawn, gate.since) == (None, 5, 1.0)  # number 8 is under way
    gate.see(look(5, oldest=9, number=None), 2.0)
    assert (gate.complete, gate.drawn, gate.since) == (5, 5, None)


def test_where_nobody_is_under_way_one_look_is_enough() -> None:
    assert gate_at(5).since is None


def test_what_was_drawn_later_waits_for_more() -> None:
    gate = gate_at(4)
    gate.see(look(5, oldest=9, number=11), 1.0)  # 5 waits for 9 and 10
    gate.see(look(6, oldest=10, number=12), 1.0)  # 6 waits for 10 and 11
    assert gate.complete == 4
    gate.see(look(6, oldest=11, number=None), 1.0)
    assert gate.complete == 5
    gate.see(look(6, oldest=12, number=None), 1.0)
    assert gate.complete == 6


def test_transactions_that_need_no_number_before_they_draw_are_told_by_their_locks() -> None:
    """The race: an ID is drawn, and its transaction has no number yet, so numbers alone would let it be passed."""
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    assert (gate.complete, gate.wants_holders(1.0)) == (4, True)
    gate.see_holders({SLOW})
    assert (gate.complete, gate.blockers) == (4, {SLOW})
    gate.see(look(6, numbered=False), 1.0)
    gate.see_holders({OTHER})
    assert (gate.complete, gate.blockers) == (5, {OTHER})
    gate.see(look(6, numbered=False), 1.0)
    gate.see_holders(frozenset())
    assert (gate.complete, gate.blockers, gate.wants_holders(1.0)) == (6, frozenset(), False)


def test_numbers_alone_would_pass_an_id_that_commits_later() -> None:
    """Why the column's default may not be all: with a number before every ID, which is not so here, 5 is passed."""
    gate = gate_at(4)
    gate.see(look(5), 1.0)  # somebody has drawn 5, and no number
    assert gate.complete == 5


def test_a_transaction_that_has_nothing_to_do_with_the_sequence_is_not_waited_for_long() -> None:
    gate = gate_at(4)
    gate.see(look(5, oldest=7, number=20), 1.0)
    assert not gate.wants_holders(1.0 + PATIENCE / 2)
    assert gate.wants_holders(1.0 + PATIENCE)
    gate.see_holders(frozenset())
    assert gate.complete == 5


def test_a_transaction_that_is_prepared_meanwhile_has_another_name_and_is_waited_for() -> None:
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    gate.see_holders({SLOW})
    gate.see_holders({PREPARED})
    assert (gate.complete, gate.blockers) == (4, {PREPARED})
    gate.see_holders(frozenset())
    assert gate.complete == 5


def test_a_sequence_that_goes_back_moves_nothing() -> None:
    gate = gate_at(9)
    for _ in range(3):
        gate.see(look(4), 1.0)
    assert (gate.complete, gate.drawn, gate.since) == (9, 4, None)


def test_what_a_sequence_took_back_is_not_passed_before_it_was_drawn_again() -> None:
    gate = gate_at(4)
    gate.see(look(9, oldest=9, number=11), 1.0)
    gate.see(look(6, oldest=10, number=20), 1.0)
    gate.see(look(7, oldest=12, number=21), 1.0)  # as if 10 had ended, for which 9 waited
    assert gate.complete == 4
    gate.see(look(7, oldest=21, number=None), 1.0)
    assert gate.complete == 7


def test_after_a_crash_nobody_is_waited_for_by_a_number_from_before() -> None:
    gate = gate_at(4)
    gate.see(look(5, oldest=9, number=11), 1.0)
    gate.start_over()
    assert (gate.complete, gate.drawn, gate.since) == (4, None, None)
    gate.see(look(5, oldest=12, number=13), 2.0)
    assert (gate.complete, gate.since) == (4, 2.0)


def test_marks_that_wait_long_are_bounded_and_the_last_of_them_is_right() -> None:
    gate = gate_at(4)
    for number in range(5, 5 + 10 * MARKS):
        gate.see(look(number, oldest=9, number=9 + number), 1.0)
    last = 4 + 10 * MARKS
    gate.see(look(last, oldest=9 + 5 + MARKS, number=None), 1.0)
    assert gate.complete is not None
    assert 4 + MARKS - 1 <= gate.complete < last - 1
    gate.see(look(last, oldest=9 + last, number=None), 1.0)
    assert gate.complete == last


@attrs.define(eq=False)
class Transaction:
    name: str
    number: int | None = None
    ids: list[int] = attrs.field(factory=list)
    prepared: bool = False


class Database(RuleBasedStateMachine):
    """Transactions draw IDs and end, some with a number from the start, looks are taken, and the server crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.time = 0.0
        self.numbered = True  # whether the trigger is there
        self.upcoming, self.last, self.names = 10, 1, 0
        self.open: list[Transaction] = []
        self.kept = self.kept_number = 1  # the last ID, and number, of what ended well: no crash takes it back
        self.begun: tuple[int, int | None] | None = None
        self.looked: Look | None = None

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
        self.keep(transaction)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        transaction = data.draw(st.sampled_from(self.open))
        self.open.remove(transaction)
        self.keep(transaction)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        self.open.remove(data.draw(st.sampled_from(self.open)))

    def keep(self, transaction: Transaction) -> None:
        self.kept = max(self.kept, *transaction.ids, 0)
        self.kept_number = max(self.kept_number, transaction.number or 0)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Numbers and IDs that nothing durable has are given again; a sequence behind ``complete`` is moved forward."""
        self.open = [each for each in self.open if each.prepared]
        self.upcoming = data.draw(st.integers(self.kept_number + 1, self.upcoming))
        self.last = max(data.draw(st.integers(self.kept, self.last)), self.gate.complete or 1)
        self.begun = self.looked = None
        self.gate.start_over()

    @precondition(lambda self: not any(each.ids for each in self.open))
    @rule()
    def install_or_remove_the_trigger(self) -> None:
        """Its lock on the table waits for those who have inserted."""
        self.numbered = not self.numbered

    @precondition(lambda self: self.begun is None and self.looked is None)
    @rule()
    def read_the_sequence(self) -> None:
        number = None
        if self.last != self.gate.drawn:
            number, self.upcoming = self.upcoming, self.upcoming + 1
        self.begun = self.last, number

    @precondition(lambda self: self.begun is not None)
    @rule()
    def read_who_is_under_way(self) -> None:
        assert self.begun is not None
        (drawn, number), self.begun = self.begun, None
        numbers = [each.number for each in self.open if each.number is not None]
        if number is not None:
            numbers.append(number)
        self.looked = Look(Token(drawn), min([*numbers, self.upcoming]), self.numbered, number)

    @precondition(lambda self: self.looked is not None)
    @rule(asked=st.booleans(), seconds=st.sampled_from([0.0, PATIENCE]))
    def end_a_look(self, *, asked: bool, seconds: float) -> None:
        self.time += seconds
        assert self.looked is not None
        self.gate.see(self.looked, self.time)
        self.looked = None
        if asked or self.gate.wants_holders(self.time):
            held = [each for each in self.open if each.ids]
            self.gate.see_holders(
                frozenset(
                    Holder(f"-1/{each.number}", None) if each.prepared else Holder(each.name, int(each.name))
                    for each in held
                )
            )

    @invariant()
    def nothing_open_is_passed(self) -> None:
        assert all(id_ > (self.gate.complete or 0) for each in self.open for id_ in each.ids)

    def teardown(self) -> None:
        """Once all have ended, so has the waiting."""
        self.open.clear()
        self.begun = self.looked = None
        for _ in range(2):
            self.read_the_sequence()
            self.read_who_is_under_way()
            self.end_a_look(asked=False, seconds=PATIENCE)
        assert (self.gate.complete, self.gate.since) == (self.last, None)


TestDatabase = Database.TestCase
