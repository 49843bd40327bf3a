"""The link to a Synapse from 1.67 on: its processes publish their commands on a channel of Redis, its server name.

One connection is subscribed.  REPLICATE, the only message that is ever published, goes out on a second connection,
which is closed when Redis has confirmed it (docs/protocol/redis.md).
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger, LogLevel
from twisted.python.failure import Failure

from replication.errors import LocalProtocolError
from replication.logs import TroubleLog
from replication.net.endpoints import describe_connect_error, format_address
from replication.net.reconnecting import ReportingEndpoint, SilentClientService
from replication.net.redis_connection import (
    ANSWER_TIMEOUT,
    RedisConnection,
    RedisError,
    RedisPlace,
    ReplyError,
    describe_error,
    encode,
    make_parser,
    publish,
)
from replication.session.backoff import Backoff
from replication.session.channel import ChannelReader, LostRow
from replication.session.connection import Fault, Received
from replication.streams.interfaces import PeerStatus
from replication.synapse import FEDERATION, PRESENCE_FEDERATION, TYPING
from replication.urls import Url
from replication.wire.commands import Command, Rdata, Replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IAddress, IDelayedCall

    from replication.wire.grammar import InstanceName, StreamName

# All in seconds.
FIRST_DELAY: Final = 0.1
MAX_DELAY: Final = 10.0
MAX_JITTER: Final = 0.1
STABLE: Final = 30.0  # a connection that lasts so long makes the delays short again
PING_AFTER: Final = 30.0
GIVE_UP_AFTER: Final = 60.0  # of silence
COLLECT: Final = 1.0  # after the first POSITION: the other processes answer REPLICATE meanwhile
NO_POSITION: Final = 10.0  # without any POSITION, the server name may be wrong
ECHO_TIMEOUT: Final = 30.0  # until a REPLICATE that Redis has confirmed arrives at the subscription
REQUEST_INTERVAL: Final = 60.0  # between REPLICATEs, except at a new connection: each process answers with a volley

_IN_MEMORY: Final = {each.name for each in (TYPING, PRESENCE_FEDERATION, FEDERATION)}  # they begin at 0 again
_REPLICATE: Final = f"{Replicate.WORD} ".encode()


class RedisPeer(RedisConnection):
    """The subscribed connection.  ``since`` is in seconds since 1970; ``address`` is that of Redis."""

    def __init__(self, client: RedisClient, clock: Any, since: float) -> None:
        self._client = client
        self._clock = clock
        self.since = since
        self.name = client.channel
        self.address = self.last_command = ""
        self.subscribed = self._ended = False
        self._timer: IDelayedCall | None = None
        self._echo_timer: IDelayedCall | None = None
        self._echoed = False  # whether a REPLICATE has arrived since ``forget_echo``

    def connectionMade(self) -> None:
        """Log in and subscribe."""
        super().connectionMade()
        self.address = format_address(self.transport.getPeer())
        self._received_at = self._clock.seconds()
        self._timer = self._clock.callLater(ANSWER_TIMEOUT, self._tick)
        self._client.peer_connected(self)
        self.log_in(self._client.place, encode(b"SUBSCRIBE", self.name.encode()))

    def dataReceived(self, data: bytes) -> None:
        """Process one read; messages are processed together."""
        self._received_at = self._clock.seconds()
        try:
            replies = self.parse(data)
        except RedisError as error:
            self.fail(Fault(str(error), "bad reply"))
            return
        messages = []
        for reply in replies:
            if type(reply) is list and reply[:1] == [b"message"] and type(reply[-1]) is bytes:
                messages.append(reply[-1])
            elif isinstance(reply, ReplyError):
                self.fail(Fault(describe_error(Failure(reply), self._client.place, self.name), "redis error"))
                return
            elif type(reply) is list and reply[:1] == [b"subscribe"]:
                self._confirm()
        if not self._echoed and _REPLICATE in messages:
            self.forget_echo()
            self._echoed = True
        if messages and not self._ended:
            self._client.messages_received(self, messages)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Stop the timers."""
        super().connectionLost(reason)
        self.forget_echo()
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._ended = True
        self._client.peer_disconnected(self)

    def forget_echo(self) -> None:
        """Forget whether a REPLICATE has arrived, and wait for none: another one follows, or nothing can arrive."""
        self._echoed = False
        timer, self._echo_timer = self._echo_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def published(self, _: int) -> None:
        """Close unless the REPLICATE that Redis has confirmed arrives here, too.

        After a failover, a proxy or a service may connect to another Redis, while the subscribed connection stays.
        """
        if not self._ended and not self._echoed:
            text = (
                "Redis has confirmed REPLICATE, and it did not arrive at the subscription: "
                "that is at another Redis, perhaps since a failover; connecting again"
            )
            self._echo_timer = self._clock.callLater(ECHO_TIMEOUT, self.fail, Fault(text, "redis error"))

    def fail(self, fault: Fault) -> None:
        """Close because of ``fault``."""
        if not self._ended:
            self._ended = True
            self._client.peer_failed(fault)
            self.transport.abortConnection()

    def other_tls(self) -> str:
        """Return what to do if TLS is why nothing was received; empty if something was."""
        if self.bytes_in:
            return ""
        scheme, _, place = self._client.endpoint.partition("://")
        cures = {
            "rediss": f"; if that port has no TLS, write redis://{place}",
            "redis": f"; if that port has TLS, write rediss://{place}",
        }
        return cures.get(scheme, "")

    def send(self, *commands: Command) -> None:
        """Refuse: other processes of the homeserver would receive it (docs/protocol/redis.md)."""
        words = ", ".join(each.WORD for each in commands)
        raise LocalProtocolError(f"{words} may not be sent over Redis: nothing but REPLICATE is published there")

    def status(self) -> PeerStatus:
        """Return what status pages show of this connection."""
        return self._client.status_of(self)

    def _confirm(self) -> None:
        if not self.subscribed:
            self.subscribed = True
            self._client.subscribed()

    def _tick(self) -> None:
        """Ping, or give up."""
        silence = self._clock.seconds() - self._received_at
        if not self.subscribed:
            text = f"it has not confirmed the subscription within {ANSWER_TIMEOUT:g} s{self.other_tls()}"
            self.fail(Fault(text, "ping timeout"))
        elif silence >= GIVE_UP_AFTER:
            self.fail(Fault(f"nothing received for {silence:.0f} s, not even an answer to PING", "ping timeout"))
        else:
            self.write(encode(b"PING"))
            self._timer = self._clock.callLater(PING_AFTER, self._tick)


