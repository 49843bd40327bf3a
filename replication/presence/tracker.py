"""What a writer does with its followers' commands USER_SYNC, CLEAR_USER_SYNC, USER_IP and FEDERATION_ACK.

docs/protocol/wire.md A4 has the meaning of each command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.presence.syncing import SILENCE_LIMIT, SyncingUsers
from replication.streams.interfaces import Sample
from replication.wire.commands import ClearUserSync, Command, FederationAck, UserIp, UserSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twisted.internet.interfaces import IReactorTime

    from replication.net.protocol import ReplicationProtocol
    from replication.presence.last_seen import LastSeen
    from replication.wire.grammar import InstanceName, Token

FLUSH_INTERVAL: Final = 5.0  # seconds between two writes of last_seen, and two searches for silent processes


@attrs.define(eq=False, repr=False, slots=False)
class PresenceTracker:
    """Tracks users that sync and users that were seen, as followers report them.

    ``acknowledged(instance, token)`` is called for each FEDERATION_ACK.  Without ``last_seen``, USER_IP is not stored
    here.  A relay has ``forward(peer, command)``, which is called with each command of a follower, and with the
    CLEAR_USER_SYNC of a silent process and the end of a user in doubt, which have no peer.
    """

    log = Logger()

    _clock: IReactorTime
    syncing: SyncingUsers
    last_seen: LastSeen | None
    _acknowledged: Callable[[InstanceName, Token], object]
    forward: Callable[[ReplicationProtocol | None, Command], object] = lambda _peer, _command: None
    # By the connection that named them.
    _instance_ids: dict[ReplicationProtocol, set[str]] = attrs.field(init=False, factory=dict)

    _refused_logged: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        """Prepare the loop."""
        self._loop = LoopingCall(self._flush)
        self._loop.clock = self._clock

    def start(self) -> None:
        """Begin to write, and to clear silent processes, every FLUSH_INTERVAL seconds."""
        self._loop.start(FLUSH_INTERVAL, now=False)

    async def stop(self) -> None:
        """Write what waits, and stop."""
        if self._loop.running:
            self._loop.stop()
        if self.last_seen is not None:
            await self.last_seen.flush()

    def receive(self, peer: ReplicationProtocol, command: Command) -> None:
        """Process a command; a command that is not about users is only forwarded."""
        self.forward(peer, command)
        match command:
            case UserSync(instance_id):
                known = self._instance_ids.setdefault(peer, set())
                if instance_id not in known:
                    self.syncing.doubt(instance_id, self._clock.seconds())
                self.syncing.receive(command, self._clock.seconds())
                self._log_refused()
                (known.add if self.syncing.knows(instance_id) else known.discard)(instance_id)
            case ClearUserSync(instance_id):
                self.syncing.clear(instance_id)
            case FederationAck(instance, token):
                self._acknowledged(instance, token)
            case UserIp() if self.last_seen is not None:
                self.last_seen.receive(command)

    def lost(self, peer: ReplicationProtocol) -> None:
        """Note when the processes behind a lost connection sent their last command: they may connect again."""
        for instance_id in self._instance_ids.pop(peer, ()):
            self.syncing.alive(instance_id, peer.session.received_at)

    def samples(self) -> Iterable[Sample]:
        """Yield the samples of the metrics page."""
        yield Sample("users_syncing", len(self.syncing))
        yield Sample("users_refused_total", self.syncing.refused)
        if self.last_seen is None:
            return
        yield Sample("user_ips_waiting", len(self.last_seen))
        yield Sample("user_ips_written_total", self.last_seen.written)
        yield Sample("user_ips_dropped_total", self.last_seen.dropped)

    def _log_refused(self) -> None:
        if self.syncing.refused and not self._refused_logged:
            self._refused_logged = True
            self.log.error(
                "the users that sync take {bytes} bytes, so no further user counts: is there a peer that sends "
                "too many USER_SYNC?",
                bytes=self.syncing.max_bytes,
            )

    def _flush(self) -> Deferred[None] | None:
        for peer, instance_ids in self._instance_ids.items():
            instance_ids.intersection_update([each for each in instance_ids if self.syncing.knows(each)])
            for instance_id in instance_ids:
                self.syncing.alive(instance_id, peer.session.received_at)
        for instance_id in self.syncing.expire(self._clock.seconds()):
            self.log.warn(
                "process {instance_id} was silent for {seconds:.0f} s: its users no longer count as syncing",
                instance_id=instance_id,
                seconds=SILENCE_LIMIT,
            )
            self.forward(None, ClearUserSync(instance_id))
        for end in self.syncing.expire_doubted(self._clock.seconds()):
            self.forward(None, end)
        if self.last_seen is None:
            return None
        writing = Deferred.fromCoroutine(self.last_seen.flush())
        return writing.addErrback(lambda failure: self.log.failure("writing users_last_seen", failure))
