"""A follower's place, rule by rule; ``test_cursor_machine.py`` has all of them at once."""

from __future__ import annotations

import pytest

from replication.errors import CatchUpError, StreamError
from replication.streams.cursor import Apply, CatchUp, Cursor, Reset
from replication.streams.facts import Fact
from replication.streams.seams import Page
from replication.wire.grammar import Token

LINK, OTHER = "link", "other link"


def fact(token: int, *texts: str) -> Fact:
    return Fact(Token(token), texts or ("[]",))


def cursor(
    position: int = 5, *, heard: int | None = None, max_held_bytes: int = 10_000, max_apply_rows: int = 3
) -> Cursor:
    """Return a cursor that has heard POSITION of where it is, unless ``heard`` says otherwise."""
    made = Cursor(Token(position), max_held_bytes=max_held_bytes, max_apply_rows=max_apply_rows)
    tell(made, position if heard is None else heard, position if heard is None else heard)
    return made


def tell(made: Cursor, prev: int, new: int, link: str = LINK) -> None:
    made.position_heard(link, Token(prev), Token(new))


def say(made: Cursor, *tokens: int | None, link: str = LINK, text: str = "[]") -> None:
    """Say a row per token; None is ``batch``."""
    made.rows_heard(link, [None if each is None else Token(each) for each in tokens], [text] * len(tokens))


def apply_all(made: Cursor) -> list[int]:
    """Apply whatever is ready; returns the tokens."""
    tokens: list[int] = []
    while isinstance(step := made.step(), Apply):
        assert step.after == made.position
        tokens += [each.token for each in step.facts]
        made.applied(step)
    return tokens


def test_live_facts_are_applied_in_order_in_portions() -> None:
    made = cursor()
    say(made, 6, 7, 9, 10)
    step = made.step()
    assert step == Apply([fact(6), fact(7), fact(9)], Token(5), Token(9), made.step().epoch)  # type: ignore[union-attr]
    assert not made.live
    assert apply_all(made) == [6, 7, 9, 10]
    assert made.position == 10
    assert made.live
    assert made.step() is None


def test_a_fact_with_more_rows_than_fit_is_applied_alone_and_whole() -> None:
    made = cursor(max_apply_rows=2)
    say(made, None, None, None, 6, 7)
    step = made.step()
    assert isinstance(step, Apply)
    assert [(each.token, len(each.texts)) for each in step.facts] == [(6, 4)]


def test_a_step_that_failed_is_asked_for_again_and_may_have_grown() -> None:
    made = cursor()
    say(made, 6)
    first = made.step()
    assert first == made.step()
    say(made, 7)
    again = made.step()
    assert isinstance(again, Apply)
    assert [each.token for each in again.facts] == [6, 7]


def test_a_position_that_joins_on_moves_the_place_without_facts() -> None:
    made = cursor()
    tell(made, 5, 8)
    assert made.step() == Apply([], Token(5), Token(8))
    assert apply_all(made) == []
    assert made.position == 8


def test_trap_28_a_position_whose_beginning_we_have_passed_needs_no_fetch() -> None:
    made = cursor()
    tell(made, 3, 8)
    assert isinstance(made.step(), Apply)


def test_a_gap_is_fetched_in_pages_and_live_facts_wait_behind_it() -> None:
    made = cursor(5, heard=9)
    assert made.step() == CatchUp(Token(5), Token(9))
    say(made, 10)
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


def test_a_page_that_reaches_too_far_brings_nothing_twice() -> None:
    made = cursor(5, heard=9)
    say(made, 10)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(4), fact(6), fact(10)], Token(12), limited=False))
    assert apply_all(made) == [6, 10]


@pytest.mark.parametrize("page", [Page([], Token(5), limited=True), Page([fact(7), fact(6)], Token(9), limited=False)])
def test_a_page_without_progress_or_order_is_an_error_of_its_source(page: Page) -> None:
    made = cursor(5, heard=9)
    step = made.step()
    assert isinstance(step, CatchUp)
    with pytest.raises(CatchUpError):
        made.fetched(step, page)
    assert made.step() == step


