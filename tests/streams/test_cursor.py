"""A follower's cursor, rule by rule; ``test_cursor_machine.py`` tests all rules together."""

from __future__ import annotations

import pytest

from replication.errors import CatchUpError, StreamError
from replication.streams.cursor import Apply, CatchUp, Check, Cursor, Reset
from replication.streams.facts import Fact, fact_bytes, row_bytes
from replication.streams.interfaces import Page
from replication.wire.grammar import Token

LINK, OTHER = "link", "other link"


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts or ("[]",))


def cursor(
    position: int = 5, *, received: int | None = None, max_held_bytes: int = 10_000, max_apply_rows: int = 3
) -> Cursor:
    """Return a cursor that has received a POSITION of its own position, unless ``received`` is another."""
    made = Cursor(Token(position), max_held_bytes=max_held_bytes, max_apply_rows=max_apply_rows)
    receive(made, position if received is None else received, position if received is None else received)
    return made


def receive(made: Cursor, prev: int, new: int, link: str = LINK) -> None:
    made.position_received(link, Token(prev), Token(new))


def send(made: Cursor, *tokens: int | None, link: str = LINK, text: str = "[]") -> None:
    """Pass on one row for each token; None is ``batch``."""
    made.rows_received(link, [None if each is None else Token(each) for each in tokens], [text] * len(tokens))


def apply_all(made: Cursor) -> list[int]:
    """Apply the facts that are ready, and return their tokens."""
    tokens: list[int] = []
    while isinstance(step := made.step(), Apply):
        assert step.after == made.position
        tokens += [each.token for each in step.facts]
        made.applied(step)
    return tokens


def test_live_facts_are_applied_in_order_in_steps_of_limited_size() -> None:
    made = cursor()
    send(made, 6, 7, 9, 10)
    step = made.step()
    assert step == Apply([fact(6), fact(7), fact(9)], Token(5), Token(9), made.step().resets)  # type: ignore[union-attr]
    assert not made.live
    assert apply_all(made) == [6, 7, 9, 10]
    assert made.position == 10
    assert made.live
    assert made.step() is None


def test_a_fact_with_more_rows_than_the_limit_is_applied_alone_and_whole() -> None:
    made = cursor(max_apply_rows=2)
    send(made, None, None, None, 6, 7)
    step = made.step()
    assert isinstance(step, Apply)
    assert [(each.token, len(each.texts)) for each in step.facts] == [(6, 4)]


def test_a_step_that_failed_is_returned_again_and_may_have_grown() -> None:
    made = cursor()
    send(made, 6)
    first = made.step()
    assert first == made.step()
    send(made, 7)
    again = made.step()
    assert isinstance(again, Apply)
    assert [each.token for each in again.facts] == [6, 7]


def test_a_position_that_joins_on_moves_the_position_without_facts() -> None:
    made = cursor()
    receive(made, 5, 8)
    assert made.step() == Apply([], Token(5), Token(8))
    assert apply_all(made) == []
    assert made.position == 8


def test_trap_28_a_position_whose_prev_is_below_the_known_one_needs_no_fetch() -> None:
    made = cursor()
    receive(made, 3, 8)
    assert isinstance(made.step(), Apply)


def test_a_gap_is_fetched_in_pages_and_live_facts_are_held_behind_it() -> None:
    made = cursor(5, received=9)
    assert made.step() == CatchUp(Token(5), Token(9))
    send(made, 10)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(6)], Token(7), limited=True))
    assert apply_all(made) == [6]
    assert made.position == 7
    step = made.step()
    assert step == CatchUp(Token(7), Token(9))
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(9)], Token(9), limited=False))
    assert apply_all(made) == [9, 10]


def test_a_page_beyond_the_gap_brings_no_fact_twice() -> None:
    made = cursor(5, received=9)
    send(made, 10)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(4), fact(6), fact(10)], Token(12), limited=False))
    assert apply_all(made) == [6, 10]


@pytest.mark.parametrize("page", [Page([], Token(5), limited=True), Page([fact(7), fact(6)], Token(9), limited=False)])
def test_a_page_without_progress_or_order_is_an_error_of_its_source(page: Page) -> None:
    made = cursor(5, received=9)
    step = made.step()
    assert isinstance(step, CatchUp)
    with pytest.raises(CatchUpError) as raised:
        made.fetched(step, page)
    assert str(raised.value) == (
        "the facts of a page that should follow 5 do not ascend"
        if page.facts
        else "facts after 5 are missing, but the source reaches only 5"
    )
    assert made.step() == step


def test_trap_5_a_fact_too_long_for_a_line_is_a_gap() -> None:
    made = cursor()
    send(made, 6)
    receive(made, 8, 8)
    assert apply_all(made) == [6]
    assert made.step() == CatchUp(Token(6), Token(8))


def test_trap_24_rows_that_were_received_before_are_dropped_and_counted() -> None:
    made = cursor()
    send(made, 6, 7)
    send(made, 6, 7, 8)
    assert made.duplicates == 2
    assert apply_all(made) == [6, 7, 8]


def test_trap_25_rows_before_a_position_on_their_link_are_dropped() -> None:
    made = Cursor(Token(5))
    send(made, 6)
    assert made.dropped == 1
    assert made.step() is None
    assert not made.linked


