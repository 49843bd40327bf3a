"""Requests that the workers of a Synapse send to its main process, by name: an application answers them.

A request is ``POST /_synapse/replication/NAME/WORD…`` with a JSON object; so is its answer.  One is ``send_event``: a
user has sent an event to a worker.  A worker sends the two requests of DEFAULTS before it answers a ``/sync`` of a
user who is online, and the ``/sync`` fails with them.  They are therefore answered with ``{}`` if no function is
registered: USER_SYNC reports the same users (docs/http.md, The calls of a Synapse).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from replication.deferreds import call_function
from replication.errors import ConfigError, decorator_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    SynapseFunction = Callable[[Sequence[str], dict[str, Any]], object]

RequestFunction = TypeVar("RequestFunction", bound="SynapseFunction")

DEFAULTS: Final = ("presence_set_state", "bump_presence_active_time")


class SynapseRequests:
    """The functions that answer requests, by name."""

    def __init__(self) -> None:
        self._functions: dict[str, SynapseFunction] = {}

    def on(self, name: str) -> Callable[[RequestFunction], RequestFunction]:
        """Register the function that answers the request ``name``: ``function(words, body)``; return the function.

        ``words`` are the rest of the path; where Synapse repeats a request, the last word is the same.  ``body`` is the
        decoded JSON object.  The function returns the answer, a dict.  It may be plain, ``async`` or return a Deferred;
        a ReplicationError refuses the request.  ConfigError if the request has a function already.
        """
        if not isinstance(name, str):
            example = "@master.on_synapse_request('send_event')"
            raise decorator_error("on_synapse_request() takes the name of a request", example, name)

        def register(function: RequestFunction) -> RequestFunction:
            if self._functions.setdefault(name, function) is not function:
                raise ConfigError(f"the Synapse request {name!r} has a function already")
            return function

        return register

    def __contains__(self, name: object) -> bool:
        return name in self._functions or name in DEFAULTS

    async def answer(self, name: str, words: Sequence[str], body: dict[str, Any]) -> object:
        """Return the answer to a request that is in this object (``name in requests``)."""
        function = self._functions.get(name)
        return {} if function is None else await call_function(function, words, body)
