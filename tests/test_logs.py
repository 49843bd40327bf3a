"""What ``twistd --logger replication.logs.…`` writes, and how a trouble is logged."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import call, patch

import pytest
from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import FileLogObserver, Logger, LogLevel, LogPublisher, textFileLogObserver
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication import logs
from tests.doubles import logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.logger import ILogObserver


class LogsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.out = io.StringIO()
        self.patch(sys, "stdout", self.out)

    def logger(self, observer: FileLogObserver) -> Logger:
        return Logger("replication.test", observer=observer)

    def test_json_is_an_object_a_line_with_the_events_own_fields(self) -> None:
        logger = self.logger(logs.json())
        logger.warn("{stream} waits\nfor {what}", stream="orders", what=["no", "field"], count=3)
        logger.info("second")
        first, second = map(json.loads, self.out.getvalue().splitlines())
        self.assertRegex(first.pop("time"), r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00$")
        self.assertEqual(
            first,
            {
                "level": "warn",
                "source": "replication.test",
                "text": "orders waits\nfor ['no', 'field']",
                "stream": "orders",
                "count": 3,
            },
        )
        self.assertEqual((second["level"], second["text"]), ("info", "second"))

    def test_a_failure_brings_its_traceback(self) -> None:
        self.logger(logs.json()).failure("it broke", Failure(ZeroDivisionError("oops")))
        line = json.loads(self.out.getvalue())
        self.assertEqual((line["level"], line["text"]), ("critical", "it broke"))
        self.assertIn("ZeroDivisionError: oops", line["traceback"])

    def test_text_is_a_line_with_time_and_source(self) -> None:
        self.logger(logs.text()).info("hello {name}", name="nc")
        self.assertRegex(self.out.getvalue(), r"^\d{4}-\S+ \[replication\.test#info\] hello nc\n$")


class EscapeTests(SynchronousTestCase):
    """``escape_event`` stands before the observers of twistd."""

    def written(self, *events: Callable[[Logger], object]) -> str:
        out = io.StringIO()
        publisher = LogPublisher(cast("ILogObserver", logs.escape_event), textFileLogObserver(out))
        for log in events:
            log(Logger("test", observer=publisher))
        return out.getvalue()

    def test_a_field_cannot_bring_control_characters(self) -> None:
        written = self.written(
            lambda log: log.info("{name} of {count:.1f}\n{error}", name="\x1b[2J", count=1, error=OSError("\x9b")),
            lambda log: log.info("plain {name}", name="é"),
        )
        self.assertEqual(
            [line.partition("] ")[2] or line for line in written.splitlines()],
            ["\\x1b[2J of 1.0", "\t\\x9b", "plain é"],
        )

    def test_a_traceback_cannot_bring_control_characters(self) -> None:
        failure = Failure(ValueError("\x1b[2J"))
        written = self.written(lambda log: log.failure("it broke", failure))
        self.assertIn("ValueError: \\x1b[2J", written)
        self.assertNotIn("\x1b", written)

    def test_an_escaped_failure_is_still_of_its_type(self) -> None:
        event: dict[str, Any] = {"log_format": "x", "log_failure": Failure(ValueError("\x1b[2J"))}
        logs.escape_event(event)
        self.assertIsNotNone(event["log_failure"].check(ValueError))

    def test_what_is_printable_stays_as_it_is(self) -> None:
        event = {"log_format": "{a}\n\t{b}", "a": "x", "b": Failure(ValueError("y"))}
        before = dict(event)
        logs.escape_event(event)
        self.assertEqual(event, before)

    def test_the_text_observer_escapes_by_itself(self) -> None:
        out = io.StringIO()
        self.patch(sys, "stdout", out)
        Logger("test", observer=logs.text()).failure("{x}", Failure(ValueError("\x9b")), x="\x1b")
        self.assertIn("] \\x1b\n", out.getvalue())
        self.assertIn("ValueError: \\x9b\n", out.getvalue())


PROGRAM = """
import sys
from twisted.logger import Logger, globalLogBeginner, globalLogPublisher, textFileLogObserver
from replication.logs import TroubleLog

if "begin" in sys.argv:
    globalLogBeginner.beginLoggingTo([textFileLogObserver(sys.stdout)], redirectStandardIO=False)
