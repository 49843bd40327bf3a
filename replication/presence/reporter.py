"""What a worker reports to its writers: users that sync, and users seen.

The commands are USER_SYNC, CLEAR_USER_SYNC and USER_IP (docs/protocol/wire.md A4).
"""

from __future__ import annotations

import random
import string
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs

from replication.session.connection import Role, check_direction
from replication.wire.commands import LINE_LIMIT, ClearUserSync, Command, UserIp, UserSync, encode_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol

SYNC_LINGER: Final = 10.0  # seconds after the last sync in which the user still counts: the next sync usually follows
SEEN_INTERVAL: Final = 120.0  # seconds in which USER_IP is not repeated for one user, token, address and device
MAX_SEEN: Final = 10_000  # of these combinations, the newest ones


def users_of(syncing: Mapping[str, Mapping[str, int]]) -> list[UserSync]:
    """Return a USER_SYNC for each user: ``syncing`` has the time of the last sync in ms, by instance ID and user."""
    return [
        UserSync(instance_id, user_id, syncing=True, last_sync_ms=last)
        for instance_id, there in syncing.items()
        for user_id, last in there.items()
    ]


def _random_letters() -> str:
    return "".join(random.choices(string.ascii_letters, k=5))  # noqa: S311 (no secret)


@attrs.define(eq=False, repr=False)
class PresenceReporter:
    """Sends a worker's commands to all writers that are connected.

    Args:
        clock: for delays.
        peers: returns the connections to writers.
        wall: the time in seconds since 1970.
        line_limit: the largest line, in bytes without the LF.

    ``instance_id`` is new at every start, so that a writer can clear the users of a process that crashed.  Each new
    connection is sent the users that sync: see ``users_now``.

    """

    _clock: IReactorTime
    _peers: Callable[[], Sequence[ReplicationProtocol]]
    _wall: Callable[[], float]
    _line_limit: int = LINE_LIMIT
    instance_id: str = attrs.field(init=False, factory=_random_letters)
    _syncing: Counter[str] = attrs.field(init=False, factory=Counter)  # the number of syncs in progress, by user
    # Users whose last sync ended less than SYNC_LINGER ago.
    _lingering: dict[str, IDelayedCall] = attrs.field(init=False, factory=dict)
    _has_synced: bool = attrs.field(init=False, default=False)
    _ended: bool = attrs.field(init=False, default=False)
    _seen: OrderedDict[tuple[str, str, str, str | None], float] = attrs.field(init=False, factory=OrderedDict)

    def send(self, command: Command) -> int:
        """Send ``command`` to every connected writer, and return the number of writers.

        LocalProtocolError if a worker may not send it, or if it cannot be encoded.
        """
        check_direction(Role.WORKER, type(command))
        line = encode_line(command, self._line_limit)
        peers = self._peers()
        for peer in peers:
            peer.write(line, 1)
        return len(peers)

    def user_ip(
        self, user_id: str, access_token: str, ip: str, user_agent: str = "", device_id: str | None = None
    ) -> int:
        """Send USER_IP: a user was seen now.  Returns the number of writers.

        It is sent once in 120 s for the same user, access token, address and device; else the result is 0.
        """
        now, key = self._clock.seconds(), (user_id, access_token, ip, device_id)
        if now - self._seen.get(key, now - SEEN_INTERVAL) < SEEN_INTERVAL:
            return 0
        writers = self.send(UserIp(user_id, access_token, ip, user_agent, device_id, self._now_ms()))
        if writers:
            self._seen[key] = now
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
        return writers

    @contextmanager
    def user_syncing(self, user_id: str) -> Iterator[None]:
        """Count a user as syncing here until the block ends, and 10 s longer.

        Blocks of one user may overlap, one for each device.  USER_SYNC is sent when the first begins and after the
        last has ended.
        """
        started = UserSync(self.instance_id, user_id, syncing=True, last_sync_ms=self._now_ms())
        encode_line(started, self._line_limit)
        lingering = self._lingering.pop(user_id, None)
        if lingering is not None:
            lingering.cancel()
        self._syncing[user_id] += 1
        if self._syncing[user_id] == 1 and lingering is None:
            self._has_synced = True
            self.send(started)
        try:
            yield
        finally:
            self._syncing[user_id] -= 1
            if not self._syncing[user_id]:
                del self._syncing[user_id]
                if not self._ended:
                    self._lingering[user_id] = self._clock.callLater(
                        SYNC_LINGER, self._stopped, user_id, self._now_ms()
                    )

    def users(self) -> list[str]:
        """Return the users that sync here."""
        return [*self._syncing, *self._lingering]

    def users_syncing(self) -> dict[str, dict[str, int]]:
        """Return the users that sync here, by this process's instance ID, with the present time in ms."""
        users = self.users()
        return {self.instance_id: dict.fromkeys(users, self._now_ms())} if users else {}

    def users_now(self) -> list[UserSync]:
        """Return what a new connection sends after REPLICATE: the users that sync (docs/protocol/connection.md B1)."""
        return users_of(self.users_syncing())

    def end(self) -> None:
        """Send CLEAR_USER_SYNC, so that writers need not wait for a time-out (docs/protocol/traps.md 11)."""
        self._ended = True
        for lingering in self._lingering.values():
            lingering.cancel()
        self._lingering.clear()
        if self._has_synced:
            self.send(ClearUserSync(self.instance_id))

    def _stopped(self, user_id: str, last_sync_ms: int) -> None:
        del self._lingering[user_id]
        self.send(UserSync(self.instance_id, user_id, syncing=False, last_sync_ms=last_sync_ms))

    def _now_ms(self) -> int:
        return int(self._wall() * 1000)
