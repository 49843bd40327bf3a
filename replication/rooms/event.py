"""Events: the nodes of a room's graph, checked when they are read from JSON, and their rows in the streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import attrs

from replication.errors import RoomError, RowError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable

_encode = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode

StateKey = tuple[str, str]  # type and state_key
StateMap = Mapping[StateKey, str]  # to the ID of the event that sets the key

MAX_DEPTH: Final = 2**53 - 1  # the largest integer that a double represents exactly
MAX_PREV_EVENTS: Final = 20  # of a received event (docs/protocol/rooms.md H4)
MAX_AUTH_EVENTS: Final = 10
MAX_OWN_PREV_EVENTS: Final = 10  # of a new local event
MAX_NAME: Final = 255  # characters of an ID, a type or a state key

CREATE: Final = "m.room.create"
MEMBER: Final = "m.room.member"
REDACTION: Final = "m.room.redaction"
RELATIONS: Final = frozenset(("m.annotation", "m.reference", "m.replace", "io.element.thread"))

# Fields that other software adds to an event; they are derived or not needed here, and ignored.
_IGNORED: Final = frozenset(
    ("name", "hashes", "signatures", "unsigned", "origin", "stream_ordering", "topological_ordering", "state_group")
)


@attrs.frozen
class Event:
    """An event as a caller gives it, with what its receiver has determined about it (``outlier`` to ``state_before``).

    Attributes:
        depth: None to compute it.
        rejected: the reason, None if the event is not rejected.
        state_before: the state events before it, None to derive them: event IDs or, for events that are not stored
            yet, (type, state_key, event_id).

    """

    event_id: str
    room_id: str
    type: str
    state_key: str | None = None
    sender: str = ""
    depth: int | None = None
    prev_event_ids: tuple[str, ...] = ()
    auth_event_ids: tuple[str, ...] = ()
    redacts: str | None = None
    content: Mapping[str, Any] = attrs.field(factory=dict)
    origin_server_ts: int = 0
    room_version: str | None = None
    outlier: bool = False
    soft_failed: bool = False
    rejected: str | None = None
    out_of_band_membership: bool = False
    state_before: tuple[str | tuple[str, str, str], ...] | None = None

    @classmethod
    def read(cls, room_id: str, source: object) -> Self:
        """Return the event of a JSON object; RoomError names the event and the invalid field."""
        if not isinstance(source, Mapping):
            raise RoomError(f"an event is an object, not a {type(source).__name__}")
        subject = f"event {str(source.get('event_id', 'without event_id'))[:100]!r}"
        for name in ("event_id", "type", "prev_event_ids"):
            if name not in source:
                raise RoomError(f"{subject}: {name} is missing")
        values: dict[str, Any] = {}
        for name, value in source.items():
            if name in _IGNORED:
                continue
            if name not in _CHECKS:
                raise RoomError(f"{subject}: unknown field {str(name)[:100]!r}; known are {', '.join(_CHECKS)}")
            wanted, check, convert = _CHECKS[name]
            if not check(value):
                raise RoomError(f"{subject}: {name} must be {wanted}")
            values[name] = convert(value)
        if values.setdefault("room_id", room_id) != room_id:
            raise RoomError(f"{subject}: its room is {values['room_id']!r}, not {room_id!r}")
        for name, most in (("prev_event_ids", MAX_PREV_EVENTS), ("auth_event_ids", MAX_AUTH_EVENTS)):
            if len(values.get(name, ())) > most:
                raise RoomError(f"{subject}: {len(values[name])} {name}; at most {most} are allowed")
        if values["event_id"] in values["prev_event_ids"]:
            raise RoomError(f"{subject} names itself in its prev_event_ids: that is a cycle")
        event = cls(**values)
        try:
            grammar.check_nesting([event.text])  # encoded here, where it can still be refused
        except (TypeError, ValueError, RecursionError, RowError) as error:
            raise RoomError(f"{subject}: content is not JSON: {error}") from error
        return event

    @property
    def key(self) -> StateKey | None:
        """The key of the state that it sets, None if it is not a state event."""
        return None if self.state_key is None else (self.type, self.state_key)

    @property
    def membership(self) -> str | None:
        """The membership that an ``m.room.member`` event sets, None for other events."""
        found = self.content.get("membership") if self.type == MEMBER else None
        return found if isinstance(found, str) else None

    @property
    def relates_to(self) -> str | None:
        """The event that it annotates, references, replaces or continues in a thread."""
        relation = self.content.get("m.relates_to")
        if not isinstance(relation, Mapping):
            return None
        kind, target = relation.get("rel_type"), relation.get("event_id")
        return target if isinstance(kind, str) and kind in RELATIONS and isinstance(target, str) else None

    @property
    def is_good(self) -> bool:
        """Whether the event may be a forward extremity."""
        return not self.outlier and self.rejected is None and not self.soft_failed

    @cached_property
    def text(self) -> str:
        """Its immutable fields without the depth, as JSON; equal for two copies of one event."""
        return _encode({name: getattr(self, name) for name in _FIXED})

    @classmethod
    def from_text(cls, text: str, *, depth: int, rejected: str | None = None) -> Self:
        """Return the event of :attr:`text`."""
        values = grammar.read_json(text)
        for name in ("prev_event_ids", "auth_event_ids"):
            values[name] = tuple(values[name])
        return cls(**values, depth=depth, rejected=rejected)


def _is_name(value: object) -> bool:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= each <= "\udfff" for each in value)  # no lone surrogate


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_name, value)) and len(set(value)) == len(value)


def _is_state(value: object) -> bool:
    return isinstance(value, (list, tuple)) and _is_names([_id_of(each) for each in value])


def _id_of(named: object) -> object:
    """Return the event ID of an item of ``state_before``, None if the item is invalid."""
    match named:
        case str():
            return named
        case [kind, key, event_id] if _is_name(kind) and (key == "" or _is_name(key)):
            return event_id
    return None


def _is_count(value: object, most: int = MAX_DEPTH) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _or_none(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


def _same(value: Any) -> Any:
    return value


def _state(value: list[Any] | None) -> tuple[Any, ...] | None:
    return None if value is None else tuple([each if isinstance(each, str) else tuple(each) for each in value])


def _names(value: list[str] | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value)


_CHECKS: Final[Mapping[str, tuple[str, Callable[[object], bool], Callable[[Any], Any]]]] = {
    "event_id": ("a text of 1 to 255 characters", _is_name, _same),
    "room_id": ("a text of 1 to 255 characters", _is_name, _same),
    "type": ("a text of 1 to 255 characters", _is_name, _same),
    "state_key": ("a text of up to 255 characters, or null", lambda it: it in (None, "") or _is_name(it), _same),
    "sender": ("a text of up to 255 characters", lambda it: it == "" or _is_name(it), _same),
    "depth": ("a number from 0 to 2**53 - 1, or null", _or_none(_is_count), _same),
    "prev_event_ids": ("a list of different event IDs", _is_names, _names),
    "auth_event_ids": ("a list of different event IDs", _is_names, _names),
    "redacts": ("an event ID, or null", _or_none(_is_name), _same),
    "content": ("an object", lambda it: isinstance(it, dict), _same),
    "origin_server_ts": ("a number of milliseconds", lambda it: _is_count(it, 2**63 - 1), _same),
    "room_version": ("a text, or null", _or_none(_is_name), _same),
    "outlier": ("true or false", lambda it: isinstance(it, bool), _same),
    "soft_failed": ("true or false", lambda it: isinstance(it, bool), _same),
    "rejected": ("a reason, or null", _or_none(lambda it: isinstance(it, str) and bool(it)), _same),
    "out_of_band_membership": ("true or false", lambda it: isinstance(it, bool), _same),
    "state_before": ("a list of event IDs or of [type, state_key, event_id], or null", _or_none(_is_state), _state),
}
_FIXED: Final = (
    *("event_id", "room_id", "type", "state_key", "sender", "prev_event_ids", "auth_event_ids"),
    *("redacts", "content", "origin_server_ts"),
)


def encode_ev(event: Event, *, rejected: str | None, flag: Callable[[bool], object]) -> list[object]:
    """Return the ``ev`` row of the stream ``events``, with the fields of Synapse 1.47."""
    membership = None if rejected is not None else event.membership
    return ["ev", [*encode_backfill(event, rejected=rejected), membership, flag(rejected is not None)]]


def encode_state(room_id: str, key: StateKey, event_id: str | None) -> list[object]:
    """Return the ``state`` row of the stream ``events``; ``event_id`` None removes the key."""
    return ["state", [room_id, *key, event_id]]


def encode_backfill(event: Event, *, rejected: str | None) -> list[object]:
    """Return the row of the stream ``backfill`` for an event."""
    redacts = event.redacts if event.type == REDACTION else None
    related = (None, None) if rejected is not None else (redacts, event.relates_to)
    return [event.event_id, event.room_id, event.type, event.state_key, *related]
