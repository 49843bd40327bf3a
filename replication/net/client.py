"""A follower's connection to one writer, made again whenever it is lost.

This is Twisted's ``ClientService`` with another rule for the delay between attempts (docs/protocol/connection.md B5).
The delay grows with every attempt.  It is short again only after a connection that brought the right SERVER, a first
POSITION and no fault.  So neither side can cause a loop of fast reconnects (docs/protocol/traps.md 7).
"""

from __future__ import annotations

import math
import random
import time
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import Factory
from twisted.logger import Logger, LogLevel

from replication.errors import ConfigError
from replication.logs import TroubleLog
from replication.net.echo import Echo
from replication.net.endpoints import (
    check_host_of,
    client_endpoint,
    describe_connect_error,
    describe_endpoint_error,
    show_certificate,
    split_endpoint,
)
from replication.net.protocol import Limits, ReplicationProtocol
from replication.net.reconnecting import FreshEndpoint, ReportingEndpoint, SilentClientService
from replication.net.tls import check_files_of, check_host
from replication.session.backoff import Backoff
from replication.session.connection import Fault, Received, Role
from replication.urls import Url
from replication.wire.commands import COMMANDS, Command, Name, Ping, Position, Replicate, Server
from replication.wire.commands import Error as ErrorCommand

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.internet.interfaces import IAddress, IDelayedCall
    from twisted.python.failure import Failure

    from replication.wire.grammar import InstanceName, StreamName

# All in seconds.
FIRST_DELAY = 0.1
MAX_DELAY = 2.0
MAX_DELAY_WRONG_SERVER = 30.0  # only a change of a configuration ends this fault
MAX_JITTER = 0.1
SERVER_WARNING = 5.0  # a writer sends SERVER at once; a port of another protocol may send nothing
ANSWER_TIMEOUT = 30.0  # without an answer to PING echo; a writer whose database does not answer takes 10 s
SERVER_TIMEOUT = 30.0  # before the writer's first PING, no other time-out counts
REFUSED_SOON = 10.0  # a connection that the writer closes with an ERROR before that is as bad as none
MAX_PAUSE = 2.0  # longer than a slow disk needs, far shorter than the keep-alive time-out

_NO_FILES = ("tcp:", "unix:")  # endpoints that need no certificates: parsed once
_TIMEOUT = "ping timeout: "
_SILENT = "no SERVER line received, although earlier connections received one: restart the writer's process if it hangs"
_NO_SERVER = "no SERVER line received: is this a writer's --listen port, and not its --http port?"


