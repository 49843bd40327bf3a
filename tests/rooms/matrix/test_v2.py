"""State resolution 2 by hand: who wins is decided by power, then by age; the recordings check the rest."""

from __future__ import annotations

from typing import Any

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
    """Return a state event by somebody who joined."""
    ids = [CREATE.event_id, "$pl", sender.event_id]
    user = sender.sender
    more.setdefault("state_key", "")
    return event(kind, user, auth_event_ids=ids, origin_server_ts=when, event_id=name, **more)


def resolve(*branches: list[Event]) -> dict[Any, str]:
    """Resolve branches on top of the common beginning."""
    known = {each.event_id: each for branch in [FIRST, *branches] for each in branch}
    states = [{each.key: each.event_id for each in [*FIRST, *branch] if each.key} for branch in branches]

    def fetch(ids: Any) -> dict[str, Event]:
        return {each: known[each] for each in ids if each in known}

    return dict(resolve_v2(states, fetch, "9"))


def test_states_without_a_conflict_are_returned_as_they_are() -> None:
    assert resolve([], []) == {each.key: each.event_id for each in FIRST}


def test_of_two_topics_the_later_one_wins() -> None:
    early, late = by(BOB_IN, "m.room.topic", 1, "$b"), by(BOB_IN, "m.room.topic", 2, "$a")
    assert resolve([early], [late])["m.room.topic", ""] == "$a"
    same = by(BOB_IN, "m.room.topic", 1, "$c")
    assert resolve([early], [same])["m.room.topic", ""] == "$c"


def test_a_key_that_only_one_branch_has_is_checked_and_kept() -> None:
    assert resolve([by(BOB_IN, "m.room.name", 1, "$n")], [])["m.room.name", ""] == "$n"
    assert ("m.room.name", "") not in resolve([by(CAROL_IN, "m.room.name", 1, "$n")], [])


def test_a_ban_beats_what_the_banned_did_meanwhile() -> None:
    ban = by(ALICE_IN, "m.room.member", 5, "$ban", state_key=BOB, content={"membership": "ban"})
    topic = by(BOB_IN, "m.room.topic", 9, "$t")
    resolved = resolve([ban], [topic])
    assert resolved["m.room.member", BOB] == "$ban"
    assert ("m.room.topic", "") not in resolved


def test_power_goes_before_age_where_power_is_at_stake() -> None:
    """Bob takes Alice's topic right away; she, with more power, has taken his power: hers is first, his is refused."""
    demoted = by(ALICE_IN, "m.room.power_levels", 9, "$alice", content={**POWER, "users": {ALICE: 100}})
    grabbed = by(BOB_IN, "m.room.power_levels", 1, "$bob", content={**POWER, "state_default": 40})
    assert resolve([demoted], [grabbed])["m.room.power_levels", ""] == "$alice"


def test_what_was_said_under_newer_power_levels_comes_later() -> None:
    newer = by(ALICE_IN, "m.room.power_levels", 5, "$pl2", content={**POWER, "ban": 60})
    old_topic = by(BOB_IN, "m.room.topic", 99, "$old")
    new_topic = event(
        *("m.room.topic", BOB, ""),
        auth_event_ids=[CREATE.event_id, "$pl2", BOB_IN.event_id],
        origin_server_ts=1,
        event_id="$new",
    )
    assert resolve([newer, new_topic], [old_topic])["m.room.topic", ""] == "$new"


def test_a_rejected_event_gives_nobody_a_right() -> None:
    refused = Event.from_text(BOB_IN.text, depth=1, rejected="no")
    known = {each.event_id: each for each in [*FIRST, refused]}
    topic = by(BOB_IN, "m.room.topic", 1, "$t")
    known["$t"] = topic
    base = {each.key: each.event_id for each in FIRST if each.key}
    resolved = resolve_v2([base, {**base, ("m.room.topic", ""): "$t"}], lambda ids: {i: known[i] for i in ids}, "9")
    assert ("m.room.topic", "") not in resolved


def test_an_event_that_is_not_stored_cannot_win() -> None:
    base = {each.key: each.event_id for each in FIRST if each.key}
    known = {each.event_id: each for each in FIRST}
    states = [base, {**base, ("m.room.topic", ""): "$nobody has it"}]
    resolved = resolve_v2(states, lambda ids: {each: known[each] for each in ids if each in known}, "9")
    assert resolved == base


def test_the_beginning_is_sound() -> None:
    assert LEVELS.content == POWERS.content
    assert rules("public").content == RULES.content