def test_trap_26_batches_of_two_writers_may_interleave() -> None:
    """Each writer has its own cursor, so rows and POSITIONs of one do not touch an incomplete fact of the other."""
    first, second = cursor(max_apply_rows=10), cursor(max_apply_rows=10)
    send(first, None, text="1")
    send(second, None, text="2")
    receive(second, 5, 5)
    send(first, 6, text="1")
    send(second, 7, text="2")
    assert first.step() == Apply([fact(6, "1", "1")], Token(5), Token(6))
    assert second.step() == Apply([fact(7, "2", "2")], Token(5), Token(7))


def test_trap_27_a_fetch_that_failed_is_repeated_without_another_position() -> None:
    made = cursor(5, received=9)
    asked = made.step()
    send(made, 10)
    made.link_lost(LINK)
    assert made.step() == asked == CatchUp(Token(5), Token(9))


def test_an_incomplete_fact_is_dropped_with_its_link_and_whole_on_the_next() -> None:
    made = cursor()
    send(made, None, None)
    made.link_lost(LINK)
    receive(made, 5, 5, OTHER)
    send(made, None, 6, link=OTHER)
    step = made.step()
    assert isinstance(step, Apply)
    assert [len(each.texts) for each in step.facts] == [2]


def test_a_fact_is_whole_however_its_rows_are_split_over_reads() -> None:
    made = cursor(max_apply_rows=10)
    send(made, None)
    send(made, None, 6, None)
    send(made, 7)
    step = made.step()
    assert isinstance(step, Apply)
    assert [(each.token, len(each.texts)) for each in step.facts] == [(6, 3), (7, 2)]


def test_the_last_rows_of_a_fact_without_its_first_rows_are_dropped() -> None:
    made = Cursor(Token(5))
    send(made, None)
    receive(made, 5, 5)
    send(made, 6, 7)
    assert made.step() == CatchUp(Token(5), Token(6))
    assert made.dropped == 2


def test_a_fact_that_ends_before_the_position_of_its_link_hides_no_later_one() -> None:
    made = Cursor(Token(5))
    send(made, None)
    send(made, 6)
    receive(made, 6, 6)
    send(made, None, 7)
    assert (made.dropped, made.step()) == (2, CatchUp(Token(5), Token(6)))
    assert made.published == 7
    made.fetched(CatchUp(Token(5), Token(6)), Page([fact(6)], Token(6), limited=False))
    assert made.step() == Apply([fact(6), fact(7, "[]", "[]")], Token(5), Token(7))


def test_a_position_in_the_middle_of_a_fact_does_not_split_it() -> None:
    made = cursor(max_apply_rows=10)
    send(made, None)
    receive(made, 5, 5)
    send(made, 6)
    assert made.step() == Apply([fact(6, "[]", "[]")], Token(5), Token(6))


def test_trap_5_an_incomplete_fact_that_a_position_passes_is_fetched() -> None:
    """Its rows are not added to the next fact.  The next fact is fetched, because it may be incomplete too."""
    made = cursor()
    send(made, None)
    receive(made, 5, 6)
    assert (made.dropped, made.held_bytes) == (1, 0)
    send(made, 7)
    assert apply_all(made) == []
    assert made.step() == CatchUp(Token(6), Token(7))


def test_the_incomplete_fact_of_a_link_is_dropped_when_another_link_is_followed() -> None:
    made = cursor()
    send(made, None)
    receive(made, 5, 6, OTHER)
    send(made, None, 6)  # on the link that is not followed any more
    send(made, None)
    assert (made.dropped, made.held_bytes) == (4, 0)
    receive(made, 6, 6)
    send(made, 7, 8)
    assert made.step() == Apply([], Token(5), Token(6))
    assert apply_all(made) == []
    assert made.step() == CatchUp(Token(6), Token(7))


def test_the_rows_of_an_incomplete_fact_are_not_added_to_a_fact_of_another_link() -> None:
    made = cursor()
    send(made, None)
    receive(made, 5, 5, OTHER)
    assert (made.dropped, made.held_bytes) == (1, 0)
    send(made, None, 6, link=OTHER)
    assert made.step() == Apply([fact(6, "[]", "[]")], Token(5), Token(6))


def test_an_incomplete_fact_that_is_known_already_leaves_no_gap() -> None:
    made = Cursor(Token(5))
    send(made, None)
    receive(made, 5, 6)
    send(made, None, 6, 7)
    assert apply_all(made) == [7]


def test_losing_a_link_that_is_not_followed_changes_nothing() -> None:
    made = cursor()
    send(made, None)
    send(made, None, link=OTHER)
    made.link_lost(OTHER)
    assert not made._skipping
    send(made, 6)
    assert made.step() == Apply([fact(6, "[]", "[]")], Token(5), Token(6))


def test_the_incomplete_fact_of_a_lost_link_is_dropped() -> None:
    made = cursor()
    send(made, None, None)
    made.link_lost(LINK)
    assert (made.dropped, made.held_bytes, made.linked, made.link) == (2, 0, False, None)
    receive(made, 5, 5)
    send(made, None)
    made.link_lost(LINK)
    assert made.dropped == 3


