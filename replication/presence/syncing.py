"""Which users sync at which process, from USER_SYNC and CLEAR_USER_SYNC (docs/protocol/wire.md A4).  No I/O."""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING, Final

import attrs

from replication.wire.commands import UserSync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_SYNCING_BYTES: Final = 64 * 2**20  # of memory for all users: 350,000 with common IDs
_USER_BYTES: Final = 150  # of a user at one process, beside the ID (CPython 3.11, 64 bits)
SILENCE_LIMIT: Final = 300.0  # seconds (docs/protocol/traps.md 11)


@attrs.define
class _Process:
    users: dict[str, int] = attrs.field(factory=dict)  # the time of each user's last sync, in ms since 1970
    received_at: float = 0.0
    doubted: dict[str, float] = attrs.field(factory=dict)  # since when, for users that a new connection has not named


@attrs.define(eq=False)
class SyncingUsers:
    """The users that sync, by process.

    ``changed(user_id, syncing)`` is called when a user begins to sync at a first process, and when the user syncs at no
    process any more.  The users of a process that was silent for SILENCE_LIMIT seconds are cleared by ``expire``.

    A process repeats its users over a new connection.  Those that it has not repeated for so long stopped between the
    two connections: ``expire_doubted`` removes them.

    All users take ``max_bytes`` bytes at most.  Further ones do not count; ``refused`` is how often that happened.
    """

    _changed: Callable[[str, bool], None]
    _processes: dict[str, _Process] = attrs.field(init=False, factory=dict)  # by instance ID
    _counts: dict[str, int] = attrs.field(init=False, factory=dict)  # the number of processes at which a user syncs
    max_bytes: int = attrs.field(default=MAX_SYNCING_BYTES, kw_only=True)
    refused: int = attrs.field(init=False, default=0)
    _bytes: int = attrs.field(init=False, default=0)  # the approximate memory of all users

    def knows(self, instance_id: str) -> bool:
        """Return whether any user syncs at a process."""
        return instance_id in self._processes

    def __len__(self) -> int:
        """Return the number of users that sync."""
        return len(self._counts)

    def __contains__(self, user_id: object) -> bool:
        """Return whether a user syncs at any process."""
        return user_id in self._counts

    def processes(self) -> Mapping[str, Mapping[str, int]]:
        """Return the users by instance ID, each with the time of the last sync in ms since 1970."""
        return {instance_id: dict(process.users) for instance_id, process in self._processes.items()}

    def receive(self, command: UserSync, now: float) -> None:
        """Note that a user has begun or stopped syncing; ``now`` is in seconds of the caller's clock."""
        user_id, instance_id = command.user_id, command.instance_id
        process = self._processes.get(instance_id)
        if command.syncing:
            known = process is not None and user_id in process.users
            if not known and self._bytes + _size(instance_id, user_id) > self.max_bytes:
                self.refused += 1
                return
            if process is None:
                process = self._processes[instance_id] = _Process()
            process.users[user_id] = command.last_sync_ms
            process.doubted.pop(user_id, None)
            process.received_at = now
            if not known:
                self._count(instance_id, user_id, +1)
        elif process is not None:
            process.received_at = now
            self._remove(instance_id, user_id)

    def clear(self, instance_id: str) -> None:
        """Remove all users of a process."""
        process = self._processes.pop(instance_id, None)
        for user_id in process.users if process is not None else ():
            self._count(instance_id, user_id, -1)

    def doubt(self, instance_id: str, now: float) -> None:
        """Note that a process has a new connection: it repeats the users that still sync."""
        process = self._processes.get(instance_id)
        if process is not None:
            for user_id in process.users:
                process.doubted.setdefault(user_id, now)

    def alive(self, instance_id: str, received_at: float) -> None:
        """Note when any command of a process was received, in seconds of the caller's clock."""
        process = self._processes.get(instance_id)
        if process is not None:
            process.received_at = max(process.received_at, received_at)

    def expire(self, now: float) -> list[str]:
        """Clear the processes that were silent for too long, and return their instance IDs."""
        oldest = now - SILENCE_LIMIT
        silent = [each for each, process in self._processes.items() if process.received_at <= oldest]
        for instance_id in silent:
            self.clear(instance_id)
        return silent

    def expire_doubted(self, now: float) -> list[UserSync]:
        """Remove the users that were in doubt for SILENCE_LIMIT seconds, and return the end of each."""
        oldest = now - SILENCE_LIMIT
        ends = [
            UserSync(instance_id, user_id, syncing=False, last_sync_ms=process.users[user_id])
            for instance_id, process in self._processes.items()
            for user_id, since in process.doubted.items()
            if since <= oldest
        ]
        for each in ends:
            self._remove(each.instance_id, each.user_id)
        return ends

    def _remove(self, instance_id: str, user_id: str) -> None:
        process = self._processes[instance_id]
        process.doubted.pop(user_id, None)
        if process.users.pop(user_id, None) is not None:
            if not process.users:
                del self._processes[instance_id]
            self._count(instance_id, user_id, -1)

    def _count(self, instance_id: str, user_id: str, step: int) -> None:
        self._bytes += step * _size(instance_id, user_id)
        count = self._counts.get(user_id, 0) + step
        if count:
            self._counts[user_id] = count
        else:
            del self._counts[user_id]
        if count == max(step, 0):
            self._changed(user_id, step > 0)


def _size(instance_id: str, user_id: str) -> int:
    """Return the approximate memory of a user at one process, in bytes."""
    return _USER_BYTES + getsizeof(instance_id) + getsizeof(user_id)
