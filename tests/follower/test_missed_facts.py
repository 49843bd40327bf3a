"""Pages of missed facts: their history, the endpoint of their writer, and access tokens."""

from __future__ import annotations

from replication.follower.catch_up import CatchUpSources
from replication.streams.cursor import CatchUp
from replication.streams.definitions import CACHES
from replication.streams.facts import Fact
from replication.streams.interfaces import Page
from replication.wire.grammar import Token
from tests.doubles import logged, now
from tests.follower.cases import HELLO, MASTER, WorkerCase, position


class PageTests(WorkerCase):
    def test_what_was_missed_of_a_stream_that_is_not_stored_is_fetched_without_a_history(self) -> None:
        self.apply()
        fetched: list[object] = []

        async def fetch(_: object, *which: object, followed: object) -> Page:
            fetched.append((which[1], followed))
            return Page((), Token(9), limited=False)

        self.patch(CatchUpSources, "fetch", fetch)
        self.serve(*[HELLO + position(1, 1) + position(at, at, "stock") for at in (5, 9)])
        self.start()
        with logged():
            self.net.cut()
            self.net.run(2)
        self.assertEqual((fetched, self.at("stock")), ([("stock", ())], 9))

    def test_a_page_for_a_follower_is_fetched_from_the_sources_without_access_tokens(self) -> None:
        """See docs/protocol/streams.md C4."""
        row = '["get_user_by_access_token",["secret"],7]'
        step = CatchUp(Token(1), Token(9))
        asked: list[tuple[object, ...]] = []

        async def page(_: object, *which: object) -> Page:
            asked.append(which)
            return Page([Fact(Token(2), (row,))], Token(5), limited=True)

        self.patch(CatchUpSources, "page", page)
        for shown in (False, True):
            followed = self.make_worker(access_tokens=shown)._followed
            followed.links._of_streams[CACHES, MASTER] = "tcp:a:1"
            found = now(followed.missed.page(CACHES, MASTER, step, 7))
            text = row if shown else row.replace('["secret"]', "null")
            self.assertEqual(([*found.facts], found.upto, found.limited), ([Fact(Token(2), (text,))], 5, True))
        self.assertEqual(asked, [("tcp:a:1", CACHES, MASTER, step, 7)] * 2)
