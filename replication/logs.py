"""Log observers for ``twistd --logger replication.logs.text`` and ``twistd --logger replication.logs.json``.

Both write to standard output what is logged through ``twisted.logger``: text as twistd itself writes it, or one JSON
object a line, with the fields that an event was given beside its text.  They suit ``twistd -n``: a daemon's standard
output goes nowhere, and ``--logfile`` has no say once there is a ``--logger``.
"""

from __future__ import annotations

import json as standard_json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from twisted.logger import FileLogObserver, eventAsText, textFileLogObserver

if TYPE_CHECKING:
    from twisted.logger import LogEvent


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
    return textFileLogObserver(sys.stdout)
