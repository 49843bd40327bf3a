"""The tables of the live page: their order, and that everything in them is escaped."""

from __future__ import annotations

from msgspec.structs import replace

from replication.wire.grammar import InstanceName, Token
from tests.web.live.hostile import HostileServed
from tests.web.served import ApiTestCase, Client, served_site


class TablesTests(ApiTestCase):
    def page(self, query: str = "") -> str:
        received = self.get(f"/{query}")
        self.assertEqual(received.code, 200, received.body)
        self.assertEqual(received.headers["content-type"], "text/html; charset=utf-8")
        return received.body.decode()

    def test_what_is_stopped_comes_first_and_says_why(self) -> None:
        page = self.page()
        self.assertLess(page.index(">worker2<"), page.index(">master<"))
        self.assertIn("<b>orders</b> of worker2: the function raised", page)
        self.assertIn("<li>stream &#x27;orders&#x27;: mend it</li>", page)

    def test_an_error_that_names_the_stream_and_the_writer_is_shown_without_a_second_name(self) -> None:
        (orders, *_) = self.served.stream_statuses()
        stopped = replace(orders.writers[1], error="applying orders of worker2 after 7: no <b>")
        self.served.stream_statuses = lambda only=None: [replace(orders, writers=[stopped])]  # type: ignore[method-assign]
        self.assertIn("<li>applying <b>orders</b> of worker2 after 7: no &lt;b&gt;<p>", self.page())

    def test_a_fact_that_a_function_cannot_take_is_linked_with_the_cure(self) -> None:
        (orders, *_) = self.served.stream_statuses()
        stopped = replace(orders.writers[1], failed=Token(8))
        self.served.stream_statuses = lambda only=None: [replace(orders, writers=[stopped])]  # type: ignore[method-assign]
        self.assertIn(
            'The function cannot take <a href="?stream=orders&amp;id=8">fact 8</a>. Mend what it uses', self.page()
        )

    def test_a_writer_that_is_catching_up_has_the_source(self) -> None:
        (orders, *_) = self.served.stream_statuses()
        behind = replace(orders.writers[0], state="catching up", source="<its own HTTP>")
        self.served.stream_statuses = lambda only=None: [replace(orders, writers=[behind])]  # type: ignore[method-assign]
        self.assertIn("catching up from &lt;its own HTTP&gt;", self.page())

    def test_a_writer_that_catches_up_for_a_moment_stays_in_its_place(self) -> None:
        """A worker of a Synapse does so at each fact of several rows."""
        (orders, *_) = self.served.stream_statuses()
        brief = replace(orders.writers[0], state="catching up")
        long = replace(brief, published=Token(5_000))
        live = replace(orders.writers[0], instance=InstanceName("live"), state="live")
        shown = [replace(brief, instance=InstanceName("z-brief")), live]
        self.served.stream_statuses = lambda only=None: [replace(orders, writers=shown)]  # type: ignore[method-assign]
        page = self.page()
        self.assertLess(page.index(">live<"), page.index(">z-brief<"))
        self.assertIn(">catching up</span>", page)
        shown.append(replace(long, instance=InstanceName("z-long")))
        page = self.page()
        self.assertLess(page.index(">z-long<"), page.index(">live<"))

    def test_a_writer_that_is_not_connected_needs_attention(self) -> None:
        self.served.unreachable = ["tcp:master:9092 (Connection refused)"]
        self.assertIn("<li>no connection to the writer at tcp:master:9092 (Connection refused): ", self.page())

    def test_a_name_that_two_processes_share_needs_attention(self) -> None:
        twins = [replace(each, name="twin", shares_name=True) for each in self.served.peer_statuses() * 2]
        self.served.peer_statuses = lambda: twins  # type: ignore[method-assign]
        self.assertEqual(self.page().count("two processes have the instance name &#x27;twin&#x27;"), 1)

    def test_a_part_of_a_name_selects_rows(self) -> None:
        self.assertNotIn(">worker2</td>", self.page("?find=maste"))

    def test_everything_is_escaped(self) -> None:
        client = Client(served_site(HostileServed())[1])
        received = client.ask("GET", "/?stream=orders")
        page = received.body.decode()
        for planted in ("<b onclick", "<u>", "<i>", "\x1b", "\u202e", "&amp;amp;amp;"):
            self.assertNotIn(planted, page)
        self.assertGreater(page.count("&lt;b onclick=&quot;x()&quot;&gt;&amp;amp;"), 6)
        found = client.ask("GET", "/?find=%3Cb%3E&stream=%22%3E%3Cb%3E").body.decode()
        self.assertNotIn("<b>", found.replace("<b>orders</b>", ""))
