"""Tests of ``/v1/followers``."""

from __future__ import annotations

import json
from typing import cast

from replication.net.access import Access, Grant, Rights
from replication.storage.memory import MemoryStore
from replication.web import followers
from replication.web.followers import ReportNote
from replication.web.site import make_site
from replication.wire.grammar import InstanceName
from replication.writer.known_followers import LATER, KnownFollowers
from tests.doubles import now
from tests.web.served import JSON, ApiTestCase, Client

PATH = "/v1/followers/worker1"


class FollowersTests(ApiTestCase):
    def setUp(self) -> None:
        super().setUp()
        store = MemoryStore()
        now(store.open())
        self.served.followers = KnownFollowers(
            store, lambda: 7.5, store.open, lambda: False, lambda _: [InstanceName("master")]
        )

    def test_a_report_is_listed_until_the_follower_is_forgotten(self) -> None:
        positions = {"orders": {"master": 5}}
        answer = self.client.ask("PUT", PATH, json.dumps({"positions": positions}).encode(), [JSON])
        self.assertEqual((answer.code, answer.json), (200, {"next": LATER}))
        listed = {"name": "worker1", "reported": 7.5, "positions": positions}
        self.assertEqual(self.get("/v1/followers").json, {"followers": [listed]})
        self.assertEqual(self.get(PATH, "DELETE").json, {})
        self.assertEqual(self.get("/v1/followers").json, {"followers": []})
        self.assert_refused(self.get(PATH, "DELETE"), 404, "no follower 'worker1' has reported")

    def test_the_version_of_a_follower_is_noted(self) -> None:
        for agent, version in (("replication/0.2.0.dev0", "0.2.0.dev0"), ("replication", ""), ("curl/8 <b>", "")):
            self.client.ask("PUT", PATH, b'{"positions": {}}', [JSON, ("User-Agent", agent)])
            self.assertEqual(self.site.resource.report_notes["worker1"], ReportNote(version, self.clock.seconds()))
        self.get(PATH, "DELETE")
        self.assertEqual(self.site.resource.report_notes, {})
        self.patch(followers, "MAX_NOTES", 2)
        for name in ("a", "b", "a", "c"):
            self.client.ask("PUT", f"/v1/followers/{name}", b'{"positions": {}}', [JSON])
        self.assertEqual([*self.site.resource.report_notes], ["a", "c"])

    def test_a_report_that_would_take_seconds_is_refused(self) -> None:
        body = b'{"positions": {%s"orders": {}}}' % (b" " * followers.LONGEST_REPORT)
        self.assert_refused(self.client.ask("PUT", PATH, body, [JSON]), 413, "a report of more than 8388608 bytes")

    def test_a_wrong_report_is_refused(self) -> None:
        for body in (
            b"{}",
            b"[",
            b'{"positions": {"orders": 5}}',
            b'{"positions": {"orders": {"master": -1}}}',
            b'{"positions": {"orders": {"master": 9223372036854775808}}}',
            b'{"positions": {"orders": {"master": 100000000000000000000}}}',
            b'{"positions": {}, "x": 1}',
            b'{"positions": "\xff"}',
        ):
            self.assert_refused(self.client.ask("PUT", PATH, body, [JSON]), 400, "not a report of positions")
        self.assert_refused(self.client.ask("PUT", "/v1/followers/a%20b", b'{"positions": {}}', [JSON]), 400)

    def test_a_process_that_writes_nothing_takes_no_report(self) -> None:
        self.served.followers = None
        self.assert_refused(self.client.ask("PUT", PATH, b'{"positions": {}}', [JSON]), 404, "only follows")
        self.assert_refused(self.get("/v1/followers"), 404, "only follows")

    def test_a_peer_changes_the_report_of_another_only_where_it_may_read(self) -> None:
        """An empty report had the effect of DELETE without the right ``admin``: the retention waited for none."""
        grants = [
            Grant(Rights(("reader",), {"orders"}), secret="r"),
            Grant(Rights(("shop",), append={"orders"}), secret="a"),
            Grant(Rights(("relay",), {"*"}), secret="*"),
        ]
        client = Client(make_site(self.served, secret=None, access=Access(grants), reactor=self.clock))

        def report(secret: str, report: object) -> int:
            body = json.dumps(report).encode()
            return client.ask("PUT", PATH, body, [JSON, ("Authorization", f"Bearer {secret}")]).code

        def positions() -> object:
            (found,) = now(cast("KnownFollowers", self.served.followers).followers())
            return found.positions

        self.assertEqual(report("*", {"positions": {"orders": {"master": 5}, "caches": {"master": 3}}}), 200)
        self.assertEqual((report("a", {"positions": {}}), report("r", {"positions": {}})), (403, 403))
        self.assertEqual(report("r", {"positions": {"orders": {"master": 6}}}), 200)
        self.assertEqual(positions(), {"orders": {"master": 6}, "caches": {"master": 3}})
        self.assertEqual(report("r", {"positions": {"orders": {"master": 7}}, "streams": ["orders", "caches"]}), 200)
        self.assertEqual(positions(), {"orders": {"master": 7}, "caches": {"master": 3}})
        self.assertEqual(report("*", {"positions": {"orders": {"master": 8}}, "streams": ["orders"]}), 200)
        self.assertEqual(positions(), {"orders": {"master": 8}, "caches": {"master": 3}})
        self.assertEqual(report("*", {"positions": {"orders": {"master": 9}}, "streams": ["caches"]}), 400)
        self.assertEqual(report("*", {"positions": {"orders": {"master": 9}}}), 200)
        self.assertEqual(positions(), {"orders": {"master": 9}})

    def test_a_report_without_a_right_to_read_is_refused_for_that(self) -> None:
        """The body of such a peer is not stored; the answer was that the body is cut."""
        access = Access([Grant(Rights(("none",)), secret="n")])
        client = Client(make_site(self.served, secret=None, access=access, reactor=self.clock))
        body = b'{"positions": {"orders": {"master": 5}}}'
        answer = client.ask("PUT", PATH, body, [JSON, ("Authorization", "Bearer n")])
        self.assert_refused(answer, 403, "the right to read")

    def test_a_peer_reports_of_the_streams_that_it_may_read(self) -> None:
        access = Access([Grant(Rights(("reader",), {"orders"}), secret="r")])
        client = Client(make_site(self.served, secret=None, access=access, reactor=self.clock))
        headers = [JSON, ("Authorization", "Bearer r")]
        for stream, code in (("orders", 200), ("caches", 403)):
            body = json.dumps({"positions": {stream: {"master": 5}}}).encode()
            self.assertEqual(client.ask("PUT", PATH, body, headers).code, code)
