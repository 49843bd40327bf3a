"""The live page over a transport in memory: its parts, its headers and its login."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

from replication.net.access import ALL, Access, Grant, Rights
from replication.web.site import make_site
from tests.web.live.hostile import HostileServed
from tests.web.served import ApiTestCase, Client

if TYPE_CHECKING:
    from tests.web.served import Received


def login(secret: str, user: str = "anybody") -> list[tuple[str, str | bytes]]:
    return [("Authorization", b"Basic " + base64.b64encode(f"{user}:{secret}".encode()))]


class PageTests(ApiTestCase):
    def page(self, query: str = "") -> str:
        received = self.get(f"/{query}")
        self.assertEqual(received.code, 200, received.body)
        self.assertEqual(received.headers["content-type"], "text/html; charset=utf-8")
        return received.body.decode()

    def test_it_has_streams_writers_and_connections(self) -> None:
        page = self.page()
        self.assertIn("<h1>master master of example.com</h1>", page)
        for cell in ("orders", "worker2", "stopped", "9", "10 for 2 s", "127.0.0.1:5", "345"):
            self.assertRegex(page, rf">{re.escape(cell)}<")
        self.assertIn("not ready: stream orders of worker2 is stopped", page)

    def test_nothing_is_loaded_from_elsewhere_and_no_script_stands_in_the_page(self) -> None:
        received = self.get("/")
        page = received.body.decode()
        self.assertEqual(re.findall(r'(?:src|href)="(?!\?)([^"]*)"', page), ["live/live.css", "live/live.js"])
        self.assertEqual(re.findall(r"<script[^>]*>(.*?)</script>", page), [""])
        self.assertNotIn("style=", page)
        self.assertIn("default-src 'none'", received.headers["content-security-policy"])
        self.assertEqual(received.headers["x-content-type-options"], "nosniff")
        for name, kind in (("live.css", "text/css"), ("live.js", "text/javascript")):
            file = self.get(f"/live/{name}")
            self.assertEqual((file.code, file.headers["content-type"]), (200, f"{kind}; charset=utf-8"))
            self.assertNotIn(b"//", re.sub(rb"// .*", b"", file.body))


class LoginTests(ApiTestCase):
    def setUp(self) -> None:
        super().setUp()
        reader = Grant(Rights(("reader",), {"orders"}), secret="read")
        other = Grant(Rights(("other",), {"caches"}), secret="other")
        admin = Grant(Rights(("admin",), {ALL}, admin=True), secret="root")
        self.site = make_site(
            HostileServed(), secret="hidden", access=Access([reader, other, admin]), reactor=self.clock
        )

    def ask(self, headers: list[tuple[str, str | bytes]], path: str = "/") -> Received:
        return Client(self.site).ask("GET", path, None, headers)

    def test_a_browser_is_asked_for_the_secret(self) -> None:
        for path in ("/", "/live/events", "/live/live.js"):
            received = self.ask([], path)
            self.assertEqual(received.code, 401)
            self.assertTrue(received.headers["www-authenticate"].startswith("Basic "), received.headers)
        self.assertEqual(self.ask([], "/v1/streams").headers["www-authenticate"], "Bearer")

    def test_the_secret_is_the_password_of_any_user(self) -> None:
        self.assertEqual(self.ask(login("hidden")).code, 200)
        self.assertEqual(self.ask(login("hidden", user="")).code, 200)
        for wrong in ("", "hidde", "Bearer hidden"):
            self.assertEqual(self.ask(login(wrong)).code, 401, wrong)
        self.assertEqual(self.ask([("Authorization", "Basic !!!")]).code, 401)

    def test_a_page_of_another_site_has_no_access_with_the_login_of_a_browser(self) -> None:
        received = self.ask([*login("hidden"), ("Origin", "https://evil.example")])
        self.assertEqual(received.code, 403)
        self.assertEqual(self.ask([*login("hidden"), ("Origin", "http://localhost")]).code, 200)

    def test_a_viewer_sees_what_its_secret_may_read(self) -> None:
        self.assertIn(">orders<", self.ask(login("read")).body.decode())
        page = self.ask(login("other"), "/?stream=orders").body.decode()
        self.assertNotIn("<b>orders", page)
        self.assertNotIn("paid", page)

    def test_only_an_admin_has_buttons(self) -> None:
        self.assertIn('data-decision="skip"', self.ask(login("root")).body.decode())
        self.assertNotIn("data-decision", self.ask(login("read")).body.decode())
