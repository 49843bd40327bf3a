"""Matrix authorization rules of room versions 1 to 11 (server-server API, "Rooms").

Signatures are not checked here: a server checks them when it receives an event.  An event is checked against a state,
given as a mapping from (type, state key) to events.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from replication.rooms.event import CREATE, MEMBER, REDACTION

if TYPE_CHECKING:
    from replication.rooms.event import Event, StateKey

    Auth = Mapping[StateKey, Event]

POWER_LEVELS: Final = "m.room.power_levels"
JOIN_RULES: Final = "m.room.join_rules"
THIRD_PARTY_INVITE: Final = "m.room.third_party_invite"
ALIASES: Final = "m.room.aliases"

_LEVELS: Final = {"ban": 50, "kick": 50, "redact": 50, "invite": 0, "state_default": 50, "events_default": 0}
CREATOR_POWER: Final = 100
# The first room version that has each join rule.  Any other rule, such as "private", lets no user join.
_JOIN_RULES: Final[Mapping[str, int]] = {"public": 1, "invite": 1, "knock": 7, "restricted": 8, "knock_restricted": 10}


def auth_keys(event: Event, room_version: str) -> set[StateKey]:
    """Return the keys of the state that the authorization of an event depends on."""
    if event.type == CREATE:
        return set()
    keys: set[StateKey] = {(CREATE, ""), (POWER_LEVELS, ""), (MEMBER, event.sender)}
    if event.type == MEMBER and event.state_key is not None:
        keys.add((MEMBER, event.state_key))
        if event.membership in ("join", "invite", "knock"):
            keys.add((JOIN_RULES, ""))
        if event.membership == "invite":
            token = _dig(event.content, "third_party_invite", "signed", "token")
            if isinstance(token, str):
                keys.add((THIRD_PARTY_INVITE, token))
        vouching = event.content.get("join_authorised_via_users_server")
        if event.membership == "join" and isinstance(vouching, str) and _has_rule(room_version, "restricted"):
            keys.add((MEMBER, vouching))
    return keys


def is_allowed(event: Event, auth: Auth, room_version: str) -> bool:
    """Return whether an event is allowed in the state ``auth``."""
    if event.type == CREATE:
        return not event.prev_event_ids and (_number(room_version) >= 11 or "creator" in event.content)  # noqa: PLR2004
    create = auth.get((CREATE, ""))
    if create is None or not _may_federate(event, create):
        return False
    if event.type == ALIASES and _number(room_version) < 6:  # noqa: PLR2004
        return event.state_key is not None and event.state_key == domain_of(event.sender)
    if event.type == MEMBER:
        return _member_allowed(event, auth, create, room_version)
    if _membership(auth, event.sender) != "join":
        return False
    power = power_of(event.sender, auth, room_version)
    if event.type == THIRD_PARTY_INVITE:
        return power >= _level(auth, "invite")
    if power < _level_to_send(event, auth):
        return False
    if event.state_key is not None and event.state_key.startswith("@") and event.state_key != event.sender:
        return False
    if event.type == POWER_LEVELS:
        return _levels_allowed(event, auth, power, room_version)
    if event.type == REDACTION and _number(room_version) < 3:  # noqa: PLR2004
        own = event.redacts is not None and domain_of(event.redacts) == domain_of(event.event_id)
        return own or power >= _level(auth, "redact")
    return True


def power_of(user: str, auth: Auth, room_version: str) -> int:
    """Return a user's power level; in a room without power levels, 100 for the creator and 0 for others."""
    levels, create = auth.get((POWER_LEVELS, "")), auth.get((CREATE, ""))
    if levels is not None:
        return level_in(levels, user)
    return CREATOR_POWER if create is not None and user == creator_of(create, room_version) else 0


def creator_of(create: Event, room_version: str) -> object:
    """Return the creator of a room: the sender of ``m.room.create`` or, up to version 10, the user that it names."""
    return create.sender if _number(room_version) >= 11 else create.content.get("creator")  # noqa: PLR2004


def level_in(levels: Event, user: str) -> int:
    """Return a user's power level in an ``m.room.power_levels`` event."""
    users = levels.content.get("users")
    mine = _integer(users.get(user)) if isinstance(users, Mapping) else None
    return mine if mine is not None else _integer(levels.content.get("users_default")) or 0


def domain_of(name: str) -> str:
    """Return the server name in a user ID, or in an event ID of room versions 1 and 2."""
    return name.partition(":")[2]


def _may_federate(event: Event, create: Event) -> bool:
    federates = create.content.get("m.federate") is not False
    return federates or domain_of(event.sender) == domain_of(create.sender)


def _member_allowed(event: Event, auth: Auth, create: Event, room_version: str) -> bool:
    target, sender = event.state_key, event.sender
    if target is None:
        return False
    now, power = _membership(auth, target), power_of(sender, auth, room_version)
    sender_joined = _membership(auth, sender) == "join"
    rule = _join_rule(auth)
    match event.membership:
        case "join":
            return _join_allowed(event, auth, create, room_version)
        case "invite":
            if "third_party_invite" in event.content:
                return now != "ban" and _third_party_allowed(event, auth)
            return sender_joined and now not in ("join", "ban") and power >= _level(auth, "invite")
        case "leave":
            if sender == target:
                return now in (("invite", "join", "knock") if _number(room_version) >= 7 else ("invite", "join"))  # noqa: PLR2004
            if not sender_joined or (now == "ban" and power < _level(auth, "ban")):
                return False
            return power >= _level(auth, "kick") and power_of(target, auth, room_version) < power
        case "ban":
            return sender_joined and power >= _level(auth, "ban") and power_of(target, auth, room_version) < power
        case "knock":
            known = rule in ("knock", "knock_restricted") and _has_rule(room_version, rule)
            return known and sender == target and now not in ("ban", "invite", "join")
    return False


