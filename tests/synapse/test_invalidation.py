"""Cached functions are invalidated by rows such as a Synapse publishes under its special names."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING

from twisted.trial.unittest import SynchronousTestCase

from replication.caches import CachedFunction, Caches
from replication.synapse.invalidation import (
    BY_DEVICE_SIGNATURES,
    BY_MEMBER,
    BY_ROOM,
    BY_ROOM_AND_MEMBER,
    BY_SERVER_KEY,
)
from tests.synapse.published import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_700_000_000_000
ROOMS, USERS = ("!tea:alpha.test", "!pub:alpha.test"), ("@anna:alpha.test", "@ben:alpha.test", "@cara:alpha.test")
TEA, PUB = ROOMS
ANNA, BEN, CARA = USERS


class SpecialNameTests(SynchronousTestCase):
    """One test for each special name."""

    def setUp(self) -> None:
        caches = self.caches = Caches()

        @caches.cached(invalidated_by=BY_ROOM)
        def topic(room: str) -> None: ...

        @caches.cached(invalidated_by=BY_ROOM)
        def state(room: str, state_key: str) -> None: ...

        @caches.cached(invalidated_by=BY_MEMBER)
        def rooms(user: str) -> None: ...

        @caches.cached(invalidated_by=BY_ROOM_AND_MEMBER)
        def membership(room: str, user: str) -> None: ...

        @caches.cached(invalidated_by=BY_DEVICE_SIGNATURES)
        def signatures(user: str, device: str) -> None: ...

        @caches.cached(invalidated_by=BY_SERVER_KEY)
        def server_key(server: str, key: str) -> None: ...

        pairs = [*product(ROOMS, USERS)]
        self.calls: list[tuple[CachedFunction[..., None], Sequence[tuple[str, ...]]]] = [
            (topic, [(each,) for each in ROOMS]),
            (state, pairs),
            (rooms, [(each,) for each in USERS]),
            (membership, pairs),
            (signatures, [*product(USERS, ("D1", "D2"))]),
            (server_key, [*product(("a.test", "b.test"), ("ed25519:1", "ed25519:2"))]),
        ]
        self.computed_again()

    def computed_again(self) -> list[tuple[str, ...]]:
        """Call everything; return the calls that computed, with the names of their functions."""
        computed = []
        for function, calls in self.calls:
            for call in calls:
                misses = function.cache_info().misses
                function(*call)
                if function.cache_info().misses > misses:
                    computed.append((function.__qualname__.rpartition(".")[2], *call))
        return computed

    def assert_invalidates(self, name: str, keys: list[str], *calls: tuple[str, ...]) -> None:
        self.caches.apply([[name, keys, NOW]])
        self.assertEqual(self.computed_again(), [*calls])

    def test_current_state(self) -> None:
        """The row names the room, and the users whose membership has changed."""
        of_tea = [("topic", TEA), *(("state", TEA, user) for user in USERS)]
        self.assert_invalidates("cs_cache_fake", [TEA], *of_tea)
        users = [("rooms", ANNA), ("rooms", CARA), ("membership", TEA, ANNA), ("membership", TEA, CARA)]
        self.assert_invalidates("cs_cache_fake", [TEA, ANNA, CARA], *of_tea, *users)

    def test_purged_history(self) -> None:
        of_pub = [("topic", PUB), *(("state", PUB, user) for user in USERS)]
        self.assert_invalidates("ph_cache_fake", [PUB], *of_pub)

    def test_deleted_room(self) -> None:
        """The row does not name the members, so what was cached of any user is dropped."""
        of_pub = [("topic", PUB), *(("state", PUB, user) for user in USERS)]
        users = [*(("rooms", user) for user in USERS), *(("membership", PUB, user) for user in USERS)]
        self.assert_invalidates("dr_cache_fake", [PUB], *of_pub, *users)

    def test_signatures_of_devices(self) -> None:
        keys = [json.dumps([ANNA, "D1"]), json.dumps([BEN, "D2"])]
        calls = [("signatures", ANNA, "D1"), ("signatures", BEN, "D2")]
        self.assert_invalidates("_get_e2e_cross_signing_signatures_for_device", keys, *calls)

    def test_keys_of_servers(self) -> None:
        keys = [json.dumps(["a.test", "ed25519:2"])]
        self.assert_invalidates("_get_server_keys_json", keys, ("server_key", "a.test", "ed25519:2"))

    def test_every_recorded_row_is_understood(self) -> None:
        """Those that a Synapse 1.163 has published; four of the special names are among them."""
        rows = [json.loads(each.split(" ", 4)[4]) for each in messages() if each.startswith("RDATA caches ")]
        self.caches.apply(rows)
        counts = {name: sum(row[0] == name for row in rows) for name, *_ in rows}
        found = {name: count for name, (_, count) in self.caches.stats().items()}
        self.assertEqual(found["topic"], counts["cs_cache_fake"] + counts["dr_cache_fake"])
        self.assertEqual(found["signatures"], counts["_get_e2e_cross_signing_signatures_for_device"])
        self.assertEqual(found["server_key"], counts["_get_server_keys_json"])
