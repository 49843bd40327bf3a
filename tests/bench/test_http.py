"""``replication bench http`` at a tiny size."""

from __future__ import annotations

from tests.bench.scenarios import ScenarioTestCase


class HttpTests(ScenarioTestCase):
    def test_a_fact_a_request_is_measured_beside_an_empty_resource(self) -> None:
        clients, servers = ["1 client", "32 clients"], ["empty", "fact"]
        self.assertEqual(self.variants("http"), {f"{count}, {server}" for count in clients for server in servers})
        ratios = {each["variant"] for each in self.results if each["unit"] == "x"}
        self.assertEqual(ratios, {f"{count}, fact" for count in clients})
