"""An end asks whether a connection is open still, or for an epoch: by a PING that comes back."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.net.echo import MAX_UNANSWERED, Echo
from replication.wire.commands import Ping


class EchoTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.sent: list[Ping] = []
        self.clock = Clock()
        self.echo = Echo(self.sent.append, self.clock.seconds)
        self.answers: list[str | None] = []

    def ask(self, question: str = "") -> None:
        self.echo.request(question).addCallback(self.answers.append)

    def test_only_its_own_number_is_an_answer(self) -> None:
        self.ask()
        for text in ("1790000000000", "echo 2", "echo", "ECHO 1", ""):
            self.echo.received(Ping(text))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1")], []))
        self.echo.received(Ping("echo 1"))
        self.echo.received(Ping("echo 1"))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1")], [""]))

    def test_the_answer_is_what_follows_the_question(self) -> None:
        self.ask("orders master")
        self.assertEqual(self.sent, [Ping("echo 1 orders master")])
        self.echo.received(Ping("echo 1 orders master 09f911aa.00000002"))
        self.assertEqual(self.answers, ["09f911aa.00000002"])

    def test_a_server_that_knows_no_questions_sends_them_back_as_they_are(self) -> None:
        self.ask("orders master")
        self.echo.received(Ping("echo 1 orders master"))
        self.assertEqual(self.answers, [""])

    def test_the_time_without_an_answer_begins_with_the_first_question_and_again_with_each_answer(self) -> None:
        self.clock.advance(9.0)
        self.assertEqual(self.echo.waited(), 0.0)
        self.ask()
        self.clock.advance(4.0)
        self.ask()
        self.clock.advance(3.0)
        self.assertEqual(self.echo.waited(), 7.0)
        self.assertTrue(self.echo.received(Ping("echo 1")))
        self.clock.advance(2.0)
        self.assertFalse(self.echo.received(Ping("1790000000000")))
        self.assertEqual(self.echo.waited(), 2.0)
        self.assertTrue(self.echo.received(Ping("echo 2")))
        self.clock.advance(1.0)
        self.assertEqual(self.echo.waited(), 0.0)

    def test_answers_may_come_in_another_order(self) -> None:
        self.ask("orders a")
        self.ask("orders b")
        self.echo.received(Ping("echo 2 orders b B"))
        self.echo.received(Ping("echo 1 orders a A"))
        self.assertEqual(self.answers, ["B", "A"])

    def test_only_so_many_wait_for_an_answer_at_once(self) -> None:
        """Ten thousand streams must not fill the queue of the connection, nor that of the database there."""
        for _ in range(MAX_UNANSWERED + 2):
            self.ask()
        self.assertEqual(len(self.sent), MAX_UNANSWERED)
        self.echo.received(Ping("echo 7"))
        self.assertEqual(self.sent[-1], Ping(f"echo {MAX_UNANSWERED + 1}"))
        self.echo.lost()
        self.assertEqual(self.answers, ["", *[None] * (MAX_UNANSWERED + 1)])
        self.assertEqual(len(self.sent), MAX_UNANSWERED + 1, "nothing is sent on a lost connection")

    def test_a_lost_connection_answers_nothing(self) -> None:
        self.ask()
        cancelled = self.echo.request()
        cancelled.addErrback(lambda _: None)
        cancelled.cancel()
        self.echo.lost()
        self.ask()
        self.assertEqual(self.answers, [None, None])

    def test_a_lost_connection_answers_any_number_of_streams(self) -> None:
        """Each that waited was answered inside the answer of the one before: some never were, of two hundred."""
        for _ in range(2000):
            self.ask()
        self.echo.lost()
        self.assertEqual(self.answers, [None] * 2000)

    def test_one_that_is_cancelled_while_it_waits_is_not_sent(self) -> None:
        for _ in range(MAX_UNANSWERED):
            self.ask()
        cancelled = self.echo.request("orders a")
        cancelled.addErrback(lambda _: None)
        cancelled.cancel()
        self.ask("orders b")
        self.echo.received(Ping("echo 1"))
        self.assertEqual(self.sent[-1], Ping(f"echo {MAX_UNANSWERED + 1} orders b"))
