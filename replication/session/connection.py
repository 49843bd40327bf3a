"""One end of a connection: parses what is received, checks directions, and decides when to send PING.

There is no socket and no clock: bytes and the time come in, values go out.  Times are seconds of any monotonic clock.
One class serves both roles; only what they may send differs (docs/protocol/wire.md, docs/protocol/connection.md).
"""

from __future__ import annotations

from enum import Enum
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec

from replication.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from replication.wire import grammar
from replication.wire.commands import COMMANDS, LINE_LIMIT, Command, Ping, Position, Rdata, encode_line, parse_line
from replication.wire.lines import LineBuffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.wire.grammar import InstanceName, StreamName, Token

_QUOTED: Final = 80  # characters of a bad line that the ERROR line quotes
_TLS: Final = (b"\x16\x03", "\x16\x03")  # how a peer with TLS begins; the rest is random
MAX_INCOMPLETE: Final = 16  # facts of one connection; a writer completes one before it begins the next
MAX_WRITERS: Final = 100_000  # pairs of a stream and an instance with a POSITION on one connection
_RDATA: Final = f"{Rdata.WORD} "
_RDATA_FIELDS: Final = 4


class Role(Enum):
    """The role of one end: the master accepted the connection, the worker made it."""

    MASTER = "master"
    WORKER = "worker"

    @property
    def other(self) -> Role:
        """The role of the other end."""
        return Role.WORKER if self is Role.MASTER else Role.MASTER


def may_send(role: Role, command: type[Command]) -> bool:
    """Return whether ``role`` may send ``command``."""
    return role.value in command.SENT_BY


def check_direction(role: Role, command: type[Command]) -> None:
    """Raise LocalProtocolError if ``role`` may not send ``command``."""
    if not may_send(role, command):
        raise LocalProtocolError(f"{command.WORD} may not be sent by a {role.value}")


@attrs.frozen
class Keepalive:
    """The times of the keep-alive, in seconds (docs/protocol/connection.md B2).

    PING is sent ``ping_after`` seconds after the last line.  Once the peer has sent PING, the connection is closed
    after ``give_up_after`` seconds without a good line.  ConfigError if a time is not above 0 and finite.
    """

    ping_after: float = 5.0
    give_up_after: float = 15.0

    def __attrs_post_init__(self) -> None:
        """Check both times."""
        for name, seconds in (("ping_after", self.ping_after), ("give_up_after", self.give_up_after)):
            if not (seconds > 0 and isfinite(seconds)):
                raise ConfigError(f"keep-alive: {name} must be a number of seconds above 0, not {seconds}")


class Fault(msgspec.Struct, frozen=True):
    """Why a connection ends: ``text`` is for the ERROR line, ``kind`` is a label for metrics.

    The kinds found here are ``unknown command``, ``bad line``, ``wrong direction``, ``line too long``, ``not UTF-8``,
    ``incomplete facts``, ``too many writers`` and ``ping timeout``.
    """

    text: str
    kind: str


class Rows(msgspec.Struct, frozen=True):
    """Consecutive RDATA of one stream and instance: ``places`` are tokens, None for ``batch``; ``texts`` are rows."""

    stream: StreamName
    instance: InstanceName
    places: Sequence[Token | None]
    texts: Sequence[str]


Received = Command | Rows | Fault  # an Rdata is always part of Rows


@attrs.define(eq=False, repr=False)
class _Writers:
    """Pairs of a stream and an instance that a peer has sent; the number of each kind is limited."""

    incomplete: set[tuple[str, str]] = attrs.field(init=False, factory=set)  # the last row is of an incomplete fact
    with_position: set[tuple[str, str]] = attrs.field(init=False, factory=set)


