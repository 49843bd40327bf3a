"""Calls that an application answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError
from replication.web.synapse_requests import SynapseRequests

if TYPE_CHECKING:
    from collections.abc import Sequence


class CallTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.calls = SynapseRequests()

    def ask(self, name: str) -> object:
        return self.successResultOf(Deferred.fromCoroutine(self.calls.answer(name, ["word"], {"key": 1})))

    def test_any_kind_of_function_answers(self) -> None:
        def plain(words: Sequence[str], body: dict[str, Any]) -> object:
            return {"plain": [*words], **body}

        async def later(words: Sequence[str], body: dict[str, Any]) -> object:
            return plain(words, body)

        for name, function in (("a", plain), ("b", later), ("c", lambda *given: succeed(plain(*given)))):
            self.assertNotIn(name, self.calls)
            self.calls.on(name)(function)
            self.assertIn(name, self.calls)
            self.assertEqual(self.ask(name), {"plain": ["word"], "key": 1})

    def test_what_every_sync_brings_is_known(self) -> None:
        self.assertIn("presence_set_state", self.calls)
        self.assertEqual(self.ask("presence_set_state"), {})

    def test_an_application_may_do_that_better(self) -> None:
        self.calls.on("presence_set_state")(lambda *_: {"better": True})
        self.assertEqual(self.ask("presence_set_state"), {"better": True})

    def test_one_call_has_one_function(self) -> None:
        self.calls.on("a")(lambda *_: {})
        with self.assertRaisesRegex(ConfigError, "'a' has a function already"):
            self.calls.on("a")(lambda *_: {})
