"""Logging: a repeated failure once (``TroubleLog``), observers for ``twistd --logger``, log files opened again.

``replication.logs.text`` and ``replication.logs.json`` are the observers.  Both write the events of ``twisted.logger``
to standard output: as text in twistd's own format, or as JSON, one object a line, with the event's fields.  Use them
with ``twistd -n``: a daemon's standard output is lost, and twistd ignores ``--logfile`` when ``--logger`` is given.
"""

from __future__ import annotations

import gc
import json as standard_json
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, cast

from twisted.internet.defer import Deferred
from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    LimitedHistoryLogObserver,
    Logger,
    LogLevel,
    LogPublisher,
    eventAsText,
    formatEvent,
    globalLogPublisher,
    textFileLogObserver,
)
from twisted.python.failure import Failure
from twisted.python.logfile import BaseLogFile

from replication.errors import escape

if TYPE_CHECKING:
    from typing import Any

    from twisted.logger import ILogObserver, LogEvent


OF_APPLICATION: Final = "the application's function"  # the text of its failures begins so
NO_MEMORY: Final = b"replication: this process has no memory left and ends; restart it, nothing is lost\n"
_BREAKS: Final = "\n\t"  # the observers of Twisted indent the lines of a text after the first
# Until a program sets an observer, twisted.logger keeps events in memory, and writes critical ones to standard error.
_BEFORE_OBSERVERS = (LogPublisher, LimitedHistoryLogObserver, FilteringLogObserver)
_log: Final = Logger()


class TroubleLog:
    """Logs one kind of trouble once, again if its text changes, and once that it is over.

    ``error`` is the text of the present trouble, for status pages; None if there is none.  If a program has set no
    observer of ``twisted.logger``, the trouble is written to standard error, as ``logging`` does without a handler.
    """

    def __init__(self, log: Logger, level: Any = LogLevel.error) -> None:
        self.error: str | None = None
        self._log = log
        self._level = level

    def report(self, message: str, *, error: object, **fields: object) -> bool:
        """Log ``message``, a format with ``{error}`` and ``fields``, unless the last report had the same ``error``.

        Returns whether it was logged.
        """
        text = escape(str(error), keep=_BREAKS)
        if text == self.error:
            return False
        self.error = text
        trace: list[tuple[object, object]] = []
        self._log.emit(self._level, message, error=text, log_trace=trace, **fields)
        if all(isinstance(observer, _BEFORE_OBSERVERS) for _, observer in trace):
            shown = escape(message.format(error=text, **fields), keep=_BREAKS)
            print("replication:", shown, file=sys.stderr)  # noqa: T201
        return True

    def end(self, message: str | None = None, **fields: object) -> None:
        """Note that the trouble is over, and log ``message`` at level info; nothing if there was no trouble."""
        if self.error is not None and message is not None:
            self._log.info(message, **fields)
        self.error = None


def _format_json(event: LogEvent) -> str | None:
    """Return ``event`` as a line: time (UTC), level, source, text, traceback if any, and its own plain fields."""
    text = eventAsText(event, includeTraceback=False, includeTimestamp=False, includeSystem=False)
    fields = {
        key: value
        for key, value in event.items()
        if isinstance(value, str | int | float | None) and not key.startswith("log_")
    }
    level = event.get("log_level")
    line = fields | {
        "time": datetime.fromtimestamp(event["log_time"], UTC).isoformat(timespec="milliseconds"),
        "level": level.name if level is not None else "info",
        "source": event.get("log_namespace", "-"),
        "text": text,
    }
    if "log_failure" in event:
        line["traceback"] = event["log_failure"].getTraceback()
    return standard_json.dumps(line) + "\n"


def json() -> FileLogObserver:
    """Return an observer that writes JSON lines to standard output."""
    return FileLogObserver(sys.stdout, _format_json)


def text() -> FileLogObserver:
    """Return an observer that writes plain text to standard output."""
    format_event = textFileLogObserver(sys.stdout).formatEvent
    return FileLogObserver(sys.stdout, lambda event: escape(format_event(event) or "", keep=_BREAKS))


def add_observers(reactor: Any) -> None:
    """Add a daemon's observers: ``escape_event`` before those of twistd, ``end_without_memory`` after them."""
    globalLogPublisher.addObserver(cast("ILogObserver", escape_event))
    reactor.callWhenRunning(globalLogPublisher.addObserver, end_without_memory)


def escape_event(event: LogEvent) -> None:
    """Escape what a terminal would obey in the text and in the traceback of ``event``.

    It is an observer: the observers that are added to a publisher after it receive the event as it is then.
    """
    text = formatEvent(event)
    if (escaped := escape(text, keep=_BREAKS)) != text:
        event.pop("log_flattened", None)
        event.update(log_format="{log_escaped}", log_escaped=escaped)
    failure = event.get("log_failure")
    if failure is not None:
        traceback = failure.getTraceback()
        if (escaped := escape(traceback, keep=_BREAKS)) != traceback:
            event["log_failure"] = _EscapedFailure(failure, escaped)


def end_without_memory(event: LogEvent) -> None:
    """End the process with status 1 if ``event`` has a MemoryError; this observer comes last, so the log has the event.

    Such an error may leave any state half changed, and a process that ends at once loses nothing.  If a function of
    the application has requested too much memory, only its fact fails: the process goes on.
    """
    failure = event.get("log_failure", event.get("failure"))  # the second is that of twisted.python.log
    text = str(event.get("log_format", ""))
    if failure is not None and failure.check(MemoryError) and not text.startswith(OF_APPLICATION):
        os.write(2, NO_MEMORY)  # takes no memory
        os._exit(1)


def log_lost_errors() -> None:
    """Log each MemoryError that a Deferred has as its result: if nothing receives it, a daemon ends by that.

    Without memory, Twisted may take a callback from a Deferred and not call it.  Then work that has a connection of
    the store never goes on.  The garbage collector finds the error only if nothing refers to that work.
    """
    for each in gc.get_objects():
        failure = getattr(each, "result", None) if issubclass(type(each), Deferred) else None
        if isinstance(failure, Failure) and failure.check(MemoryError):
            _log.failure("an error was lost", failure)


class _EscapedFailure(Failure):
    """A failure with this text as its traceback."""

    def __init__(self, failure: Failure, traceback: str) -> None:
        super().__init__(failure.value, failure.type, failure.tb)  # type: ignore[no-untyped-call]
        self._traceback = traceback

    def getTraceback(self, elideFrameworkCode: int = 0, detail: str = "default") -> str:  # noqa: ARG002, N803 (Twisted's)
        return self._traceback


def reopen_log_files() -> int:
    """Open each log file of this process again under its name, and return their number.

    twistd does not give its log file to a service, so the garbage collector lists those that are open.
    """
    gc.unfreeze()  # frozen objects are not listed
    files = [each for each in gc.get_objects() if issubclass(type(each), BaseLogFile) and not each.closed]
    gc.freeze()
    for each in files:
        each.reopen()
    return len(files)
