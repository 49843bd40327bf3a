"""The commands of the protocol: one frozen class for each (docs/protocol/wire.md A4, A5).

``parse_line`` parses one line.  ``encode_line`` encodes a command, and checks what holds for every line: one space
after the name, no LF inside, the largest length.  ``SENT_BY`` has the roles that may send a command.  An application's
own commands are subclasses of ``ApplicationCommand``.
"""

from __future__ import annotations

import reprlib
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Self, get_args

import attrs

from replication.errors import LocalProtocolError, RemoteProtocolError, RowError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from replication.wire.grammar import InstanceName, StreamName, Token

_FIELDS: Final = reprlib.Repr()  # shows a command with its fields, also if its own repr() raises
_FIELDS.maxother = 200  # characters

LINE_LIMIT: Final = 16_384  # bytes without the LF: what every Synapse accepts (docs/protocol/wire.md A1)


class _TextCommand:
    """A command with one argument: the rest of the line, with its spaces; it may be empty."""

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]]  # attrs sets it: the name of the one field

    if TYPE_CHECKING:

        def __init__(self, text: str) -> None: ...

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take the rest of the line."""
        return cls(rest)

    def encode(self) -> str:
        """Return the rest of the line."""
        text: str = getattr(self, self.__match_args__[0])
        return text


@attrs.frozen
class Server(_TextCommand):
    """``SERVER <server_name>``: the first line of a master."""

    WORD: ClassVar[str] = "SERVER"
    SENT_BY: ClassVar[Collection[str]] = ("master",)
    name: str


@attrs.frozen
class Error(_TextCommand):
    """``ERROR <text>``: why the sender is about to close; the receiver only logs it."""

    WORD: ClassVar[str] = "ERROR"
    SENT_BY: ClassVar[Collection[str]] = ("master", "worker")
    STOPPING: ClassVar[str] = "server stopping"
    text: str


@attrs.frozen
class Ping(_TextCommand):
    """``PING <text>``: a sign of life, normally with the time in ms; the first starts the receiver's time-out.

    If the text of a server's PING ends with ``ECHO``, that server sends back each PING whose text begins with it.  To
    ``echo NUMBER STREAM INSTANCE PLACE`` it adds that writer's epochs from a place on.  A server sends ``HISTORY STREAM
    INSTANCE`` when that history has changed while its followers were connected, and ``WITHDRAWN STREAM INSTANCE`` when
    it does not send the position of that writer any more.  The first PING of a relay has ``PARTIAL`` if the relay has
    not found all writers yet; it sends ``COMPLETE`` when it has (docs/protocol/connection.md B2).  So does a writer if
    a stream has no position yet.
    """

    WORD: ClassVar[str] = "PING"
    SENT_BY: ClassVar[Collection[str]] = ("master", "worker")
    ECHO: ClassVar[str] = "echo"
    HISTORY: ClassVar[str] = "history"
    WITHDRAWN: ClassVar[str] = "withdrawn"
    PARTIAL: ClassVar[str] = "partial"
    COMPLETE: ClassVar[str] = "complete"
    text: str


@attrs.frozen
class Name(_TextCommand):
    """``NAME <instance>``: a label for logs and metrics."""

    WORD: ClassVar[str] = "NAME"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
    name: str


@attrs.frozen
class ClearUserSync(_TextCommand):
    """``CLEAR_USER_SYNC <instance_id>``: no user syncs at that process any more."""

    WORD: ClassVar[str] = "CLEAR_USER_SYNC"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
    instance_id: str


@attrs.frozen
class RemoteServerUp(_TextCommand):
    """``REMOTE_SERVER_UP <server>``: a server that was unreachable answers again."""

    WORD: ClassVar[str] = "REMOTE_SERVER_UP"
    SENT_BY: ClassVar[Collection[str]] = ("master", "worker")
    server: str


@attrs.frozen
class Rdata:
    """``RDATA <stream> <instance> <token|batch> <row>``: one row; only the last row of a fact has the token."""

    WORD: ClassVar[str] = "RDATA"
    SENT_BY: ClassVar[Collection[str]] = ("master",)
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

    def encode(self) -> str:
        """Return the arguments."""
        token = "batch" if self.token is None else self.token
        return f"{self.stream} {self.instance} {token} {self.row}"


@attrs.frozen
class Position:
    """``POSITION <stream> <instance> <prev> <new>``: the writer has no fact with ``prev < token <= new``."""

    WORD: ClassVar[str] = "POSITION"
    SENT_BY: ClassVar[Collection[str]] = ("master",)
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

    def encode(self) -> str:
        """Return the arguments."""
        return f"{self.stream} {self.instance} {self.prev} {self.new}"


@attrs.frozen
class Replicate:
    """``REPLICATE [stream ...]``: the receiver answers with the positions of these streams, or of all."""

    WORD: ClassVar[str] = "REPLICATE"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
    streams: tuple[StreamName, ...] = ()

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take any number of names.  Names are an extension, which Synapse ignores (docs/protocol/wire.md A4)."""
        return cls(tuple(grammar.stream_name(each) for each in rest.split()))

    def encode(self) -> str:
        """Return the arguments."""
        return " ".join(self.streams)


