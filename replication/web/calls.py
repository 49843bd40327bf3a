"""What the workers of a Synapse ask its main process to do, by name, over HTTP: for an application to answer.

Such a call is ``POST /_synapse/replication/NAME/WORD…`` with a JSON object, and so is its answer.  ``send_event`` is
one, for a worker where a user says something: what that means is the application's business.  Two of them come before a
worker answers any ``/sync`` of a user who wants to be seen, and it does not if they fail; so they are taken as read
unless an application answers them.  That the user syncs, USER_SYNC says too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import maybeDeferred

from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Function = Callable[[Sequence[str], dict[str, Any]], object]

F = TypeVar("F", bound="Function")

TAKEN_AS_READ = ("presence_set_state", "bump_presence_active_time")


class Calls:
    """Which function answers which call."""

    def __init__(self) -> None:
        self._functions: dict[str, Function] = {}

    def answer(self, name: str) -> Callable[[F], F]:
        """Register a function for a call: ``function(words, body)``, plain, ``async`` or returning a Deferred.

        ``words`` are the rest of the path; where Synapse would repeat a call, the last is the same for each repetition.
        ``body`` is what was sent, and a dict is what is sent back.  A ReplicationError refuses.
        """

        def register(function: F) -> F:
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(f"the call {name!r} has a function already")
            return function

        return register

    def __contains__(self, name: object) -> bool:
        return name in self._functions or name in TAKEN_AS_READ

    async def ask(self, name: str, words: Sequence[str], body: dict[str, Any]) -> object:
        """Return the answer to a call that is known."""
        function = self._functions.get(name)
        return {} if function is None else await maybeDeferred(function, words, body)
