"""Special names in the stream ``caches`` of a Synapse, which invalidate cached functions (docs/protocol/streams.md C4).

    from replication.synapse.invalidation import BY_ROOM

    @worker.cached(invalidated_by=BY_ROOM)
    def get_member_ids(room_id):
        ...

Each constant is named after the arguments of the function.  The function may have more arguments after these: all calls
that begin with them are invalidated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    SpecialNames = Mapping[str, Callable[[Sequence[str]], Iterable[Sequence[str]] | None]]

_CURRENT_STATE: Final = "cs_cache_fake"  # a room, and the users whose membership has changed
_HISTORY_PURGED: Final = "ph_cache_fake"  # a room
_ROOM_DELETED: Final = "dr_cache_fake"  # a room, without its users


def _room(keys: Sequence[str]) -> list[Sequence[str]]:
    return [keys[:1]]


def _users(keys: Sequence[str]) -> list[Sequence[str]]:
    return [[user] for user in keys[1:]]


def _room_and_users(keys: Sequence[str]) -> list[Sequence[str]]:
    return [[keys[0], user] for user in keys[1:]]


def _json(keys: Sequence[str]) -> list[Any]:
    """Return the arguments of several calls: each key is a JSON array."""
    return [json.loads(each) for each in keys]


def _all(_: Sequence[str]) -> None:
    """Invalidate all calls: the row does not have their arguments."""


BY_ROOM: Final[SpecialNames] = {_CURRENT_STATE: _room, _HISTORY_PURGED: _room, _ROOM_DELETED: _room}
"""For ``(room_id)``: the room's current state or members have changed, its history was purged, or it was deleted."""

BY_MEMBER: Final[SpecialNames] = {_CURRENT_STATE: _users, _ROOM_DELETED: _all}
"""For ``(user_id)``: the user's membership in a room has changed."""

BY_ROOM_AND_MEMBER: Final[SpecialNames] = {_CURRENT_STATE: _room_and_users, _ROOM_DELETED: _room}
"""For ``(room_id, user_id)``: the user's membership in the room has changed."""

BY_DEVICE_SIGNATURES: Final[SpecialNames] = {"_get_e2e_cross_signing_signatures_for_device": _json}
"""For ``(user_id, device_id)``: the cross-signing signatures of the device have changed."""

BY_SERVER_KEY: Final[SpecialNames] = {"_get_server_keys_json": _json}
"""For ``(server_name, key_id)``: the signing key of the server was stored."""