@attrs.define(eq=False, repr=False)
class ReplicationConnection:
    """The state of one end.

    Args:
        role: of this end.
        now: the present time in seconds.
        keepalive: the times of the keep-alive.
        line_limit: the largest line in either direction, in bytes without the LF.
        commands: those that this end accepts, by name; by default the protocol's.

    After a Fault it is ``closed``: input is ignored, and only an ERROR with the Fault's text should be sent.
    ``sent_at`` is the time of the last line sent, ``received_at`` that of the last good line received.  Both begin with
    the time of the connection.  ``lines_received`` counts the peer's lines, blank lines too.

    """

    role: Role
    received_at: float = attrs.field(alias="now")
    _keepalive: Keepalive = attrs.field(factory=Keepalive)
    line_limit: int = LINE_LIMIT
    _commands: Mapping[str, type[Command]] = COMMANDS
    sent_at: float = attrs.field(init=False)
    closed: bool = attrs.field(init=False, default=False)
    lines_received: int = attrs.field(init=False, default=0)
    _lines: LineBuffer = attrs.field(init=False)
    _writers: _Writers | None = attrs.field(init=False, default=None)  # None at a master, which has many connections
    _pinged: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        """Begin with the time of the connection."""
        self.sent_at = self.received_at
        self._lines = LineBuffer(self.line_limit)

    # ---- receiving

    def receive_data(self, data: bytes, now: float) -> list[Received]:
        """Return the commands of the lines that ``data`` completes; consecutive RDATA as Rows.

        A Fault is the last of them: this end is then ``closed``, and the rest of ``data`` is discarded.  Nothing is
        raised.
        """
        if self.closed:
            return []
        received = self._read_block(self._lines.feed(data))
        if self._lines.overflowed and not self.closed:
            received.append(self._refuse_length())
        return self._note_time(received, now)

    def receive_line(self, line: bytes, now: float) -> list[Received]:
        """Return the command of one line without its LF, as :meth:`receive_data` does, but more slowly."""
        if self.closed:
            return []
        return self._note_time([self._refuse_length()] if len(line) > self.line_limit else self._read_line(line), now)

    def _note_time(self, received: list[Received], now: float) -> list[Received]:
        if received and not isinstance(received[0], Fault):
            self.received_at = now
        return received

    def _read_block(self, block: bytes) -> list[Received]:
        """Parse whole lines, each with its LF and within the limit."""
        try:
            lines = block.decode().split("\n")
        except UnicodeDecodeError as error:
            start = block.rfind(b"\n", 0, error.start) + 1
            received = self._read_block(block[:start])
            if not self.closed:
                received += self._read_line(block[start : block.index(b"\n", start)])
            return received
        lines.pop()  # the empty text after the last LF
        return self._receive_lines(lines, in_bulk=self.role is Role.WORKER and b"\r" not in block)

    def _read_line(self, line: bytes) -> list[Received]:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            return [self._refuse("not UTF-8", f"not UTF-8 at byte {error.start + 1}: {error.reason}", line)]
        return self._receive_lines([text], in_bulk=False)

    def _receive_lines(self, lines: list[str], *, in_bulk: bool) -> list[Received]:
        received: list[Received] = []
        at = 0
        while at < len(lines) and not self.closed:
            rows = None
            if in_bulk and lines[at].startswith(_RDATA):
                try:
                    rows = read_run(lines, at)
                except RemoteProtocolError:
                    in_bulk = False  # a line of this run is wrong: parse one by one from here to find it
            if rows is None:
                received += self._receive_line(lines[at])
                count = 1
            else:
                received.append(self._within_limits(rows, lines[at]))
                count = len(rows.texts)
            at += count
            self.lines_received += count
        return received

    def _receive_line(self, line: str) -> list[Received]:
        """Parse one line: nothing if it is blank, else a command or a Fault."""
        if not line.strip():
            return []
        try:
            command = parse_line(line, self._commands)
        except RemoteProtocolError as error:
            return [self._refuse(error.kind, str(error), line)]
        except Exception as error:  # noqa: BLE001 (an application's own parse() may raise anything)
            return [self._refuse("bad line", f"{type(error).__name__}: {error}", line)]
        try:
            check_direction(self.role.other, type(command))
        except LocalProtocolError as error:
            return [self._refuse("wrong direction", f"invalid command: {error}", line)]
        if isinstance(command, Rdata):
            return [self._within_limits(Rows(command.stream, command.instance, [command.token], [command.row]), line)]
        if isinstance(command, Position):
            return [self._within_limits(command, line)]
        if isinstance(command, Ping):
            self._pinged = True
        return [command]

    def _within_limits(self, received: Rows | Position, line: str) -> Rows | Position | Fault:
        """Return ``received``, or a Fault: what a follower keeps for one connection is bounded."""
        writers = self._writers = self._writers or _Writers()
        writer = received.stream, received.instance
        if isinstance(received, Position):
            writers.incomplete.discard(writer)
            writers.with_position.add(writer)
        elif received.places[-1] is None:
            writers.incomplete.add(writer)
        elif writers.incomplete:
            writers.incomplete.discard(writer)
        if len(writers.incomplete) > MAX_INCOMPLETE:
            return self._refuse("incomplete facts", f"more than {MAX_INCOMPLETE} facts are incomplete", line)
        if len(writers.with_position) > MAX_WRITERS:
            return self._refuse("too many writers", f"positions of more than {MAX_WRITERS} streams and writers", line)
        return received

    def _refuse(self, kind: str, why: str, line: str | bytes) -> Fault:
        self.closed = True
        if line[:2] in _TLS:
            return Fault(f"line {self.lines_received + 1}: the peer connects with TLS, this port has none", "bad line")
        return Fault(f"line {self.lines_received + 1}: {why}, in {_quote(line)}", kind)

    def _refuse_length(self) -> Fault:
        self.closed = True
        where = f"line {self.lines_received + 1} has more than {self.line_limit} bytes"
        return Fault(f"Line length exceeded: {where}", "line too long")

    # ---- sending

    def send(self, command: Command, now: float) -> bytes:
        """Return the line of ``command``, to be written now.

        LocalProtocolError if this role may not send it, or if it cannot be encoded.
        """
        check_direction(self.role, type(command))
        line = encode_line(command, self.line_limit)
        self.sent_at = now
        return line

    def sent(self, now: float) -> None:
        """Note that lines were written which were encoded elsewhere."""
        self.sent_at = now

    # ---- keep-alive

    def wake_at(self) -> float:
        """Return when to call :meth:`tick`, if no line is sent or received before; infinity once closed."""
        return inf if self.closed else min(self._ping_at(), self._give_up_at())

    def tick(self, now: float, wall_ms: int) -> Ping | Fault | None:
        """Return what is due: a PING to send, with ``wall_ms`` as its text, a Fault that closes, or None."""
        if self.closed:
            return None
        if now >= self._give_up_at():
            self.closed = True
            return Fault(f"ping timeout: nothing received for {self._keepalive.give_up_after:g} s", "ping timeout")
        return Ping(str(wall_ms)) if now >= self._ping_at() else None

    def _ping_at(self) -> float:
        return self.sent_at + self._keepalive.ping_after

    def _give_up_at(self) -> float:
        return self.received_at + self._keepalive.give_up_after if self._pinged else inf


def read_run(lines: list[str], at: int) -> Rows:
    """Parse consecutive RDATA of one stream and instance, from index ``at``; RemoteProtocolError if one is wrong.

    The lines have no CR.  It accepts exactly the lines that ``Rdata.parse`` accepts.
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


def _quote(line: Any) -> str:
    """Return the beginning of a bad line, a str or bytes, for its ERROR; of USER_IP no access token, only the user."""
    start = line[:_QUOTED]
    if start[:8] in {"USER_IP ", b"USER_IP "}:
        start = start[7:8].join(start.split(start[7:8])[:2])
    return repr(start) + ("..." if len(line) > len(start) else "")
