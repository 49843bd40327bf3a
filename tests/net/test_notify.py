"""What systemd receives: the start, the status, the watchdog's signs of life, and the end."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from uuid import uuid4

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase

from replication.net.notify import BEAT, Notifier
from tests.system.notifications import NotifySocket


class NotifierTests(SynchronousTestCase):
    """A real socket, and a clock that the test moves."""

    def setUp(self) -> None:
        self.clock = Clock()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = str(Path(folder.name) / "notify")
        self.systemd = NotifySocket(self.path)
        self.addCleanup(self.systemd.close)
        self.fault: str | None = None
        self.described = "ready"

    async def check(self) -> str | None:
        return self.fault

    def notifier(self, **environment: str) -> Notifier:
        return Notifier(self.clock, {"NOTIFY_SOCKET": self.path, **environment})

    def ready(self, **environment: str) -> Notifier:
        notifier = self.notifier(**environment)
        notifier.ready(self.check, lambda: self.described)
        self.addCleanup(notifier.stopping)
        return notifier

    def received(self) -> list[str]:
        return self.systemd.received()

    def test_nothing_happens_without_the_variable(self) -> None:
        notifier = Notifier(self.clock, {"WATCHDOG_USEC": "1000000"})
        with capturedLogs() as logged:
            notifier.status("waits")
            notifier.ready(self.check, lambda: "ready")
            notifier.stopping()
        self.assertEqual((self.clock.getDelayedCalls(), logged), ([], []))

    def test_ready_is_sent_with_the_status_and_then_each_new_status(self) -> None:
        self.ready()
        self.assertEqual(self.received(), ["READY=1\nSTATUS=ready"])
        self.clock.advance(BEAT)
        self.assertEqual(self.received(), [])
        self.described = "stream orders of master is stopped"
        self.clock.advance(BEAT)
        self.assertEqual(self.received(), ["STATUS=stream orders of master is stopped"])

    def test_an_abstract_socket_is_reached(self) -> None:
        name = f"@replication-{uuid4()}"
        systemd = NotifySocket(name)
        self.addCleanup(systemd.close)
        Notifier(self.clock, {"NOTIFY_SOCKET": name}).status("waits")
        self.assertEqual(systemd.received(), ["STATUS=waits"])

    def test_a_watchdog_gets_two_signs_of_life_in_its_time(self) -> None:
        self.ready(WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid()))
        self.assertEqual(self.received(), ["READY=1\nSTATUS=ready\nWATCHDOG=1"])
        for _ in range(3):
            self.clock.advance(1.5)
            self.assertEqual(self.received(), ["WATCHDOG=1"])

    def test_the_watchdog_of_another_process_gets_none(self) -> None:
        self.ready(WATCHDOG_USEC="3000000", WATCHDOG_PID="1")
        self.clock.advance(BEAT)
        self.assertEqual(self.received(), ["READY=1\nSTATUS=ready"])

    def test_a_check_that_fails_ends_the_signs_of_life_and_is_the_status(self) -> None:
        self.ready(WATCHDOG_USEC="3000000")
        self.received()
        self.fault = "timers have not run for 11 s"
        self.clock.advance(1.5)
        self.clock.advance(1.5)
        self.assertEqual(self.received(), ["STATUS=timers have not run for 11 s"])
        self.fault = None
        self.clock.advance(1.5)
        self.assertEqual(self.received(), ["STATUS=ready\nWATCHDOG=1"])

    def test_the_end_is_sent_and_no_sign_of_life_after_it(self) -> None:
        notifier = self.ready(WATCHDOG_USEC="3000000")
        self.received()
        notifier.stopping()
        self.assertEqual(self.received(), ["STOPPING=1"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_check_that_ends_after_the_end_sends_nothing(self) -> None:
        checking: Deferred[None] = Deferred()

        async def check() -> None:
            await checking

        notifier = self.notifier()
        notifier.ready(check, lambda: "ready")
        notifier.stopping()
        checking.callback(None)
        self.assertEqual(self.received(), ["STOPPING=1"])

    def test_a_status_is_one_short_line(self) -> None:
        self.notifier().status("no\nREADY=1" + 9999 * "☃")
        (sent,) = self.received()
        self.assertEqual(sent[:20], r"STATUS=no\nREADY=1☃☃☃"[:20])
        self.assertLess(len(sent.encode()), 4096)  # what systemd takes
        self.assertNotIn("\n", sent)

    def test_what_systemd_cannot_take_now_is_sent_at_the_next_beat(self) -> None:
        self.systemd.close()
        Path(self.path).unlink()
        with capturedLogs() as logged:
            self.ready()
            self.clock.advance(BEAT)
            self.systemd = NotifySocket(self.path)
            self.addCleanup(self.systemd.close)
            self.clock.advance(BEAT)
        self.assertEqual(self.received(), ["READY=1\nSTATUS=ready"])
        texts = [formatEvent(each) for each in logged]
        self.assertRegex(texts[0], "^systemd cannot be notified: .*No such file")
        self.assertEqual(texts[1:], ["systemd can be notified again"], "each is logged once")

    def test_a_full_socket_does_not_block(self) -> None:
        notifier = self.notifier()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            try:
                while True:
                    other.sendto(b"x", self.path)
            except BlockingIOError:
                pass
        notifier.status("waits")
        self.assertNotIn("STATUS=waits", self.received())
