"""Health: what proves that a process lives and can do its work, and how little the proofs cost."""

from __future__ import annotations

from unittest.mock import patch

from twisted.internet.defer import Deferred, fail
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError, StreamError
from replication.streams.interfaces import StreamStatus
from replication.web.health import BEAT, LATE, Health
from tests.doubles import now
from tests.web.served import ApiTestCase, FakeServed, Received, header

SILENT = "the store has not answered for 5 s"


class TimerTests(SynchronousTestCase):
    """The reactor's clock, which may be the wall clock, and the monotonic one."""

    def setUp(self) -> None:
        self.clock, self.time = Clock(), 0.0
        self.health = Health(FakeServed(), self.clock, lambda: self.time)
        self.addCleanup(self.health.stop)
        self.assertIsNone(now(self.health.process_fault()))  # the first probe starts the timer

    def advance(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.time += 1.0
            self.clock.advance(1.0)

    def test_timers_that_run_are_no_fault(self) -> None:
        for _ in range(10):
            self.advance(BEAT)
            self.assertIsNone(now(self.health.process_fault()))

    def test_timers_stand_still_after_the_clock_of_the_reactor_went_back(self) -> None:
        self.advance(100)
        self.clock.rightNow -= 3600.0
        self.advance(LATE + BEAT + 1)
        waiting = Deferred.fromCoroutine(self.health.process_fault())
        self.clock.advance(0)
        fault = self.successResultOf(waiting)
        self.assertRegex(str(fault), r"^timers have not run for \d\d s: was the wall clock set back\?")
        self.clock.rightNow += 3600.0
        self.advance(1)
        self.assertIsNone(now(self.health.process_fault()))

    def test_a_process_that_was_stopped_as_a_whole_runs_its_timers_first(self) -> None:
        """After SIGSTOP and SIGCONT, or on a machine that was suspended, a request may be read before they run."""
        self.advance(7)
        self.time += 600.0
        self.clock.rightNow += 600.0
        waiting = Deferred.fromCoroutine(self.health.process_fault())
        self.clock.advance(0)
        self.assertIsNone(self.successResultOf(waiting))


class HealthTests(ApiTestCase):
    def test_a_process_with_a_task_that_has_ended_is_neither_live_nor_ready(self) -> None:
        self.served.failed.append("storing positions")
        for path in ("/health/live", "/health/ready"):
            self.assert_refused(self.get(path), 503, "storing positions: ended by an error, which the log has. Restart")

    def test_health_answers_role_server_name_and_instance_name(self) -> None:
        answer = self.get("/health")
        self.assertEqual(answer.code, 200)
        identity = {"role": "master", "server_name": "example.com", "instance_name": "master"}
        self.assertEqual(answer.json, {"status": "ok", **identity})

    def test_health_is_503_with_the_error_of_the_store(self) -> None:
        for error in (StoreError("database is locked: app.db"), StreamError("orders: the function raised")):
            self.served.error = error
            answer = self.get("/health")
            self.assert_refused(answer, 503, str(error))
            identity = [answer.json[key] for key in ("role", "server_name", "instance_name")]
            self.assertEqual(identity, ["master", "example.com", "master"])

    def test_health_gives_a_silent_store_five_seconds(self) -> None:
        self.served.checking = Deferred()
        self.client.send(header("GET", "/health"))
        self.clock.advance(4.9)
        self.assertEqual(self.client.transport.value(), b"")
        self.clock.advance(0.2)
        self.assert_refused(self.client.received(), 503, "has not answered for 5 s")
        self.flushLoggedErrors(MemoryError)  # that another test has left

    def test_an_error_that_nothing_receives_is_logged_while_the_store_is_silent(self) -> None:
        """Without memory, Twisted may lose the callback of work that has the store: the log ends a daemon."""
        error = MemoryError()
        lost: Deferred[None] = fail(error)  # in a daemon, work that waits refers to it
        self.addCleanup(lost.addErrback, lambda _: None)
        self.served.checking = Deferred()
        self.client.send(header("GET", "/health"))
        self.clock.advance(4.9)
        self.assertEqual(self.flushLoggedErrors(MemoryError), [])
        self.clock.advance(0.2)
        self.assertIn(error, [each.value for each in self.flushLoggedErrors(MemoryError)])

    def test_probes_at_one_time_look_for_lost_errors_once(self) -> None:
        async def check() -> None:
            await Deferred()

        self.served.check = check  # type: ignore[method-assign]
        health = Health(self.served, self.clock, self.clock.seconds)
        with patch("replication.web.health.log_lost_errors") as look:
            for count in (1, 2):
                probes = [Deferred.fromCoroutine(health.store_fault()) for _ in range(10)]
                self.clock.advance(5.0)
                self.assertEqual([self.successResultOf(each) for each in probes], [SILENT] * 10)
                self.assertEqual(look.call_count, count)

    def ready(self) -> Received:
        return self.get("/health/ready")

    def test_a_process_is_ready_if_its_store_answers_and_nothing_stands_still(self) -> None:
        self.served.definitions = self.served.definitions[1:]
        self.served.stream_statuses = lambda only=None: [StreamStatus(each, []) for each in self.served.definitions]  # type: ignore[method-assign]
        answer = self.ready()
        self.assertEqual((answer.code, answer.json), (200, {"status": "ready"}))

    def test_a_process_is_not_ready_while_a_stream_is_stopped_or_a_writer_is_not_connected(self) -> None:
        """The answer names both, but not the error: it needs no secret."""
        self.served.unreachable = ["tcp:127.0.0.1:9092"]
        answer = self.ready()
        self.assertEqual(answer.code, 503)
        self.assertEqual(
            answer.detail,
            "stream orders of worker2 is stopped; no connection to the writer at tcp:127.0.0.1:9092",
        )
        self.assertEqual(self.get("/health").code, 200)

    def test_a_process_is_not_ready_while_its_store_cannot_be_written(self) -> None:
        self.served.error = StoreError("the disk is full")
        self.assert_refused(self.ready(), 503, "the disk is full")

    def test_the_detail_has_every_culprit(self) -> None:
        self.served.error = StoreError("the disk is full")
        self.assert_refused(self.ready(), 503, "the disk is full; stream orders of worker2 is stopped")

    def test_a_process_lives_whatever_its_store_and_its_streams_do(self) -> None:
        self.served.error = StoreError("the disk is full")
        answer = self.get("/health/live")
        self.assertEqual((answer.code, answer.json), (200, {"status": "live"}))

    def test_while_timers_stand_still_a_process_is_neither_live_nor_ready(self) -> None:
        """The timer ends with the site."""
        health = self.site.resource.health
        self.site.doStart()
        self.assertEqual(self.get("/health/live").code, 200)
        health._monotonic = lambda: health._ran + 100.0
        for path in ("/health/live", "/health/ready"):
            self.client.transport.clear()
            self.client.send(header("GET", path))
            self.clock.advance(0.0)
            self.assert_refused(self.client.received(), 503, "timers have not run for 100 s")
        self.client.protocol.connectionLost(Failure(ConnectionLost()))
        self.site.doStop()
        self.assertEqual(self.clock.getDelayedCalls(), [])
