"""Tests of state resolution 1; the recorded room of version 1 covers the rest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from replication.rooms.matrix.v1 import resolve_v1
from tests.rooms.matrix.events import ALICE, BOB, CAROL, POWER, event, member, usual

if TYPE_CHECKING:
    from replication.rooms.event import Event

BASE = dict(usual(member(CAROL, "join")).items())


def resolve(*branches: list[Event]) -> dict[Any, str]:
    known = {each.event_id: each for each in [*BASE.values(), *(each for branch in branches for each in branch)]}
    base = {key: each.event_id for key, each in BASE.items()}
    states = [{**base, **{each.key: each.event_id for each in branch if each.key}} for branch in branches]
    return dict(resolve_v1(states, lambda ids: {each: known[each] for each in ids if each in known}))


def topic(name: str, depth: int, sender: str = BOB) -> Event:
    return event("m.room.topic", sender, "", depth=depth, event_id=name)


def test_the_deepest_topic_wins_and_equal_depths_are_ordered_by_hash() -> None:
    assert resolve([topic("$a", 5)], [topic("$b", 9)])["m.room.topic", ""] == "$b"
    first = min("$a", "$b", key=lambda it: hashlib.sha1(it.encode()).hexdigest())
    assert resolve([topic("$a", 5)], [topic("$b", 5)])["m.room.topic", ""] == first


def test_an_event_that_is_not_allowed_loses_unless_none_is_allowed() -> None:
    assert resolve([topic("$a", 5)], [topic("$b", 9, CAROL)])["m.room.topic", ""] == "$a"
    assert resolve([topic("$a", 5, CAROL)], [topic("$b", 9, CAROL)])["m.room.topic", ""] == "$a"


def test_a_key_of_only_one_branch_is_not_a_conflict() -> None:
    assert resolve([topic("$a", 5, CAROL)], [])["m.room.topic", ""] == "$a"


def test_power_levels_are_checked_in_ascending_depth() -> None:
    def levels(name: str, depth: int, sender: str, **changes: Any) -> Event:
        content = {**POWER, **changes}
        return event("m.room.power_levels", sender, "", depth=depth, event_id=name, content=content)

    kept = levels("$one", 5, ALICE, users={ALICE: 100})
    assert resolve([kept], [levels("$two", 9, BOB, ban=40)])["m.room.power_levels", ""] == "$one"
    assert resolve([kept], [levels("$two", 9, ALICE, ban=40)])["m.room.power_levels", ""] == "$two"


def test_memberships_are_resolved_with_the_resolved_power_levels() -> None:
    ban = event("m.room.member", ALICE, BOB, depth=7, event_id="$ban", content={"membership": "ban"})
    stay = event("m.room.member", BOB, BOB, depth=8, event_id="$stay", content={"membership": "join"})
    assert resolve([ban], [stay])["m.room.member", BOB] == "$ban"