def test_trap_5_a_fact_too_long_for_a_line_is_a_gap() -> None:
    made = cursor()
    say(made, 6)
    tell(made, 8, 8)
    assert apply_all(made) == [6]
    assert made.step() == CatchUp(Token(6), Token(8))


def test_trap_24_what_was_heard_before_is_dropped_and_counted() -> None:
    made = cursor()
    say(made, 6, 7)
    say(made, 6, 7, 8)
    assert made.duplicates == 2
    assert apply_all(made) == [6, 7, 8]


def test_trap_25_rows_before_a_position_on_their_link_are_dropped() -> None:
    made = Cursor(Token(5))
    say(made, 6)
    assert made.dropped == 1
    assert made.step() is None
    assert not made.linked


def test_trap_26_batches_of_two_writers_may_interleave() -> None:
    """Each writer has a cursor, so one's rows and POSITIONs are nothing to the other's half fact."""
    first, second = cursor(max_apply_rows=10), cursor(max_apply_rows=10)
    say(first, None, text="1")
    say(second, None, text="2")
    tell(second, 5, 5)
    say(first, 6, text="1")
    say(second, 7, text="2")
    assert first.step() == Apply([fact(6, "1", "1")], Token(5), Token(6))
    assert second.step() == Apply([fact(7, "2", "2")], Token(5), Token(7))


def test_trap_27_a_fetch_that_failed_is_asked_for_again_without_another_position() -> None:
    made = cursor(5, heard=9)
    asked = made.step()
    say(made, 10)
    made.link_lost(LINK)
    assert made.step() == asked == CatchUp(Token(5), Token(9))


def test_a_half_fact_dies_with_its_link_and_is_whole_on_the_next() -> None:
    made = cursor()
    say(made, None, None)
    made.link_lost(LINK)
    tell(made, 5, 5, OTHER)
    say(made, None, 6, link=OTHER)
    step = made.step()
    assert isinstance(step, Apply)
    assert [len(each.texts) for each in step.facts] == [2]


def test_a_fact_comes_whole_however_it_is_cut() -> None:
    made = cursor(max_apply_rows=10)
    say(made, None)
    say(made, None, 6, None)
    say(made, 7)
    step = made.step()
    assert isinstance(step, Apply)
    assert [(each.token, len(each.texts)) for each in step.facts] == [(6, 3), (7, 2)]


def test_the_end_of_a_fact_whose_beginning_was_not_kept_is_no_fact() -> None:
    made = Cursor(Token(5))
    say(made, None)
    tell(made, 5, 5)
    say(made, 6, 7)
    assert made.step() == CatchUp(Token(5), Token(6))


def test_a_position_in_the_middle_of_a_fact_does_not_split_it() -> None:
    made = cursor(max_apply_rows=10)
    say(made, None)
    tell(made, 5, 5)
    say(made, 6)
    assert made.step() == Apply([fact(6, "[]", "[]")], Token(5), Token(6))


def test_trap_5_a_half_fact_that_a_position_passes_has_lost_its_end() -> None:
    """Its rows are not given to the next fact, and that is fetched: nobody knows whether it is whole."""
    made = cursor()
    say(made, None)
    tell(made, 5, 6)
    assert (made.dropped, made.held_bytes) == (1, 0)
    say(made, 7)
    assert apply_all(made) == []
    assert made.step() == CatchUp(Token(6), Token(7))


def test_the_half_fact_of_a_link_that_another_takes_over_from_is_torn() -> None:
    made = cursor()
    say(made, None)
    tell(made, 5, 6, OTHER)
    say(made, None, 6)  # on the link that is not followed any more
    say(made, None)
    assert (made.dropped, made.held_bytes) == (4, 0)
    tell(made, 6, 6)
    say(made, 7, 8)
    assert made.step() == Apply([], Token(5), Token(6))
    assert apply_all(made) == []
    assert made.step() == CatchUp(Token(6), Token(7))


