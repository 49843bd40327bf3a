"""A connection to Redis: where it is, the login, and the replies of its protocol, RESP2.

``hiredis`` parses the replies: it is the parser of the Redis project, in C, and does no I/O, so Twisted keeps the
transports, the timers and TLS.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import attrs
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import HostnameEndpoint, UNIXClientEndpoint, wrapClientTLS
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from twisted.internet.protocol import Factory, Protocol, connectionDone
from zope.interface import implementer

from replication.errors import TLS_CURE, ConfigError, ReplicationError, install_command
from replication.net.endpoints import describe_connect_error
from replication.net.tls import client_tls, describe_tls_error
from replication.urls import Url, hide_secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twisted.python.failure import Failure

ANSWER_TIMEOUT: Final = 10.0  # seconds for the confirmation of SUBSCRIBE and PUBLISH
MAX_MESSAGE: Final = 64 * 2**20  # bytes of one reply; no row of Synapse is near it
# The head of a list of 100,000 elements or more: hiredis makes a list of that length before the first element arrives.
# Redis sends lists of three.
_MANY: Final = re.compile(rb"\n\*[0-9]{6,10}\r")
_RESP3: Final = (b"~", b"%", b">", b"|")  # lists that Redis does not send here, and that hiredis reads
_MANY_RESP3: Final = re.compile(rb"\n[~%>|][0-9]{6,10}\r")
_HEAD: Final = 16  # bytes; hiredis refuses a number with more digits, or with zeros before it
_FORM: Final = "write redis://[user:password@]host:port/db, rediss://… or redis+unix:///path; percent-encode a password"
DEFAULT_PORT: Final = 6379
_PERMISSIONS: Final = (
    "ACL SETUSER NAME on '>PASSWORD' resetchannels '&{channel}' -@all +subscribe +publish +ping '+pubsub|numsub'"
)
_READ_ONCE: Final = "; a worker reads them at its start only"
_CURES: Final = {
    "WRONGPASS": f"check the user and the password in connect, or the file redis_password_file{_READ_ONCE}",
    "invalid password": f"check the password in connect, or the file redis_password_file{_READ_ONCE}",
    "NOAUTH": "Redis requires a password: give redis://user:password@host:port, or redis_password_file",
    "NOPERM": f"the Redis user lacks a permission: {_PERMISSIONS}",
    "without any password configured": "this Redis has no password: remove it from connect and redis_password_file",
    "DENIED": "Redis is in protected mode: set a password there, or let it listen on loopback only",
}


class RedisError(ReplicationError):
    """What Redis sends cannot be used."""


class ReplyError(RedisError):
    """The answer of Redis is an error."""


@implementer(IStreamClientEndpoint)
@attrs.frozen
class _TlsEndpoint:
    """An endpoint with TLS; the certificate in ``files`` is shown, and read for each connection."""

    endpoint: IStreamClientEndpoint
    host: str
    files: tuple[str, str] | None

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:  # noqa: N803 (Twisted's name)
        """Connect; a file that cannot be used fails the attempt."""
        return maybeDeferred(
            lambda: wrapClientTLS(client_tls(self.host, self.files), self.endpoint).connect(protocolFactory)
        )


@attrs.frozen
class RedisPlace:
    """What a URL means: the address of Redis, and the user.  The database number does not matter to channels."""

    endpoint: IStreamClientEndpoint
    user: str
    password: str = attrs.field(repr=False)

    @classmethod
    def parse(
        cls, reactor: Any, url: str, password: str | None = None, certificate: tuple[str, str] | None = None
    ) -> RedisPlace:
        """Read a URL; ``password`` is for a URL without one.  ConfigError if the URL cannot be used.

        ``certificate``: files with the certificate and private key that ``rediss://`` shows.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ConfigError(f"cannot connect to {Url(url)!r}: {_FORM}") from error
        unix = parts.scheme == "redis+unix"
        path = re.fullmatch(r"/.+" if unix else r"/?[0-9]*", parts.path)
        if path is None or bool(host) is unix or parts.query or parts.fragment:
            raise ConfigError(f"cannot connect to {Url(url)!r}: {_FORM}")
        place = unquote(parts.path)
        endpoint: Any = UNIXClientEndpoint(reactor, place) if unix else HostnameEndpoint(reactor, host, port)
        if parts.scheme == "rediss":
            endpoint = _TlsEndpoint(endpoint, host, certificate)
            try:
                client_tls(host, certificate)
            except ImportError as error:
                raise ConfigError(f"cannot connect to {Url(url)!r}: {TLS_CURE}") from error
            except Exception as error:
                files = " and ".join(certificate or ())
                why = f"{files} cannot be used as a certificate and its key: {error or type(error).__name__}"
                raise ConfigError(f"cannot connect to {Url(url)!r}: {why}") from error
        return cls(endpoint, unquote(parts.username or ""), unquote(parts.password or "") or password or "")

    def login(self) -> list[bytes]:
        """Return the command that must come first, if there is one."""
        if not self.password:
            return []
        user = [self.user.encode()] if self.user else []
        return [encode(b"AUTH", *user, self.password.encode())]

    def hide_in(self, text: str) -> str:
        """Return ``text`` without the password: an answer of Redis may quote the command."""
        return hide_secret(text, self.password)


