"""The facts that a viewer searches for."""

from __future__ import annotations

from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.wire import grammar
from replication.wire.grammar import Token
from tests.web.served import ApiTestCase, fact


class FactsTests(ApiTestCase):
    def page(self, query: str = "") -> str:
        received = self.get(f"/{query}")
        self.assertEqual(received.code, 200, received.body)
        self.assertEqual(received.headers["content-type"], "text/html; charset=utf-8")
        return received.body.decode()

    def test_a_fact_is_found_by_stream_and_id(self) -> None:
        page = self.page("?stream=orders&id=3")
        self.assertIn("<h2>Fact 3 of orders</h2>", page)
        self.assertIn('<th scope="col">order_id</th><th scope="col">state</th>', page)
        self.assertIn('<td class="number">3</td><td>b</td><td>new</td>', page)
        self.assertNotIn("paid", page)

    def test_the_latest_facts_of_a_stream_are_shown(self) -> None:
        text = self.page("?stream=orders")
        self.assertLess(text.index(">paid<"), text.index(">new<"))
        self.assertIn('<td class="number">5</td><td>a</td><td>paid</td>', text)

    def test_the_latest_facts_of_several_writers_are_in_one_order(self) -> None:
        self.served.keep("orders", "master", [fact(3, ["m", "old"]), fact(8, ["m", "new"])], settled=9)
        self.served.keep("orders", "worker2", [fact(each, ["w", f"number{each}"]) for each in (5, 7)], settled=9)
        text = self.page("?stream=orders")
        places = [text.index(f">{each}<") for each in ("new", "number7", "number5", "old")]
        self.assertEqual(places, sorted(places))

    def test_a_row_that_is_very_long_is_shortened_without_decoding_it(self) -> None:
        long = Fact(Token(5), ('["a","' + "x" * 30_000 + '"]',))
        self.patch(grammar, "read_json", lambda _: self.fail("it was decoded"))
        self.served.histories["orders", "master"] = [long]
        self.assertIn("… (30,008 characters)", self.page("?stream=orders&id=5"))

    def test_a_row_whose_fields_have_no_names_is_shown_whole(self) -> None:
        rows = [["only"], [], "text", ["two", "fields"]]
        self.served.definitions[0] = StreamDefinition("orders")
        self.served.keep("orders", "master", [fact(5, *rows)])
        page = self.page("?stream=orders&id=5")
        for cell in ("[&quot;only&quot;]", "[]", "text", "[&quot;two&quot;,&quot;fields&quot;]"):
            self.assertIn(f"<td>{cell}</td>", page)

    def test_a_number_that_no_float_holds_and_a_lone_surrogate_are_shown(self) -> None:
        self.served.histories["orders", "master"] = [Fact(Token(5), ('[1e999,"\\ud800"]',))]
        self.assertIn("<td>1e999</td><td>\\ud800</td>", self.page("?stream=orders&id=5"))

    def test_what_is_not_there_is_named(self) -> None:
        self.assertIn("There is no such fact here", self.page("?stream=caches&id=3"))
        self.assertIn("No stream &#x27;nope&#x27; here", self.page("?stream=nope"))
        self.assert_refused(self.get("/?id=3"), 400, "'stream' is missing")
        self.assert_refused(self.get("/?stream=orders&id=x"), 400, "id: ")
        self.assert_refused(self.get("/live/secrets.txt"), 404, "secrets.txt")

    def test_rows_are_filtered_by_a_text(self) -> None:
        text = self.page("?stream=orders&has=paid")
        self.assertIn(">paid<", text)
        self.assertNotIn(">new<", text)
        self.assertIn(
            "No writer has a row with &#x27;nothing&#x27; among its last 1000 IDs",
            self.page("?stream=orders&has=nothing"),
        )
        self.served.keep("orders", "master", [fact(5, ["é", "raw"]), fact(6, ["e", "other"])])
        self.served.histories["orders", "master"][0] = Fact(Token(5), ('["é","raw"]',))  # as a Synapse may write it
        self.assertIn(">raw<", self.page("?stream=orders&has=%C3%A9"))
        self.assertNotIn(">other<", self.page("?stream=orders&has=%C3%A9"))
        self.assertIn('data-followed="&amp;stream=orders&amp;has=a%26b"', self.page("?stream=orders&has=a%26b"))