def test_complete_facts_are_kept_when_their_link_is_lost() -> None:
    made = cursor()
    send(made, 6)
    made.link_lost(LINK)
    receive(made, 6, 6, OTHER)
    assert apply_all(made) == [6]


def test_a_stale_position_on_a_link_that_is_followed_is_ignored() -> None:
    made = cursor()
    send(made, 6)
    receive(made, 5, 5)
    receive(made, 4, 4, OTHER)
    assert apply_all(made) == [6]
    assert (made.linked, made.link) == (True, LINK)


def test_memory_is_limited_and_facts_beyond_the_limit_are_fetched() -> None:
    made = cursor(max_held_bytes=1000)
    for token in range(6, 40):
        send(made, token, text="x" * 100)
    assert made.held_bytes <= 1000
    assert made.dropped > 0
    done = apply_all(made)
    assert done
    assert made.step() == CatchUp(Token(done[-1]), Token(39))
    send(made, 40)
    assert made.published == 40


def test_facts_and_incomplete_facts_may_take_exactly_the_memory_limit() -> None:
    size = fact_bytes([fact(6), fact(7)])
    for limit, dropped in ((size, 0), (size - 1, 1)):
        made = cursor(max_held_bytes=limit)
        send(made, 6)
        send(made, 7)
        assert made.dropped == dropped
    rows = row_bytes(["[]", "[]"])
    for limit, dropped in ((rows, 0), (rows - 1, 2)):
        made = cursor(max_held_bytes=limit)
        send(made, None, None)
        assert made.dropped == dropped


def test_every_row_that_is_dropped_for_lack_of_memory_is_counted() -> None:
    made = cursor(max_held_bytes=1)
    send(made, 6)
    send(made, 7, 8)
    assert (made.dropped, made.step()) == (3, CatchUp(Token(5), Token(8)))


def test_held_facts_beyond_the_limit_are_fetched_with_the_gap() -> None:
    made = cursor(5, received=9, max_held_bytes=1000)
    send(made, 10, 11, text="x" * 200)
    assert made.held_bytes > 0
    send(made, 12, 13, text="x" * 200)
    assert (made.held_bytes, made.dropped) == (0, 4)
    assert made.step() == CatchUp(Token(5), Token(13))
    send(made, 14)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(each) for each in range(6, 14)], Token(13), limited=False))
    assert apply_all(made) == [*range(6, 15)]
    assert made.held_bytes == 0


def test_a_position_ahead_of_held_facts_adds_them_to_the_gap() -> None:
    made = cursor(5, received=9)
    send(made, 10)
    receive(made, 12, 12)
    assert (made.held_bytes, made.dropped) == (0, 1)
    assert made.step() == CatchUp(Token(5), Token(12))


def test_a_position_that_joins_on_behind_a_gap_does_not_grow_the_gap() -> None:
    made = cursor(5, received=9)
    receive(made, 9, 12)
    assert (made.step(), made.published) == (CatchUp(Token(5), Token(9)), 12)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([], Token(9), limited=False))
    assert made.step() == Apply([], Token(5), Token(12))


def test_a_page_that_comes_twice_counts_once() -> None:
    made = cursor(5, received=9)
    step = made.step()
    assert isinstance(step, CatchUp)
    for _ in range(2):
        made.fetched(step, Page([fact(6), fact(7)], Token(7), limited=True))
    assert apply_all(made) == [6, 7]


def test_crowded_is_true_above_half_of_the_memory_limit() -> None:
    made = cursor(max_held_bytes=1000)
    assert not made.crowded
    for token in range(6, 8):
        send(made, token, text="x" * 100)
    assert made.crowded


def test_an_incomplete_fact_beyond_the_memory_limit_is_fetched() -> None:
    made = cursor(max_held_bytes=1000)
    for _ in range(30):
        send(made, None, text="x" * 100)
    assert made.held_bytes <= 1100
    send(made, 6, 7)
    assert made.step() == CatchUp(Token(5), Token(6))


def test_facts_that_are_announced_are_fetched_up_to_the_last() -> None:
    made = cursor()
    made.facts_announced(LINK, [None])
    made.facts_announced(LINK, [Token(4), Token(5)])
    made.facts_announced(OTHER, [Token(9)])
    assert made.step() is None
    made.facts_announced(LINK, [None, Token(6), Token(9), Token(8), None])
    assert made.step() == CatchUp(Token(5), Token(9))
    made.facts_announced(LINK, [Token(11)])
    step = made.step()
    assert step == CatchUp(Token(5), Token(11))
    made.fetched(step, Page([fact(6), fact(11)], Token(11), limited=False))
    assert apply_all(made) == [6, 11]


