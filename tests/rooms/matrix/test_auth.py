"""Tests of the authorization rules: each rule of the specification, allowed and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replication.rooms.event import Event
from replication.rooms.matrix.auth import auth_keys, is_allowed, power_of
from tests.rooms.matrix.events import (
    ALICE,
    BOB,
    CAROL,
    CREATE,
    LEVELS,
    POWER,
    event,
    member,
    rules,
    state,
    usual,
)

if TYPE_CHECKING:
    from replication.rooms.event import StateKey

JOINED = member(CAROL, "join")


def levels(**changes: Any) -> dict[str, Any]:
    return {**POWER, **changes}


def with_levels(**changes: Any) -> Event:
    return event("m.room.power_levels", ALICE, "", content=levels(**changes))


def without_rules(*more: Event) -> dict[StateKey, Event]:
    """Return a state without join rules: an invitation is needed."""
    return {key: each for key, each in usual(*more).items() if key != ("m.room.join_rules", "")}


@pytest.mark.parametrize(
    ("what", "auth", "version", "allowed"),
    [
        (CREATE, {}, "9", True),
        (event("m.room.create", ALICE, "", content={}), {}, "9", False),
        (event("m.room.create", ALICE, "", content={}), {}, "11", True),
        (event("m.room.create", ALICE, "", content={"creator": ALICE}, prev_event_ids=["$x"]), {}, "9", False),
        (event("m.room.message"), {}, "9", False),
        (event("m.room.message"), usual(), "9", True),
        (event("m.room.message", CAROL), usual(), "9", False),
        (event("m.room.topic", CAROL, ""), usual(JOINED), "9", False),
        (event("m.room.topic", BOB, ""), usual(), "9", True),
        (event("custom", BOB, ALICE), usual(), "9", False),
        (event("custom", BOB, BOB), usual(), "9", True),
        (event("m.room.message", CAROL), state(CREATE, JOINED), "9", True),
        (
            event("m.room.message", CAROL),
            state(event("m.room.create", ALICE, "", content={"creator": ALICE, "m.federate": False}), JOINED),
            *("9", False),
        ),
        (event("m.room.aliases", CAROL, "there"), usual(), "5", True),
        (event("m.room.aliases", CAROL, "here"), usual(), "5", False),
        (event("m.room.aliases", CAROL, "there"), usual(), "6", False),
        (event("m.room.redaction", CAROL, redacts="$x:there", event_id="$y:there"), usual(JOINED), "1", True),
        (event("m.room.redaction", CAROL, redacts="$x:here", event_id="$y:there"), usual(JOINED), "1", False),
        (event("m.room.redaction", CAROL, redacts="$x:here", event_id="$y:there"), usual(JOINED), "3", True),
        (event("m.room.redaction", CAROL, redacts="$x:here", event_id="$y:there"), usual(JOINED), "2", False),
        (event("m.room.redaction", BOB, redacts="$x:there", event_id="$y:here"), usual(), "1", True),
        (
            event("m.room.redaction", BOB, redacts="$x:there", event_id="$y:here"),
            usual(with_levels(redact=51)),
            "1",
            False,
        ),
        (event("m.room.redaction", CAROL, event_id="$y:there"), usual(JOINED), "1", False),
        (event("m.room.third_party_invite", CAROL, "t"), usual(JOINED), "9", True),
        (event("m.room.third_party_invite", CAROL, "t"), usual(JOINED, with_levels(invite=1)), "9", False),
        (event("m.room.message", CAROL), usual(JOINED, with_levels(events_default=1)), "9", False),
        (event("m.room.topic", BOB, ""), usual(with_levels(state_default=51)), "9", False),
        (event("m.room.topic", CAROL, ""), usual(JOINED, with_levels(events={"m.room.topic": 0})), "9", True),
        (event("m.room.topic", BOB, ""), usual(with_levels(events={"m.room.topic": 51})), "9", False),
        (event("m.room.aliases", CAROL, None), usual(), "5", False),
        (event("m.room.aliases", CAROL, "there"), usual(JOINED), "org.example.new", False),
    ],
)
def test_events(what: Event, auth: Any, version: str, *, allowed: bool) -> None:
    assert is_allowed(what, auth, version) is allowed


@pytest.mark.parametrize(
    ("what", "auth", "version", "allowed"),
    [
        (member(CAROL, "join"), usual(), "9", True),
        (member(CAROL, "join", ALICE), usual(), "9", False),
        (member(CAROL, "join"), usual(rules("invite")), "9", False),
        (member(CAROL, "join"), usual(rules("invite"), member(CAROL, "invite", ALICE)), "9", True),
        (member(CAROL, "join"), usual(member(CAROL, "ban", ALICE)), "9", False),
        (member(CAROL, "join"), usual(rules("restricted")), "9", False),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("restricted")), "9", True),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("restricted")), "7", False),
        (member(CAROL, "join", join_authorised_via_users_server="@no:one"), usual(rules("restricted")), "9", False),
        (member(CAROL, "invite", BOB), usual(), "9", True),
        (member(CAROL, "invite", CAROL), usual(), "9", False),
        (member(BOB, "invite", ALICE), usual(), "9", False),
        (member(CAROL, "leave"), usual(), "9", False),
        (member(CAROL, "leave"), usual(JOINED), "9", True),
        (member(CAROL, "leave", BOB), usual(JOINED), "9", True),
        (member(ALICE, "leave", BOB), usual(), "9", False),
        (member(CAROL, "leave", BOB), usual(member(CAROL, "ban", ALICE)), "9", True),
        (member(BOB, "leave", CAROL), usual(JOINED), "9", False),
        (member(CAROL, "ban", BOB), usual(), "9", True),
        (member(ALICE, "ban", BOB), usual(), "9", False),
        (member(CAROL, "knock"), usual(rules("knock")), "7", True),
        (member(CAROL, "knock"), usual(rules("knock")), "6", False),
        (member(CAROL, "knock"), usual(rules("knock_restricted")), "9", False),
        (member(CAROL, "knock"), usual(rules("knock_restricted")), "10", True),
        (member(CAROL, "knock", ALICE), usual(rules("knock")), "7", False),
        (member(CAROL, "knock"), usual(rules("knock"), member(CAROL, "invite", BOB)), "7", False),
        (member(CAROL, "knock"), usual(rules("knock"), member(CAROL, "ban", BOB)), "7", False),
        (member(CAROL, "knock"), usual(rules("knock"), JOINED), "7", False),
        (member(CAROL, "knock"), usual(rules("public")), "9", False),
        (member(CAROL, "join"), usual(rules("knock")), "9", False),
        (member(CAROL, "join"), usual(rules("knock"), member(CAROL, "knock")), "9", False),
        (member(CAROL, "join"), usual(rules("private"), JOINED), "9", False),
        (member(CAROL, "join"), usual(rules("invite"), JOINED), "1", True),
        (member(CAROL, "join"), usual(rules("knock"), JOINED), "6", False),
        (member(CAROL, "join"), usual(rules("knock"), JOINED), "7", True),
        (member(CAROL, "join"), usual(rules("restricted"), JOINED), "7", False),
        (member(CAROL, "join"), usual(rules("restricted"), JOINED), "8", True),
        (member(CAROL, "join"), usual(rules("knock_restricted"), JOINED), "9", False),
        (member(CAROL, "join"), usual(rules("knock_restricted"), JOINED), "10", True),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("knock_restricted")), "9", False),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("knock_restricted")), "10", True),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("invite")), "10", False),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("knock")), "10", False),
        (member(CAROL, "join"), usual(rules("unknown"), JOINED), "9", False),
        (member(CAROL, "join", join_authorised_via_users_server=7), usual(rules("restricted")), "9", False),
        (member(CAROL, "join", join_authorised_via_users_server=BOB), usual(rules("restricted")), "8", True),
        (
            member(CAROL, "join", join_authorised_via_users_server=BOB),
            usual(rules("restricted"), with_levels(invite=50)),
            *("9", True),
        ),
        (
            member(CAROL, "join", join_authorised_via_users_server=BOB),
            usual(rules("restricted"), with_levels(invite=51)),
            *("9", False),
        ),
        (member(CAROL, "join"), without_rules(member(CAROL, "invite", BOB)), "9", True),
        (member(CAROL, "join"), without_rules(), "9", False),
        (member(CAROL, "invite", BOB), usual(with_levels(invite=50)), "9", True),
        (member(CAROL, "invite", BOB), usual(with_levels(invite=51)), "9", False),
        (member(CAROL, "invite", BOB), usual(member(CAROL, "ban", ALICE)), "9", False),
        (member(CAROL, "leave"), usual(member(CAROL, "invite", BOB)), "9", True),
        (member(CAROL, "leave"), usual(member(CAROL, "knock")), "7", True),
        (member(CAROL, "leave"), usual(member(CAROL, "knock")), "6", False),
        (member(CAROL, "leave"), usual(member(CAROL, "ban", BOB)), "9", False),
        (member(CAROL, "leave", BOB), usual(JOINED, with_levels(kick=51)), "9", False),
        (member(CAROL, "leave", BOB), usual(JOINED, with_levels(users={ALICE: 100, BOB: 50, CAROL: 50})), "9", False),
        (member(CAROL, "leave", BOB), usual(member(CAROL, "ban", ALICE), with_levels(ban=51)), "9", False),
        (member(CAROL, "leave", BOB), usual(JOINED, member(BOB, "leave")), "9", False),
        (member(CAROL, "ban", BOB), usual(with_levels(ban=51)), "9", False),
        (member(CAROL, "ban", BOB), usual(with_levels(users={ALICE: 100, BOB: 50, CAROL: 50})), "9", False),
        (member(CAROL, "ban", BOB), usual(member(BOB, "leave")), "9", False),
        (member(CAROL, "dance"), usual(), "9", False),
        (event("m.room.member", ALICE, None, content={"membership": "join"}), usual(), "9", False),
    ],
)
def test_memberships(what: Event, auth: Any, version: str, *, allowed: bool) -> None:
    assert is_allowed(what, auth, version) is allowed


def test_the_creator_joins_first_directly_after_the_create_event() -> None:
    right = event("m.room.member", ALICE, ALICE, content={"membership": "join"}, prev_event_ids=[CREATE.event_id])
    assert is_allowed(right, state(CREATE), "9")
    assert not is_allowed(member(ALICE, "join"), state(CREATE), "9")
    assert not is_allowed(member(BOB, "join"), state(CREATE), "9")
    assert not is_allowed(right, state(CREATE, member(ALICE, "leave")), "9"), "has joined before"


def test_the_creator_is_the_one_that_the_create_event_names_and_from_version_11_on_its_sender() -> None:
    def joins(user: str, version: str) -> bool:
        content = {"membership": "join"}
        first = event("m.room.member", user, user, content=content, prev_event_ids=[named.event_id])
        return is_allowed(first, state(named), version)

    named = event("m.room.create", ALICE, "", content={"creator": BOB})
    assert [joins(user, version) for version in ("10", "11") for user in (ALICE, BOB)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("sender", "content", "version", "allowed"),
    [
        (ALICE, levels(users={ALICE: 100, BOB: 100}), "9", True),
        (BOB, levels(users={ALICE: 100, BOB: 49}), "9", True),
        (BOB, levels(users={ALICE: 100, BOB: 51}), "9", False),
        (BOB, levels(users={ALICE: 99, BOB: 50}), "9", False),
        (BOB, levels(users={ALICE: 100, BOB: 50, CAROL: 50}), "9", True),
        (BOB, levels(ban=51), "9", False),
        (BOB, levels(events={"m.room.name": 60}), "9", False),
        (BOB, levels(events={"m.room.name": 50}), "9", True),
        (BOB, levels(notifications={"room": 60}), "9", False),
        (BOB, levels(notifications={"room": 60}), "5", True),
        (BOB, levels(events={"m.room.name": 60}), "5", False),
        (BOB, levels(notifications={"room": 60}), "6", False),
        (BOB, levels(users_default=51), "9", False),
        (BOB, levels(invite=50), "9", True),
        (BOB, levels(state_default=49), "9", True),
        (ALICE, levels(users_default="1"), "10", False),
        (ALICE, levels(ban=True), "10", False),
        (ALICE, levels(users={"name": 1}), "9", False),
        (ALICE, levels(users={"@name": 1}), "9", False),
        (ALICE, levels(users={"name:h": 1}), "9", False),
        (ALICE, levels(users=[1]), "9", False),
        (ALICE, levels(users={ALICE: "100", BOB: 50}), "9", True),
        (ALICE, levels(users={ALICE: "100", BOB: 50}), "10", False),
        (ALICE, levels(ban=40), "10", True),
        (ALICE, levels(events={"m.room.name": 60}, notifications={"room": 60}), "10", True),
        (ALICE, {}, "10", True),
        (ALICE, levels(events=[]), "10", False),
        (ALICE, levels(notifications=[]), "10", False),
        (ALICE, levels(notifications={"room": "60"}), "10", False),
        (CAROL, levels(), "9", False),
    ],
)
def test_power_levels(sender: str, content: Any, version: str, *, allowed: bool) -> None:
    what = event("m.room.power_levels", sender, "", content=content)
    assert is_allowed(what, usual(JOINED), version) is allowed


def test_the_first_power_levels_may_have_any_values() -> None:
    auth = state(CREATE, member(ALICE, "join"))
    assert is_allowed(LEVELS, auth, "9")


def test_users_of_equal_power_cannot_demote_each_other() -> None:
    both = event("m.room.power_levels", ALICE, "", content=levels(users={ALICE: 100, BOB: 100}))
    less = event("m.room.power_levels", ALICE, "", content=levels(users={ALICE: 100, BOB: 50}))
    assert not is_allowed(less, usual(both), "9")


def test_an_invited_user_may_join_under_every_rule_that_is_known() -> None:
    for rule in ("public", "invite", "knock", "restricted", "knock_restricted", "private", "another"):
        for before in ("invite", "join"):
            allowed = is_allowed(member(CAROL, "join"), usual(rules(rule), member(CAROL, before, ALICE)), "10")
            assert allowed == (rule not in ("private", "another")), (rule, before)


def test_in_which_rooms_a_user_may_knock() -> None:
    names = ("public", "invite", "knock", "restricted", "knock_restricted", "private")
    allowed = {
        version: [name for name in names if is_allowed(member(CAROL, "knock"), usual(rules(name)), version)]
        for version in ("6", "7", "9", "10", "11")
    }
    both = ["knock", "knock_restricted"]
    assert allowed == {"6": [], "7": ["knock"], "9": ["knock"], "10": both, "11": both}


def test_a_third_party_invite_needs_its_state_event() -> None:
    signed = {"mxid": CAROL, "token": "t"}
    invite = member(CAROL, "invite", BOB, third_party_invite={"signed": signed})
    promise = event("m.room.third_party_invite", BOB, "t")
    assert is_allowed(invite, usual(promise), "9")
    assert not is_allowed(invite, usual(), "9")
    assert not is_allowed(invite, usual(event("m.room.third_party_invite", ALICE, "t")), "9")
    stolen = member("@eve:there", "invite", BOB, third_party_invite={"signed": signed})
    assert not is_allowed(stolen, usual(promise), "9")
    assert ("m.room.third_party_invite", "t") in auth_keys(invite, "9")


def test_auth_keys_of_an_event() -> None:
    three = {("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", CAROL)}
    assert auth_keys(CREATE, "9") == set()
    assert auth_keys(event("m.room.message", CAROL), "9") == three
    for membership in ("join", "invite", "knock"):
        assert auth_keys(member(CAROL, membership), "9") == three | {("m.room.join_rules", "")}
    for membership in ("leave", "ban"):
        assert auth_keys(member(CAROL, membership), "9") == three
    vouched = member(CAROL, "join", join_authorised_via_users_server=BOB)
    assert ("m.room.member", BOB) in auth_keys(vouched, "9")
    assert ("m.room.member", BOB) not in auth_keys(vouched, "7")


def test_without_power_levels_only_the_creator_has_power() -> None:
    assert power_of(ALICE, state(CREATE), "9") == 100
    assert power_of(BOB, state(CREATE), "9") == 0
    assert power_of(ALICE, {}, "9") == 0
    named = event("m.room.create", ALICE, "", content={"creator": BOB})
    assert [power_of(user, state(named), "10") for user in (ALICE, BOB)] == [0, 100]
    assert [power_of(user, state(named), "11") for user in (ALICE, BOB)] == [100, 0]
    odd = event("m.room.power_levels", ALICE, "", content={"users": {BOB: True}, "users_default": "7"})
    assert power_of(BOB, state(CREATE, odd), "9") == 7


@pytest.mark.parametrize(("level", "power"), [("x", 0), (1e999, 0), (7.9, 7), ([], 0), (None, 0), (" 12 ", 12)])
def test_power_levels_of_old_rooms_are_converted(level: object, power: int) -> None:
    odd = event("m.room.power_levels", ALICE, "", content={"users": {BOB: 5}, "users_default": 0, "ban": 50})
    assert power_of(BOB, state(CREATE, odd), "9") == 5
    content = Event.from_text(odd.text, depth=1).content
    content["users"][BOB] = level  # what a JSON body can hold, whatever Event.read takes
    changed = Event(event_id="$odd", room_id="!r", type="m.room.power_levels", state_key="", content=content)
    assert power_of(BOB, state(CREATE, changed), "9") == power


def test_a_room_without_federation_accepts_only_its_own_server() -> None:
    alone = event("m.room.create", ALICE, "", content={"creator": ALICE, "m.federate": False})
    auth = {**usual(JOINED), ("m.room.create", ""): alone}
    assert not is_allowed(event("m.room.message", CAROL), auth, "9")
    assert is_allowed(event("m.room.message", BOB), auth, "9")
