"""What a writer does with the commands of its followers that are not about facts (protocol A4).

USER_SYNC and CLEAR_USER_SYNC say who syncs where, USER_IP where a user was last seen, FEDERATION_ACK how much of the
federation stream may be forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.lastseen import LastSeen
from replication.session.syncing import SyncingUsers
from replication.streams.seams import Sample
from replication.wire.commands import ClearUserSync, FederationAck, UserIp, UserSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twisted.internet.interfaces import IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.streams.seams import IStreamStore
    from replication.wire.commands import Command
    from replication.wire.grammar import InstanceName, Token

LOOK_EVERY: Final = 5.0  # seconds between two looks at what is to be written and who is silent


class Effects:
    """Who syncs, and where users were last seen.

    ``acknowledged`` is called with each sender's place in the federation stream, ``changed`` with each user who begins
    or stops to sync.
    """

    log = Logger()

    def __init__(
        self,
        clock: IReactorTime,
        store: IStreamStore,
        *,
        acknowledged: Callable[[InstanceName, Token], None],
        changed: Callable[[str, bool], None],
    ) -> None:
        self.syncing = SyncingUsers(changed)
        self.last_seen = LastSeen(store)
        self._clock = clock
        self._acknowledged = acknowledged
        self._spoke_for: dict[ReplicationProtocol, set[str]] = {}  # the instance IDs that a connection used
        self._looking = LoopingCall(self._look)
        self._looking.clock = clock

    def start(self) -> None:
        """Begin to look at what is to be done."""
        self._looking.start(LOOK_EVERY, now=False)

    async def stop(self) -> None:
        """Write what waits."""
        if self._looking.running:
            self._looking.stop()
        await self.last_seen.flush()

    def hear(self, peer: ReplicationProtocol, command: Command) -> None:
        """Do what a command asks for."""
        match command:
            case UserSync(instance_id):
                self._spoke_for.setdefault(peer, set()).add(instance_id)
                self.syncing.hear(command, self._clock.seconds())
            case ClearUserSync(instance_id):
                self.syncing.clear(instance_id)
            case FederationAck(instance, token):
                self._acknowledged(instance, token)
            case UserIp():
                self.last_seen.hear(command)
            case _:
                pass

    def lost(self, peer: ReplicationProtocol) -> None:
        """Note when the processes behind a connection were heard last: they may be back in a moment, or never."""
        for instance_id in self._spoke_for.pop(peer, ()):
            self.syncing.alive(instance_id, peer.session.heard_at)

    def samples(self) -> Iterable[Sample]:
        """Yield the figures of the metrics page."""
        yield Sample("users_syncing", "gauge", "Users that sync at any process.", len(self.syncing))
        yield Sample("user_ips_waiting", "gauge", "Places of users that wait to be written.", len(self.last_seen))
        yield Sample("user_ips_written_total", "counter", "Places of users written.", self.last_seen.written)
        yield Sample("user_ips_dropped_total", "counter", "Places of users let go unwritten.", self.last_seen.dropped)

    def _look(self) -> Deferred[None]:
        for peer, instance_ids in self._spoke_for.items():
            for instance_id in instance_ids:
                self.syncing.alive(instance_id, peer.session.heard_at)
        for instance_id in self.syncing.expire(self._clock.seconds()):
            self.log.warn("process {instance_id} is gone or silent: its users sync no more", instance_id=instance_id)
        writing = Deferred.fromCoroutine(self.last_seen.flush())
        return writing.addErrback(lambda failure: self.log.failure("writing where users were last seen", failure))
