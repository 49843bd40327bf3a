"""A shell command of the documents."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

from tests.system.daemons import environment

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 240.0  # seconds; Spark takes its time on a machine that is busy


class Terminal:
    """A running command and the lines that it has printed."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command = command
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            ["sh", "-c", command],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip())

    @property
    def ended(self) -> bool:
        """Whether the command has ended."""
        return self._process.poll() is not None

    def finish(self) -> int:
        """Wait for its end, and return the status."""
        status = self._process.wait(PATIENCE)
        self.close()
        return status

    def close(self) -> None:
        """Kill the command if it runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
