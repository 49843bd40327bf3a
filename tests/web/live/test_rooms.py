"""A room on the live page: its picture, its steps, and that everything in it is escaped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from twisted.trial.unittest import SynchronousTestCase

from replication.errors import StoreError
from replication.net.access import Access, Grant, Rights
from replication.web.live.rooms import DRAWN
from replication.web.site import make_site
from tests.web.live.hostile import MARKUP
from tests.web.live.test_calls import login
from tests.web.served import Client, FakeServed
from tests.web.test_rooms import JSON, URL, KeptRooms, Site, event

if TYPE_CHECKING:
    from replication.web.rooms import IRooms

AT = "/?room=%21r%3Afar.test"


def state(name: str, kind: str, key: str, *prev: str) -> dict[str, object]:
    return {"event_id": name, "type": kind, "state_key": key, "prev_event_ids": list(prev)}


class RoomTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.site = Site()
        self.site.post(state("$a", "m.room.create", ""), state("$b", "topic", "", "$a"), event("$c", "$b"))
        self.site.post(event("$d", "$b"), state("$e", "topic", "", "$c"))

    def page(self, query: str) -> str:
        received = Client(self.site.site).ask("GET", query)
        self.assertEqual(received.code, 200, received.body)
        return received.body.decode()

    def events(self, page: str) -> list[str]:
        """Return the events of the table, newest first."""
        return re.findall(r'at=t[0-9_]+">(\$\w+)</a>', page)

    def test_a_room_is_shown_as_it_is_now(self) -> None:
        page = self.page(AT)
        self.assertIn("<h2>Room !r:far.test</h2>", page)
        self.assertIn("2 forward and 0 backward extremities", page)
        self.assertEqual(page.count('stroke="#28b463"'), 3)  # two extremities, and the legend
        self.assertEqual(self.events(page), ["$e", "$d", "$c", "$b", "$a"])
        self.assertIn("<h2>Current state</h2>", page)
        self.assertIn("<td>topic</td><td>&#x27;&#x27;</td><td>$b</td>", page)  # of two branches

    def test_each_event_is_a_step_back_and_on(self) -> None:
        page, seen = self.page(AT), []
        while back := re.search(r'href="\?(room=[^"]*)">one event back', page):
            page = self.page(f"/?{back[1].replace('&amp;', '&')}")
            seen.append(self.events(page)[0])
        self.assertEqual(seen, ["$d", "$c", "$b", "$a"])
        on = re.search(r'href="\?(room=[^"]*)">one event on', page)
        assert on is not None
        page = self.page(f"/?{on[1].replace('&amp;', '&')}")
        self.assertEqual(self.events(page), ["$b", "$a"])
        self.assertEqual(page.count('stroke="#28b463"'), 2)  # one extremity, and the legend
        self.assertIn("<h2>State after $b</h2>", page)
        self.assertIn("<td>topic</td><td>&#x27;&#x27;</td><td>$b</td>", page)

    def test_a_limited_number_of_events_is_drawn(self) -> None:
        names = [f"$m{number}" for number in range(2 * DRAWN)]
        self.site.post(*[event(name, prev) for name, prev in zip(names, ["$e", *names], strict=False)])
        self.assertEqual(self.events(self.page(AT)), names[::-1][:DRAWN])

    def test_what_is_not_there_is_named(self) -> None:
        self.assertIn("!other", self.page("/?room=%21other"))
        self.assertIn("has no event at or before t0_1", self.page(f"{AT}&at=t0_1"))
        received = Client(self.site.site).ask("GET", f"{AT}&at=later")
        self.assertEqual((received.code, "t12_345" in received.body.decode()), (400, True))
        without = Client(make_site(FakeServed(), secret=None)).ask("GET", AT).body.decode()
        self.assertIn("This process keeps no rooms", without)
        self.assertNotIn('name="room"', without)
        self.assertIn('name="room" value="!r:far.test"', self.page(AT))

    def test_the_page_is_there_while_the_database_does_not_answer(self) -> None:
        async def view(room_id: str) -> None:
            raise StoreError(f"the database with {room_id} is locked")

        self.site.rooms.view = view  # type: ignore[method-assign]
        self.assertIn("<p>the database with !r:far.test is locked</p>", self.page(AT))

    def test_everything_is_escaped(self) -> None:
        self.site.post(event(MARKUP, "$e", type=MARKUP, state_key=MARKUP, sender=MARKUP))
        page = self.page(AT)
        for planted in ("<b onclick", "\x1b", "\u202e"):
            self.assertNotIn(planted, page)
        self.assertGreater(page.count("&lt;b onclick=&quot;x()&quot;"), 3)

    def test_a_viewer_needs_the_right_to_read_the_streams_of_rooms(self) -> None:
        grants = [
            Grant(Rights((name,), streams), secret=name)
            for name, streams in (("one", {"orders"}), ("two", {"events", "backfill"}))
        ]
        rooms = KeptRooms()
        site = make_site(FakeServed(), secret="hidden", access=Access(grants), rooms=cast("IRooms", rooms))
        Client(site).ask("POST", f"{URL}/events", b'{"events": []}', [*JSON, *login("hidden")])
        self.assertIn("right", Client(site).ask("GET", AT, None, login("one")).body.decode())
        self.assertIn("no room &#x27;!r:far.test&#x27;", Client(site).ask("GET", AT, None, login("two")).body.decode())
