"""Users over HTTP: who syncs where, and where one was last seen, as USER_SYNC and USER_IP have said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from replication.web.exchange import Answer, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.wire.commands import UserIp


class IUsers(Protocol):
    """What is known of users: by a Master or a Worker."""

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by instance ID, each user that syncs there, with the time of the last sync in ms."""
        ...

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen, the latest first; StoreError or NotAWriterError if that cannot be told."""
        ...


async def answer_users(users: IUsers) -> Answer:
    """Return everybody who syncs, and where; times are in ms of the epoch."""
    places: dict[str, dict[str, int]] = {}
    for instance_id, syncing in users.users_syncing().items():
        for user_id, last_sync_ms in syncing.items():
            places.setdefault(user_id, {})[instance_id] = last_sync_ms
    return say({"users": [{"user_id": user_id, "syncing": places[user_id]} for user_id in sorted(places)]})


async def answer_user(users: IUsers, user_id: str) -> Answer:
    """Return one user: where they sync, and where they were seen; an access token is nothing to show."""
    syncing = {instance_id: there[user_id] for instance_id, there in users.users_syncing().items() if user_id in there}
    seen = [
        {"ip": each.ip, "user_agent": each.user_agent, "device_id": each.device_id, "last_seen": each.last_seen}
        for each in await users.places_of(user_id)
    ]
    return say({"user_id": user_id, "syncing": syncing, "seen": seen})
