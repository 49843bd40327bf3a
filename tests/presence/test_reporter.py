"""The commands that a worker sends about users and acknowledgements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self
from unittest.mock import patch

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import LocalProtocolError
from replication.presence import reporter
from replication.presence.reporter import PresenceReporter
from replication.wire.commands import (
    ApplicationCommand,
    ClearUserSync,
    FederationAck,
    RemoteServerUp,
    Server,
    UserSync,
)
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Sequence


class Peer:
    """A connection to a writer that records lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, lines: bytes, count: int) -> None:
        assert lines.count(b"\n") == count
        self.lines += lines.decode().splitlines()


@attrs.frozen
class MastersCommand(ApplicationCommand):
    """A command that only a master may send."""

    WORD = "MASTERS_COMMAND"
    SENT_BY = ("master",)

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls()

    def encode(self) -> str:
        return ""


class ReporterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock, self.peers = Clock(), [Peer(), Peer()]
        self.reporter = self.make_reporter()
        self.me = self.reporter.instance_id

    def tearDown(self) -> None:
        self.reporter.end()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def make_reporter(self) -> PresenceReporter:
        def peers() -> Any:
            return self.peers

        return PresenceReporter(
            self.clock,
            peers=peers,
            wall=lambda: 1_700 + self.clock.seconds(),
        )

    def sent(self) -> Sequence[str]:
        """Return the lines sent since the last call, the same to every writer."""
        first, *others = [peer.lines for peer in self.peers]
        for each in others:
            self.assertEqual(each, first)
        for peer in self.peers:
            peer.lines = []
        return first

    def test_each_start_has_a_new_instance_id(self) -> None:
        self.assertRegex(self.me, r"^[A-Za-z]{5}$")
        self.assertNotEqual(self.make_reporter().instance_id, self.me)

    def test_commands_are_sent_to_all_connected_writers(self) -> None:
        self.assertEqual(self.reporter.send(RemoteServerUp("example.org")), 2)
        self.assertEqual(self.reporter.send(FederationAck(InstanceName("sender1"), Token(123))), 2)
        self.assertEqual(self.sent(), ["REMOTE_SERVER_UP example.org", "FEDERATION_ACK sender1 123"])
        self.peers = []
        self.assertEqual(self.reporter.send(RemoteServerUp("example.org")), 0)

    def test_a_command_that_may_not_be_sent_is_an_error_and_no_connection_closes(self) -> None:
        for command, why in (
            (Server("x"), "SERVER may not be sent by a worker"),
            (MastersCommand(), "MASTERS_COMMAND may not be sent by a worker"),
            (ClearUserSync("a\nb"), "CLEAR_USER_SYNC would be read as something else"),
        ):
            with self.assertRaisesRegex(LocalProtocolError, why):
                self.reporter.send(command)
        with self.assertRaisesRegex(LocalProtocolError, "USER_SYNC"), self.reporter.user_syncing("@a b:h"):
            self.fail("it was sent")  # pragma: no cover
        self.assertEqual((self.reporter.users(), self.reporter.users_now(), self.sent()), ([], [], []))

    def test_user_ip_is_sent_once_in_120_s(self) -> None:
        def seen(**more: Any) -> int:
            return self.reporter.user_ip("@u:h", "tok", "1.2.3.4", "UA", **more)

        self.assertEqual((seen(), seen(), seen(device_id="D")), (2, 0, 2))
        self.clock.advance(119)
        self.assertEqual(seen(), 0)
        self.clock.advance(1)
        self.assertEqual(seen(), 2)
        self.assertEqual(
            self.sent(),
            [
                'USER_IP @u:h ["tok","1.2.3.4","UA",null,1700000]',
                'USER_IP @u:h ["tok","1.2.3.4","UA","D",1700000]',
                'USER_IP @u:h ["tok","1.2.3.4","UA",null,1820000]',
            ],
        )

    def test_user_ip_is_sent_again_if_no_writer_was_connected_or_it_was_forgotten(self) -> None:
        peers, self.peers = self.peers, []
        self.assertEqual(self.reporter.user_ip("@u:h", "tok", "1.2.3.4"), 0)
        self.peers = peers
        with patch.object(reporter, "MAX_SEEN", 2):
            self.assertEqual([self.reporter.user_ip("@u:h", "tok", ip) for ip in "1231"], [2, 2, 2, 2])

    def test_a_user_syncs_until_10_s_after_the_last_device(self) -> None:
        with self.reporter.user_syncing("@u:h"), self.reporter.user_syncing("@u:h"):
            self.assertEqual(self.sent(), [f"USER_SYNC {self.me} @u:h start 1700000"])
        self.clock.advance(9)
        with self.reporter.user_syncing("@u:h"):
            self.clock.advance(60)
        self.assertEqual(self.reporter.users(), ["@u:h"])
        self.assertEqual(self.sent(), [])
        self.clock.advance(10)
        self.assertEqual(self.sent(), [f"USER_SYNC {self.me} @u:h end 1769000"])
        self.assertEqual(self.reporter.users(), [])

    def test_a_sync_ends_when_its_block_raises(self) -> None:
        with self.assertRaises(ZeroDivisionError), self.reporter.user_syncing("@u:h"):
            raise ZeroDivisionError
        self.clock.advance(10)
        self.assertEqual(len(self.sent()), 2)

    def test_a_new_connection_receives_the_users_that_sync_now(self) -> None:
        with self.reporter.user_syncing("@gone:h"):
            pass
        with self.reporter.user_syncing("@u:h"):
            self.clock.advance(5)
            self.assertEqual(
                self.reporter.users_now(),
                [UserSync(self.me, user, syncing=True, last_sync_ms=1_705_000) for user in ("@u:h", "@gone:h")],
            )

    def test_trap_11_the_end_sends_clear_user_sync(self) -> None:
        with self.reporter.user_syncing("@u:h"):
            self.reporter.end()
        self.assertEqual(self.sent()[1:], [f"CLEAR_USER_SYNC {self.me}"])
        self.assertEqual(self.reporter.users_now(), [])

    def test_without_users_the_end_sends_nothing(self) -> None:
        self.reporter.end()
        self.assertEqual(self.sent(), [])
