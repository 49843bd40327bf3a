"""The notify protocol of systemd: a datagram to ``$NOTIFY_SOCKET`` for each change (docs/how-to/run-under-systemd.md).

The libraries for it (sdnotify, systemd-python, cysystemd) are unmaintained or need a compiler, and each is these few
lines.  Without ``$NOTIFY_SOCKET`` nothing happens.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from replication.errors import escape
from replication.logs import TroubleLog

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from typing import Any

    from twisted.internet.interfaces import IReactorTime

BEAT: Final = 5.0  # seconds between two looks at the status; a watchdog that is faster makes them shorter
LONGEST_STATUS: Final = 500  # characters; systemd drops a datagram of more than 4096 bytes


class Notifier:
    """Sends the state of this process to systemd.

    ``environment`` has NOTIFY_SOCKET, a path or ``@`` and an abstract name, and perhaps WATCHDOG_USEC and WATCHDOG_PID.
    """

    log = Logger()

    def __init__(self, clock: IReactorTime, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._watchdog = _watchdog_seconds(environment)
        self._trouble = TroubleLog(self.log)
        self._ready = False  # whether READY=1 was sent
        self._status = ""
        self._check: Callable[[], Coroutine[Deferred[Any], Any, str | None]]
        self._describe: Callable[[], str]
        self._beat = LoopingCall(lambda: Deferred.fromCoroutine(self._look()))
        self._beat.clock = clock

    def status(self, text: str) -> None:
        """Show ``text`` in ``systemctl status``."""
        self._send(f"STATUS={_one_line(text)}")

    def ready(
        self, check: Callable[[], Coroutine[Deferred[Any], Any, str | None]], describe: Callable[[], str]
    ) -> None:
        """Send that the start has succeeded, and from now on the watchdog's sign of life and each new status.

        ``check`` returns why systemd should restart this process, or None: while there is a reason, no sign of life is
        sent.  ``describe`` returns the status.
        """
        self._check, self._describe = check, describe
        if self._address:
            interval = BEAT if self._watchdog is None else min(BEAT, self._watchdog / 2)
            self._beat.start(interval).addErrback(lambda failure: self.log.failure("the watchdog failed", failure))

    def stopping(self) -> None:
        """Send that the process ends."""
        if self._beat.running:
            self._beat.stop()
        self._send("STOPPING=1")

    async def _look(self) -> None:
        """Send what is due.  A datagram that systemd cannot take now is sent at the next beat."""
        fault = await self._check()
        if not self._beat.running:  # it was stopped meanwhile
            return
        status = _one_line(fault or self._describe())
        states = [] if self._ready else ["READY=1"]
        if status != self._status:
            states.append(f"STATUS={status}")
        if fault is None and self._watchdog is not None:
            states.append("WATCHDOG=1")
        if states and self._send(*states):
            self._ready, self._status = True, status

    def _send(self, *states: str) -> bool:
        """Send one datagram, and return whether systemd has it; do not wait."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as notify:
                notify.sendto("\n".join(states).encode(), self._address)
        except OSError as error:
            self._trouble.report("systemd cannot be notified: {error}", error=error)
            return False
        self._trouble.end("systemd can be notified again")
        return True


def _watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Return within how many seconds systemd expects a sign of life; None if it expects none of this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if ours and microseconds.isdecimal() and int(microseconds) else None


def _one_line(text: str) -> str:
    """Return ``text`` as the value of a variable, whose end is the end of the line."""
    return escape(text)[:LONGEST_STATUS]
