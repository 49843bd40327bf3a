"""A follower's link to one writer: connect, and connect again, for as long as it is wanted.

A ``ClientService`` with one rule of ours: the wait between attempts is only short again once the peer has said the
right SERVER and a first POSITION, and nothing wrong after that.  Else every loss lengthens it, so a master that we hang
up on, or that hangs up on us, is not called in a tight loop (protocol B5, trap 7).
"""

from __future__ import annotations

import math
import random
import re
from importlib import import_module
from typing import TYPE_CHECKING

import attrs
from twisted.application.internet import ClientService, backoffPolicy
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.logger import Logger, LogPublisher
from zope.interface import implementer

from replication.errors import TLS_CURE, ConfigError
from replication.net.protocol import Limits, ReplicationProtocol
from replication.session.connection import Fault, Role
from replication.wire.commands import Error as ErrorCommand
from replication.wire.commands import Name, Ping, Position, Replicate, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from twisted.internet.defer import Deferred
    from twisted.internet.interfaces import IAddress, IDelayedCall, IProtocol, IProtocolFactory
    from twisted.python.failure import Failure

    from replication.session.connection import Heard, Words
    from replication.wire.commands import Command
    from replication.wire.grammar import InstanceName, StreamName

FIRST_DELAY = 0.1  # seconds; protocol B5
MAX_DELAY = 2.0
HELLO_PATIENCE = 30.0  # seconds for a writer to say SERVER: its silence counts no other way before its first PING
LONGEST_REST = 2.0  # seconds: a slow disk; far below what keep-alives bear


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _ToldEndpoint:
    """An endpoint that tells why it cannot connect: ClientService keeps that to itself."""

    name: str
    endpoint: IStreamClientEndpoint
    failed: Callable[[Failure], Failure]

    def __str__(self) -> str:
        """Return what ClientService's log lines call it."""
        return self.name

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803 (Twisted's name)
        """Connect."""
        return self.endpoint.connect(protocolFactory).addErrback(self.failed)


class _QuietClientService(ClientService):
    """A ClientService that does not log each of its attempts."""

    _log = Logger(observer=LogPublisher())  # to nobody


class WriterLink(Factory):
    """Keeps one connection to ``endpoint`` and passes on what its writer says.

    ``server_name`` is what SERVER must say; None takes whoever answers.  ``hello`` returns what we say before we ask.
    """

    noisy = False
    log = Logger()

    def __init__(
        self,
        reactor: Any,
        endpoint: str,
        *,
        server_name: str | None,
        instance_name: InstanceName,
        streams: Sequence[StreamName],
        limits: Limits,
        on_heard: Callable[[WriterLink, Sequence[Heard]], None],
        on_lost: Callable[[WriterLink], None],
        on_fault: Callable[[Fault], None],
        hello: Callable[[], Sequence[Command]] = tuple,
        words: Words | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.state = "not connected"
        self.peer: ReplicationProtocol | None = None
        self.connections = 0
        self._reactor = reactor
        self._server_name = server_name
        self._instance_name = instance_name
        self._streams = tuple(streams)
        self._limits = limits
        self._on_heard = on_heard
        self._on_lost = on_lost
        self._on_fault = on_fault
        self._more = hello
        self._words = words
        self._said = ""
        self._good_said = self._was_good = False
        self._faulted = False
        self._hello: IDelayedCall | None = None  # there while SERVER is to come
        self._resting: IDelayedCall | None = None
        self._attempts = 0  # since the last good conversation; ClientService counts since the last TCP connection
        self._backoff = backoffPolicy(FIRST_DELAY, MAX_DELAY, math.e, jitter=lambda: random.uniform(0.0, 0.1))  # noqa: S311
        try:
            client = clientFromString(reactor, endpoint)
        except Exception as error:
            why = endpoint_trouble(endpoint, error, "tcp:HOST:PORT")
            raise ConfigError(f"cannot connect to {endpoint!r}: {why}") from error
        self._service = _QuietClientService(
            _ToldEndpoint(endpoint, client, self._connect_failed), self, retryPolicy=self._next_delay, clock=reactor
        )

    def start(self) -> None:
        """Begin to connect."""
        self._service.startService()

    def stop(self) -> Deferred[None]:
        """Close; fires once the connection is gone."""
        if self.peer is not None:
            self.state = "stopping"
            self.peer.close("server stopping")
        return self._service.stopService()

    @property
    def greeted(self) -> bool:
        """Whether the writer is there and has said SERVER."""
        return self.peer is not None and self._hello is None

    def rest(self) -> None:
        """Read no more until ``go_on``, but for LONGEST_REST at most, and not again before that."""
        if self._resting is None and self.peer is not None:
            self.peer.pauseProducing()  # type: ignore[no-untyped-call]
            self._resting = self._reactor.callLater(LONGEST_REST, self.peer.resumeProducing)

    def go_on(self) -> None:
        """Read on."""
        resting, self._resting = self._resting, None
        if resting is not None and resting.active():
            resting.cancel()
            if self.peer is not None:
                self.peer.resumeProducing()  # type: ignore[no-untyped-call]

    def ask(self) -> None:
        """Have the writer tell its positions again, if it is there."""
        if self.peer is not None:
            self.peer.say(Replicate(self._streams))

    def buildProtocol(self, addr: IAddress | None) -> ReplicationProtocol:  # noqa: ARG002 (Twisted's signature)
        """Return a protocol that speaks as a worker."""
        return ReplicationProtocol(Role.WORKER, self, self._reactor, self._limits, words=self._words)

    # ---- Conversation

    def peer_connected(self, peer: ReplicationProtocol) -> None:
        """Introduce ourselves; neither side waits for the other (protocol B1)."""
        self.peer = peer
        self.connections += 1
        self.state = "connected"
        self._faulted = False
        lacking = f"no SERVER line for {HELLO_PATIENCE:g} s: is that a writer's --listen, and not its --http?"
        silent = Fault(f"ping timeout: {lacking}", "ping timeout")
        self._hello = self._reactor.callLater(HELLO_PATIENCE, peer.fail, silent)
        now = int(self._reactor.seconds() * 1000)
        peer.say(Name(self._instance_name), Ping(str(now)), *self._more(), Replicate(self._streams))

    def peer_said(self, peer: ReplicationProtocol, heard: Sequence[Heard]) -> None:
        """Check who speaks, and pass on what is said, up to what is wrong."""
        for index, command in enumerate(heard):
            wrong = self._check(peer, command)
            if wrong is not None:
                self._pass_on(heard[:index])
                peer.fail(Fault(f"Wrong remote: {wrong}", "wrong server name"))
                return
        self._pass_on(heard)

    def _check(self, peer: ReplicationProtocol, command: Heard) -> str | None:
        """Return why we are not talking to the right writer, if we are not."""
        if isinstance(command, Server):
            if self._server_name not in (None, command.name):
                return f"this is {command.name[:100]!r}, {self._server_name!r} was expected"
            self._end_hello()
            peer.name = command.name
        elif isinstance(command, ErrorCommand):
            self._tell(f"the writer at {self.endpoint} says: {command.text[:200]!r}")
        elif self._hello is not None:
            return "a writer speaks its SERVER line first"
        return None

    def _pass_on(self, heard: Sequence[Heard]) -> None:
        if heard:
            self._on_heard(self, heard)
        if self.state == "connected" and any(isinstance(each, Position) for each in heard):
            self.state = "following"
            self._tell_good()

    def peer_faulted(self, peer: ReplicationProtocol, fault: Fault) -> None:  # noqa: ARG002 (one peer at a time)
        """Say what was wrong with it."""
        self._faulted = True
        self._tell(f"the writer at {self.endpoint}: {fault.text}")
        self._on_fault(fault)

    def peer_lost(self, peer: ReplicationProtocol) -> None:
        """Note the loss; ClientService connects again."""
        if self.state == "following" and not self._faulted:  # all was well: what comes now is new trouble
            self._said = ""
            self._attempts = 0
            self._good_said = False
            self.log.info("lost {name} at {endpoint}", name=peer.name, endpoint=self.endpoint)
        self.peer = None
        self._end_hello()
        self.go_on()
        self.state = "not connected"
        self._on_lost(self)

    def peer_gone(self, peer: ReplicationProtocol) -> None:
        """Do nothing: ClientService knows."""

    # ---- inside

    def _end_hello(self) -> None:
        hello, self._hello = self._hello, None
        if hello is not None and hello.active():
            hello.cancel()

    def _connect_failed(self, failure: Failure) -> Failure:
        if self._service.running:  # else it is stop() that ended the attempt
            self._tell(f"cannot connect to {self.endpoint}: {failure.getErrorMessage()}")
        return failure

    def _next_delay(self, attempt: int) -> float:  # noqa: ARG002 (ours counts since the last good conversation)
        """Return how many seconds to wait before the next attempt."""
        delay = self._backoff(self._attempts)
        self._attempts += 1
        return delay

    def _tell(self, text: str) -> None:
        """Log what went wrong, but not the same thing at every attempt."""
        if text != self._said:
            self._said = text
            self._good_said = False
            self.log.warn("{text}", text=text)

    def _tell_good(self) -> None:
        """Log that we follow, but not at every attempt of a writer with which the same thing goes wrong each time."""
        if self._good_said or self.peer is None:
            return
        text = "{name} at {endpoint} is back" if self._was_good else "following {name} at {endpoint} as {instance}"
        self._good_said = self._was_good = True
        self.log.info(text, name=self.peer.name, endpoint=self.endpoint, instance=self._instance_name)


def endpoint_trouble(endpoint: str, error: Exception, form: str) -> str:
    """Return what is wrong with an endpoint for which Twisted's parsers raised ``error``, which may be anything.

    ``form`` is how a plain one looks.
    """
    kind = endpoint.partition(":")[0]
    if kind in {"ssl", "tls"} and not _has_tls():
        return TLS_CURE
    if kind == "tcp" or str(error).startswith("Unknown endpoint type"):
        return f"write {form}"
    return f"not an endpoint ({error})"


def _has_tls() -> bool:
    try:
        import_module("OpenSSL")
        import_module("service_identity")
    except ImportError:
        return False
    return True


def http_beside(endpoint: str) -> str | None:
    """Return where the HTTP of the writer at ``endpoint`` is unless somebody says otherwise: same host, next port.

    None where that cannot be told: only ``tcp:`` endpoints have a host and a port.
    """
    kind, *parts = [part.replace("\\", "") for part in re.split(r"(?<!\\):", endpoint)]
    named = dict(part.split("=", 1) for part in parts if "=" in part)
    plain = [part for part in parts if "=" not in part]
    host = named.get("host") or (plain.pop(0) if plain else "")
    port = named.get("port") or (plain.pop(0) if plain else "")
    if kind != "tcp" or not host or not port.isdecimal():
        return None
    return f"http://{f'[{host}]' if ':' in host else host}:{int(port) + 1}"
