"""The functions that an application registers for commands from its peers."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

from twisted.logger import Logger

from replication.deferreds import call_function
from replication.errors import ConfigError, decorator_error
from replication.logs import OF_APPLICATION
from replication.session.connection import Role, may_send
from replication.wire.commands import COMMANDS, ApplicationCommand, Command, Position, Rdata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from replication.net.links import IPeer

CommandFunction = TypeVar("CommandFunction", bound="Callable[..., object]")
SyncingFunction = TypeVar("SyncingFunction", bound="Callable[[str, bool], object]")
_WORD: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}", re.ASCII)


class CommandFunctions:
    """An application's functions, by command.

    ``senders`` are the roles of the peers of this process.  ``commands`` has the commands that this process accepts, by
    name: those of the protocol and of the application.
    """

    log = Logger()

    def __init__(self, senders: Collection[Role]) -> None:
        self.commands: dict[str, type[Command]] = dict(COMMANDS)
        self._senders = senders
        self._functions: dict[type[Command], list[Callable[..., object]]] = {}
        self._syncing: list[Callable[[str, bool], object]] = []

    def on_command(self, command: type[Command]) -> Callable[[CommandFunction], CommandFunction]:
        """Return a decorator for a function ``received(command, peer)``: plain, ``async`` or returning a Deferred.

        ``command`` is a class of ``replication.wire.commands``, or a subclass of ``ApplicationCommand``, which this
        process accepts from then on.  ``peer`` is the connection that sent it, with ``name``, ``address`` and
        ``send()`` for an answer.  An error of the function is logged.

        ConfigError if no peer of this process may send that command.  Rules: docs/protocol/wire.md A4.
        """
        if inspect.isroutine(command):
            example = "@worker.on_command(RemoteServerUp)"
            raise decorator_error("on_command() takes the class of a command", example, command)
        self._accept(command)
        if command in (Rdata, Position) or not any(may_send(role, command) for role in self._senders):
            raise ConfigError(f"{command.WORD} is not received here" + "; use on(stream)" * (command is Rdata))

        def register(function: CommandFunction) -> CommandFunction:
            self._functions.setdefault(command, []).append(function)
            return function

        return register

    def on_syncing(self, function: SyncingFunction) -> SyncingFunction:
        """Register ``changed(user_id, syncing)``: a user now syncs at a first process, or no longer at any."""
        self._syncing.append(function)
        return function

    def taken(self, word: str) -> type[Command] | None:
        """Return the class of a command for which a function is registered, by its name; None if there is none."""
        command = self.commands.get(word)
        return command if command in self._functions else None

    def receive(self, peer: IPeer, command: Command) -> None:
        """Call the functions that are registered for ``command``."""
        for function in self._functions.get(type(command), ()):
            self._call(command.WORD, function, command, peer)

    def syncing_changed(self, user_id: str, syncing: bool) -> None:  # noqa: FBT001 (it is what changed)
        """Call the functions of ``on_syncing``."""
        for function in self._syncing:
            self._call("syncing", function, user_id, syncing)

    def _accept(self, command: type[Command]) -> None:
        """Accept a command of the application, if it is not accepted already; ConfigError if it is no command."""
        word = getattr(command, "WORD", "")
        if self.commands.get(word) is command:
            return
        if not (isinstance(command, type) and issubclass(command, ApplicationCommand) and _WORD.fullmatch(word)):
            raise ConfigError(f"{command!r} is no command: subclass ApplicationCommand, with a WORD in capitals")
        if word in self.commands:
            raise ConfigError(f"{word} is {self.commands[word].__name__} already: give {command.__name__} another WORD")
        unknown = set(command.SENT_BY) - {role.value for role in Role}
        if isinstance(command.SENT_BY, str) or unknown or not command.SENT_BY:
            raise ConfigError(f'{word}: SENT_BY lists "master", "worker" or both, as in SENT_BY = ["worker"]')
        self.commands[word] = command

    def _call(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function and log its error, which does not concern the connection."""
        call_function(function, *arguments).addErrback(
            lambda failure: self.log.failure(OF_APPLICATION + " for {what} raised", failure, what=what)
        )
