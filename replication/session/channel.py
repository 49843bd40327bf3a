"""The messages of a Redis channel: one command each, without an LF (docs/protocol/redis.md).

Every process of a Synapse publishes on the channel, and new releases bring new commands.  So nothing that is received
ends the connection, except another process with our name.  What is not needed is skipped, mostly before it is parsed,
and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

import attrs
import msgspec

from replication.errors import RemoteProtocolError
from replication.session.connection import MAX_WRITERS, Fault, Received, Rows, read_run
from replication.wire import grammar
from replication.wire.commands import COMMANDS, Command, Position, Rdata, parse_line
from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_NAMES: Final = 100  # names of unknown commands, and of streams that are not followed, that are kept
_NOT_NEEDED: Final = frozenset({*COMMANDS, "LOCK_RELEASED", "NEW_ACTIVE_TASK", "CANCEL_TASK"})
_RDATA: Final = f"{Rdata.WORD} ".encode()
_POSITION: Final = f"{Position.WORD} ".encode()
_WORD: Final = re.compile(r"[A-Z][A-Z_]{0,63}")


class LostRow(msgspec.Struct, frozen=True):
    """A row that is not valid, of a writer that has sent a POSITION: its fact is missing."""

    stream: StreamName
    instance: InstanceName


def _no_command(_: str) -> None:
    return None


@attrs.define(eq=False, repr=False, kw_only=True)
class ChannelReader:
    """Turns messages into what a ``ReplicationConnection`` turns lines into.

    Args:
        instance_name: of this process.  If another process publishes under it, ``receive`` returns a Fault, and
            nothing after it.
        wants: whether a stream is followed; the rows of others are skipped unparsed.
        command: returns the class of another command that the application takes, by name, else None.

    ``messages`` counts all messages, ``positions`` the POSITIONs of all streams, and ``skipped`` the messages that were
    skipped, by reason: ``not followed``, ``not needed``, ``blank``, ``unknown command``, ``bad message``, ``bad row``
    and ``too many writers``.
    ``unknown_commands`` and ``not_followed`` are the names that were skipped, the first MAX_NAMES of each.

    """

    _instance_name: InstanceName
    _wants: Callable[[StreamName], bool]
    _command: Callable[[str], type[Command] | None] = _no_command
    messages: int = attrs.field(init=False, default=0)
    positions: int = attrs.field(init=False, default=0)
    skipped: Counter[str] = attrs.field(init=False, factory=Counter)
    unknown_commands: list[str] = attrs.field(init=False, factory=list)
    not_followed: list[str] = attrs.field(init=False, factory=list)
    closed: bool = attrs.field(init=False, default=False)
    # Whether rows that begin so are followed.
    _followed: dict[bytes, bool] = attrs.field(init=False, factory=dict)
    _writers: set[tuple[str, str]] = attrs.field(init=False, factory=set)  # pairs of a stream and an instance

    def receive(self, messages: Sequence[bytes]) -> list[Received | LostRow]:
        """Return the commands of these messages.  Nothing is raised.

        The RDATA of one writer between two other commands are one Rows, even if RDATA of other writers are among them:
        writers publish independently.
        """
        received: list[Received | LostRow] = []
        runs: dict[bytes, list[bytes]] = {}  # RDATA, by stream and instance
        prefix: bytes | tuple[()] = ()  # with which no message begins
        run: list[bytes] = []
        if self.closed:
            return received
        for message in messages:
            self.messages += 1
            if message.startswith(prefix):
                run.append(message)
            elif message.startswith(_RDATA) and message.count(b" ") >= 3:  # noqa: PLR2004 (a stream, an instance, and more)
                prefix = b" ".join(message.split(b" ", 3)[:3]) + b" "
                run = runs.setdefault(prefix, [])
                run.append(message)
            else:
                if message.startswith(_POSITION):  # it makes its writer known for the rows after it only
                    self._read_runs(runs, received)
                    runs, prefix = {}, ()
                commands: list[Received | LostRow] = []
                self._read_message(message, commands)
                if commands:
                    self._read_runs(runs, received)
                    received += commands
                    runs, prefix = {}, ()
            if self.closed:
                break
        self._read_runs(runs, received)
        if self.closed:  # what was read after the Fault is dropped
            return received[: [isinstance(each, Fault) for each in received].index(True) + 1]
        return received

    def _read_runs(self, runs: Mapping[bytes, Sequence[bytes]], received: list[Received | LostRow]) -> None:
        for prefix, run in runs.items():
            if prefix not in self._followed:
                if len(self._followed) >= MAX_WRITERS:
                    self._followed.clear()
                self._followed[prefix] = self._is_followed(prefix, received)
            if self._followed[prefix]:
                self._read_rows(run, received)
            else:
                self.skipped["not followed"] += len(run)

    def _read_rows(self, run: Sequence[bytes], received: list[Received | LostRow]) -> None:
        """Read RDATA of one stream and instance."""
        try:
            text = b"\n".join(run).decode()
            lines = text.split("\n")
            if len(lines) == len(run) and "\r" not in text:
                received.append(read_run(lines, 0))
                return
        except (UnicodeDecodeError, RemoteProtocolError):
            pass  # one of them is wrong: parse one by one to find it
        for message in run:
            self._read_message(message, received)

    def _is_followed(self, prefix: bytes, received: list[Received | LostRow]) -> bool:
        """Return whether rows that begin so are to be parsed."""
        fields = prefix.decode(errors="replace").split(" ")
        stream, instance = fields[1], fields[2]
        self._refuse_our_name(instance, received)
        if self._wants(StreamName(stream)):
            return True
        self._note(self.not_followed, stream)
        return False

    def _read_message(self, message: bytes, received: list[Received | LostRow]) -> None:
        """Read one message: a command, or nothing."""
        try:
            text = message.decode()
        except UnicodeDecodeError:
            self._skip_bad(message.decode(errors="replace"), received)
            return
        word = text.partition(" ")[0]
        if "\n" in text:
            self._skip_bad(text, received)
        elif word == Position.WORD:
            self._read_position(text, received)
        elif word == Rdata.WORD:
            try:
                row = Rdata.parse(text.removesuffix("\r").partition(" ")[2])
                received.append(Rows(row.stream, row.instance, [row.token], [row.row]))
            except RemoteProtocolError:
                self._skip_bad(text, received)
        elif (command := self._command(word)) is not None:
            try:
                received.append(parse_line(text, {word: command}))
            except Exception:  # noqa: BLE001 (an application's own parse() may raise anything)
                self.skipped["bad message"] += 1
        elif word in _NOT_NEEDED:
            self.skipped["not needed"] += 1
        elif not text.strip():
            self.skipped["blank"] += 1
        elif _WORD.fullmatch(word):
            self.skipped["unknown command"] += 1
            self._note(self.unknown_commands, word)
        else:
            self.skipped["bad message"] += 1

    def _read_position(self, text: str, received: list[Received | LostRow]) -> None:
        self.positions += 1
        fields = text.split(" ")
        if len(fields) > 2:  # noqa: PLR2004 (POSITION, a stream, an instance)
            self._refuse_our_name(fields[2], received)
        try:
            if len(fields) > 1 and not self._wants(grammar.stream_name(fields[1])):
                self.skipped["not followed"] += 1
                self._note(self.not_followed, fields[1])
                return
            position = Position.parse(text.partition(" ")[2].removesuffix("\r"))
        except RemoteProtocolError:
            self.skipped["bad message"] += 1
            return
        self._writers.add((position.stream, position.instance))
        if len(self._writers) > MAX_WRITERS:
            self._writers.discard((position.stream, position.instance))
            self.skipped["too many writers"] += 1
            return
        received.append(position)

    def _refuse_our_name(self, instance: str, received: list[Received | LostRow]) -> None:
        """Add a Fault if another process has our name; what follows it is dropped."""
        if instance == self._instance_name:
            self.closed = True
            why = f"another process publishes under the name of this process, {instance}"
            received.append(Fault(f"{why}: give each process an instance name of its own", "same instance name"))

    def _skip_bad(self, text: str, received: list[Received | LostRow]) -> None:
        """Count a message that cannot be read; if it is a row of a known writer, its fact is missing."""
        match text.split(" ", 3):
            case [Rdata.WORD, stream, instance, *_] if (stream, instance) in self._writers:
                self.skipped["bad row"] += 1
                received.append(LostRow(StreamName(stream), InstanceName(instance)))
            case _:
                self.skipped["bad message"] += 1

    def _note(self, names: list[str], name: str) -> None:
        if name not in names and len(names) < MAX_NAMES:
            names.append(name[:100])