if "add" in sys.argv:
    globalLogPublisher.addObserver(textFileLogObserver(sys.stdout))
trouble = TroubleLog(Logger("test"))
for error in ("refused", "refused", "timed out"):
    trouble.report("cannot connect to {endpoint}: {error}", endpoint="tcp:a:1", error=error)
"""
TROUBLES = ["cannot connect to tcp:a:1: refused", "cannot connect to tcp:a:1: timed out"]


@pytest.mark.parametrize("observer", ["", "begin", "add"])
def test_a_trouble_is_written_to_standard_error_if_the_program_has_no_observer(observer: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, observer], check=True, capture_output=True, text=True)
    logged = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    written = done.stderr.splitlines()
    if observer:
        assert (logged, written) == (TROUBLES, [])
    else:
        assert (logged, written) == ([], [f"replication: {each}" for each in TROUBLES])


class MemoryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.log = Logger(observer=cast("Any", logs.end_without_memory))

    def ends(self, error: Exception, text: str = "it failed") -> bool:
        """Return whether the failure ends this process."""
        with patch.object(os, "write") as write, patch.object(os, "_exit") as leave:
            self.log.failure(text, Failure(error))
        self.assertEqual(write.call_args_list, [call(2, logs.NO_MEMORY)] if leave.called else [])
        return leave.called

    def test_a_failure_for_lack_of_memory_ends_the_process(self) -> None:
        self.assertTrue(self.ends(MemoryError()))
        self.assertFalse(self.ends(ValueError()))
        self.log.error("no failure")

    def test_a_failure_of_twisted_python_log_ends_it_too(self) -> None:
        """As that of ``dataReceived``."""
        with patch.object(os, "write"), patch.object(os, "_exit") as leave:
            logs.end_without_memory({"failure": Failure(MemoryError()), "isError": 1})
        leave.assert_called_once_with(1)

    def test_an_error_that_no_callback_has_received_is_logged(self) -> None:
        """Twisted loses a callback if memory is lacking just before its call; work that waits keeps the Deferred."""
        error = MemoryError()
        lost = [fail(error), fail(ValueError()), succeed(None), Deferred()]
        logs.log_lost_errors()
        found = self.flushLoggedErrors()
        self.assertEqual({each.type for each in found}, {MemoryError})  # another test may have left one, too
        self.assertEqual([each.value for each in found if each.value is error], [error])
        for each in lost:
            each.addErrback(lambda _: None)

    def test_a_lack_of_memory_in_a_function_of_the_application_does_not_end_it(self) -> None:
        self.assertFalse(self.ends(MemoryError(), f"{logs.OF_APPLICATION} for {{stream}} raised"))


class TroubleLogTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.trouble = logs.TroubleLog(Logger("replication.test"), LogLevel.warn)

    def report(self, error: object) -> bool:
        return self.trouble.report("{stream} waits: {error}", error=error, stream="orders")

    def test_the_same_trouble_is_logged_once(self) -> None:
        with logged() as lines:
            reported = [self.report(OSError("disk full")) for _ in range(3)]
        self.assertEqual((lines, reported), (["orders waits: disk full"], [True, False, False]))
        self.assertEqual(self.trouble.error, "disk full")

    def test_another_trouble_is_logged(self) -> None:
        with logged() as lines:
            for error in ("one", "two", "one"):
                self.report(error)
        self.assertEqual(lines, ["orders waits: one", "orders waits: two", "orders waits: one"])

    def test_its_end_is_logged_once_and_only_after_a_trouble(self) -> None:
        with logged(LogLevel.info) as lines:
            self.trouble.end("{stream} continues", stream="orders")
            self.report("one")
            for _ in range(2):
                self.trouble.end("{stream} continues", stream="orders")
        self.assertEqual(lines, ["orders waits: one", "orders continues"])
        self.assertIsNone(self.trouble.error)

    def test_without_a_message_the_end_is_not_logged(self) -> None:
        self.report("one")
        with logged(LogLevel.debug) as lines:
            self.trouble.end()
        self.assertEqual((lines, self.trouble.error), ([], None))

    def test_braces_in_an_error_are_not_a_format(self) -> None:
        with logged() as lines:
            self.report("{stream!r} {nothing}")
        self.assertEqual(lines, ["orders waits: {stream!r} {nothing}"])
