"""An application's functions for commands."""

from __future__ import annotations

from typing import Any, Self, cast

import attrs
from twisted.internet.defer import fail
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError
from replication.net.command_functions import CommandFunctions
from replication.session.connection import Role
from replication.wire.commands import (
    COMMANDS,
    ApplicationCommand,
    Command,
    Ping,
    Position,
    Rdata,
    RemoteServerUp,
    Server,
    UserSync,
)

PEER = cast("Any", "a peer")


@attrs.frozen
class Reindex(ApplicationCommand):
    """An application's own command."""

    WORD = "REINDEX"
    SENT_BY = ("worker",)
    table: str

    @classmethod
    def parse(cls, rest: str) -> Self:
        return cls(rest)

    def encode(self) -> str:
        return self.table


class CommandFunctionsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.functions = CommandFunctions([Role.WORKER])
        self.received: list[object] = []

    def register(self, command: type[Command]) -> None:
        @self.functions.on_command(command)
        def note(command: Command, peer: object) -> None:
            self.received.append((command, peer))

    def test_each_function_gets_its_command_and_the_peer(self) -> None:
        for command in (Ping, RemoteServerUp, RemoteServerUp):
            self.register(command)
        self.functions.receive(PEER, RemoteServerUp("a"))
        self.functions.receive(PEER, UserSync("a", "@u", syncing=True, last_sync_ms=1))
        self.assertEqual(self.received, [(RemoteServerUp("a"), PEER)] * 2)

    def test_an_applications_own_command_is_understood_once_a_function_is_registered(self) -> None:
        self.assertNotIn("REINDEX", self.functions.commands)
        self.register(Reindex)
        self.assertIs(self.functions.commands["REINDEX"], Reindex)
        self.functions.receive(PEER, Reindex("t"))
        self.assertEqual(self.received, [(Reindex("t"), PEER)])

    def test_a_function_for_a_command_that_no_peer_may_send_is_refused(self) -> None:
        for command in (Server, Position):
            with self.assertRaisesRegex(ConfigError, f"^{command.WORD} is not received here$"):
                self.register(command)
        with self.assertRaisesRegex(ConfigError, r"RDATA is not received here; use on\(stream\)"):
            self.register(Rdata)
        with self.assertRaisesRegex(ConfigError, "REINDEX is not received here"):
            CommandFunctions([Role.MASTER]).on_command(Reindex)

    def test_an_invalid_application_command_is_refused(self) -> None:
        def own(word: object, sent_by: object = ("worker",)) -> Any:
            return type("Own", (ApplicationCommand,), {"WORD": word, "SENT_BY": sent_by})

        refused: list[tuple[Any, str]] = [
            (int, "is no command: subclass ApplicationCommand"),
            (Reindex("t"), "is no command"),
            (own("re-index"), "is no command"),
            (own("PING"), "PING is Ping already: give Own another WORD"),
            (own("X", "worker"), "X: SENT_BY lists"),
            (own("X", ["boss"]), "X: SENT_BY lists"),
            (own("X", []), "X: SENT_BY lists"),
        ]
        for made, why in refused:
            with self.assertRaisesRegex(ConfigError, why):
                self.functions.on_command(made)
        self.assertEqual(self.functions.commands, COMMANDS)

    def test_a_function_that_raises_is_logged_and_stops_no_other(self) -> None:
        @self.functions.on_command(Ping)
        def plain(command: Ping, peer: object) -> None:
            raise ZeroDivisionError

        @self.functions.on_command(Ping)
        async def later(command: Ping, peer: object) -> None:
            raise ZeroDivisionError

        @self.functions.on_command(Ping)
        def deferred(command: Ping, peer: object) -> object:
            return fail(ZeroDivisionError())

        self.register(Ping)
        self.functions.receive(PEER, Ping("1"))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 3)
        self.assertEqual(len(self.received), 1)

    def test_functions_for_syncing_get_the_user_and_the_change(self) -> None:
        @self.functions.on_syncing
        def changed(user_id: str, syncing: bool) -> None:
            self.received.append((user_id, syncing))

        self.functions.syncing_changed("@u", syncing=True)
        self.functions.syncing_changed("@u", syncing=False)
        self.assertEqual(self.received, [("@u", True), ("@u", False)])
