"""One end of a conversation: what the other end said, what we may say, and when somebody has been silent for too long.

No socket and no clock: bytes and the time come in, values go out (``protocol``, sections A and B).  Times are seconds
of any clock that does not go back.  One class serves both ends, because only a table tells the roles apart.
"""

from __future__ import annotations

import re
from enum import Enum
from math import inf, isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from replication.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from replication.wire import grammar
from replication.wire.commands import (
    COMMANDS,
    LINE_LIMIT,
    ApplicationCommand,
    ClearUserSync,
    Command,
    Error,
    FederationAck,
    Name,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    Server,
    UserIp,
    UserSync,
    encode_line,
    parse_line,
)
from replication.wire.lines import LineBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.wire.grammar import InstanceName, StreamName, Token

_QUOTED: Final = 80  # characters of a bad line that its ERROR line repeats
_RDATA: Final = f"{Rdata.WORD} "
_RDATA_FIELDS: Final = 4
_WORD: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}", re.ASCII)


class Role(Enum):
    """Which end of the conversation somebody is."""

    MASTER = "master"
    WORKER = "worker"

    @property
    def other(self) -> Role:
        """The other end."""
        return Role.WORKER if self is Role.MASTER else Role.MASTER


MAY_SAY: Final[Mapping[Role, frozenset[type[Command]]]] = MappingProxyType(
    {
        Role.MASTER: frozenset({Server, Rdata, Position, Error, Ping, RemoteServerUp}),
        Role.WORKER: frozenset(
            {Error, Ping, Name, Replicate, UserSync, ClearUserSync, FederationAck, UserIp, RemoteServerUp}
        ),
    }
)


class Words:
    """The commands that one process knows: those of the protocol, and what its application adds."""

    def __init__(self) -> None:
        self.classes: dict[str, type[Command]] = dict(COMMANDS)

    def add(self, command: type[Command]) -> None:
        """Know ``command``, perhaps already; ConfigError if that is no command, or its word is another one's."""
        word = getattr(command, "WORD", "")
        if self.classes.get(word) is command:
            return
        if not (isinstance(command, type) and issubclass(command, ApplicationCommand) and _WORD.fullmatch(word)):
            raise ConfigError(f"{command!r} is no command: subclass ApplicationCommand, with a WORD in capitals")
        if word in self.classes:
            raise ConfigError(f"{word} is {self.classes[word].__name__} already: give {command.__name__} another WORD")
        unknown = set(command.SAID_BY) - {role.value for role in Role}
        if isinstance(command.SAID_BY, str) or unknown or not command.SAID_BY:
            raise ConfigError(f'{word}: SAID_BY lists "master", "worker" or both, as in SAID_BY = ["worker"]')
        self.classes[word] = command

    def may_say(self, role: Role, command: type[Command]) -> bool:
        """Whether ``command`` is for that role to say."""
        if issubclass(command, ApplicationCommand):
            return role.value in command.SAID_BY
        return command in MAY_SAY[role]


@attrs.frozen
class Keepalive:
    """How long silence may last, in seconds.

    We say PING ``ping_after`` our last word.  A peer that has said PING once must not be silent for ``give_up_after``.
    """

    ping_after: float = 5.0
    give_up_after: float = 15.0

    def __attrs_post_init__(self) -> None:
        """Refuse, by ConfigError, what no timer can wait for."""
        for name, seconds in (("ping_after", self.ping_after), ("give_up_after", self.give_up_after)):
            if not (seconds > 0 and isfinite(seconds)):
                raise ConfigError(f"keep-alive: {name} must be a number of seconds above 0, not {seconds}")


@attrs.frozen
class Fault:
    """Why a conversation is over: ``text`` is for the ERROR line, ``kind`` a label for metrics.

    Kinds found here: ``unknown command``, ``bad line``, ``wrong direction``, ``line too long``, ``not UTF-8`` and
    ``ping timeout``.
    """

    text: str
    kind: str


