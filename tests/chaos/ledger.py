"""What an appender has asked for, and what was answered: a file that outlives its process.

Each line is a JSON array: ``["try", KEY, SECONDS, [FACT, …]]`` before the first request, ``["done", KEY, SECONDS,
[ID, …]]`` once it is acknowledged, and ``["refused", KEY, SECONDS, TEXT]`` after an answer that no retry can mend.
SECONDS are those of ``time.monotonic()``, which all processes of a machine share.  Nothing is imported here but the
standard library: appenders start often.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Append:
    """One append: its facts, each a list of rows, and their IDs once it is acknowledged."""

    key: str
    tried: float
    facts: list[list[Any]]
    ids: list[int] | None = None
    done: float = 0.0
    refused: str = ""


def read_ledger(path: Path) -> dict[str, Append]:
    """Return all appends by their keys, in the order in which they began."""
    found: dict[str, Append] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            kind, key, at, content = json.loads(line)
        except ValueError:
            continue  # the process was killed while it wrote the line; what the line is about was not sent or not known
        if kind == "try":
            found[key] = Append(key, at, content)
        elif kind == "done":
            found[key].ids, found[key].done = content, at
        else:
            found[key].refused = content
    return found


class LedgerFile:
    """A ledger to write to."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self._file, b"\n")  # a process that was killed may have left a part of a line

    def write(self, kind: str, key: str, content: object) -> None:
        """Add a line: with one call, so that a SIGKILL leaves it whole or absent."""
        with self._lock:
            os.write(self._file, json.dumps([kind, key, time.monotonic(), content]).encode() + b"\n")
