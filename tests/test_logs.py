"""What ``twistd --logger replication.logs.…`` writes."""

from __future__ import annotations

import io
import json
import sys

from twisted.logger import FileLogObserver, Logger
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication import logs


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