def test_a_torn_fact_that_is_known_already_leaves_no_gap() -> None:
    made = Cursor(Token(5))
    say(made, None)
    tell(made, 5, 6)
    say(made, None, 6, 7)
    assert apply_all(made) == [7]


def test_losing_a_link_that_is_not_followed_changes_nothing() -> None:
    made = cursor()
    say(made, None)
    say(made, None, link=OTHER)
    made.link_lost(OTHER)
    assert not made._torn
    say(made, 6)
    assert made.step() == Apply([fact(6, "[]", "[]")], Token(5), Token(6))


def test_a_lost_link_takes_its_half_fact_along() -> None:
    made = cursor()
    say(made, None, None)
    made.link_lost(LINK)
    assert (made.dropped, made.held_bytes, made.linked) == (2, 0, False)


def test_whole_facts_outlive_their_link() -> None:
    made = cursor()
    say(made, 6)
    made.link_lost(LINK)
    tell(made, 6, 6, OTHER)
    assert apply_all(made) == [6]


def test_a_stale_position_on_a_link_that_is_followed_is_ignored() -> None:
    made = cursor()
    say(made, 6)
    tell(made, 5, 5)
    tell(made, 4, 4, OTHER)
    assert apply_all(made) == [6]
    assert made.linked


def test_memory_is_bounded_and_what_does_not_fit_is_fetched() -> None:
    made = cursor(max_held_bytes=1000)
    for token in range(6, 40):
        say(made, token, text="x" * 100)
    assert made.held_bytes <= 1000
    assert made.dropped > 0
    done = apply_all(made)
    assert done
    assert made.step() == CatchUp(Token(done[-1]), Token(39))
    say(made, 40)
    assert made.announced == 40


def test_facts_that_were_held_and_do_not_fit_are_fetched_with_the_gap() -> None:
    made = cursor(5, heard=9, max_held_bytes=1000)
    say(made, 10, 11, text="x" * 200)
    assert made.held_bytes > 0
    say(made, 12, 13, text="x" * 200)
    assert (made.held_bytes, made.dropped) == (0, 4)
    assert made.step() == CatchUp(Token(5), Token(13))
    say(made, 14)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([fact(each) for each in range(6, 14)], Token(13), limited=False))
    assert apply_all(made) == [*range(6, 15)]
    assert made.held_bytes == 0


def test_a_position_ahead_of_what_is_held_takes_it_into_the_gap() -> None:
    made = cursor(5, heard=9)
    say(made, 10)
    tell(made, 12, 12)
    assert (made.held_bytes, made.dropped) == (0, 1)
    assert made.step() == CatchUp(Token(5), Token(12))


def test_a_position_behind_a_gap_only_says_that_there_is_no_more() -> None:
    made = cursor(5, heard=9)
    tell(made, 9, 12)
    assert (made.step(), made.announced) == (CatchUp(Token(5), Token(9)), 12)
    step = made.step()
    assert isinstance(step, CatchUp)
    made.fetched(step, Page([], Token(9), limited=False))
    assert made.step() == Apply([], Token(5), Token(12))


def test_a_page_that_comes_twice_is_taken_once() -> None:
    made = cursor(5, heard=9)
    step = made.step()
    assert isinstance(step, CatchUp)
    for _ in range(2):
        made.fetched(step, Page([fact(6), fact(7)], Token(7), limited=True))
    assert apply_all(made) == [6, 7]


def test_a_crowded_cursor_says_so() -> None:
    made = cursor(max_held_bytes=1000)
    assert not made.crowded
    for token in range(6, 8):
        say(made, token, text="x" * 100)
    assert made.crowded


def test_a_giant_half_fact_is_given_up_and_fetched() -> None:
    made = cursor(max_held_bytes=1000)
    for _ in range(30):
        say(made, None, text="x" * 100)
    assert made.held_bytes <= 1100
    say(made, 6, 7)
    assert made.step() == CatchUp(Token(5), Token(6))


