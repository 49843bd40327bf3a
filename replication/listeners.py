"""An application's functions for what is said on the wire, by command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import maybeDeferred
from twisted.logger import Logger

from replication.errors import ConfigError
from replication.session.connection import Role, Words
from replication.wire.commands import Position, Rdata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from replication.net.protocol import ReplicationProtocol
    from replication.wire.commands import Command

F = TypeVar("F", bound="Callable[..., object]")


class Listeners:
    """Who wants to hear what; ``speakers`` are the roles of those that this process hears.

    ``words`` are the commands that it knows: those of the protocol, and its application's own.
    """

    log = Logger()

    def __init__(self, speakers: Collection[Role]) -> None:
        self.words = Words()
        self._speakers = speakers
        self._functions: dict[type[Command], list[Callable[..., object]]] = {}
        self._syncing: list[Callable[[str, bool], object]] = []

    def on_command(self, command: type[Command]) -> Callable[[F], F]:
        """Register a function for a command: ``heard(command, peer)``, plain, ``async`` or returning a Deferred.

        ``command`` is a class of ``replication.wire.commands``, or the application's own: an ``ApplicationCommand``,
        which is known from then on.  ``peer`` is the connection that said it: it has a ``name``, an ``address``, and
        ``say()`` for an answer.  What the function raises is logged.  ConfigError if nobody says that here.
        """
        self.words.add(command)
        if command in (Rdata, Position) or not any(self.words.may_say(role, command) for role in self._speakers):
            raise ConfigError(f"{command.WORD} is not heard here" + "; use on(stream)" * (command is Rdata))

        def register(function: F) -> F:
            self._functions.setdefault(command, []).append(function)
            return function

        return register

    def on_syncing(self, function: F) -> F:
        """Register a function for users that begin to sync, or stop: ``changed(user_id, syncing)``."""
        self._syncing.append(function)
        return function

    def hear(self, peer: ReplicationProtocol, command: Command) -> None:
        """Pass on what a peer said."""
        for function in self._functions.get(type(command), ()):
            self._call(command.WORD, function, command, peer)

    def syncing_changed(self, user_id: str, syncing: bool) -> None:  # noqa: FBT001 (it is what changed)
        """Pass on that a user syncs now, or no more."""
        for function in self._syncing:
            self._call("syncing", function, user_id, syncing)

    def _call(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function; whatever becomes of it, the connection goes on."""
        maybeDeferred(function, *arguments).addErrback(
            lambda failure: self.log.failure("the application's function for {what} raised", failure, what=what)
        )
