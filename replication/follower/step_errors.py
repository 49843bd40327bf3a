"""The failed steps of a stream: why the facts of a writer are not applied, and what the log has of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from twisted.python.failure import Failure

from replication.errors import CatchUpError, ReplicationError
from replication.follower.failures import Again
from replication.logs import TroubleLog
from replication.streams.cursor import CatchUp, Check
from replication.streams.skips import describe_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twisted.logger import Logger

    from replication.follower.application import Application
    from replication.wire.grammar import InstanceName, StreamName

FIRST_RETRY: Final = 0.25  # seconds until a failed step is repeated; doubled at each failure in a row
LAST_RETRY: Final = 10.0
_DOING: Final[Mapping[type, str]] = {
    CatchUp: "fetching",
    Check: "checking the history of",
    Again: "applying again a fact of",
}


@attrs.define(eq=False)
class StepErrors:
    """The failed steps of one stream.

    Args:
        stream: its name.
        application: calls the functions of the application, which may raise.
        log: has the errors.

    """

    _stream: StreamName
    _application: Application
    _log: Logger
    texts: dict[InstanceName, str] = attrs.field(init=False, factory=dict)  # why a writer's facts are not applied
    count: int = attrs.field(init=False, default=0)
    # By kind of step. The end of a connection ends none: the next one may find the same trouble.
    _troubles: dict[InstanceName, dict[type, TroubleLog]] = attrs.field(init=False, factory=dict)
    # The last error of each writer whose traceback was logged, until the stream has gone on.
    _traced: dict[InstanceName, str] = attrs.field(init=False, factory=dict)

    def failed(self, writer: InstanceName, step: Any, error: Exception, delay: float) -> None:
        """Note and log that a step has failed; it is repeated after ``delay`` seconds."""
        if isinstance(error, CatchUpError) and error.behind and delay < LAST_RETRY:
            return
        what, reason, failing = _DOING.get(type(step), "applying"), describe_error(error), self._application.failing
        where = f"{what} {self._stream} of {writer or 'all writers'} after {step.after}"
        self.count += 1
        self.texts[writer] = f"{where}: {reason}" + (failing.search(writer) if what == "applying" else "")
        trouble = self._troubles.setdefault(writer, {}).setdefault(type(step), TroubleLog(self._log))
        if failing.found_now(writer):
            trouble.end()
        text, cure = "{where}: {error}; next attempt in {delay:.2f} s{cure}", failing.cure(writer)
        trouble.report(text, error=reason, where=where, delay=delay, cure=cure)
        origin = self._application.origin(error)
        if self._traced.get(writer) != origin + reason and not isinstance(error, ReplicationError):
            self._traced[writer] = origin + reason
            self._log.failure(origin + " {stream} raised", Failure(error), stream=self._stream)

    def succeeded(self, writer: InstanceName, step: Any) -> None:
        """Note that a step has succeeded."""
        self.texts.pop(writer, None)
        self._troubles.get(writer, {}).pop(type(step), None)
        if not self._application.failing.is_limited(writer):
            self._traced.pop(writer, None)

    def rested(self, writer: InstanceName, *, live: bool) -> None:
        """Note that no step is left: a failed one is not needed any more, as its writer went back, or is away."""
        self.texts.pop(writer, None)
        if live:
            self._troubles.pop(writer, None)
