"""One frozen class per word of the protocol: strict on the way in, exact on the way out.

``parse_line`` and ``encode_line`` hold what is true of every word: the one space that is always sent, the limit on a
line's length, no LF inside.  Who may say which word is not the wire's business: see ``session.connection.MAY_SAY``.  An
application's own words are subclasses of ``ApplicationCommand``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Self, get_args

import attrs

from replication.errors import LocalProtocolError, RemoteProtocolError, RowError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from replication.wire.grammar import InstanceName, StreamName, Token

LINE_LIMIT: Final = 16_384  # bytes without the LF: what every Synapse accepts (protocol A1)


@attrs.frozen
class Server:
    """``SERVER <server_name>``: the first line of a master."""

    WORD: ClassVar[str] = "SERVER"
    name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.name


@attrs.frozen
class Rdata:
    """One row: ``RDATA <stream> <instance> <token|batch> <json>``; only a fact's last row has its token."""

    WORD: ClassVar[str] = "RDATA"
    stream: StreamName
    instance: InstanceName
    token: Token | None
    row: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take four fields; the last is JSON and may hold spaces."""
        match rest.split(" ", 3):
            case [stream, instance, token, row]:
                return cls(
                    grammar.stream_name(stream),
                    grammar.instance_name(instance),
                    grammar.place(token),
                    grammar.row_text(row),
                )
        raise RemoteProtocolError("RDATA takes a stream, an instance, a token and a row")

    def spell(self) -> str:
        """Return what follows the word."""
        token = "batch" if self.token is None else self.token
        return f"{self.stream} {self.instance} {token} {self.row}"


@attrs.frozen
class Position:
    """``POSITION <stream> <instance> <prev> <new>``: the instance wrote nothing with prev < token <= new."""

    WORD: ClassVar[str] = "POSITION"
    stream: StreamName
    instance: InstanceName
    prev: Token
    new: Token

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take four fields; neither token may be ``batch``."""
        match rest.split(" "):
            case [stream, instance, prev, new]:
                return cls(
                    grammar.stream_name(stream),
                    grammar.instance_name(instance),
                    grammar.token(prev),
                    grammar.token(new),
                )
        raise RemoteProtocolError("POSITION takes a stream, an instance and two tokens")

    def spell(self) -> str:
        """Return what follows the word."""
        return f"{self.stream} {self.instance} {self.prev} {self.new}"


@attrs.frozen
class Error:
    """``ERROR <text>``: why the sender is about to close; the receiver only logs it."""

    WORD: ClassVar[str] = "ERROR"
    text: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.text


@attrs.frozen
class Ping:
    """``PING <text>``: a sign of life, normally the time in ms; the first one arms the receiver's time-out."""

    WORD: ClassVar[str] = "PING"
    text: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.text


@attrs.frozen
class Name:
    """``NAME <instance>``: a label for logs and metrics."""

    WORD: ClassVar[str] = "NAME"
    name: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.name


@attrs.frozen
class Replicate:
    """``REPLICATE [stream ...]``: tell me the positions of these streams, or of all."""

    WORD: ClassVar[str] = "REPLICATE"
    streams: tuple[StreamName, ...] = ()

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take any number of names; Synapse ignores them, our master does not."""
        return cls(tuple(grammar.stream_name(each) for each in rest.split()))

    def spell(self) -> str:
        """Return what follows the word."""
        return " ".join(self.streams)


@attrs.frozen
class UserSync:
    """``USER_SYNC <instance_id> <user_id> <start|end> <last_sync_ms>``: a user began or stopped to sync there."""

    WORD: ClassVar[str] = "USER_SYNC"
    instance_id: str
    user_id: str
    syncing: bool
    last_sync_ms: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take four fields."""
        match rest.split(" "):
            case [instance_id, user_id, ("start" | "end") as state, last_sync_ms] if instance_id and user_id:
                return cls(instance_id, user_id, state == "start", grammar.token(last_sync_ms))
        raise RemoteProtocolError("USER_SYNC takes an instance ID, a user ID, start or end, and a time in ms")

    def spell(self) -> str:
        """Return what follows the word."""
        return f"{self.instance_id} {self.user_id} {'start' if self.syncing else 'end'} {self.last_sync_ms}"


@attrs.frozen
class ClearUserSync:
    """``CLEAR_USER_SYNC <instance_id>``: forget every user that syncs there."""

    WORD: ClassVar[str] = "CLEAR_USER_SYNC"
    instance_id: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.instance_id