@attrs.frozen
class Rows:
    """Consecutive RDATA of one stream and instance; ``places`` are their tokens, None for ``batch``."""

    stream: StreamName
    instance: InstanceName
    places: Sequence[Token | None]
    texts: Sequence[str]


Heard = Command | Rows | Fault  # an Rdata is always part of Rows

_DEFAULT_KEEPALIVE: Final = Keepalive()
_PROTOCOL: Final = Words()  # nobody adds to it


class ReplicationConnection:
    """What one end knows of the conversation.

    After a Fault it is ``closed`` and hears nothing more; what may still be said is an ERROR with the Fault's text.
    ``spoke_at`` and ``heard_at`` are when we last spoke and when the peer last said something right (at first: when
    the connection was made), ``lines_heard`` counts its lines, blank ones too.
    """

    __slots__ = (
        "_keepalive",
        "_lines",
        "_pinged",
        "_words",
        "closed",
        "heard_at",
        "lines_heard",
        "role",
        "spoke_at",
    )

    def __init__(
        self,
        role: Role,
        now: float,
        keepalive: Keepalive = _DEFAULT_KEEPALIVE,
        line_limit: int = LINE_LIMIT,
        words: Words | None = None,
    ) -> None:
        self.role = role
        self.closed = False
        self.spoke_at = self.heard_at = now
        self.lines_heard = 0
        self._keepalive = keepalive
        self._lines = LineBuffer(line_limit)
        self._words = words or _PROTOCOL
        self._pinged = False

    @property
    def line_limit(self) -> int:
        """How many bytes a line may have, in either direction, LF not counted."""
        return self._lines.limit

    # ---- what the peer says

    def receive_data(self, data: bytes, now: float) -> list[Heard]:
        """Read the lines that ``data`` completes, runs of RDATA in bulk.

        A Fault comes last, after all that was right before it, and closes; the rest is discarded.  Nothing raises.
        """
        if self.closed:
            return []
        heard = self._read_block(self._lines.feed(data))
        if self._lines.overflowed and not self.closed:
            heard.append(self._refuse_length())
        return self._noted(heard, now)

    def receive_line(self, line: bytes, now: float) -> list[Heard]:
        """Read one line without its LF: the slow equal of :meth:`receive_data`, for those who cut lines themselves."""
        if self.closed:
            return []
        return self._noted([self._refuse_length()] if len(line) > self.line_limit else self._read_line(line), now)

    def _noted(self, heard: list[Heard], now: float) -> list[Heard]:
        if heard and not isinstance(heard[0], Fault):
            self.heard_at = now
        return heard

    def _read_block(self, block: bytes) -> list[Heard]:
        """Read whole lines, each with its LF and within the limit."""
        try:
            lines = block.decode().split("\n")
        except UnicodeDecodeError as error:
            start = block.rfind(b"\n", 0, error.start) + 1
            heard = self._read_block(block[:start])
            if not self.closed:
                heard += self._read_line(block[start : block.index(b"\n", start)])
            return heard
        lines.pop()  # what follows the last LF: nothing
        return self._hear_lines(lines, in_bulk=self.role is Role.WORKER and b"\r" not in block)

    def _read_line(self, line: bytes) -> list[Heard]:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            return [self._refuse("not UTF-8", f"not UTF-8 at byte {error.start + 1}: {error.reason}", line)]
        return self._hear_lines([text], in_bulk=False)

    def _hear_lines(self, lines: list[str], *, in_bulk: bool) -> list[Heard]:
        heard: list[Heard] = []
        at = 0
        while at < len(lines) and not self.closed:
            rows = None
            if in_bulk and lines[at].startswith(_RDATA):
                try:
                    rows = _read_run(lines, at)
                except RemoteProtocolError:
                    in_bulk = False  # one of the next lines is wrong: what is left goes one by one, up to that
            if rows is None:
                heard += self._hear_line(lines[at])
                count = 1
            else:
                heard.append(rows)
                count = len(rows.texts)
            at += count
            self.lines_heard += count
        return heard

    def _hear_line(self, line: str) -> list[Heard]:
        """Read one line by the book: nothing from a blank one, else what it says or why it may not."""
        if not line.strip():
            return []
        try:
            command = parse_line(line, self._words.classes)
        except RemoteProtocolError as error:
            return [self._refuse(error.kind, str(error), line)]
        except Exception as error:  # noqa: BLE001 (an application's own parse() may raise anything)
            return [self._refuse("bad line", f"{type(error).__name__}: {error}", line)]
        if not self._words.may_say(self.role.other, type(command)):
            why = f"invalid command: {command.WORD} is not for a {self.role.other.value} to say"
            return [self._refuse("wrong direction", why, line)]
        if isinstance(command, Rdata):
            return [Rows(command.stream, command.instance, [command.token], [command.row])]
        if isinstance(command, Ping):
            self._pinged = True
        return [command]

    def _refuse(self, kind: str, why: str, line: str | bytes) -> Fault:
        self.closed = True
        quoted = repr(line[:_QUOTED]) + ("..." if len(line) > _QUOTED else "")
        return Fault(f"line {self.lines_heard + 1}: {why}, in {quoted}", kind)

    def _refuse_length(self) -> Fault:
        self.closed = True
        where = f"line {self.lines_heard + 1} has more than {self.line_limit} bytes"
        return Fault(f"Line length exceeded: {where}", "line too long")

    # ---- what we say

    def send(self, command: Command, now: float) -> bytes:
        """Return the bytes that say ``command``; LocalProtocolError if it is not ours to say, or cannot be said."""
        if not self._words.may_say(self.role, type(command)):
            raise LocalProtocolError(f"{command.WORD} is not for a {self.role.value} to say")
        line = encode_line(command, self.line_limit)
        self.spoke_at = now
        return line

    def sent(self, now: float) -> None:
        """Take note that lines which were spelt elsewhere went out."""
        self.spoke_at = now

    # ---- what silence means

    def wake_at(self) -> float:
        """When :meth:`tick` next has something to do, if nobody speaks before; never, once closed."""
        return inf if self.closed else min(self._ping_at(), self._give_up_at())

    def tick(self, now: float, wall_ms: int) -> Ping | Fault | None:
        """Return what ``now`` is the time for: a PING to send, with ``wall_ms`` as its text, or a Fault that closes."""
        if self.closed:
            return None
        if now >= self._give_up_at():
            self.closed = True
            return Fault(f"ping timeout: nothing heard for {self._keepalive.give_up_after:g} s", "ping timeout")
        return Ping(str(wall_ms)) if now >= self._ping_at() else None

    def _ping_at(self) -> float:
        return self.spoke_at + self._keepalive.ping_after

    def _give_up_at(self) -> float:
        return self.heard_at + self._keepalive.give_up_after if self._pinged else inf


def _read_run(lines: list[str], at: int) -> Rows:
    """Read all RDATA of one stream and instance that follow each other from ``at``; RemoteProtocolError if one is bad.

    The lines have no CR.  What is right and wrong here must be what it is to ``Rdata.parse``.
    """
    fields = lines[at].split(" ", _RDATA_FIELDS - 1)
    if len(fields) < _RDATA_FIELDS:
        raise RemoteProtocolError("RDATA has too few fields")
    stream, instance = grammar.stream_name(fields[1]), grammar.instance_name(fields[2])
    prefix = f"{_RDATA}{stream} {instance} "
    tokens, texts = [], []
    for end in range(at, len(lines)):
        line = lines[end]
        if not line.startswith(prefix):
            break
        token, _, text = line[len(prefix) :].partition(" ")
        tokens.append(token)
        texts.append(text)
    grammar.row_texts(texts)
    return Rows(stream, instance, grammar.places(tokens), texts)
