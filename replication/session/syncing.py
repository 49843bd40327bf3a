"""Who syncs where: what USER_SYNC and CLEAR_USER_SYNC say, by process (protocol A4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from replication.wire.commands import UserSync

PATIENCE: Final = 300.0  # seconds (trap 11)


@attrs.define
class _Process:
    users: dict[str, int] = attrs.field(factory=dict)  # when each synced last, in ms
    heard_at: float = 0.0


class SyncingUsers:
    """The users that sync anywhere, and where.

    ``changed`` is called with a user and whether they sync, when they begin at a first process and when they stop at
    their last.  A process that has been silent for ``patience`` seconds, or gone, can no longer say that its users have
    stopped: it is cleared.
    """

    def __init__(self, changed: Callable[[str, bool], None], patience: float = PATIENCE) -> None:
        self._changed = changed
        self._patience = patience
        self._processes: dict[str, _Process] = {}
        self._counts: dict[str, int] = {}  # at how many processes a user syncs

    def __len__(self) -> int:
        """How many users sync."""
        return len(self._counts)

    def __contains__(self, user_id: object) -> bool:
        """Whether a user syncs anywhere."""
        return user_id in self._counts

    def processes(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by instance ID, each user that syncs there, with the time of the last sync in ms."""
        return {instance_id: dict(process.users) for instance_id, process in self._processes.items()}

    def at(self, user_id: str) -> Mapping[str, int]:
        """Return the instance IDs where a user syncs, each with the time of the last sync in ms."""
        return {
            instance_id: process.users[user_id]
            for instance_id, process in self._processes.items()
            if user_id in process.users
        }

    def hear(self, command: UserSync, now: float) -> None:
        """Note that a user has begun or stopped, at ``now`` in seconds."""
        user_id, instance_id = command.user_id, command.instance_id
        process = self._processes.get(instance_id)
        if command.syncing:
            if process is None:
                process = self._processes[instance_id] = _Process()
            known = user_id in process.users
            process.users[user_id] = command.last_sync_ms
            process.heard_at = now
            if not known:
                self._count(user_id, +1)
        elif process is not None:
            process.heard_at = now
            if process.users.pop(user_id, None) is not None:
                if not process.users:
                    del self._processes[instance_id]
                self._count(user_id, -1)

    def clear(self, instance_id: str) -> None:
        """Forget all users of a process."""
        process = self._processes.pop(instance_id, None)
        for user_id in process.users if process is not None else ():
            self._count(user_id, -1)

    def alive(self, instance_id: str, heard_at: float) -> None:
        """Note that a process was heard, whatever it said."""
        process = self._processes.get(instance_id)
        if process is not None:
            process.heard_at = max(process.heard_at, heard_at)

    def expire(self, now: float) -> list[str]:
        """Clear the processes that have been silent for too long, and return their instance IDs."""
        silent = [each for each, process in self._processes.items() if process.heard_at <= now - self._patience]
        for instance_id in silent:
            self.clear(instance_id)
        return silent

    def _count(self, user_id: str, step: int) -> None:
        count = self._counts.get(user_id, 0) + step
        if count:
            self._counts[user_id] = count
        else:
            del self._counts[user_id]
        if count == max(step, 0):
            self._changed(user_id, step > 0)