@attrs.frozen
class FederationAck:
    """``FEDERATION_ACK <instance> <token>``: the federation stream has been sent on up to here."""

    WORD: ClassVar[str] = "FEDERATION_ACK"
    instance: InstanceName
    token: Token

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take two fields."""
        match rest.split(" "):
            case [instance, token]:
                return cls(grammar.instance_name(instance), grammar.token(token))
        raise RemoteProtocolError("FEDERATION_ACK takes an instance and a token")

    def spell(self) -> str:
        """Return what follows the word."""
        return f"{self.instance} {self.token}"


@attrs.frozen
class UserIp:
    """``USER_IP <user_id> [access_token, ip, user_agent, device_id, last_seen]``: where a user was last seen."""

    WORD: ClassVar[str] = "USER_IP"
    user_id: str
    access_token: str
    ip: str
    user_agent: str
    device_id: str | None
    last_seen: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take a user ID and a JSON array of exactly five (protocol A5)."""
        user_id, space, text = rest.partition(" ")
        match grammar.read_json(text) if space and user_id else None:
            case [str(access_token), str(ip), str(agent), (str() | None) as device, seen] if (
                type(seen) is int and seen < 2**63
            ):
                return cls(user_id, access_token, ip, agent, device, seen)
        raise RemoteProtocolError("USER_IP takes a user ID and [access_token, ip, user_agent, device_id, last_seen]")

    def spell(self) -> str:
        """Return what follows the word."""
        seen = [self.access_token, self.ip, self.user_agent, self.device_id, self.last_seen]
        return f"{self.user_id} {grammar.spell_row(seen)}"


@attrs.frozen
class RemoteServerUp:
    """``REMOTE_SERVER_UP <server>``: a server that was away answers again."""

    WORD: ClassVar[str] = "REMOTE_SERVER_UP"
    server: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line as it is."""
        return cls(rest)

    def spell(self) -> str:
        """Return what follows the word."""
        return self.server


class ApplicationCommand:
    """A word of an application's own: subclass it, frozen, and give it to ``on_command`` of those who are to hear it.

    ``SAID_BY`` names the roles that may say it: ``master``, ``worker`` or both.  What ``spell`` returns must not hold
    an LF, and ``parse`` must make the same command of it.
    """

    __slots__ = ()
    WORD: ClassVar[str]
    SAID_BY: ClassVar[Collection[str]]

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Return the command, given what follows the word and one space; RemoteProtocolError says what is wrong."""
        raise NotImplementedError(f"{cls.__name__} lacks parse()")

    def spell(self) -> str:
        """Return what follows the word."""
        raise NotImplementedError(f"{type(self).__name__} lacks spell()")


ProtocolCommand = (
    Server
    | Rdata
    | Position
    | Error
    | Ping
    | Name
    | Replicate
    | UserSync
    | ClearUserSync
    | FederationAck
    | UserIp
    | RemoteServerUp
)

Command = ProtocolCommand | ApplicationCommand

COMMANDS: Final[Mapping[str, type[Command]]] = MappingProxyType({each.WORD: each for each in get_args(ProtocolCommand)})


def parse_line(line: str, words: Mapping[str, type[Command]] = COMMANDS) -> Command:
    """Read one line without its LF; RemoteProtocolError says what is wrong with it.

    A single CR at the end is a telnet's and is dropped (protocol A1).
    """
    word, _, rest = line.removesuffix("\r").partition(" ")
    command = words.get(word)
    if command is None:
        hint = "; this is not an HTTP port" if rest.endswith((" HTTP/1.1", " HTTP/1.0")) else ""
        raise RemoteProtocolError(f"unknown command: {word[:40]!r}{hint}", "unknown command")
    return command.parse(rest)


def encode_line(command: Command, limit: int = LINE_LIMIT) -> bytes:
    """Return the bytes that say ``command``, with the LF; LocalProtocolError if no peer would read it from them.

    The line is read back before it goes: a name with a space, a row that is not JSON, a CR at the end are found here.
    """
    word = command.WORD
    try:
        text = f"{word} {command.spell()}"
        line = text.encode()
        understood = "\n" not in text and parse_line(text, {word: type(command)}) == command
    except (RowError, RemoteProtocolError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"{word} cannot be said: {error}") from error
    if not understood:
        raise LocalProtocolError(f"{word} would be read as something else: {text[:80]!r}")
    if len(line) > limit:
        raise LocalProtocolError(f"{word} would take {len(line)} bytes; a line holds {limit}")
    return line + b"\n"
