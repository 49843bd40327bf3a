"""The history in segments, on the live page."""

from __future__ import annotations

from replication.errors import CatchUpError
from replication.net.access import Access, Grant, Rights
from replication.streams.retention import SegmentChain
from replication.web.site import make_site
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.web.live.hostile import MARKUP
from tests.web.live.test_calls import login
from tests.web.served import ApiTestCase, Client


def chain(folder: str = "/segments", stream: str = "orders") -> SegmentChain:
    return SegmentChain(folder, StreamName(stream), InstanceName("master"), Token(0), Token(4711), 5000, 123_456)


class SegmentsTests(ApiTestCase):
    def page(self) -> str:
        return self.get("/").body.decode()

    def test_what_the_folders_have_is_shown(self) -> None:
        self.assertNotIn("History in segments", self.page())
        self.served.chains = [chain()]
        cells = "".join(f'<td class="number">{each}</td>' for each in ("0", "4,711", "5,000", "123,456"))
        self.assertIn(f"<td>orders</td><td>master</td>{cells}<td>/segments</td>", self.page())

    def test_a_folder_that_cannot_be_read_is_named_and_the_page_is_there(self) -> None:
        async def segments() -> list[SegmentChain]:
            raise CatchUpError("no such bucket")

        self.served.segments = segments  # type: ignore[method-assign]
        self.assertIn("<p>no such bucket</p>", self.page())

    def test_a_viewer_sees_the_streams_of_its_secret_and_names_are_escaped(self) -> None:
        self.served.chains = [chain(MARKUP), chain("/segments", "other")]
        grant = Grant(Rights(("reader",), {"orders"}), secret="read")
        site = make_site(self.served, secret="hidden", access=Access([grant]), reactor=self.clock)
        page = Client(site).ask("GET", "/", None, login("read")).body.decode()
        self.assertNotIn("<td>other</td>", page)
        self.assertNotIn("<b onclick", page)
        self.assertIn("&lt;b onclick", page)