@attrs.frozen
class UserSync:
    """``USER_SYNC <instance_id> <user_id> <start|end> <last_sync_ms>``: a user began or stopped syncing."""

    WORD: ClassVar[str] = "USER_SYNC"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
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

    def encode(self) -> str:
        """Return the arguments."""
        return f"{self.instance_id} {self.user_id} {'start' if self.syncing else 'end'} {self.last_sync_ms}"


@attrs.frozen
class FederationAck:
    """``FEDERATION_ACK <instance> <token>``: an instance has sent the stream ``federation`` on, up to ``token``."""

    WORD: ClassVar[str] = "FEDERATION_ACK"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
    instance: InstanceName
    token: Token

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take two fields."""
        match rest.split(" "):
            case [instance, token]:
                return cls(grammar.instance_name(instance), grammar.token(token))
        raise RemoteProtocolError("FEDERATION_ACK takes an instance and a token")

    def encode(self) -> str:
        """Return the arguments."""
        return f"{self.instance} {self.token}"


@attrs.frozen
class UserIp:
    """``USER_IP <user_id> [access_token, ip, user_agent, device_id, last_seen]``: where a user was last seen."""

    WORD: ClassVar[str] = "USER_IP"
    SENT_BY: ClassVar[Collection[str]] = ("worker",)
    user_id: str
    access_token: str
    ip: str
    user_agent: str
    device_id: str | None
    last_seen: int

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Take a user ID and a JSON array of exactly five (docs/protocol/wire.md A5)."""
        user_id, space, text = rest.partition(" ")
        match grammar.read_json(text) if space and user_id else None:
            case [str(access_token), str(ip), str(agent), (str() | None) as device, seen] if (
                type(seen) is int and 0 <= seen < 2**63
            ):
                return cls(user_id, access_token, ip, agent, device, seen)
        raise RemoteProtocolError("USER_IP takes a user ID and [access_token, ip, user_agent, device_id, last_seen]")

    def encode(self) -> str:
        """Return the arguments."""
        seen = [self.access_token, self.ip, self.user_agent, self.device_id, self.last_seen]
        return f"{self.user_id} {grammar.encode_row(seen)}"


class ApplicationCommand:
    """An application's own command: a frozen subclass with ``WORD``, ``SENT_BY``, ``parse`` and ``encode``.

    ``WORD`` is the command's name, in capitals.  ``SENT_BY`` has the roles that may send it: ``"master"``,
    ``"worker"`` or both.  A process accepts the command once ``on_command`` was called with the class.
    """

    __slots__ = ()
    WORD: ClassVar[str]
    SENT_BY: ClassVar[Collection[str]]

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Return the command, given its arguments: the line without the name and one space.

        RemoteProtocolError, or any other exception, if they are wrong.  ``parse(command.encode()) == command``.
        """
        raise NotImplementedError(f"{cls.__name__} lacks parse()")

    def encode(self) -> str:
        """Return the arguments, without an LF."""
        raise NotImplementedError(f"{type(self).__name__} lacks encode()")


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
    """Return the command of one line without its LF; RemoteProtocolError if there is none.

    ``words`` has the classes by their names.  One CR at the end is dropped (docs/protocol/wire.md A1).
    """
    word, _, rest = line.removesuffix("\r").partition(" ")
    command = words.get(word)
    if command is None:
        hint = ""
        if rest.endswith((" HTTP/1.1", " HTTP/1.0")):
            hint = "; this is not an HTTP port"
        elif word.startswith("HTTP/"):
            hint = "; this is an HTTP server: connect to the writer's --listen port, not to its --http port"
        elif word.startswith("-"):
            hint = "; this looks like a Redis: a worker follows it with connect = redis://HOST:PORT"
        raise RemoteProtocolError(f"unknown command: {word[:40]!r}{hint}", kind="unknown command")
    return command.parse(rest)


def encode_line(command: Command, limit: int = LINE_LIMIT) -> bytes:
    """Return the line of ``command`` with its LF; LocalProtocolError if a peer would refuse or misread it.

    ``limit`` is in bytes without the LF.  The line is parsed again: this finds a name with a space, a row that is not
    JSON, and a CR at the end.
    """
    word = command.WORD
    try:
        text = f"{word} {command.encode()}"
        line = text.encode()
        same = "\n" not in text and parse_line(text, {word: type(command)}) == command
    except (RowError, RemoteProtocolError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"{word} cannot be encoded: {error}") from error
    except Exception as error:  # an application's own encode() and parse() may raise anything
        why = f"{type(error).__name__}: {error}"
        raise LocalProtocolError(f"{word} cannot be encoded: {why}, in {_FIELDS.repr(command)}") from error
    if not same:
        raise LocalProtocolError(f"{word} would be read as something else: {text[:80]!r}")
    if len(line) > limit:
        raise LocalProtocolError(f"{word} would take {len(line)} bytes; a line holds {limit}")
    return line + b"\n"
