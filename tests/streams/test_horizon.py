"""The horizon of a sequence from which any transaction allocates; transactions end in any order."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from replication.streams.horizon import HOLDERS_AFTER, WAITS, Holder, SequenceHorizon, SequenceSnapshot
from replication.wire.grammar import Token

SLOW, OTHER = Holder("3/17", 4711), Holder("4/2", 4712)
PREPARED = Holder("-1/765", None)
SESSIONS = st.integers(1, 4)


def snapshot(
    last_value: int, oldest: int = 9, transaction_id: int | None = 9, *, assigned_first: bool = True
) -> SequenceSnapshot:
    return SequenceSnapshot(Token(last_value), oldest, assigned_first, transaction_id)


def horizon_at(settled: int) -> SequenceHorizon:
    horizon = SequenceHorizon()
    horizon.update(snapshot(settled), 0.0)
    assert horizon.settled == settled
    return horizon


def test_trap_36_an_allocated_id_waits_for_every_transaction_in_progress() -> None:
    horizon = SequenceHorizon()
    horizon.update(snapshot(5, oldest=8, transaction_id=9), 1.0)
    assert (horizon.settled, horizon.last_value, horizon.since) == (None, 5, 1.0)  # transaction 8 is in progress
    horizon.update(snapshot(5, oldest=9, transaction_id=None), 2.0)
    assert (horizon.settled, horizon.last_value, horizon.since) == (5, 5, None)


def test_before_the_first_poll_nothing_is_known_and_nothing_is_waited_for() -> None:
    horizon = SequenceHorizon()
    assert (horizon.settled, horizon.last_value, horizon.blockers, horizon.since) == (None, None, frozenset(), None)
    assert not horizon.wants_holders(1e9)
    assert not horizon.wants_committed(1e9)


def test_the_wait_of_ids_that_join_is_as_old_as_the_oldest_of_them() -> None:
    horizon = horizon_at(4)
    for number in range(WAITS + 3):
        horizon.update(snapshot(5 + number, oldest=9, transaction_id=10), 1.0 + number)
    assert [wait.since for wait in horizon._waits] == [1.0 + number for number in range(WAITS)]


def test_without_transactions_in_progress_one_poll_is_enough() -> None:
    assert horizon_at(5).since is None


def test_a_later_id_waits_for_more_transactions() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, oldest=9, transaction_id=11), 1.0)  # 5 waits for 9 and 10
    horizon.update(snapshot(6, oldest=10, transaction_id=12), 1.0)  # 6 waits for 10 and 11
    assert horizon.settled == 4
    horizon.update(snapshot(6, oldest=11, transaction_id=None), 1.0)
    assert horizon.settled == 5
    horizon.update(snapshot(6, oldest=12, transaction_id=None), 1.0)
    assert horizon.settled == 6


def test_transactions_without_a_transaction_id_are_found_by_their_locks() -> None:
    """The race: an ID is allocated before its transaction has a transaction ID, so rule 1 would settle it."""
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    assert (horizon.settled, horizon.wants_holders(1.0)) == (4, True)
    horizon.update_holders({SLOW})
    assert (horizon.settled, horizon.blockers) == (4, {SLOW})
    horizon.update(snapshot(6, assigned_first=False), 1.0)
    horizon.update_holders({OTHER})
    assert (horizon.settled, horizon.blockers) == (5, {OTHER})
    horizon.update(snapshot(6, assigned_first=False), 1.0)
    horizon.update_holders(frozenset())
    assert (horizon.settled, horizon.blockers, horizon.wants_holders(1.0)) == (6, frozenset(), False)


def test_transaction_ids_alone_would_settle_an_id_that_commits_later() -> None:
    """Rule 1 is wrong if a transaction allocates before it has a transaction ID: here it settles 5, which is open."""
    horizon = horizon_at(4)
    horizon.update(snapshot(5), 1.0)  # 5 was allocated by a transaction without a transaction ID
    assert horizon.settled == 5


def test_a_transaction_that_has_nothing_to_do_with_the_sequence_is_not_waited_for_long() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, oldest=7, transaction_id=20), 0.0)
    assert not horizon.wants_holders(HOLDERS_AFTER / 2)
    assert horizon.wants_holders(HOLDERS_AFTER)
    later = horizon_at(4)
    later.update(snapshot(5, oldest=7, transaction_id=20), 1.0)
    assert not later.wants_holders(1.0)
    horizon.update_holders(frozenset())
    assert horizon.settled == 5


def test_a_transaction_that_is_prepared_meanwhile_has_another_name_and_is_waited_for() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW})
    horizon.update_holders({PREPARED})
    assert (horizon.settled, horizon.blockers) == (4, {PREPARED})
    horizon.update_holders(frozenset())
    assert horizon.settled == 5


def test_a_transaction_prepared_after_the_wait_began_is_not_waited_for() -> None:
    later, latest = Holder("-1/766", None), Holder("-1/767", None)
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW, PREPARED})
    horizon.update_holders({SLOW, PREPARED, later})
    assert horizon.blockers == {SLOW, PREPARED}
    horizon.update_holders({later})  # as which SLOW may have been prepared
    assert (horizon.settled, horizon.blockers) == (4, {later})
    horizon.update_holders({latest})
    assert horizon.settled == 5


def test_a_session_that_allocates_prepares_and_allocates_again_between_two_polls_is_waited_for() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW})
    horizon.update_holders({Holder("3/18", SLOW.session), PREPARED})
    assert (horizon.settled, horizon.blockers) == (4, {PREPARED})
    horizon.update_holders({Holder("3/18", SLOW.session)})
    assert horizon.settled == 5


def test_of_several_sessions_each_may_be_prepared_at_another_time() -> None:
    later = Holder("-1/766", None)
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW, OTHER})
    horizon.update_holders({PREPARED, OTHER})
    assert horizon.blockers == {PREPARED, OTHER}
    horizon.update_holders({OTHER})
    assert horizon.blockers == {OTHER}
    horizon.update_holders({later})
    assert (horizon.settled, horizon.blockers) == (4, {later})
    horizon.update_holders(frozenset())
    assert horizon.settled == 5


def test_a_transaction_that_is_seen_twice_while_it_is_prepared_is_waited_for() -> None:
    """PostgreSQL reads the locks of sessions before those of prepared transactions."""
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW})
    horizon.update_holders({SLOW, PREPARED})
    horizon.update_holders({PREPARED})
    assert (horizon.settled, horizon.blockers) == (4, {PREPARED})


def test_a_sequence_that_goes_back_moves_nothing() -> None:
    horizon = horizon_at(9)
    for _ in range(3):
        horizon.update(snapshot(4), 1.0)
    assert (horizon.settled, horizon.last_value, horizon.since) == (9, 4, None)


def test_ids_that_a_sequence_took_back_are_not_settled_before_they_are_allocated_again() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(9, oldest=9, transaction_id=11), 1.0)
    horizon.update(snapshot(6, oldest=10, transaction_id=20), 1.0)
    horizon.update(snapshot(7, oldest=12, transaction_id=21), 1.0)  # as if 10 had ended, for which 9 waited
    assert horizon.settled == 4
    horizon.update(snapshot(7, oldest=21, transaction_id=None), 1.0)
    assert horizon.settled == 7


def test_ids_with_committed_rows_do_not_wait() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(6, oldest=7, transaction_id=9), 1.0)
    horizon.update(snapshot(8, oldest=7, transaction_id=10), 2.0)
    assert not horizon.wants_committed(1.0)
    assert horizon.wants_committed(2.0)
    horizon.update_committed(Token(7))  # 8 has no row yet
    assert (horizon.settled, horizon.since) == (7, 2.0)
    horizon.update_committed(Token(5))
    assert horizon.settled == 7
    horizon.update_committed(Token(9))  # has a row, and was not allocated from this sequence
    assert (horizon.settled, horizon.since, horizon.wants_committed(2.0)) == (8, None, False)


def test_committed_rows_end_a_wait_and_its_blockers() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, assigned_first=False), 1.0)
    horizon.update_holders({SLOW})
    horizon.update_committed(Token(5))
    assert (horizon.settled, horizon.since, horizon.blockers) == (5, None, frozenset())


def test_committed_rows_settle_nothing_before_anything_is_settled() -> None:
    """IDs below the first row of a table may be open."""
    horizon = SequenceHorizon()
    horizon.update(snapshot(6, oldest=7, transaction_id=9), 1.0)
    assert not horizon.wants_committed(2.0)
    horizon.update_committed(Token(6))
    assert horizon.settled is None


def test_after_a_crash_no_transaction_id_from_before_counts() -> None:
    horizon = horizon_at(4)
    horizon.update(snapshot(5, oldest=9, transaction_id=11), 1.0)
    horizon.reset()
    assert (horizon.settled, horizon.last_value, horizon.since) == (4, None, None)
    horizon.update(snapshot(5, oldest=12, transaction_id=13), 2.0)
    assert (horizon.settled, horizon.since) == (4, 2.0)


def test_an_id_that_a_crash_took_back_is_waited_for_when_it_is_allocated_again() -> None:
    """Else it would settle with the transactions from before the crash, though a later one has allocated it."""
    horizon = horizon_at(4)
    horizon.update(snapshot(5, oldest=9, transaction_id=11), 1.0)
    horizon.update(snapshot(6, oldest=9, transaction_id=12), 1.0)
    horizon.update(snapshot(5, oldest=9, transaction_id=13), 2.0)
    horizon.update(snapshot(6, oldest=9, transaction_id=15), 3.0)
    horizon.update(snapshot(6, oldest=14, transaction_id=None), 4.0)
    assert (horizon.settled, horizon.since) == (5, 3.0)


def test_waits_are_bounded_and_the_last_one_is_right() -> None:
    horizon = horizon_at(4)
    for number in range(5, 5 + 10 * WAITS):
        horizon.update(snapshot(number, oldest=9, transaction_id=9 + number), 1.0)
    last = 4 + 10 * WAITS
    assert len(horizon._waits) == WAITS
    horizon.update(snapshot(last, oldest=9 + 5 + WAITS, transaction_id=None), 1.0)
    assert horizon.settled is not None
    assert 4 + WAITS - 1 <= horizon.settled < last - 1
    horizon.update(snapshot(last, oldest=9 + last, transaction_id=None), 1.0)
    assert horizon.settled == last


@attrs.define(eq=False)
class Transaction:
    name: str
    session: int | None  # None once it is prepared
    transaction_id: int | None = None
    ids: list[int] = attrs.field(factory=list)

    @property
    def holder(self) -> Holder:
        return Holder(self.name, self.session)


class Database(RuleBasedStateMachine):
    """A model: sessions allocate in transactions that end or are prepared; a watch polls; the server crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.horizon = SequenceHorizon()
        self.time = 0.0
        self.assigned_first = True  # whether the trigger is there
        self.upcoming, self.last, self.names = 10, 1, 0
        self.open: list[Transaction] = []
        self.kept = self.kept_transaction_id = 1  # the last ID, and number, of what ended well: no crash takes it back
        self.rows: set[int] = set()  # the IDs that have committed rows
        self.drop_poll()

    def drop_poll(self) -> None:
        """Drop the present poll, after any part of it."""
        self.begun: tuple[int, int | None] | None = None
        self.snapshot: SequenceSnapshot | None = None
        self.held: frozenset[Holder] | None = None
        self.run: int | None = None

    def of(self, session: int) -> Transaction:
        """Return the transaction that a session is in, or begin one."""
        for each in self.open:
            if each.session == session:
                return each
        self.names += 1
        self.open.append(Transaction(f"{session}/{self.names}", session))
        return self.open[-1]

    def assign_id(self, transaction: Transaction) -> None:
        if transaction.transaction_id is None:
            transaction.transaction_id, self.upcoming = self.upcoming, self.upcoming + 1

    @rule(session=SESSIONS, count=st.integers(1, 3))
    def allocate(self, session: int, count: int) -> None:
        transaction = self.of(session)
        if self.assigned_first:
            self.assign_id(transaction)
        for _ in range(count):
            self.last += 1
            transaction.ids.append(self.last)

    @rule(session=SESSIONS)
    def write_elsewhere(self, session: int) -> None:
        self.assign_id(self.of(session))

    @rule(session=SESSIONS, renamed=st.booleans())
    def prepare(self, session: int, *, renamed: bool) -> None:
        """Up to PostgreSQL 13.4, and in 14.0, it receives another name; later only after a crash."""
        transaction = self.of(session)
        self.assign_id(transaction)
        transaction.session = None
        if renamed:
            transaction.name = f"-1/{transaction.transaction_id}"
        self.keep(transaction)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """A transaction need not have inserted a row under each ID that it allocated."""
        transaction = data.draw(st.sampled_from(self.open))
        self.assign_id(transaction)
        self.keep(transaction)
        self.open.remove(transaction)
        missing = data.draw(st.sets(st.sampled_from(transaction.ids))) if transaction.ids else set()
        self.rows.update({*transaction.ids} - missing)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        self.open.remove(data.draw(st.sampled_from(self.open)))

    def keep(self, transaction: Transaction) -> None:
        self.kept = max(self.kept, *transaction.ids, 0)
        self.kept_transaction_id = max(self.kept_transaction_id, transaction.transaction_id or 0)

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """What is not durable is assigned again; a sequence behind ``settled`` is moved forward."""
        self.open = [each for each in self.open if each.session is None]
        for each in self.open:
            each.name = f"-1/{each.transaction_id}"
        self.upcoming = data.draw(st.integers(self.kept_transaction_id + 1, self.upcoming))
        self.last = max(data.draw(st.integers(self.kept, self.last)), self.horizon.settled or 1)
        self.drop_poll()
        self.horizon.reset()

    @precondition(lambda self: not any(each.ids for each in self.open))
    @rule()
    def install_or_remove_the_trigger(self) -> None:
        """Its lock on the table waits for transactions that have inserted."""
        self.assigned_first = not self.assigned_first

    @precondition(lambda self: (self.begun, self.snapshot, self.held, self.run) == (None,) * 4)
    @rule()
    def read_the_sequence(self) -> None:
        number = None
        if self.last != self.horizon.last_value:
            number, self.upcoming = self.upcoming, self.upcoming + 1
        self.begun = self.last, number

    @precondition(lambda self: self.begun is not None)
    @rule()
    def read_transactions_in_progress(self) -> None:
        assert self.begun is not None
        (last_value, number), self.begun = self.begun, None
        numbers = [each.transaction_id for each in self.open if each.transaction_id is not None]
        if number is not None:
            numbers.append(number)
        self.snapshot = SequenceSnapshot(Token(last_value), min([*numbers, self.upcoming]), self.assigned_first, number)

    @precondition(lambda self: self.snapshot is not None)
    @rule(asked=st.booleans(), seconds=st.sampled_from([0.0, HOLDERS_AFTER]))
    def end_a_poll(self, *, asked: bool, seconds: float) -> None:
        self.time += seconds
        assert self.snapshot is not None
        self.horizon.update(self.snapshot, self.time)
        self.snapshot = None
        if asked or self.horizon.wants_holders(self.time):
            self.held = frozenset(each.holder for each in self.open if each.ids and each.session is not None)

    @precondition(lambda self: self.held is not None)
    @rule()
    def read_prepared_transactions(self) -> None:
        """The locks are read in two parts: a transaction that is prepared meanwhile is seen twice."""
        assert self.held is not None
        prepared = {each.holder for each in self.open if each.ids and each.session is None}
        holders, self.held = self.held | prepared, None
        self.horizon.update_holders(holders)

    @precondition(
        lambda self: (self.begun, self.snapshot, self.held) == (None,) * 3 and self.horizon.settled is not None
    )
    @rule()
    def read_committed_ids(self) -> None:
        run = self.horizon.settled or 0
        while run + 1 in self.rows:
            run += 1
        self.run = run

    @precondition(lambda self: self.run is not None)
    @rule()
    def see_committed_ids(self) -> None:
        assert self.run is not None
        run, self.run = self.run, None
        self.horizon.update_committed(Token(run))
        last_value = self.horizon.last_value
        assert last_value is None or (self.horizon.settled or 0) >= min(run, last_value)

    @rule()
    def lose_a_poll(self) -> None:
        """A poll has no answer."""
        self.drop_poll()

    @invariant()
    def no_open_id_is_passed(self) -> None:
        assert all(id_ > (self.horizon.settled or 0) for each in self.open for id_ in each.ids)

    def poll(self) -> None:
        if self.run is not None:
            self.see_committed_ids()
        self.read_the_sequence()
        self.read_transactions_in_progress()
        self.end_a_poll(asked=True, seconds=HOLDERS_AFTER)
        self.read_prepared_transactions()
        self.no_open_id_is_passed()

    def teardown(self) -> None:
        """Waits end while other transactions go on, one of them always prepared; in the end every ID is settled."""
        self.open.clear()
        self.drop_poll()
        last_value = []
        for _ in range(6):
            self.allocate(1, 1)
            self.poll()
            last_value.append(self.last)
            self.prepare(1, renamed=True)
            del self.open[:-1]
        assert self.horizon.settled is not None
        assert self.horizon.settled >= last_value[-3]
        self.open.clear()
        self.poll()
        assert (self.horizon.settled, self.horizon.since) == (self.last, None)


TestDatabase = Database.TestCase