@attrs.define(eq=False, repr=False, slots=False, kw_only=True)
class WriterClient(Factory):
    """Keeps one connection to a writer, and passes on what the writer sends.

    Args:
        reactor: for the connection and all timers.
        endpoint: Twisted's client endpoint string, such as ``tcp:HOST:PORT``.
        server_name: the name that the writer's SERVER must have; None accepts any.
        instance_name: what NAME sends.
        streams: the streams that REPLICATE names; if empty, all are sent.
        limits: of the connection.
        on_received: called with this object and all commands of one read, in order.
        on_lost: called once for each connection that ends.
        on_fault: called with each fault of the writer.
        on_following: called once for each connection, after ``on_received`` had its first positions.
        greeting: returns commands that are sent before REPLICATE, on each new connection.
        users: returns commands that are sent after it, because a writer takes long to process many users.
        commands: those that this end accepts, by name; by default the protocol's.
        wall: the time in seconds since 1970, for PING.
        certificate: the files with the certificate and private key that ``tls:`` shows; ``endpoint`` may name its own.

    ConfigError if Twisted cannot parse ``endpoint``.  Rules: docs/protocol/connection.md.

    """

    noisy = False
    log = Logger()
    _reactor: Any
    endpoint: str
    _server_name: str | None
    _instance_name: InstanceName
    _streams: Sequence[StreamName]
    _limits: Limits
    _on_received: Callable[[WriterClient, Sequence[Received]], None]
    _on_lost: Callable[[WriterClient], None]
    _on_fault: Callable[[Fault], None]
    _on_following: Callable[[WriterClient], None] = lambda _: None
    _greeting: Callable[[], Sequence[Command]] = tuple
    _users: Callable[[], Sequence[Command]] = tuple
    _commands: Mapping[str, type[Command]] = COMMANDS
    _wall: Callable[[], float] = time.time
    _certificate: tuple[str, str] | None = None

    def __attrs_post_init__(self) -> None:
        """Parse ``endpoint``."""
        self.state = "not connected"  # or "connected", "following" or "stopping"
        self.peer: ReplicationProtocol | None = None
        self.resting = 0  # it accepts no connection
        self.connections = 0  # made since the start
        self._trouble = TroubleLog(self.log, LogLevel.warn)
        self._following_logged = self._followed_before = self._greeted_before = False
        self._last_fault: Fault | None = None  # of the present or last connection
        self._refused = False  # whether the writer has sent an ERROR on it
        self._unanswered = False  # whether a connection has failed because no PING came back, and none has since
        self._reported = False  # whether that connection has a trouble in the log
        self._server_timer: IDelayedCall | None = None  # None once SERVER has been received
        self._pause_timer: IDelayedCall | None = None  # None while reading is not paused
        self._echo: Echo | None = None  # None if the writer is not known to answer
        self._backoff = Backoff(FIRST_DELAY, MAX_DELAY, math.e)
        self._wrong_server_backoff = Backoff(FIRST_DELAY, MAX_DELAY_WRONG_SERVER, math.e)
        description = show_certificate(self.endpoint, self._certificate)
        try:
            check_files_of(description)
            check_host_of(description)
            client = client_endpoint(self._reactor, description)
        except Exception as error:
            why = describe_endpoint_error(self.endpoint, error, "tcp:HOST:PORT")
            raise ConfigError(f"cannot connect to {Url(self.endpoint)!r}: {why}") from error
        if not self.endpoint.startswith(_NO_FILES):
            client = FreshEndpoint(self._reactor, description)
        endpoint = ReportingEndpoint(self.endpoint, client, self._connect_failed, self._reactor)
        self._service = SilentClientService(endpoint, self, retryPolicy=self._next_delay, clock=self._reactor)

    def start(self) -> None:
        """Begin to connect."""
        self._service.startService()

    def stop(self) -> Deferred[None]:
        """Close; fires once the connection is gone."""
        if self.peer is not None:
            self.state = "stopping"
            self.peer.close(ErrorCommand.STOPPING)
        return self._service.stopService()

    @property
    def greeted(self) -> bool:
        """Whether the writer is connected, has sent SERVER, and sends PINGs back if it has offered that."""
        return self.peer is not None and self._server_timer is None and not self._unanswered

    @property
    def error(self) -> str | None:
        """The logged reason why this writer is not followed; None while it is followed, or if there is no trouble."""
        return None if self.state == "following" and not self._unanswered else self._trouble.error

    def pause_reading(self) -> None:
        """Read no more until ``resume_reading``, or for MAX_PAUSE seconds; a second call does not extend that."""
        if self._pause_timer is None and self.peer is not None:
            self.peer.pauseProducing()  # type: ignore[no-untyped-call]
            self._pause_timer = self._reactor.callLater(MAX_PAUSE, self.peer.resumeProducing)

    def resume_reading(self) -> None:
        """Read again."""
        timer, self._pause_timer = self._pause_timer, None
        if timer is not None and timer.active():
            timer.cancel()
            if self.peer is not None:
                self.peer.resumeProducing()  # type: ignore[no-untyped-call]

    def can_go_back(self, stream: StreamName) -> bool:  # noqa: ARG002 (over Redis it matters)
        """Whether a position below the known one means that the writer was restored."""
        return True

    def begins_again(self, stream: StreamName) -> bool:  # noqa: ARG002 (over Redis it matters)
        """Return False: a writer that is started again closes the connection."""
        return False

    def position_missing(self) -> None:
        """Do nothing: a writer sends its positions itself, in order."""

    def request_positions(self) -> None:
        """Send REPLICATE, so that the writer sends its positions again; nothing while it is not connected."""
        if self.peer is not None:
            self.peer.send(Replicate(tuple(self._streams)))

    def echo(self, question: str = "") -> Deferred[str | None]:
        """Send a PING with ``question`` and fire with the answer; fire with an empty one if there is none."""
        if self.peer is None:
            return succeed(None)
        return succeed("") if self._echo is None else self._echo.request(question)

    def buildProtocol(self, addr: IAddress | None) -> ReplicationProtocol:  # noqa: ARG002 (Twisted's signature)
        """Return a protocol in the role of a worker."""
        return ReplicationProtocol(
            Role.WORKER, self, self._reactor, self._limits, commands=self._commands, wall=self._wall
        )

    # ---- IConnectionOwner

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """Send the first lines; neither side waits for the other (docs/protocol/connection.md B1)."""
        kind, named = split_endpoint(self.endpoint, "host", "port")
        if kind == "tls":
            check_host(peer.transport.getHandle(), named["host"])
        self.peer = peer
        self.connections += 1
        self.state = "connected"
        self._last_fault, self._reported, self._refused = None, False, False
        self._connected_at = self._reactor.seconds()
        self._server_timer = self._reactor.callLater(SERVER_WARNING, self._warn_of_no_server, peer)
        ping = Ping(str(int(self._wall() * 1000)))
        name, replicate = Name(self._instance_name), Replicate(tuple(self._streams))
        peer.send(name, ping, *self._greeting(), replicate, *self._users())

    def commands_received(self, peer: ReplicationProtocol, received: Sequence[Received]) -> None:
        """Pass commands on; close at the first that the right writer would not send."""
        for index, command in enumerate(received):
            wrong = self._check(peer, command)
            if wrong is not None:
                self._pass_on(received[:index])
                peer.fail(Fault(f"Wrong remote: {wrong}", "wrong server name"))
                return
        self._pass_on(received)

    def peer_failed(self, peer: ReplicationProtocol, fault: Fault) -> None:  # noqa: ARG002 (one peer at a time)
        """Log the fault."""
        self._last_fault = fault
        self._report(f"the writer at {self.endpoint}: {fault.text.removeprefix(_TIMEOUT)}")
        self._on_fault(fault)

    def peer_disconnected(self, peer: ReplicationProtocol) -> None:
        """Note the loss, and pass it on."""
        refused_soon = self._refused and self._reactor.seconds() - self._connected_at < REFUSED_SOON
        if self.state == "following" and self._last_fault is None and not refused_soon:  # now a new trouble begins
            self._trouble.end()
            self._backoff.reset()
            self._wrong_server_backoff.reset()
            self._following_logged = False
            self.log.info("lost {name} at {endpoint}", name=peer.name, endpoint=self.endpoint)
        elif not self._reported and self.state != "stopping":
            self._report(f"the writer at {self.endpoint}: {peer.tls_error or self._describe_early_end()}; retrying")
        self.peer, self._echo, echo = None, None, self._echo
        self._cancel_server_timer()
        self.resume_reading()
        self.state = "not connected"
        self._on_lost(self)
        if echo is not None:
            echo.lost()

    def transport_closed(self, peer: ReplicationProtocol) -> None:
        """Do nothing: ClientService connects again."""

    # ---- inside

    def _check(self, peer: ReplicationProtocol, command: Received) -> str | None:
        """Return why this is not the right writer; None if nothing is wrong."""
        if isinstance(command, Server):
            if self._server_name not in (None, command.name):
                return f"this is {command.name[:100]!r}, {self._server_name!r} was expected; check --server-name"
            self._cancel_server_timer()
            self._greeted_before = True
            peer.name = command.name
        elif isinstance(command, ErrorCommand):
            stops = command.text == ErrorCommand.STOPPING
            self._refused = not stops
            event = "is stopping" if stops else f"sent ERROR: {command.text[:200]!r}"
            self._report(f"the writer at {self.endpoint} {event}")
        elif self._server_timer is not None:
            return "a writer sends SERVER before anything else"
        elif isinstance(command, Ping):
            self._ping_received(peer, command)
        return None

    def _ping_received(self, peer: ReplicationProtocol, ping: Ping) -> None:
        if self._echo is None and ping.text.endswith(Ping.ECHO):
            self._echo = Echo(peer.send, self._reactor.seconds)
            if self._unanswered:
                self._echo.request()
        elif self._echo is None or self._echo.received(ping):
            self._unanswered = False
            if self.state == "following":
                self._log_following()
        elif self._echo.waited() >= ANSWER_TIMEOUT:
            # A writer sends such a PING when it has nothing else to send, so no answer is behind other lines.
            self._unanswered = True
            text = f"{_TIMEOUT}it has not answered PING echo for {ANSWER_TIMEOUT:g} s"
            peer.fail(Fault(text, "ping timeout"))

    def _pass_on(self, received: Sequence[Received]) -> None:
        if received:
            self._on_received(self, received)
        if self.state == "connected" and any(isinstance(each, Position) for each in received):
            self.state = "following"
            self._log_following()
            self._on_following(self)

    def _warn_of_no_server(self, peer: ReplicationProtocol) -> None:
        why = _SILENT if self._greeted_before else _NO_SERVER
        self._report(f"the writer at {self.endpoint}: {why}")  # and the Fault is not logged again
        fault = Fault(f"{_TIMEOUT}{why}", "ping timeout")
        self._server_timer = self._reactor.callLater(SERVER_TIMEOUT - SERVER_WARNING, peer.fail, fault)

    def _describe_early_end(self) -> str:
        if self._server_timer is None:
            return "it closed the connection before its first POSITION"
        guess = self.endpoint.startswith("tcp:") and not self._greeted_before
        tls = "; if that port has TLS, write tls:" if guess else ""
        return f"it closed the connection before SERVER{tls}"

    def _cancel_server_timer(self) -> None:
        timer, self._server_timer = self._server_timer, None
        if timer is not None and timer.active():
            timer.cancel()

    def _connect_failed(self, failure: Failure) -> Failure:
        if self._service.running:  # else stop() cancelled the attempt
            self._report(f"cannot connect to {self.endpoint}: {describe_connect_error(failure)}; retrying")
        return failure

    def _next_delay(self, attempt: int) -> float:  # noqa: ARG002 (it counts from the last TCP connection)
        """Return the number of seconds before the next attempt."""
        wrong_server = self._last_fault is not None and self._last_fault.kind == "wrong server name"
        backoff = self._wrong_server_backoff if wrong_server else self._backoff
        return backoff.next() + random.uniform(0.0, MAX_JITTER)  # noqa: S311 (no secret)

    def _report(self, text: str) -> None:
        self._reported = True
        if self._trouble.report("{error}", error=text):
            self._following_logged = False

    def _log_following(self) -> None:
        """Log that the writer is followed: once, as long as each connection ends with the same fault."""
        if self._following_logged or self._unanswered or self.peer is None:
            return
        again, first = "{name} at {endpoint} is back", "following {name} at {endpoint} as {instance}"
        message = again if self._followed_before else first
        self._following_logged = self._followed_before = True
        self.log.info(message, name=self.peer.name, endpoint=self.endpoint, instance=self._instance_name)
