"""Users over HTTP."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from tests.web.served import Client, FakeServed, served_site


class UserTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.served = FakeServed()
        _, site, _ = served_site(self.served)
        self.client = Client(site)

    def test_everybody_who_syncs_and_where(self) -> None:
        self.assertEqual(
            self.client.ask("GET", "/v1/users").json,
            {
                "users": [
                    {"user_id": "@u:h", "syncing": {"abcde": 5, "fghij": 6}},
                    {"user_id": "@v:h", "syncing": {"abcde": 7}},
                ]
            },
        )

    def test_one_user_without_the_access_token(self) -> None:
        heard = self.client.ask("GET", "/v1/users/@v:h")
        self.assertEqual(
            heard.json,
            {
                "user_id": "@v:h",
                "syncing": {"abcde": 7},
                "seen": [{"ip": "1.2.3.4", "user_agent": "UA", "device_id": "DEV", "last_seen": 9}],
            },
        )
        self.assertEqual(self.client.ask("GET", "/v1/users/%40nobody:h").json["syncing"], {})

    def test_a_database_that_fails_is_a_503(self) -> None:
        self.served.error = StoreError("full")
        self.assertEqual(self.client.ask("GET", "/v1/users/@v:h").code, 503)
