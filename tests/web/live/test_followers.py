"""The followers that report, on the live page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from replication.errors import StoreError
from replication.net.access import Access, Grant, Rights
from replication.streams.interfaces import KnownFollower
from replication.web.followers import ReportNote
from replication.web.live.feed import INTERVAL
from replication.web.live.followers import FRESH
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.web.live.hostile import MARKUP
from tests.web.live.test_calls import login
from tests.web.served import ApiTestCase, Client

if TYPE_CHECKING:
    from collections.abc import Sequence


class Reports:
    def __init__(self, **positions: int) -> None:
        self.known = [
            KnownFollower(InstanceName(name), {StreamName("orders"): {InstanceName("master"): Token(at)}}, 1.7e9)
            for name, at in positions.items()
        ]
        self.error: StoreError | None = None

    async def followers(self) -> Sequence[KnownFollower]:
        if self.error is not None:
            raise self.error
        return self.known


class FollowersTests(ApiTestCase):
    def page(self) -> str:
        return self.get("/").body.decode()

    def test_those_that_are_furthest_behind_come_first(self) -> None:
        self.served.followers = Reports(near=10, far=3)  # type: ignore[assignment]
        page = self.page()
        self.assertIn("<td>far</td><td>-</td><td><time>2023-11-14 22:13:20Z</time></td>", page)
        self.assertIn('<td class="number">≤ 8</td><td>orders of master</td>', page)
        self.assertIn('<td class="number">≤ 1</td><td>orders of master</td>', page)
        self.assertLess(page.index("<td>far</td>"), page.index("<td>near</td>"))

    def test_a_recent_report_is_compared_with_what_was_published_at_its_time(self) -> None:
        """A follower that keeps up is not shown as behind by what was published since its last report."""
        self.served.followers = Reports(counter=9)  # type: ignore[assignment]
        self.page()  # the samples begin: 11 is published
        self.assertIn('<td class="number">≤ 2</td><td>orders of master</td>', self.page())
        notes, writer = self.site.resource.report_notes, self.served.stream_statuses()[0].writers[0]
        later = replace(writer, position=Token(1_000), published=Token(1_000))
        status = replace(self.served.stream_statuses()[0], writers=[later])
        notes["counter"] = ReportNote("0.2.0", self.clock.seconds())
        self.served.stream_statuses = lambda only=None: [status]  # type: ignore[method-assign]
        self.clock.advance(INTERVAL)
        self.assertIn("<td>counter</td><td>0.2.0</td>", self.page())
        self.assertIn('<td class="number">2</td><td>orders of master</td>', self.page())
        self.clock.pump([INTERVAL] * int(1 + FRESH / INTERVAL))
        self.client = Client(self.site)  # the other connection was closed
        self.assertIn('<td class="number">≤ 991</td><td>orders of master</td>', self.page())

    def test_without_reports_there_is_a_sentence_or_nothing(self) -> None:
        self.served.followers = None
        self.assertNotIn("Followers that report", self.page())
        self.served.followers = Reports()  # type: ignore[assignment]
        self.assertIn("No follower has reported", self.page())
        self.served.followers.error = StoreError("locked")  # type: ignore[union-attr]
        self.assertIn("<p>locked</p>", self.page())

    def test_a_viewer_that_is_no_admin_sees_none_as_in_the_api(self) -> None:
        self.served.followers = Reports(near=10)  # type: ignore[assignment]
        grants = [
            Grant(Rights((name,), {"orders"}, admin=name == "admin"), secret=name) for name in ("reader", "admin")
        ]
        site = make_site(self.served, secret=None, access=Access(grants), reactor=self.clock)
        shown = {name: Client(site).ask("GET", "/", None, login(name)).body.decode() for name in ("reader", "admin")}
        self.assertNotIn("near", shown["reader"])
        self.assertIn("<td>near</td>", shown["admin"])

    def test_names_are_escaped(self) -> None:
        self.served.followers = Reports(**{MARKUP: 3})  # type: ignore[assignment]
        self.assertNotIn("<b onclick", self.page())
