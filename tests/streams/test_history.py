"""Histories of writers: a follower finds the last fact that it shares with a restored database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replication.streams.history import (
    MAX_EPOCHS,
    Epoch,
    begin_epoch,
    certain_position,
    common_position,
    doubted_since,
    encode_history,
    encode_part,
    is_behind,
    raise_epoch,
    raised_name,
    read_history,
    read_part,
    read_position,
)
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from replication.streams.history import History


def epoch(name: str, start: int, settled: int | None = None) -> Epoch:
    return Epoch(name, Token(start if settled is None else settled), Token(start))


A, B, C = epoch("a", 1), epoch("b", 5), epoch("c", 11)


def common(followed: History, published: History, position: int) -> Token | None:
    return common_position(followed, published, Token(position))


def test_a_part_of_a_history_has_the_number_of_all_epochs() -> None:
    history = [Epoch("a", Token(1), Token(1)), Epoch("b", Token(5), Token(7))]
    assert encode_part(history, 1, 100) == '[2,[["b",5,7]]]'
    assert [read_part(encode_part(history, place, 1)) for place in (0, 2)] == [(2, history[:1]), (2, [])]


def test_an_ordinary_restart_keeps_the_position() -> None:
    assert common([A, B], [A, B, C], 11) == 11
    assert common([A], [A, B, C], 5) == 5
    assert common([A, B], [A, B], 100) == 100


def test_after_a_restore_the_common_position_is_that_of_the_backup() -> None:
    """The follower was at 11 in epoch b; the backup ended at 6, where epoch c begins."""
    assert common([A, B], [A, B, epoch("c", 6)], 11) == 6
    assert common([A, B, epoch("x", 8)], [A, B, epoch("c", 6)], 11) == 6
    assert common([A, B, epoch("x", 8)], [A, B, C], 15) == 8


def test_a_follower_below_the_backup_keeps_its_position() -> None:
    assert common([A, B], [A, B, epoch("c", 6)], 4) == 4


def test_facts_below_a_raised_position_are_in_doubt_and_the_position_alone_is_not() -> None:
    """A follower at 10 has lost facts above 7. One at 7 has received the raised positions 12 and 20."""
    before = [A, epoch("b.x", 5)]
    raised = raise_epoch(before, epoch("raised-c.y", 12, settled=7), Token(7))
    assert (common(before, raised, 10), doubted_since(before, raised, Token(10))) == (10, 7)
    later = raise_epoch(raised, epoch("raised-c.y", 20, settled=7), Token(12))
    assert later == [*before, epoch("raised-c.y", 20, settled=7)]
    histories: list[History] = [before, raised, later]
    for followed in histories:
        assert common(followed, later, 20) == 20
    assert doubted_since(raised, later, Token(20)) is None


def test_a_position_was_raised_before_a_restore_and_is_raised_beyond_it_afterwards() -> None:
    """The follower is at 52. The writer had ended at 41; the backup has it at 31."""
    followed = raise_epoch([A], epoch("raised-b.x", 52, settled=41), Token(41))
    restored = raise_epoch([A], epoch("raised-c.y", 131, settled=31), Token(31))
    assert [common(followed, restored, position) for position in (52, 60, 31)] == [31, 31, 31]
    started = [A, epoch("b.x", 35)]
    assert common(started, restored, 41) == 31
    complete = raise_epoch([A], epoch("raised-c.y", 131, settled=41), Token(41))
    assert common(followed, complete, 52) == 52  # the backup may have all of its facts: they are counted


@pytest.mark.parametrize(("position", "expected"), [(20, 20), (21, 21), (22, 20), (50, 20)])
def test_a_reader_without_the_epoch_has_no_position_above_the_one_that_was_raised(position: int, expected: int) -> None:
    """The writer had a fact at 21, above its stored position.  After a restore to there, all later facts are lost."""
    raised = raise_epoch([A], epoch(raised_name(Token(21), "x.y"), 50, settled=20), Token(21))
    again = begin_epoch(raise_epoch(raised, epoch(raised_name(Token(50), "y.y"), 60, settled=50), Token(50)), C)
    for theirs in (raised, again):
        assert read_position([A], theirs, Token(position)) == expected
        assert read_position(raised, theirs, Token(position)) == position
    assert read_position([B], raised, Token(position)) is None
    old = raise_epoch([A], epoch("raised-1a2b3c4d.x", 50, settled=20), Token(21))
    assert read_position([A], old, Token(position)) == position


def test_an_epoch_in_which_a_position_was_raised_stays() -> None:
    """A follower has it with the start 12, and is at 20."""
    followed = [A, epoch("raised-c.y", 12, settled=7)]
    stored = [A, epoch("raised-c.y", 20, settled=7)]
    assert common(followed, begin_epoch(stored, epoch("d.z", 20)), 20) == 20
    another = raise_epoch(followed, epoch("raised-e.z", 21, settled=20), Token(20))  # the other's store was overtaken
    assert another == [*stored, epoch("raised-e.z", 21, settled=20)]
    assert raise_epoch([], A, Token(1)) == [A]
    many = [epoch(str(number), number) for number in range(MAX_EPOCHS)]
    assert raise_epoch(many, epoch("raised-f.z", 5000), Token(20)) == [*many[1:], epoch("raised-f.z", 5000)]


def test_open_ids_of_the_backup_are_not_common() -> None:
    """ID 5 was open in the backup and 6 committed: only what is at or below 4 is the same for certain."""
    assert common([A], [A, epoch("b", 6, settled=4)], 11) == 4
    assert common([A], [A, epoch("b", 6, settled=4)], 6) == 6


def test_histories_without_a_shared_epoch_have_nothing_in_common() -> None:
    assert common([A, B], [epoch("x", 1)], 11) is None
    assert common([A], [], 11) is None
    assert common([], [A], 11) is None


def test_a_history_is_behind_another_that_goes_on_after_its_last_epoch() -> None:
    one, two, other = (Epoch(name, Token(start), Token(start)) for name, start in (("one", 1), ("two", 5), ("new", 5)))
    assert is_behind([one], [one, two])
    for history in ([], [one, two], [one, two, other], [one, other], [other]):
        assert not is_behind(history, [one, two]), history


def test_an_epoch_without_facts_is_replaced() -> None:
    assert begin_epoch([A, B], epoch("c", 5)) == [A, epoch("c", 5)]
    assert begin_epoch([], A) == [A]


def test_what_was_open_stays_in_doubt_if_an_epoch_is_replaced() -> None:
    """A writer that is started twice before its next fact stores its position at the first of these starts."""
    assert begin_epoch([A, epoch("b", 5, settled=3)], epoch("c", 5)) == [A, epoch("c", 5, settled=3)]


def test_ids_that_were_open_when_the_state_of_the_tables_changed_are_in_doubt() -> None:
    first, promoted = epoch("a.1", 1), epoch("b.2", 8, settled=4)
    for theirs, position, since in (
        ([first, promoted], 8, 4),
        ([first, promoted], 5, 4),
        ([first, promoted], 4, None),
        ([first, promoted], 9, 4),  # as of a follower that has applied up to 8, and received a POSITION 9
        ([first, epoch("b.1", 8, settled=4)], 8, None),  # the same tables
        ([first, epoch("b", 8, settled=4)], 8, None),  # of a version that stores no state
        ([epoch("a", 1), promoted], 8, None),
        ([promoted], 8, None),
        ([first, epoch("x.1", 8, settled=6), epoch("b.2", 9, settled=5)], 8, 5),
        ([first, promoted, epoch("c.2", 20, settled=9)], 8, 4),
    ):
        ours = theirs[:1] if len(theirs) > 1 else [first]
        assert doubted_since(ours, theirs, Token(position)) == since, (theirs, position)
    assert doubted_since([first, promoted], [first, promoted], Token(8)) is None


def test_facts_in_doubt_that_cannot_be_counted_are_not_certain() -> None:
    """ID 5 was open in the backup and 6 committed; the facts have been read from the original database."""
    first, other = epoch("a.1", 1), epoch("b.2", 6, settled=4)
    for position, certain in ((3, 3), (4, 4), (5, 4), (6, 4), (9, 4)):
        assert certain_position([first], [first, other], Token(position)) == certain
    assert certain_position([first, other], [first, other], Token(6)) == 6
    assert certain_position([first], [first, epoch("b.2", 6)], Token(6)) == 6
    assert certain_position([first], [other], Token(6)) is None


def test_the_first_epoch_stays_as_common_start() -> None:
    """A backup from before the first fact has no other epoch that a follower knows."""
    assert begin_epoch([A], epoch("b", 1)) == [A, epoch("b", 1)]
    assert begin_epoch([A, epoch("b", 1)], epoch("c", 1)) == [A, epoch("c", 1)]
    assert common([A], [A, epoch("b", 1)], 11) == 1
    assert common([A, epoch("b", 1)], [A, epoch("c", 1)], 11) == 1


def test_a_stream_that_is_not_empty_may_start_twice_before_the_next_fact() -> None:
    """Its first epoch begins above 1: in a mapped table, or a database of version 0.1."""
    followed = [*begin_epoch([], epoch("a", 50))]
    assert common(followed, [*begin_epoch(followed, epoch("b", 50))], 50) == 50


def test_a_history_keeps_the_newest_epochs() -> None:
    history: list[Epoch] = []
    for start in range(2 * MAX_EPOCHS):
        history = [*begin_epoch(history, epoch(str(start), start))]
    assert [each.start for each in history] == [*range(MAX_EPOCHS, 2 * MAX_EPOCHS)]


def test_a_history_survives_its_encoding() -> None:
    assert encode_history([A, epoch("b", 6, settled=4)]) == '[["a",1,1],["b",4,6]]'
    assert read_history(encode_history([A, B])) == [A, B]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["a",1]]', '[["a","b",1]]', "[" * 100_000])
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_history(text)


@attrs.define
class Writer:
    """A database: its facts by token, with the run that wrote each, and its history."""

    facts: dict[int, int]
    history: list[Epoch]

    @property
    def position(self) -> Token:
        return Token(max(self.facts, default=1))

    def copy(self) -> Writer:
        return Writer(dict(self.facts), [*self.history])


class Restores(RuleBasedStateMachine):
    """A writer restarts, and is restored from any of its backups; a follower connects now and then."""

    @initialize()
    def begin(self) -> None:
        self.runs = 0
        self.writer = Writer({}, [])
        self.backups = [self.writer.copy()]
        self.copied: dict[int, int] = {}
        self.followed: list[Epoch] = []
        self.unknown = False  # whether the backup is older than the first start
        self.lost = False  # whether the follower has met a history without a shared epoch
        self.restart()

    @rule()
    def restart(self) -> None:
        self.runs += 1
        self.writer.history = [*begin_epoch(self.writer.history, epoch(f"run {self.runs}", self.writer.position))]

    @rule(count=st.integers(1, 4), skipped=st.integers(0, 2))
    def append(self, count: int, skipped: int) -> None:
        for _ in range(count):
            self.writer.facts[self.writer.position + 1 + skipped] = self.runs

    @rule()
    def back_up(self) -> None:
        self.backups.append(self.writer.copy())

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        self.writer = data.draw(st.sampled_from(self.backups)).copy()
        self.unknown |= not self.writer.history
        self.restart()

    @rule(share=st.floats(0, 1))
    @precondition(lambda self: not self.lost)
    def follow(self, share: float) -> None:
        """Check the history, go back, and copy a part of what is missing."""
        position = Token(max(self.copied, default=0))
        if self.followed:
            found = common_position(self.followed, self.writer.history, position)
            if found is None:
                assert self.unknown
                self.lost = True
                return
            self.copied = {token: run for token, run in self.copied.items() if token <= found}
        self.followed = [*self.writer.history]
        missing = sorted(self.writer.facts.keys() - self.copied.keys())
        for token in missing[: round(share * len(missing))]:
            self.copied[token] = self.writer.facts[token]
        self.check_copy()

    def check_copy(self) -> None:
        """The copy has the writer's facts up to its position, and no other."""
        position = max(self.copied, default=0)
        assert self.copied == {token: run for token, run in self.writer.facts.items() if token <= position}

    @invariant()
    def epochs_after_the_first_have_different_starts(self) -> None:
        starts = [each.start for each in getattr(self, "writer", Writer({}, [])).history[1:]]
        assert len({*starts}) == len(starts)


TestRestores = Restores.TestCase
