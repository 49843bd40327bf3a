"""What a follower says to its writers beside asking for facts (protocol A4): who syncs, who was seen, what was sent."""

from __future__ import annotations

import random
import string
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from replication.errors import LocalProtocolError
from replication.session.connection import Role
from replication.wire.commands import (
    LINE_LIMIT,
    ClearUserSync,
    FederationAck,
    RemoteServerUp,
    UserIp,
    UserSync,
    encode_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twisted.internet.interfaces import IDelayedCall, IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.session.connection import Words
    from replication.wire.commands import Command
    from replication.wire.grammar import InstanceName, Token

LINGER: Final = 10.0  # seconds that a user counts as syncing after the last sync: the next one is on its way
SEEN_AGAIN: Final = 120.0  # seconds in which the same user at the same place is not said again
PLACES: Final = 10_000  # that are remembered for that


class Voice:
    """Speaks to all writers that are connected, and says again to each new connection what is still so.

    ``instance_id`` is new at every start, so a writer can forget what a process that crashed has said.
    """

    def __init__(
        self,
        clock: IReactorTime,
        instance_name: InstanceName,
        *,
        words: Words,
        peers: Callable[[], Sequence[ReplicationProtocol]],
        wall: Callable[[], float],
        line_limit: int = LINE_LIMIT,
    ) -> None:
        self.instance_id = "".join(random.choices(string.ascii_letters, k=5))  # noqa: S311 (no secret)
        self._clock = clock
        self._instance_name = instance_name
        self._words = words
        self._peers = peers
        self._wall = wall
        self._line_limit = line_limit
        self._syncing: dict[str, int] = {}  # how many syncs of a user are under way
        self._leaving: dict[str, IDelayedCall] = {}
        self._has_synced = self._ended = False
        self._seen: OrderedDict[tuple[str, str, str, str | None], float] = OrderedDict()

    def say(self, command: Command) -> int:
        """Say ``command`` to every writer that is connected, and return to how many that is.

        LocalProtocolError if it is not a worker's to say, or cannot be said.
        """
        if not self._words.may_say(Role.WORKER, type(command)):
            raise LocalProtocolError(f"{command.WORD} is not for a worker to say")
        line = encode_line(command, self._line_limit)
        peers = self._peers()
        for peer in peers:
            peer.write(line, 1)
        return len(peers)

    def remote_server_up(self, server: str) -> int:
        """Say that a server which was away answers again; all others hear it."""
        return self.say(RemoteServerUp(server))

    def federation_ack(self, token: Token) -> int:
        """Say that the federation stream has been sent on up to ``token``, so that its writer may forget it."""
        return self.say(FederationAck(self._instance_name, token))

    def user_ip(
        self, user_id: str, access_token: str, ip: str, user_agent: str = "", device_id: str | None = None
    ) -> int:
        """Say that a user was seen just now; not again within two minutes, for the same token, address and device."""
        now, key = self._clock.seconds(), (user_id, access_token, ip, device_id)
        if now - self._seen.get(key, now - SEEN_AGAIN) < SEEN_AGAIN:
            return 0
        told = self.say(UserIp(user_id, access_token, ip, user_agent, device_id, self._now_ms()))
        if told:
            self._seen[key] = now
            self._seen.move_to_end(key)
            if len(self._seen) > PLACES:
                self._seen.popitem(last=False)
        return told

    @contextmanager
    def user_syncing(self, user_id: str) -> Iterator[None]:
        """Count a user as syncing here, from any number of devices, until the block is left and ten seconds on.

        Writers are told of the first begin and the last end, and so is each one that is connected to meanwhile.
        """
        started = UserSync(self.instance_id, user_id, syncing=True, last_sync_ms=self._now_ms())
        encode_line(started, self._line_limit)
        leaving = self._leaving.pop(user_id, None)
        if leaving is not None:
            leaving.cancel()
        self._syncing[user_id] = self._syncing.get(user_id, 0) + 1
        if self._syncing[user_id] == 1 and leaving is None:
            self._has_synced = True
            self.say(started)
        try:
            yield
        finally:
            self._syncing[user_id] -= 1
            if not self._syncing[user_id]:
                del self._syncing[user_id]
                if not self._ended:
                    self._leaving[user_id] = self._clock.callLater(LINGER, self._left, user_id, self._now_ms())

    def users(self) -> list[str]:
        """Return the users that sync here."""
        return [*self._syncing, *self._leaving]

    def users_syncing(self) -> dict[str, dict[str, int]]:
        """Return the same by our instance ID, with the time in ms until which they have synced: now."""
        users = self.users()
        return {self.instance_id: dict.fromkeys(users, self._now_ms())} if users else {}

    def hello(self) -> list[Command]:
        """Return what is said to a writer that was just connected to, before it is asked for facts (protocol B1)."""
        now = self._now_ms()
        return [UserSync(self.instance_id, user_id, syncing=True, last_sync_ms=now) for user_id in self.users()]

    def end(self) -> None:
        """Say that nobody syncs here any more: who stops cleanly does not leave that to be found out (trap 11)."""
        self._ended = True
        for leaving in self._leaving.values():
            leaving.cancel()
        self._leaving.clear()
        if self._has_synced:
            self.say(ClearUserSync(self.instance_id))

    def _left(self, user_id: str, last_sync_ms: int) -> None:
        del self._leaving[user_id]
        self.say(UserSync(self.instance_id, user_id, syncing=False, last_sync_ms=last_sync_ms))

    def _now_ms(self) -> int:
        return int(self._wall() * 1000)
