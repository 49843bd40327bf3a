"""IDs of a sequence that transactions of others draw, and end in any order."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.streams.gate import MARKS, PATIENCE, Gate, Holder, Look
from replication.wire.grammar import Token

SLOW, OTHER = Holder("3/17", 4711), Holder("4/2", 4712)
PREPARED = Holder("-1/765", None)
SESSIONS = st.integers(1, 4)


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


def test_who_was_prepared_after_what_is_waited_for_is_not_waited_for() -> None:
    later, latest = Holder("-1/766", None), Holder("-1/767", None)
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    gate.see_holders({SLOW, PREPARED})
    gate.see_holders({SLOW, PREPARED, later})
    assert gate.blockers == {SLOW, PREPARED}
    gate.see_holders({later})  # as which SLOW may have been prepared
    assert (gate.complete, gate.blockers) == (4, {later})
    gate.see_holders({latest})
    assert gate.complete == 5


def test_who_draws_prepares_and_draws_again_between_two_looks_is_waited_for() -> None:
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    gate.see_holders({SLOW})
    gate.see_holders({Holder("3/18", SLOW.session), PREPARED})
    assert (gate.complete, gate.blockers) == (4, {PREPARED})
    gate.see_holders({Holder("3/18", SLOW.session)})
    assert gate.complete == 5


def test_of_several_sessions_each_may_be_prepared_at_another_time() -> None:
    later = Holder("-1/766", None)
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    gate.see_holders({SLOW, OTHER})
    gate.see_holders({PREPARED, OTHER})
    assert gate.blockers == {PREPARED, OTHER}
    gate.see_holders({OTHER})
    assert gate.blockers == {OTHER}
    gate.see_holders({later})
    assert (gate.complete, gate.blockers) == (4, {later})
    gate.see_holders(frozenset())
    assert gate.complete == 5


def test_who_is_seen_twice_while_it_is_prepared_is_waited_for() -> None:
    """The locks of sessions are read before those of prepared transactions."""
    gate = gate_at(4)
    gate.see(look(5, numbered=False), 1.0)
    gate.see_holders({SLOW})
    gate.see_holders({SLOW, PREPARED})
    gate.see_holders({PREPARED})
    assert (gate.complete, gate.blockers) == (4, {PREPARED})


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
    session: int | None  # None once it is prepared
    number: int | None = None
    ids: list[int] = attrs.field(factory=list)

    @property
    def holder(self) -> Holder:
        return Holder(self.name, self.session)


class Database(RuleBasedStateMachine):
    """Sessions draw IDs in transactions that end or are prepared, looks are taken, and the server crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.time = 0.0
        self.numbered = True  # whether the trigger is there
        self.upcoming, self.last, self.names = 10, 1, 0
        self.open: list[Transaction] = []
        self.kept = self.kept_number = 1  # the last ID, and number, of what ended well: no crash takes it back
        self.forget_look()

    def forget_look(self) -> None:
        """Leave off the look that is under way, after whichever part of it."""
        self.begun: tuple[int, int | None] | None = None
        self.looked: Look | None = None
        self.held: frozenset[Holder] | None = None

    def of(self, session: int) -> Transaction:
        """Return the transaction that a session is in, or begin one."""
        for each in self.open:
            if each.session == session:
                return each
        self.names += 1
        self.open.append(Transaction(f"{session}/{self.names}", session))
        return self.open[-1]

    def number(self, transaction: Transaction) -> None:
        if transaction.number is None:
            transaction.number, self.upcoming = self.upcoming, self.upcoming + 1

    @rule(session=SESSIONS, count=st.integers(1, 3))
    def draw(self, session: int, count: int) -> None:
        transaction = self.of(session)
        if self.numbered:
            self.number(transaction)
        for _ in range(count):
            self.last += 1
            transaction.ids.append(self.last)

    @rule(session=SESSIONS)
    def write_elsewhere(self, session: int) -> None:
        self.number(self.of(session))

    @rule(session=SESSIONS, renamed=st.booleans())
    def prepare(self, session: int, *, renamed: bool) -> None:
        """PostgreSQL has given it a name of its own up to 13.4 and 14.0, and since then after a crash only."""
        transaction = self.of(session)
        self.number(transaction)
        transaction.session = None
        if renamed:
            transaction.name = f"-1/{transaction.number}"
        self.keep(transaction)

    def keep(self, transaction: Transaction) -> None:
        self.kept = max(self.kept, *transaction.ids, 0)
        self.kept_number = max(self.kept_number, transaction.number or 0)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Numbers and IDs that nothing durable has are given again; a sequence behind ``complete`` is moved forward."""
        self.open = [each for each in self.open if each.session is None]
        for each in self.open:
            each.name = f"-1/{each.number}"
        self.upcoming = data.draw(st.integers(self.kept_number + 1, self.upcoming))
        self.last = max(data.draw(st.integers(self.kept, self.last)), self.gate.complete or 1)
        self.forget_look()
        self.gate.start_over()

    @precondition(lambda self: not any(each.ids for each in self.open))
    @rule()
    def install_or_remove_the_trigger(self) -> None:
        """Its lock on the table waits for those who have inserted."""
        self.numbered = not self.numbered

    @precondition(lambda self: self.begun is None and self.looked is None and self.held is None)
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
            self.held = frozenset(each.holder for each in self.open if each.ids and each.session is not None)

    @precondition(lambda self: self.held is not None)
    @rule()
    def read_who_is_prepared(self) -> None:
        """The locks are not read at once: who is prepared meanwhile is seen twice."""
        assert self.held is not None
        prepared = {each.holder for each in self.open if each.ids and each.session is None}
        holders, self.held = self.held | prepared, None
        self.gate.see_holders(holders)

    @rule()
    def lose_a_look(self) -> None:
        """Its answer never came."""
        self.forget_look()

    @invariant()
    def nothing_open_is_passed(self) -> None:
        assert all(id_ > (self.gate.complete or 0) for each in self.open for id_ in each.ids)

    def look(self) -> None:
        self.read_the_sequence()
        self.read_who_is_under_way()
        self.end_a_look(asked=True, seconds=PATIENCE)
        self.read_who_is_prepared()
        self.nothing_open_is_passed()

    def teardown(self) -> None:
        """The waiting ends while others go on, one of them always prepared; and once all have ended, for good."""
        self.open.clear()
        self.forget_look()
        drawn = []
        for _ in range(6):
            self.draw(1, 1)
            self.look()
            drawn.append(self.last)
            self.prepare(1, renamed=True)
            del self.open[:-1]
        assert self.gate.complete is not None
        assert self.gate.complete >= drawn[-3]
        self.open.clear()
        self.look()
        assert (self.gate.complete, self.gate.since) == (self.last, None)


TestDatabase = Database.TestCase
