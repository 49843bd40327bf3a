"""An end asks whether a connection is open still: by a PING that comes back."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.net.echo import Echo
from replication.wire.commands import Ping


class EchoTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.sent: list[Ping] = []
        self.echo = Echo(self.sent.append)
        self.answers: list[bool] = []

    def ask(self) -> None:
        self.echo.request().addCallback(self.answers.append)

    def test_only_its_own_text_is_an_answer(self) -> None:
        self.ask()
        self.echo.received(Ping("1790000000000"))
        self.echo.received(Ping("echo 2"))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1")], []))
        self.echo.received(Ping("echo 1"))
        self.echo.received(Ping("echo 1"))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1")], [True]))

    def test_an_answer_to_an_earlier_ping_does_not_count(self) -> None:
        """All that ask while a PING is on its way share the next one."""
        self.ask()
        self.ask()
        self.ask()
        self.echo.received(Ping("echo 1"))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1"), Ping("echo 2")], [True]))
        self.echo.received(Ping("echo 2"))
        self.assertEqual((self.sent[2:], self.answers), ([], [True, True, True]))

    def test_one_that_asks_when_it_is_answered_gets_a_ping_of_its_own(self) -> None:
        self.echo.request().addCallback(lambda _: self.ask())
        self.echo.received(Ping("echo 1"))
        self.assertEqual((self.sent, self.answers), ([Ping("echo 1"), Ping("echo 2")], []))

    def test_a_lost_connection_answers_nothing(self) -> None:
        self.ask()
        self.ask()
        cancelled = self.echo.request()
        cancelled.addErrback(lambda _: None)
        cancelled.cancel()
        self.echo.lost()
        self.assertEqual(self.answers, [False, False])
