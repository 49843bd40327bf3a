"""A note is confirmed by two looks in a row."""

from __future__ import annotations

from replication.follower.confirmed_notes import LONGEST_PAUSE, ConfirmedNotes
from replication.wire.grammar import StreamName

ORDERS, PAYMENTS = StreamName("orders"), StreamName("payments")


def test_what_two_looks_find_is_noted_and_logged_once_until_it_ends() -> None:
    logged: list[str] = []
    notes = ConfirmedNotes(logged.append, 10.0)
    assert notes.look({ORDERS: ["lost"], PAYMENTS: []}) == 10.0
    assert not notes.of(ORDERS) and not logged
    for _ in range(2):
        assert notes.look({ORDERS: ["lost"], PAYMENTS: ["new"]}) == LONGEST_PAUSE
        assert (notes.of(ORDERS), logged[0]) == (["lost"], "lost")
    assert logged == ["lost", "new"]
    assert notes.look({ORDERS: [], PAYMENTS: []}) is None
    assert (notes.of(ORDERS), notes.of(PAYMENTS)) == ([], [])


def test_after_a_new_begin_only_notes_count_as_found_before() -> None:
    notes = ConfirmedNotes(str, 10.0)
    notes.look({ORDERS: ["one"]})
    notes.look({ORDERS: ["one", "two"]})
    notes.begin()
    notes.look({ORDERS: ["one", "two"]})
    assert notes.of(ORDERS) == ["one"]