def encode(*words: bytes) -> bytes:
    """Return a command in the form of RESP2."""
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%s\r\n" % (len(word), word) for word in words])


def make_parser() -> Any:
    """Return a parser of replies; ConfigError if ``hiredis`` is not installed."""
    try:
        from hiredis import Reader  # noqa: PLC0415 (an extra)
    except ImportError as error:
        raise ConfigError(f"redis:// needs hiredis: {install_command('redis')}") from error
    return Reader(replyError=ReplyError)


def describe_error(failure: Failure, place: RedisPlace, channel: str) -> str:
    """Return why a connection to ``place`` failed, with the cure of what Redis has answered."""
    if not isinstance(failure.value, ReplyError):
        return describe_connect_error(failure)
    text = place.hide_in(str(failure.value))[:200]
    cure = cure_of(text, channel)
    return f"Redis answers {text!r}" + (f"; {cure}" if cure else "")


def cure_of(answer: str, channel: str) -> str:
    """Return what to do about an error that Redis has answered; empty if that is not known."""
    return next((cure for words, cure in _CURES.items() if words in answer), "").format(channel=channel)


class RedisConnection(Protocol):
    """A connection to Redis: writes commands, and reads replies."""

    transport: Any
    tls_error: str | None = None
    bytes_in = bytes_out = 0

    def connectionMade(self) -> None:
        """Start to parse."""
        self._parser = make_parser()
        self._tail = b"\n"  # the end of what was read
        self._unparsed = 0  # bytes of a reply that is not complete
        self._after_login: Sequence[bytes] = ()

    def log_in(self, place: RedisPlace, *commands: bytes) -> None:
        """Log in, then write ``commands``: after a failed AUTH, Redis would run them as its default user."""
        login = place.login()
        self._after_login = commands if login else ()
        self.write(*(login or commands))

    def write(self, *commands: bytes) -> None:
        """Write encoded commands."""
        data = b"".join(commands)
        self.bytes_out += len(data)
        self.transport.write(data)

    def parse(self, data: bytes) -> list[Any]:
        """Return the replies that ``data`` completes; RedisError if these are none."""
        self.bytes_in += len(data)
        self._unparsed += len(data)
        replies = []
        read = self._tail + data
        if _MANY.search(read) or (any(each in read for each in _RESP3) and _MANY_RESP3.search(read)):
            raise RedisError("it sends a list of 100,000 elements or more")
        self._tail = read[-_HEAD:]
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not False:
                replies.append(reply)
        except Exception as error:
            raise RedisError("what it sends is not the protocol of Redis: is this its port?") from error
        if replies:
            self._unparsed = 0
            if replies[0] == b"OK" and self._after_login:
                self.write(*self._after_login)
                self._after_login = ()
        elif self._unparsed > MAX_MESSAGE:
            raise RedisError(f"a message has more than {MAX_MESSAGE} bytes")
        return replies

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Note why TLS failed, if it did."""
        self.tls_error = describe_tls_error(reason.value, self.transport)


class Publication(RedisConnection):
    """A connection that publishes one message; ``confirmed`` fires with the number of its receivers."""

    def __init__(self, place: RedisPlace, command: bytes) -> None:
        self._place = place
        self._command = command
        self.confirmed: Deferred[int] = Deferred()

    def connectionMade(self) -> None:
        """Log in and publish."""
        super().connectionMade()
        self.log_in(self._place, self._command)

    def dataReceived(self, data: bytes) -> None:
        """Wait for the first number, or an error."""
        try:
            replies = self.parse(data)
        except RedisError as error:
            replies = [error]
        for reply in replies:
            if self.confirmed.called:
                return
            if isinstance(reply, Exception):
                self.confirmed.errback(reply)
            elif isinstance(reply, int):
                self.confirmed.callback(reply)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Fail if there was no answer."""
        super().connectionLost(reason)
        if not self.confirmed.called:
            self.confirmed.errback(RedisError(self.tls_error or "it closed the connection"))


def publish(clock: Any, place: RedisPlace, channel: str, message: bytes) -> Deferred[int]:
    """Publish a message on a connection of its own; fires with the number of subscribers that Redis has sent it to.

    Fails with the error of the connection, or a RedisError.  A connection that is subscribed cannot publish.
    """

    async def send() -> int:
        command = encode(b"PUBLISH", channel.encode(), message)
        factory = Factory.forProtocol(lambda: Publication(place, command))
        factory.noisy = False
        connection: Any = await place.endpoint.connect(factory).addTimeout(ANSWER_TIMEOUT, clock)
        try:
            receivers: int = await connection.confirmed.addTimeout(ANSWER_TIMEOUT, clock)
        finally:
            connection.transport.loseConnection()
        return receivers

    return Deferred.fromCoroutine(send())
