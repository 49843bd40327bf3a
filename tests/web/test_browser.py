"""The calls of a browser are there unless they are turned off, and cost nothing before the first."""

from __future__ import annotations

import subprocess
import sys

from replication.web.site import make_site
from tests.web.served import ApiTestCase, Client


class BrowserTests(ApiTestCase):
    def test_it_can_be_turned_off(self) -> None:
        client = Client(make_site(self.served, secret=None, reactor=self.clock, live_page=False))
        for path in ("/", "/live/events", "/live/live.css"):
            self.assertEqual(client.ask("GET", path).code, 404)


def test_a_process_without_viewers_does_not_import_the_page() -> None:
    code = "import sys, replication.service; print([each for each in sys.modules if 'replication.web.live' in each])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