class TestReset:
    """The writer went back: it was restored, or begins anew."""

    def test_it_is_undone_before_anything_else(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        tell(made, 4, 4, OTHER)
        step = made.step()
        assert isinstance(step, Reset)
        assert (step.after, step.to) == (9, 4)
        assert not made.live
        made.applied(step)
        assert made.position == 4
        say(made, 5, link=OTHER)
        assert apply_all(made) == [5]

    def test_only_what_was_not_yet_applied_is_forgotten_if_that_is_enough(self) -> None:
        made = cursor(5)
        say(made, 6, 7, 8)
        made.link_lost(LINK)
        tell(made, 6, 6, OTHER)
        assert made.step() == CatchUp(Token(5), Token(6), 1)

    def test_a_page_from_before_is_ignored(self) -> None:
        made = cursor(5, heard=9)
        step = made.step()
        assert isinstance(step, CatchUp)
        made.link_lost(LINK)
        tell(made, 7, 7, OTHER)
        made.fetched(step, Page([fact(6)], Token(9), limited=False))
        assert made.step() == CatchUp(Token(5), Token(7), 1)

    def test_a_step_under_way_that_comes_through_is_undone(self) -> None:
        made = cursor(5)
        say(made, 6, 7)
        step = made.step()
        assert isinstance(step, Apply)
        made.link_lost(LINK)
        tell(made, 5, 5, OTHER)
        made.applied(step)
        again = made.step()
        assert isinstance(again, Reset)
        assert (again.after, again.to) == (7, 5)

    def test_what_a_step_under_way_applied_of_what_is_still_true_is_not_applied_again(self) -> None:
        made = cursor(5)
        say(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        say(made, 8, 9)
        made.link_lost(LINK)
        tell(made, 8, 8, OTHER)
        fetch = made.step()
        assert isinstance(fetch, CatchUp)
        made.fetched(fetch, Page([fact(6), fact(7), fact(8)], Token(8), limited=False))
        made.applied(under_way)
        assert apply_all(made) == [8]
        assert made.held_bytes == 0

    def test_a_step_under_way_may_reach_further_than_what_is_ready(self) -> None:
        made = cursor(5)
        say(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        say(made, 8, 9)
        made.link_lost(LINK)
        tell(made, 8, 8, OTHER)
        made.applied(under_way)
        assert made.step() == CatchUp(Token(7), Token(8), 1)

    def test_facts_of_the_new_life_are_not_taken_for_those_of_a_step_under_way(self) -> None:
        made = cursor(5)
        say(made, 6, 7)
        under_way = made.step()
        assert isinstance(under_way, Apply)
        made.link_lost(LINK)
        tell(made, 5, 5, OTHER)
        say(made, 6, 7, 8, link=OTHER, text="0")
        made.applied(under_way)
        undo = made.step()
        assert undo == Reset(Token(7), Token(5), 1)
        assert isinstance(undo, Reset)
        made.applied(undo)
        assert made.step() == Apply([fact(each, "0") for each in (6, 7, 8)], Token(5), Token(8), 1)

    def test_one_after_the_other_goes_back_to_the_lowest(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        tell(made, 4, 4, OTHER)
        say(made, 5, 6, 7, link=OTHER)
        made.link_lost(OTHER)
        tell(made, 6, 6)
        step = made.step()
        assert step == Reset(Token(9), Token(4), 2)
        assert isinstance(step, Reset)
        made.applied(step)
        assert made.step() == CatchUp(Token(4), Token(6), 2)

    def test_trap_29_a_writer_that_reaches_the_old_number_again_does_not_look_up_to_date(self) -> None:
        made = cursor(9)
        made.link_lost(LINK)
        tell(made, 0, 0, OTHER)
        say(made, *range(1, 10), link=OTHER)
        assert made.position == made.announced == 9
        assert not made.live
        step = made.step()
        assert step == Reset(Token(9), Token(0), 1)
        assert isinstance(step, Reset)
        made.applied(step)
        assert apply_all(made) == [*range(1, 10)]
        assert made.live


def test_a_step_from_elsewhere_is_refused() -> None:
    made = cursor()
    with pytest.raises(StreamError, match="but the position is 5"):
        made.applied(Apply([], Token(3), Token(4)))


class TestOutOfOrder:
    """Trap 12: what a Synapse tells of backfill goes down, and leaves the lowest out."""

    def test_trap_12_facts_in_descending_order_are_fetched(self) -> None:
        made = cursor()
        say(made, 9, 8, 6)
        assert made.step() == CatchUp(Token(5), Token(9), fresh=True)
        made.fetched(CatchUp(Token(5), Token(9)), Page([fact(6), fact(7), fact(8), fact(9)], Token(9), limited=False))
        assert apply_all(made) == [6, 7, 8, 9]
        assert made.live

    @pytest.mark.parametrize("tokens", [(6, 9, 8), (7, 9, 6), (6, 6, 8, 7)])
    def test_any_other_disorder_is_fetched_too(self, tokens: tuple[int, ...]) -> None:
        made = cursor()
        say(made, *tokens)
        assert made.step() == CatchUp(Token(5), Token(max(tokens)), fresh=True)
        assert (made.held_bytes, made.dropped) == (0, len(tokens))

    def test_once_a_link_was_found_out_each_leap_is_fetched(self) -> None:
        made = cursor()
        say(made, 7, 6)
        made.fetched(CatchUp(Token(5), Token(7)), Page([fact(6), fact(7)], Token(7), limited=False))
        assert apply_all(made) == [6, 7]
        say(made, 12)
        say(made, 10)
        assert made.step() == CatchUp(Token(7), Token(12), fresh=True)
        made.fetched(CatchUp(Token(7), Token(12)), Page([fact(10), fact(12)], Token(12), limited=False))
        assert apply_all(made) == [10, 12]
        say(made, 11, 10)
        assert made.step() is None

    def test_what_comes_late_is_fetched_and_applied_after_what_is_applied_already(self) -> None:
        made = cursor()
        say(made, 6, 19)
        under_way = made.step()
        say(made, 18, 21)
        assert isinstance(under_way, Apply)
        made.applied(under_way)
        assert made.step() == CatchUp(Token(6), Token(19), fresh=True)
        made.fetched(CatchUp(Token(6), Token(19)), Page([fact(7), fact(8)], Token(8), limited=True))
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

    def test_nothing_is_late_any_more_for_a_writer_that_begins_anew(self) -> None:
        made = cursor()
        say(made, 9)
        say(made, 8)
        assert apply_all(made) == [9]
        made.link_lost(LINK)
        tell(made, 3, 3)
        assert made.step() == Reset(Token(9), Token(3), 1)

    def test_behind_a_gap_the_gap_grows(self) -> None:
        made = cursor()
        tell(made, 8, 8)
        say(made, 12, 11)
        assert made.step() == CatchUp(Token(5), Token(12), fresh=True)

    def test_behind_a_gap_what_comes_late_is_fetched_once_the_gap_is_closed(self) -> None:
        made = cursor()
        tell(made, 8, 8)
        say(made, 12)
        say(made, 11)
        made.fetched(CatchUp(Token(5), Token(8)), Page([fact(7)], Token(8), limited=False))
        assert apply_all(made) == [7, 12]
        assert made.step() == CatchUp(Token(8), Token(12), fresh=True)
        made.fetched(CatchUp(Token(8), Token(12)), Page([fact(11), fact(12)], Token(12), limited=False))
        assert apply_all(made) == [11]
        assert made.live

    def test_what_is_told_again_is_no_disorder(self) -> None:
        """As a Synapse's caches are, whose rows go out before their ID counts."""
        made = cursor()
        say(made, 7, 8, 7, 8, 9)
        say(made, 8, 9, 5)
        assert apply_all(made) == [7, 8, 9]
        assert made.duplicates == 5

    def test_below_a_position_there_is_nothing_to_come_late(self) -> None:
        made = cursor()
        say(made, 9)
        tell(made, 9, 12)
        say(made, 11)
        assert apply_all(made) == [9]
        assert (made.position, made.step(), made.duplicates) == (12, None, 1)