class TestReset:
    """The writer was restored or reset."""

    def test_applied_facts_are_undone_first(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        receive(made, 4, 4, OTHER)
        step = made.step()
        assert isinstance(step, Reset)
        assert (step.after, step.to) == (9, 4)
        assert not made.live
        made.applied(step)
        assert made.position == 4
        send(made, 5, link=OTHER)
        assert apply_all(made) == [5]

    def test_without_applied_facts_above_it_nothing_is_undone(self) -> None:
        made = cursor(5)
        send(made, 6, 7, 8)
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        assert made.step() == CatchUp(Token(5), Token(6), 1)

    def test_a_page_from_before_a_reset_is_ignored(self) -> None:
        made = cursor(5, received=9)
        step = made.step()
        assert isinstance(step, CatchUp)
        made.link_lost(LINK)
        receive(made, 7, 7, OTHER)
        made.fetched(step, Page([fact(6)], Token(9), limited=False))
        assert made.step() == CatchUp(Token(5), Token(7), 1)

    def test_a_step_from_before_a_reset_that_is_committed_is_undone(self) -> None:
        made = cursor(5)
        send(made, 6, 7)
        step = made.step()
        assert isinstance(step, Apply)
        made.link_lost(LINK)
        receive(made, 5, 5, OTHER)
        made.applied(step)
        again = made.step()
        assert isinstance(again, Reset)
        assert (again.after, again.to) == (7, 5)

    def test_facts_of_a_step_from_before_a_reset_up_to_the_reset_are_not_applied_again(self) -> None:
        made = cursor(5)
        send(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        send(made, 8, 9)
        made.link_lost(LINK)
        receive(made, 8, 8, OTHER)
        fetch = made.step()
        assert isinstance(fetch, CatchUp)
        made.fetched(fetch, Page([fact(6), fact(7), fact(8)], Token(8), limited=False))
        made.applied(under_way)
        assert apply_all(made) == [8]
        assert made.held_bytes == 0

    def test_a_step_from_before_a_reset_may_end_at_the_reset(self) -> None:
        made = cursor(5)
        send(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        send(made, 8)
        made.link_lost(LINK)
        receive(made, 7, 7, OTHER)
        fetch = made.step()
        assert isinstance(fetch, CatchUp)
        made.fetched(fetch, Page([fact(6), fact(7)], Token(7), limited=False))
        made.applied(under_way)
        assert made.held_bytes == 0
        send(made, 8, link=OTHER)
        assert apply_all(made) == [8]

    def test_ready_and_held_facts_are_dropped(self) -> None:
        made = cursor(5)
        send(made, 6)
        receive(made, 9, 9)
        send(made, 10, 11)
        made.link_lost(LINK)
        receive(made, 5, 5, OTHER)
        assert (made.dropped, made.held_bytes, made.live) == (3, 0, True)

    def test_a_step_from_before_a_reset_may_reach_further_than_ready_facts(self) -> None:
        made = cursor(5)
        send(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        send(made, 8, 9)
        made.link_lost(LINK)
        receive(made, 8, 8, OTHER)
        made.applied(under_way)
        assert made.step() == CatchUp(Token(7), Token(8), 1)

    def test_facts_after_a_reset_differ_from_those_of_a_step_before_it(self) -> None:
        made = cursor(5)
        send(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        made.link_lost(LINK)
        receive(made, 5, 5, OTHER)
        send(made, 6, 7, 8, link=OTHER, text="0")
        made.applied(under_way)
        undo = made.step()
        assert undo == Reset(Token(7), Token(5), 1)
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert made.step() == Apply([fact(each, "0") for each in (6, 7, 8)], Token(5), Token(8), 1)

    def test_several_resets_go_back_to_the_lowest(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        receive(made, 4, 4, OTHER)
        send(made, 5, 6, 7, link=OTHER)
        made.link_lost(OTHER)
        receive(made, 6, 6)
        step = made.step()
        assert step == Reset(Token(9), Token(4), 2)
        assert isinstance(step, Reset)
        made.applied(step)
        assert made.step() == CatchUp(Token(4), Token(6), 2)

    def test_trap_29_a_writer_that_reaches_its_old_token_again_is_still_reset(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        receive(made, 0, 0, OTHER)
        send(made, *range(1, 10), link=OTHER)
        assert made.position == made.published == 9
        assert not made.live
        step = made.step()
        assert step == Reset(Token(9), Token(0), 1)
        assert isinstance(step, Reset)
        made.applied(step)
        assert apply_all(made) == [*range(1, 10)]
        assert made.live


class TestHistory:
    """With ``checks_history`` the first step on each link is a Check; what the histories do not share is dropped."""

    def checked_cursor(self, position: int = 5) -> Cursor:
        made = Cursor(Token(position), max_held_bytes=10_000, checks_history=True)
        receive(made, position, position)
        self.check(made, position)
        return made

    def linked_behind(self) -> Cursor:
        """Return a cursor at 9 that has received the POSITION 6 on a new link."""
        made = self.checked_cursor(9)
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        return made

    def check(self, made: Cursor, common: int, *, both_known: bool = True) -> Check:
        """Compare once, and confirm if nothing is above ``common``."""
        step = made.step()
        assert isinstance(step, Check)
        if made.compared(step, Token(common), both_known=both_known):
            made.checked(step)
        return step

    def test_nothing_is_applied_before_the_histories_are_compared(self) -> None:
        made = Cursor(Token(5), checks_history=True)
        assert made.step() is None
        receive(made, 5, 7)
        assert (made.step(), made.live, made.reached) == (Check(Token(5), Token(5), 1), False, 5)
        self.check(made, 5)
        assert apply_all(made) == []
        assert (made.position, made.live, made.reached) == (7, True, 7)

    def test_a_cursor_is_confirmed_while_nothing_is_to_be_compared_or_undone(self) -> None:
        made = Cursor(Token(9), checks_history=True)
        assert made.confirmed
        receive(made, 9, 9)
        assert not made.confirmed
        self.check(made, 7)
        assert not made.confirmed
        undo = made.step()
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert not made.confirmed
        self.check(made, 7)
        assert made.confirmed
        made.link_lost(LINK)
        assert made.confirmed

    def test_a_reset_that_was_applied_after_a_new_link_forgot_it_leaves_nothing_to_fetch(self) -> None:
        made = self.checked_cursor(11)
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        self.check(made, 6)
        undo = made.step()
        assert undo == Reset(Token(11), Token(6), 1)
        made.link_lost(OTHER)
        receive(made, 6, 6)
        assert made.step() == Check(Token(11), Token(11), 3)
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert self.check(made, 6) == Check(Token(6), Token(6), 3)
        assert (made.step(), made.position, made.live) == (None, 6, True)

    def test_a_history_that_has_changed_on_the_link_is_compared_again(self) -> None:
        made = self.checked_cursor()
        send(made, 6)
        made.compare_again()
        step = made.step()
        assert step == Check(Token(5), Token(6), 2)
        made.compare_again()  # while that is compared: it may have the former history
        assert isinstance(step, Check)
        assert not made.compared(step, Token(6), both_known=True)
        assert self.check(made, 6) == Check(Token(5), Token(6), 3)
        assert apply_all(made) == [6]
        made.link_lost(LINK)
        made.compare_again()
        assert made.step() is None, "the next link compares it"
        without = Cursor(Token(5))
        receive(without, 5, 5)
        without.compare_again()
        assert without.step() is None

    def test_received_facts_above_the_common_position_are_dropped_and_all_is_fetched(self) -> None:
        made = self.checked_cursor()
        send(made, 6, 7, 8)
        send(made, None)
        made.link_lost(LINK)
        receive(made, 9, 9, OTHER)
        assert self.check(made, 6) == Check(Token(5), Token(8), 2)
        assert (made.dropped, made.held_bytes) == (4, 0)
        assert self.check(made, 5) == Check(Token(5), Token(5), 2)
        assert made.step() == CatchUp(Token(5), Token(9), 1)

    def test_applied_facts_above_the_common_position_are_undone_and_checked_again(self) -> None:
        made = self.checked_cursor(9)
        made.link_lost(LINK)
        receive(made, 12, 12, OTHER)
        self.check(made, 7)
        undo = made.step()
        assert undo == Reset(Token(9), Token(7), 1)
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert self.check(made, 7) == Check(Token(7), Token(7), 2)
        assert made.step() == CatchUp(Token(7), Token(12), 1)

    def test_a_lower_position_is_out_of_date_if_the_histories_agree(self) -> None:
        """A relay may be behind; a writer may send the position of a former writer that another one has raised."""
        made = self.linked_behind()
        send(made, 7, 8, 9, 10, link=OTHER)
        self.check(made, 9)
        assert (made.published, made.held_bytes) == (10, fact_bytes([fact(10)]))
        assert apply_all(made) == [10]
        assert (made.live, made.confirmed) == (True, True)

    def test_the_facts_of_a_link_that_is_behind_are_not_applied_again(self) -> None:
        made = self.linked_behind()
        self.check(made, 9)
        assert (made.step(), made.live, made.published) == (None, True, 9)
        send(made, 7, 8, 9, 10, link=OTHER)
        assert made.duplicates == 3
        assert apply_all(made) == [10]

    def test_a_gap_of_a_link_that_is_behind_is_fetched_above_the_position(self) -> None:
        made = self.linked_behind()
        send(made, 7, link=OTHER)
        receive(made, 8, 12, OTHER)  # a row was too long
        send(made, 13, link=OTHER)
        self.check(made, 9)
        assert made.step() == CatchUp(Token(9), Token(12), 1)

    def test_the_histories_decide_how_far_the_cursor_goes_back_and_not_the_position(self) -> None:
        made = self.linked_behind()
        self.check(made, 8)
        assert made.step() == Reset(Token(9), Token(8), 2)

    def test_a_lower_position_decides_if_a_history_is_not_known(self) -> None:
        made = self.linked_behind()
        self.check(made, 9, both_known=False)
        assert made.step() == Reset(Token(9), Token(6), 1)

    def test_an_incomplete_fact_is_dropped_when_the_cursor_goes_back(self) -> None:
        made = self.checked_cursor()
        send(made, 6)
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        send(made, None, link=OTHER)
        self.check(made, 5)
        assert (made.dropped, made.held_bytes) == (2, 0)
        self.check(made, 5)
        send(made, 7, link=OTHER)
        assert made.step() == CatchUp(Token(5), Token(7), 1)

    def test_a_link_that_stands_at_the_common_position_opens_no_gap(self) -> None:
        made = self.checked_cursor(9)
        made.link_lost(LINK)
        receive(made, 7, 7, OTHER)
        self.check(made, 7)
        undo = made.step()
        assert isinstance(undo, Reset)
        made.applied(undo)
        self.check(made, 7)
        assert (made.step(), made.live, made.published) == (None, True, 7)

    def test_a_reset_that_is_committed_after_the_next_link_is_checked_again(self) -> None:
        made = self.checked_cursor(9)
        made.link_lost(LINK)
        receive(made, 12, 12, OTHER)
        self.check(made, 7)
        undo = made.step()
        assert isinstance(undo, Reset)
        made.link_lost(OTHER)
        receive(made, 12, 12)
        assert made.step() == Check(Token(9), Token(12), 3)
        made.applied(undo)
        assert self.check(made, 7) == Check(Token(7), Token(7), 3)
        assert made.step() == CatchUp(Token(7), Token(12), 3)

    def test_what_was_received_or_applied_before_is_compared_on_each_link(self) -> None:
        made = self.checked_cursor()
        send(made, 6, 7, 8, 9)
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        assert made.step() == Check(Token(5), Token(9), 2)
        made.link_lost(OTHER)
        receive(made, 6, 6)
        assert self.check(made, 6) == Check(Token(5), Token(9), 3)

    def test_applied_facts_that_are_to_be_undone_are_compared_on_the_next_link(self) -> None:
        made = self.checked_cursor(9)
        made.link_lost(LINK)
        receive(made, 7, 7, OTHER)
        self.check(made, 7)
        assert isinstance(made.step(), Reset)
        made.link_lost(OTHER)
        receive(made, 7, 7)
        assert made.step() == Check(Token(9), Token(9), 3)

    def test_an_empty_stream_is_compared_at_0(self) -> None:
        made = Cursor(Token(0), checks_history=True)
        receive(made, 0, 0)
        assert made.step() == Check(Token(0), Token(0), 1)

    def test_reading_does_not_pause_during_a_comparison(self) -> None:
        """The comparison ends with an answer of the writer, and that is behind the facts that are not read yet."""
        made = Cursor(Token(5), max_held_bytes=1000, checks_history=True)
        receive(made, 5, 5)
        for token in range(6, 8):
            send(made, token, text="x" * 100)
        assert not made.crowded
        self.check(made, 7)
        assert made.crowded

    def test_a_comparison_of_an_earlier_link_counts_no_more(self) -> None:
        made = self.checked_cursor()
        made.link_lost(LINK)
        receive(made, 6, 6, OTHER)
        earlier = made.step()
        assert isinstance(earlier, Check)
        made.link_lost(OTHER)
        assert made.step() is None
        assert not made.compared(earlier, Token(5), both_known=True)
        receive(made, 6, 6)
        assert not made.compared(earlier, Token(5), both_known=True)
        made.checked(earlier)
        assert made.step() == Check(Token(5), Token(6), 3)


def test_a_step_that_does_not_start_at_the_position_is_refused() -> None:
    made = cursor()
    with pytest.raises(StreamError, match="but the position is 5"):
        made.applied(Apply([], Token(3), Token(4)))


class TestOutOfOrder:
    """Trap 12: Synapse sends ``backfill`` in descending order, and for some batches omits the lowest token."""

    def test_trap_12_facts_in_descending_order_are_fetched(self) -> None:
        made = cursor()
        send(made, 9, 8, 6)
        assert made.step() == CatchUp(Token(5), Token(9), fresh=True)
        made.fetched(CatchUp(Token(5), Token(9)), Page([fact(6), fact(7), fact(8), fact(9)], Token(9), limited=False))
        assert apply_all(made) == [6, 7, 8, 9]
        assert made.live

    @pytest.mark.parametrize("tokens", [(6, 9, 8), (7, 9, 6), (6, 6, 8, 7)])
    def test_facts_in_any_other_disorder_are_fetched(self, tokens: tuple[int, ...]) -> None:
        made = cursor()
        send(made, *tokens)
        assert made.step() == CatchUp(Token(5), Token(max(tokens)), fresh=True)
        assert (made.held_bytes, made.dropped) == (0, len(tokens))

    def test_after_facts_out_of_order_every_later_fact_is_fetched(self) -> None:
        made = cursor()
        send(made, 7, 6)
        made.fetched(CatchUp(Token(5), Token(7)), Page([fact(6), fact(7)], Token(7), limited=False))
        assert apply_all(made) == [6, 7]
        send(made, 12)
        send(made, 10)
        assert made.step() == CatchUp(Token(7), Token(12), fresh=True)
        made.fetched(CatchUp(Token(7), Token(12)), Page([fact(10), fact(12)], Token(12), limited=False))
        assert apply_all(made) == [10, 12]
        send(made, 11, 10)
        assert made.step() is None

    def test_rows_of_an_incomplete_fact_after_facts_out_of_order_wait_for_its_last_row(self) -> None:
        made = cursor()
        send(made, 7, 6)
        made.fetched(CatchUp(Token(5), Token(7)), Page([fact(6), fact(7)], Token(7), limited=False))
        assert apply_all(made) == [6, 7]
        send(made, None, None)
        assert made.step() is None
        send(made, 8)
        assert made.step() == CatchUp(Token(7), Token(8), fresh=True)

    def test_after_many_facts_in_order_facts_are_no_longer_fetched(self) -> None:
        """A relay sends a fact that it has found late below its position: each later one was fetched, for ever."""
        made = cursor()
        send(made, 6, 9)
        assert apply_all(made) == [6, 9]
        send(made, 8)
        step = made.step()
        assert step == CatchUp(Token(6), Token(9), fresh=True)
        tokens = [*range(10, 11 + Cursor.ORDERED_AGAIN)]
        send(made, *tokens)
        assert made.step() == step
        made.fetched(step, Page([fact(8), fact(9)], Token(9), limited=False))
        assert apply_all(made) == [8]
        send(made, 200)
        step = made.step()
        assert step == CatchUp(Token(9), Token(200), fresh=True)  # nothing is trusted before pages have filled the gap
        made.fetched(step, Page([*map(fact, tokens), fact(200)], Token(200), limited=False))
        assert apply_all(made) == [*tokens, 200]
        send(made, 203)
        assert apply_all(made) == [203]
        send(made, 201)
        step = made.step()
        assert step == CatchUp(Token(200), Token(203), fresh=True)
        made.fetched(step, Page([fact(201), fact(203)], Token(203), limited=False))
        assert apply_all(made) == [201]
        send(made, 205)
        assert made.step() == CatchUp(Token(203), Token(205), fresh=True)

    def test_a_late_fact_is_fetched_and_applied_although_a_later_one_is_applied(self) -> None:
        made = cursor()
        send(made, 6, 19)
        under_way = made.step()
        send(made, 18, 21)
        assert isinstance(under_way, Apply)
        made.applied(under_way)
        assert made.step() == CatchUp(Token(6), Token(19), fresh=True)
        made.fetched(CatchUp(Token(6), Token(19)), Page([fact(6), fact(7), fact(8)], Token(8), limited=True))
        assert made.step() == Apply([fact(7), fact(8)], Token(19), Token(19), 0)
        assert not made.live
        assert apply_all(made) == [7, 8]
        assert made.step() == CatchUp(Token(8), Token(19), fresh=True)
        made.fetched(CatchUp(Token(8), Token(19)), Page([fact(18), fact(19)], Token(19), limited=False))
        assert apply_all(made) == [18]
        assert made.step() == CatchUp(Token(19), Token(21), fresh=True)
        made.fetched(CatchUp(Token(19), Token(21)), Page([fact(21)], Token(21), limited=False))
        assert apply_all(made) == [21]
        assert (made.position, made.live) == (21, True)

    def test_a_reset_forgets_late_facts(self) -> None:
        made = cursor()
        send(made, 9)
        send(made, 8)
        assert apply_all(made) == [9]
        made.link_lost(LINK)
        receive(made, 3, 3)
        assert made.step() == Reset(Token(9), Token(3), 1)

    def test_a_late_fact_after_a_reset_belongs_to_that_reset(self) -> None:
        made = cursor()
        send(made, 6)
        made.link_lost(LINK)
        receive(made, 5, 5)
        send(made, 9)
        send(made, 8)
        assert apply_all(made) == [9]
        step = made.step()
        assert step == CatchUp(Token(5), Token(9), 1, fresh=True)
        assert isinstance(step, CatchUp)
        made.fetched(step, Page([fact(8), fact(9)], Token(9), limited=False))
        assert made.step() == Apply([fact(8)], Token(9), Token(9), 1)

    def test_the_newest_row_again_behind_a_newer_one_is_not_out_of_order(self) -> None:
        made = cursor()
        send(made, 7)
        send(made, 9, 7, 10)
        assert apply_all(made) == [7, 9, 10]

    def test_a_reset_forgets_where_late_facts_may_be_missing(self) -> None:
        made = cursor()
        send(made, 9)
        send(made, 8)
        assert apply_all(made) == [9]
        made.link_lost(LINK)
        receive(made, 3, 3)
        step = made.step()
        assert isinstance(step, Reset)
        made.applied(step)
        assert (made.live, made.step()) == (True, None)
        receive(made, 3, 12)
        assert apply_all(made) == []
        assert (made.position, made.live, made.step()) == (12, True, None)

    def test_a_reset_forgets_late_facts_that_are_fetched(self) -> None:
        made = cursor()
        send(made, 9)
        send(made, 8)
        assert apply_all(made) == [9]
        step = made.step()
        assert isinstance(step, CatchUp)
        made.fetched(step, Page([fact(8), fact(9)], Token(9), limited=False))
        made.link_lost(LINK)
        receive(made, 3, 3)
        undo = made.step()
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert (made.position, made.live, made.step()) == (3, True, None)

    @pytest.mark.parametrize("again", [5, 7])
    def test_a_row_that_comes_twice_before_facts_out_of_order_is_not_late(self, again: int) -> None:
        made = cursor()
        send(made, 7)
        send(made, again, 9, 8)
        assert apply_all(made) == [7]
        assert (made.step(), made.dropped) == (CatchUp(Token(7), Token(9), fresh=True), 3)
        send(made, 11)
        assert made.dropped == 4

    def test_a_late_fact_does_not_drop_facts_that_are_held_behind_a_gap(self) -> None:
        made = cursor()
        receive(made, 8, 8)
        send(made, 12)
        send(made, 11, 12)
        assert (made.step(), made.dropped) == (CatchUp(Token(5), Token(8), fresh=True), 2)

    def test_facts_out_of_order_behind_a_gap_grow_the_gap(self) -> None:
        made = cursor()
        receive(made, 8, 8)
        send(made, 12, 11)
        assert made.step() == CatchUp(Token(5), Token(12), fresh=True)

    def test_a_late_fact_behind_a_gap_is_fetched_after_the_gap(self) -> None:
        made = cursor()
        receive(made, 8, 8)
        send(made, 12)
        send(made, 11)
        made.fetched(CatchUp(Token(5), Token(8)), Page([fact(7)], Token(8), limited=False))
        assert apply_all(made) == [7, 12]
        assert made.step() == CatchUp(Token(8), Token(12), fresh=True)
        made.fetched(CatchUp(Token(8), Token(12)), Page([fact(11), fact(12)], Token(12), limited=False))
        assert apply_all(made) == [11]
        assert made.live

    def test_rows_that_come_twice_are_not_out_of_order(self) -> None:
        """Synapse sends rows of ``caches`` before their ID is settled."""
        made = cursor()
        send(made, 7, 8, 7, 8, 9)
        send(made, 8, 9, 5)
        assert apply_all(made) == [7, 8, 9]
        assert made.duplicates == 5

    def test_a_fact_below_a_position_is_not_late(self) -> None:
        made = cursor()
        send(made, 9)
        receive(made, 9, 12)
        send(made, 11)
        assert apply_all(made) == [9]
        assert (made.position, made.step(), made.duplicates) == (12, None, 1)


def test_a_row_that_cannot_be_read_has_its_fact_and_the_next_one_fetched() -> None:
    """The end of its fact may be lost too, so the next rows may be of that fact or of the next one."""
    made = cursor()
    send(made, 6)
    made.row_lost(LINK)
    send(made, None, 8)
    assert apply_all(made) == [6]
    assert made.step() == CatchUp(Token(6), Token(8))
    made.fetched(CatchUp(Token(6), Token(8)), Page([fact(7), fact(8)], Token(8), limited=False))
    send(made, 9)
    assert apply_all(made) == [7, 8, 9]


def test_the_first_rows_of_a_fact_are_dropped_with_a_row_that_cannot_be_read() -> None:
    made = cursor()
    send(made, None)
    made.row_lost(LINK)
    send(made, 7)
    assert made.step() == CatchUp(Token(5), Token(7))


def test_a_row_that_cannot_be_read_on_another_link_drops_nothing_here() -> None:
    made = cursor()
    send(made, None)
    made.row_lost(OTHER)
    send(made, 6)
    assert apply_all(made) == [6]


class TestAudit:
    """Facts that were found below the position, and positions that were found, in the writer's database."""

    def test_facts_below_the_position_are_applied_once_and_the_position_stays(self) -> None:
        made = cursor()
        send(made, 6, 9)
        assert apply_all(made) == [6, 9]
        assert made.found_late([fact(7), fact(8)])
        assert made.step() == Apply([fact(7), fact(8)], Token(9), Token(9))
        assert not made.live
        assert apply_all(made) == [7, 8]
        assert (made.position, made.live) == (9, True)

    def test_those_that_were_not_applied_yet_remain(self) -> None:
        made = cursor()
        send(made, 9)
        assert apply_all(made) == [9]
        assert made.found_late([fact(7), fact(8)])
        step = made.step()
        assert isinstance(step, Apply)
        made.applied(step.first(1))
        assert apply_all(made) == [8]

    def test_they_are_refused_while_others_wait_or_above_the_position(self) -> None:
        made = cursor()
        send(made, 9)
        assert not made.found_late([fact(8)])
        assert apply_all(made) == [9]
        assert not made.found_late([])
        assert not made.found_late([fact(8), fact(10)])
        assert made.found_late([fact(8)])
        assert not made.found_late([fact(7)])
        assert apply_all(made) == [8]

    def test_they_are_refused_while_a_late_fact_is_to_be_fetched(self) -> None:
        made = cursor()
        send(made, 9)
        assert apply_all(made) == [9]
        send(made, 8)
        assert not made.found_late([fact(7)])
        assert made.step() == CatchUp(Token(5), Token(9), fresh=True)

    def test_a_writer_that_goes_back_takes_them_back(self) -> None:
        made = cursor()
        send(made, 9)
        assert apply_all(made) == [9]
        assert made.found_late([fact(8)])
        made.link_lost(LINK)
        receive(made, 6, 6)
        assert isinstance(made.step(), Reset)

    def test_a_settled_id_opens_a_gap(self) -> None:
        made = cursor()
        assert made.settled(Token(9))
        assert made.step() == CatchUp(Token(5), Token(9))
        assert not made.settled(Token(9))
        send(made, 7, 10)
        made.fetched(CatchUp(Token(5), Token(9)), Page([fact(7)], Token(9), limited=False))
        assert apply_all(made) == [7, 10]

    def test_without_a_link_nothing_is_settled(self) -> None:
        made = cursor()
        made.link_lost(LINK)
        assert not made.settled(Token(9))
        assert made.step() is None


def test_a_part_of_a_step_ends_at_its_last_fact() -> None:
    step = Apply([fact(6), fact(7), fact(9)], Token(5), Token(12))
    assert step.first(2) == Apply([fact(6), fact(7)], Token(5), Token(7))
    assert step.first(3) is step


def test_a_part_of_late_facts_keeps_the_position() -> None:
    part = Apply([fact(3), fact(4)], Token(5), Token(5)).first(1)
    assert (part, part.late_upto) == (Apply([fact(3)], Token(5), Token(5)), 3)