def _join_allowed(event: Event, auth: Auth, create: Event, room_version: str) -> bool:
    user = event.state_key
    if user is None or event.sender != user:
        return False
    first = event.prev_event_ids == (create.event_id,) and (MEMBER, user) not in auth
    if first and user == creator_of(create, room_version):
        return True
    now, rule = _membership(auth, user), _join_rule(auth)
    if now == "ban" or not _has_rule(room_version, rule):
        return False
    if rule == "public" or now in ("invite", "join"):
        return True
    vouching = event.content.get("join_authorised_via_users_server")
    if rule not in ("restricted", "knock_restricted") or not isinstance(vouching, str):
        return False
    return _membership(auth, vouching) == "join" and power_of(vouching, auth, room_version) >= _level(auth, "invite")


def _third_party_allowed(event: Event, auth: Auth) -> bool:
    signed = _dig(event.content, "third_party_invite", "signed")
    if not isinstance(signed, Mapping) or signed.get("mxid") != event.state_key:
        return False
    promise = auth.get((THIRD_PARTY_INVITE, str(signed.get("token"))))
    return promise is not None and promise.sender == event.sender


def _levels_allowed(event: Event, auth: Auth, power: int, room_version: str) -> bool:
    new = event.content
    if not _levels_are_well_formed(new, room_version):
        return False
    before = auth.get((POWER_LEVELS, ""))
    if before is None:
        return True
    old = before.content
    changes = [(_integer(old.get(each)), _integer(new.get(each))) for each in (*_LEVELS, "users_default")]
    for table in ("events", "notifications") if _number(room_version) >= 6 else ("events",):  # noqa: PLR2004
        changes += _table_changes(old, new, table).values()
    if any(_above(level, power) for was, level_now in changes if was != level_now for level in (was, level_now)):
        return False
    for user, (was, level_now) in _table_changes(old, new, "users").items():
        if was == level_now:
            continue
        if _above(level_now, power) or _above(was, power) or (user != event.sender and was == power):
            return False
    return True


def _above(level: int | None, power: int) -> bool:
    return level is not None and level > power


def _levels_are_well_formed(content: Mapping[str, Any], room_version: str) -> bool:
    users = content.get("users", {})
    if not isinstance(users, Mapping):
        return False
    if not all(each.startswith("@") and ":" in each for each in users):
        return False
    if _number(room_version) >= 10:  # noqa: PLR2004 - from version 10 on, levels must be integers
        tables = [content.get(each, {}) for each in ("users", "events", "notifications")]
        if not all(isinstance(each, Mapping) for each in tables):
            return False
        levels = [content[each] for each in (*_LEVELS, "users_default") if each in content]
        levels += [level for table in tables for level in table.values()]
        return all(isinstance(each, int) and not isinstance(each, bool) for each in levels)
    return all(_integer(each) is not None for each in users.values())


def _table_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], table: str
) -> dict[str, tuple[int | None, int | None]]:
    before, after = old.get(table), new.get(table)
    before = before if isinstance(before, Mapping) else {}
    after = after if isinstance(after, Mapping) else {}
    return {each: (_integer(before.get(each)), _integer(after.get(each))) for each in {*before, *after}}


def _level_to_send(event: Event, auth: Auth) -> int:
    levels = auth.get((POWER_LEVELS, ""))
    if levels is not None:
        events = levels.content.get("events")
        found = _integer(events.get(event.type)) if isinstance(events, Mapping) else None
        if found is not None:
            return found
        return _level(auth, "events_default" if event.state_key is None else "state_default")
    return 0  # without power levels, every joined user may send everything


def _level(auth: Auth, what: str) -> int:
    levels = auth.get((POWER_LEVELS, ""))
    found = None if levels is None else _integer(levels.content.get(what))
    return _LEVELS[what] if found is None else found


def _membership(auth: Auth, user: str) -> str:
    event = auth.get((MEMBER, user))
    return (event.membership if event else None) or "leave"


def _join_rule(auth: Auth) -> str:
    event = auth.get((JOIN_RULES, ""))
    rule = event.content.get("join_rule") if event else None
    return rule if isinstance(rule, str) else "invite"


def _has_rule(room_version: str, join_rule: str) -> bool:
    return join_rule in _JOIN_RULES and _number(room_version) >= _JOIN_RULES[join_rule]


def _number(room_version: str) -> int:
    """Return the number of a room version; an unknown version counts as the newest known one."""
    return int(room_version) if room_version.isascii() and room_version.isdigit() else 11


def _integer(value: object) -> int | None:
    """Return a power level: an integer or, as in old rooms, a string or float that converts to one."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float, str)):
        try:
            return int(value)
        except (ValueError, OverflowError):
            return None
    return None


def _dig(content: object, *path: str) -> object:
    for name in path:
        content = content.get(name) if isinstance(content, Mapping) else None
    return content
