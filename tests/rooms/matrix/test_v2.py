"""Tests of state resolution 2: order by power, then by age; the recordings cover the rest."""

from __future__ import annotations

from typing import Any

import pytest

from replication.rooms.event import Event
from replication.rooms.matrix.v2 import resolve_v2
from tests.rooms.matrix.events import ALICE, BOB, CAROL, CREATE, LEVELS, POWER, event, rules

BASE = {"auth_event_ids": [CREATE.event_id]}
JOIN = {"membership": "join"}
ALICE_IN = event("m.room.member", ALICE, ALICE, content=JOIN, prev_event_ids=[CREATE.event_id], **BASE)
POWERS = event(
    "m.room.power_levels", ALICE, "", content=POWER, auth_event_ids=[CREATE.event_id, ALICE_IN.event_id], event_id="$pl"
)
RULES = event(
    "m.room.join_rules",
    ALICE,
    "",
    content={"join_rule": "public"},
    auth_event_ids=[CREATE.event_id, ALICE_IN.event_id, "$pl"],
)


def joins(user: str, *more: str) -> Event:
    ids = [CREATE.event_id, "$pl", RULES.event_id, *more]
    return event("m.room.member", user, user, content={"membership": "join"}, auth_event_ids=ids)


BOB_IN, CAROL_IN = joins(BOB), joins(CAROL)
FIRST = [CREATE, ALICE_IN, POWERS, RULES, BOB_IN, CAROL_IN]


def by(sender: Event, kind: str, when: int, name: str, **more: Any) -> Event:
    """Return a state event by a joined user."""
    ids = [CREATE.event_id, "$pl", sender.event_id]
    user = sender.sender
    more.setdefault("state_key", "")
    return event(kind, user, auth_event_ids=ids, origin_server_ts=when, event_id=name, **more)


def resolve(*branches: list[Event], first: list[Event] = FIRST, version: str = "9") -> dict[Any, str]:
    """Resolve branches that begin with the common state ``first``."""
    known = {each.event_id: each for branch in [first, *branches] for each in branch}
    states = [{each.key: each.event_id for each in [*first, *branch] if each.key} for branch in branches]

    def fetch(ids: Any) -> dict[str, Event]:
        return {each: known[each] for each in ids if each in known}

    return dict(resolve_v2(states, fetch, version))


def test_equal_states_are_returned_unchanged() -> None:
    assert resolve([], []) == {each.key: each.event_id for each in FIRST}


def test_the_later_of_two_topics_wins() -> None:
    early, late = by(BOB_IN, "m.room.topic", 1, "$b"), by(BOB_IN, "m.room.topic", 2, "$a")
    assert resolve([early], [late])["m.room.topic", ""] == "$a"
    same = by(BOB_IN, "m.room.topic", 1, "$c")
    assert resolve([early], [same])["m.room.topic", ""] == "$c"


def test_a_key_of_only_one_branch_is_checked_and_kept() -> None:
    assert resolve([by(BOB_IN, "m.room.name", 1, "$n")], [])["m.room.name", ""] == "$n"
    assert ("m.room.name", "") not in resolve([by(CAROL_IN, "m.room.name", 1, "$n")], [])


def test_a_ban_wins_over_concurrent_events_of_the_banned_user() -> None:
    ban = by(ALICE_IN, "m.room.member", 5, "$ban", state_key=BOB, content={"membership": "ban"})
    topic = by(BOB_IN, "m.room.topic", 9, "$t")
    resolved = resolve([ban], [topic])
    assert resolved["m.room.member", BOB] == "$ban"
    assert ("m.room.topic", "") not in resolved


def test_power_events_are_ordered_by_power_before_age() -> None:
    """Bob lowers ``state_default``; Alice, with more power, removes his power: hers comes first, his is refused."""
    demoted = by(ALICE_IN, "m.room.power_levels", 9, "$alice", content={**POWER, "users": {ALICE: 100}})
    grabbed = by(BOB_IN, "m.room.power_levels", 1, "$bob", content={**POWER, "state_default": 40})
    assert resolve([demoted], [grabbed])["m.room.power_levels", ""] == "$alice"


@pytest.mark.parametrize(("sender", "named", "version"), [(BOB, ALICE, "9"), (BOB, ALICE, "10"), (ALICE, BOB, "11")])
def test_the_creator_has_power_before_there_are_power_levels(sender: str, named: str, version: str) -> None:
    """Without them anyone may set the first ones: those of the creator come first, although they are younger."""
    created = event("m.room.create", sender, "", content={"creator": named})
    create, alice_in = created.event_id, ALICE_IN.event_id
    public = {"join_rule": "public"}
    open_room = event("m.room.join_rules", ALICE, "", content=public, auth_event_ids=[create, alice_in])
    bob_in = event("m.room.member", BOB, BOB, content=JOIN, auth_event_ids=[create, open_room.event_id])
    mine, grabbed = (
        event(
            *("m.room.power_levels", user, ""),
            content={**POWER, "users": {user: 100}},
            auth_event_ids=[create, joined],
            origin_server_ts=when,
            event_id=name,
        )
        for user, joined, when, name in ((ALICE, alice_in, 9, "$alice"), (BOB, bob_in.event_id, 1, "$bob"))
    )
    first = [created, ALICE_IN, open_room, bob_in]
    assert resolve([mine], [grabbed], first=first, version=version)["m.room.power_levels", ""] == "$alice"


def test_events_under_newer_power_levels_come_later() -> None:
    newer = by(ALICE_IN, "m.room.power_levels", 5, "$pl2", content={**POWER, "ban": 60})
    old_topic = by(BOB_IN, "m.room.topic", 99, "$old")
    new_topic = event(
        *("m.room.topic", BOB, ""),
        auth_event_ids=[CREATE.event_id, "$pl2", BOB_IN.event_id],
        origin_server_ts=1,
        event_id="$new",
    )
    assert resolve([newer, new_topic], [old_topic])["m.room.topic", ""] == "$new"


def test_a_rejected_event_grants_no_permission() -> None:
    refused = Event.from_text(BOB_IN.text, depth=1, rejected="no")
    known = {each.event_id: each for each in [*FIRST, refused]}
    topic = by(BOB_IN, "m.room.topic", 1, "$t")
    known["$t"] = topic
    base = {each.key: each.event_id for each in FIRST if each.key}
    resolved = resolve_v2([base, {**base, ("m.room.topic", ""): "$t"}], lambda ids: {i: known[i] for i in ids}, "9")
    assert ("m.room.topic", "") not in resolved


def test_an_event_that_is_not_stored_cannot_win_a_conflict() -> None:
    base = {each.key: each.event_id for each in FIRST if each.key}
    known = {each.event_id: each for each in FIRST}
    states = [base, {**base, ("m.room.topic", ""): "$missing"}]
    resolved = resolve_v2(states, lambda ids: {each: known[each] for each in ids if each in known}, "9")
    assert resolved == base


def test_the_common_state_is_allowed() -> None:
    assert LEVELS.content == POWERS.content
    assert rules("public").content == RULES.content