@attrs.define(eq=False, repr=False, slots=False, kw_only=True)
class RedisClient(Factory):
    """Keeps a subscription to the channel of one Synapse, and passes on what its processes publish.

    Args:
        reactor: for the connections and all timers.
        url: ``redis://[user:password@]host:port/db``, ``rediss://…`` with TLS, or ``redis+unix:///path``.
        password: for a URL without one; None: there is none.
        certificate: files with the certificate and private key that ``rediss://`` shows; None: it shows none.
        channel: the server name.
        instance_name: of this process.  If another process publishes under it, nothing is followed any more.
        wants: whether a stream is followed.
        command: returns the class of a command that the application takes, by name, else None.
        on_received: called with this object and all commands of one read, in order.
        on_lost: called once for each connection that ends.
        on_fault: called with the reason of each connection that is closed from this end.
        on_following: called once for each connection, when the processes had time to send their positions.
        wall: the time in seconds since 1970.

    ``published`` counts the REPLICATEs sent.  It is an ``IWriterLink``.  ConfigError if ``url`` is not valid, or
    ``hiredis`` is not installed.  Rules: docs/protocol/redis.md.

    """

    noisy = False
    log = Logger()
    _reactor: Any
    _url: str
    _password: str | None = None
    _certificate: tuple[str, str] | None = None
    channel: str
    _instance_name: InstanceName
    _wants: Callable[[StreamName], bool]
    _command: Callable[[str], type[Command] | None] = lambda _: None
    _on_received: Callable[[RedisClient, Sequence[Received | LostRow]], None]
    _on_lost: Callable[[RedisClient], None]
    _on_fault: Callable[[Fault], None]
    _on_following: Callable[[RedisClient], None] = lambda _: None
    _wall: Callable[[], float] = time.time

    def __attrs_post_init__(self) -> None:
        """Read the URL."""
        make_parser()
        self.place = RedisPlace.parse(self._reactor, self._url, self._password, self._certificate)
        self.endpoint = str(Url(self._url))
        self.state = "not connected"
        self.peer: RedisPeer | None = None
        self.connections = self.published = 0
        self.reader = ChannelReader(instance_name=self._instance_name, wants=self._wants, command=self._command)
        self._logged_commands = self._logged_streams = 0  # names of the reader that are logged
        self._trouble = TroubleLog(self.log, LogLevel.warn)
        self._backoff = Backoff(FIRST_DELAY, MAX_DELAY, math.e)
        self._published_at = -math.inf  # seconds of the reactor
        self._publishing: Deferred[Any] | None = None
        self._request_timer: IDelayedCall | None = None  # until REPLICATE may be published again
        self._position_timer: IDelayedCall | None = None  # until positions should be here
        self._reported = self._ended = False
        self._following_since: float | None = None
        endpoint = ReportingEndpoint(self.endpoint, self.place.endpoint, self._connect_failed, self._reactor)
        self._service = SilentClientService(endpoint, self, retryPolicy=self._next_delay, clock=self._reactor)

    def start(self) -> None:
        """Begin to connect."""
        self._service.startService()

    def stop(self) -> Deferred[None]:
        """Close; fires once the connection is gone."""
        self._ended = True
        self.state = "stopping"
        self._cancel_timers()
        if self._publishing is not None:
            self._publishing.cancel()
        return self._service.stopService()

    @property
    def greeted(self) -> bool:
        """Whether Redis has confirmed the subscription, and a process has answered, or has time left for that."""
        return self._subscribed and (self.state == "following" or not self._reported)

    @property
    def error(self) -> str | None:
        """The logged reason why nothing is followed; None while it is, or if there is no trouble."""
        return None if self.state == "following" else self._trouble.error

    def pause_reading(self) -> None:
        """Go on reading: Redis drops a subscriber that does not read, and the follower fetches what it drops."""

    def resume_reading(self) -> None:
        """Do nothing: reading never pauses."""

    def can_go_back(self, stream: StreamName) -> bool:
        """Whether the stream is in memory: a lower position of another stream does not mean that facts are lost."""
        return stream in _IN_MEMORY

    begins_again = can_go_back  # its writer was started again, while the connection to Redis stays

    def position_missing(self) -> None:
        """Request positions: the writer's connection to Redis was lost with its answer to REPLICATE."""
        if self.state == "following":
            self.request_positions()

    def echo(self, question: str = "") -> Deferred[str | None]:  # noqa: ARG002
        """Fire with an empty answer: a Synapse has no histories, for which this is asked."""
        return succeed("")

    def request_positions(self) -> None:
        """Publish REPLICATE, once within REQUEST_INTERVAL: every process of the homeserver answers."""
        if self._subscribed and self._publishing is None and self._request_timer is None:
            wait = self._published_at + REQUEST_INTERVAL - self._reactor.seconds()
            self._request_timer = self._reactor.callLater(max(0.0, wait), self._publish)

    def buildProtocol(self, addr: IAddress | None) -> RedisPeer:  # noqa: ARG002 (Twisted's signature)
        """Return a protocol that subscribes."""
        return RedisPeer(self, self._reactor, self._wall())

    # ---- what the connection calls

    def peer_connected(self, peer: RedisPeer) -> None:
        """Note the connection; nothing is received before the subscription."""
        self.peer = peer
        self.connections += 1
        self.state = "connected"
        self._reported = False

    def subscribed(self) -> None:
        """Publish REPLICATE: whatever answers it is received."""
        self._position_timer = self._reactor.callLater(NO_POSITION, self._warn_of_no_position)
        self._publish()

    def messages_received(self, peer: RedisPeer, messages: Sequence[bytes]) -> None:
        """Pass on the commands of one read."""
        positions = self.reader.positions
        received = self.reader.receive(messages)
        fault = received.pop() if received and isinstance(received[-1], Fault) else None
        if received:
            peer.last_command = getattr(received[-1], "WORD", Rdata.WORD)
            self._on_received(self, received)
        if isinstance(fault, Fault):
            peer.fail(fault)
            self._give_up()
        elif self._following_since is None and self.reader.positions > positions:
            self._following_since = self._reactor.seconds()
            self._cancel_timers()
            self._position_timer = self._reactor.callLater(COLLECT, self._follow)
        self._log_names()

    def peer_failed(self, fault: Fault) -> None:
        """Log the fault."""
        self._report(f"{self.endpoint}: {fault.text}")
        self._on_fault(fault)

    def peer_disconnected(self, peer: RedisPeer) -> None:
        """Note the loss: no stream is connected until its writers send positions again."""
        since, self._following_since = self._following_since, None
        if since is not None and self._reactor.seconds() - since >= STABLE:
            self._backoff.reset()
        if self.state == "following" and not self._reported:
            self._trouble.end()
            self.log.info("lost {channel} at {endpoint}", channel=self.channel, endpoint=self.endpoint)
        elif not self._reported and not self._ended:
            why = peer.tls_error or f"it closed the connection{peer.other_tls()}"
            self._report(f"{self.endpoint}: {why}; retrying")
        self.peer = None
        self._cancel_timers()
        self.state = "stopped" if self.reader.closed else "stopping" if self._ended else "not connected"
        self._on_lost(self)

    def status_of(self, peer: RedisPeer) -> PeerStatus:
        """Return what status pages show of a connection."""
        return PeerStatus(
            name=peer.name,
            address=peer.address,
            since=peer.since,
            lines_out=self.published,
            bytes_out=peer.bytes_out,
            queued_bytes=0,
            last_command=peer.last_command,
            skipped=dict(self.reader.skipped),
            unknown_commands=tuple(self.reader.unknown_commands),
            not_followed=tuple(self.reader.not_followed),
        )

    # ---- inside

    @property
    def _subscribed(self) -> bool:
        return self.peer is not None and self.peer.subscribed

    def _publish(self) -> None:
        """Publish REPLICATE on a connection of its own: a subscribed connection cannot publish."""
        self._cancel_request()
        if self._publishing is not None:
            self._publishing.cancel()
        self._published_at = self._reactor.seconds()
        self.published += 1
        publishing = self._publishing = publish(self._reactor, self.place, self.channel, _REPLICATE)
        if self.peer is not None:
            self.peer.forget_echo()
            publishing.addCallback(self.peer.published)
        publishing.addErrback(self._publish_failed, self.peer)

        def done(_: object) -> None:
            if self._publishing is publishing:
                self._publishing = None

        publishing.addCallback(done)

    def _publish_failed(self, failure: Failure, peer: RedisPeer | None) -> None:
        """Connect again: without REPLICATE, no process would send its positions."""
        if self._ended or peer is None or peer is not self.peer:
            return
        fault = Fault(f"cannot publish REPLICATE: {describe_error(failure, self.place, self.channel)}", "redis error")
        if self.state == "following":
            self._report(f"{self.endpoint}: {fault.text}")
        else:
            peer.fail(fault)

    def _follow(self) -> None:
        """Note that the processes had time to send their positions."""
        self.state = "following"
        self._trouble.end()
        self.log.info(
            "following {channel} at {endpoint} as {instance}",
            channel=self.channel,
            endpoint=self.endpoint,
            instance=self._instance_name,
        )
        self._on_following(self)

    def _give_up(self) -> None:
        """Follow nothing any more: two processes with one name drop each other's commands."""
        self.log.critical(
            "{endpoint} is not followed any more: another process has the instance name {name}; start this process "
            "with an instance name of its own",
            endpoint=self.endpoint,
            name=self._instance_name,
        )
        self._service.stopService()

    def _warn_of_no_position(self) -> None:
        self._report(
            f"{self.endpoint}: no process answers REPLICATE on the channel {self.channel}: check server_name, and that "
            "a Synapse with workers uses this Redis"
        )

    def _log_names(self) -> None:
        """Log each unknown command, and each stream that is not followed, once."""
        commands = self.reader.unknown_commands[self._logged_commands :]
        streams = self.reader.not_followed[self._logged_streams :]
        self._logged_commands += len(commands)
        self._logged_streams += len(streams)
        if commands:
            self.log.info(
                "{where}: unknown commands are skipped: {names}", where=self.endpoint, names=", ".join(commands)
            )
        if streams:
            self.log.info("{where}: streams not followed: {names}", where=self.endpoint, names=", ".join(streams))

    def _cancel_request(self) -> None:
        timer, self._request_timer = self._request_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _cancel_timers(self) -> None:
        self._cancel_request()
        timer, self._position_timer = self._position_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _connect_failed(self, failure: Failure) -> Failure:
        if self._service.running:  # else stop() cancelled the attempt
            self._report(f"cannot connect to {self.endpoint}: {describe_connect_error(failure)}; retrying")
        return failure

    def _next_delay(self, attempt: int) -> float:  # noqa: ARG002 (it counts from the last TCP connection)
        """Return the number of seconds before the next attempt."""
        return self._backoff.next() + random.uniform(0.0, MAX_JITTER)  # noqa: S311 (no secret)

    def _report(self, text: str) -> None:
        self._reported = True
        self._trouble.report("{error}", error=self.place.hide_in(text))
