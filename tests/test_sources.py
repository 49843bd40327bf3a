"""Where missed facts come from: one source after the other, and a reason from each that has none."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, ConfigError, StoreError
from replication.sources import LARGE_GAP, DatabaseCatchUp, SegmentCatchUp, Sources
from replication.storage import open_store
from replication.streams.cursor import CatchUp
from replication.streams.facts import Fact
from replication.streams.registry import StreamDefinition
from replication.streams.seams import Page, Write
from replication.web.client import HttpCatchUp
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Net, begin, error_of, logged, now
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
STEP = CatchUp(Token(1), Token(9))
Answer = Page | Exception | Deferred[Page]


class FakeSource:
    """Answers what it is given; a list, one after the other."""

    def __init__(self, answer: Answer | list[Answer]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, int]] = []
        self.closed = False

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked.append((after, upto, limit))
        answer = self.answer.pop(0) if isinstance(self.answer, list) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, Deferred) else answer

    async def close(self) -> None:
        self.closed = True


def page(upto: int) -> Page:
    return Page([], Token(upto), limited=False)


def full(upto: int) -> Page:
    return Page([Fact(Token(upto), ("[]",))], Token(upto), limited=True)


class UsesSources(SynchronousTestCase):
    def sources(self, *answers: Answer | list[Answer]) -> tuple[Sources, list[FakeSource]]:
        urls = [f"http://source{number}:1" for number in range(len(answers))]
        sources = Sources(Net(), urls, {}, None)
        fakes = [FakeSource(answer) for answer in answers]
        sources._made = dict(zip(urls, fakes, strict=True))  # type: ignore[arg-type]
        return sources, fakes

    def fetch(self, sources: Sources, endpoint: str | None = None) -> list[Any]:
        return begin(sources.fetch(endpoint, ORDERS, MASTER, STEP, 500))


class SourcesTests(UsesSources):
    def test_the_first_that_gets_further_answers(self) -> None:
        sources, (one, two, three) = self.sources(CatchUpError("down"), page(5), page(9))
        self.assertEqual(self.fetch(sources), [page(5)])
        self.assertEqual((one.asked, two.asked, three.asked), ([(1, 9, 500)], [(1, 9, 500)], []))

    def test_one_that_has_nothing_new_is_passed_over(self) -> None:
        sources, _ = self.sources(page(1), StoreError("locked"), page(9))
        self.assertEqual(self.fetch(sources), [page(9)])

    def test_if_none_has_it_each_says_why(self) -> None:
        sources, _ = self.sources(CatchUpError("down"), StoreError("locked"), page(1))
        error = error_of(self.fetch(sources))
        self.assertIsInstance(error, CatchUpError)
        self.assertEqual(str(error), "down; locked; http://source2:1 has nothing of master after 1")

    def test_what_is_no_fault_of_a_source_is_not_taken_for_one(self) -> None:
        sources, (_, second) = self.sources(TypeError("a bug"), page(9))
        self.assertIsInstance(error_of(self.fetch(sources)), TypeError)
        self.assertEqual(second.asked, [])

    def test_folders_are_asked_in_their_place_but_first_for_a_large_gap(self) -> None:
        """A segment's sum has to be checked first, which is not worth it for a few facts."""
        answers = (page(9), page(9), page(9))
        sources, fakes = self.sources(*answers)
        sources._urls = ["http://source0:1", "segments", "http://source2:1"]
        sources._made = dict(zip(sources._urls, fakes, strict=True))  # type: ignore[arg-type]
        large = CatchUp(Token(1), Token(2 + LARGE_GAP))
        for step, asked in ((STEP, 0), (large, 1)):
            now(sources.fetch(None, ORDERS, MASTER, step, 500))
            self.assertEqual([len(each.asked) for each in fakes], [1, asked, 0])

    def test_after_folders_comes_the_writers_own_http(self) -> None:
        """Segments end somewhere."""
        sources, (folder, own) = self.sources(page(1), page(9))
        sources._urls = ["segments"]
        sources._made = {"segments": folder, "http://here:9093": own}  # type: ignore[dict-item]
        self.assertEqual(self.fetch(sources, "tcp:here:9092"), [page(9)])
        error = error_of(self.fetch(sources, "unix:/run/r.sock"))
        self.assertIn("segments has nothing of master after 1; no HTTP is known for 'master'", str(error))

    def test_after_databases_too_and_they_do_not_have_what_lives_in_memory(self) -> None:
        """Trap 29: who reads all the rest from a database must not stand still where there is no table."""
        with TemporaryDirectory() as folder:
            pump, url = Pump(), f"sqlite:///{folder}/writer.db"
            store = open_store(url, pump)
            pump.wait(store.open())
            pump.wait(store.declare(StreamDefinition(ORDERS, in_memory=True)))
            pump.wait(store.transaction().commit([Write(ORDERS, InstanceName(""), Token(10_000))]))
            sources, own = Sources(pump, [url], {}, None), FakeSource(page(9))
            sources._made["http://here:9093"] = own  # type: ignore[assignment]
            with logged() as said:
                fetched = pump.wait(sources.fetch("tcp:here:9092", ORDERS, MASTER, STEP, 500))
            self.assertEqual(fetched, page(9))
            self.assertIn("nothing of stream 'orders' is kept here", said[0])
            pump.wait(sources.close())
            pump.wait(store.close())

    def test_why_a_source_is_passed_over_is_logged_once_until_it_answers_again(self) -> None:
        sources, (first, _) = self.sources(CatchUpError("segment 7 is damaged"), page(9))
        with logged() as lines:
            for answer in ("segment 7 is damaged", "segment 7 is damaged", page(1), "segment 8 is damaged"):
                first.answer = CatchUpError(answer) if isinstance(answer, str) else answer
                self.fetch(sources)
        said = [
            "a source of missed facts fails: segment 7 is damaged",
            "a source of missed facts fails: segment 8 is damaged",
        ]
        self.assertEqual(lines, said)

    def test_what_makes_up_a_long_way_is_logged_once(self) -> None:
        """So that who waits sees which source it is, a folder of segments, say; a short way is nobody's news."""
        sources, (first, _) = self.sources(page(9), page(LARGE_GAP + 50))
        long_way = CatchUp(Token(1), Token(LARGE_GAP + 99))
        with logged(LogLevel.info) as said:
            for step in (STEP, long_way, long_way):
                now(sources.fetch(None, ORDERS, MASTER, step, 10))
            first.answer = CatchUpError("it is gone")
            now(sources.fetch(None, ORDERS, MASTER, long_way, 10))
        texts = [text for text in said if text.startswith("fetching")]
        self.assertEqual(
            texts,
            [f"fetching orders of master from http://source{n}:1: 100098 IDs to go" for n in (0, 1)],
        )

    def test_giving_up_the_wait_is_passed_on_and_asks_nobody_else(self) -> None:
        sources, (_, second) = self.sources(Deferred(), page(9))
        fetching = Deferred.fromCoroutine(sources.fetch(None, ORDERS, MASTER, STEP, 500))
        outcome = begin(fetching)
        fetching.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(second.asked, [])

    def test_all_are_closed(self) -> None:
        sources, fakes = self.sources(page(1), page(1))
        now(sources.close())
        self.assertTrue(all(fake.closed for fake in fakes))


class AheadTests(UsesSources):
    """While a page is being applied, the next one is read."""

    def setUp(self) -> None:
        self.reading: Deferred[Page] = Deferred()
        self.many, (self.source,) = self.sources([full(5), self.reading, page(9)])
        self.assertEqual(self.fetch(self.many), [full(5)])
        self.assertEqual(self.source.asked, [(1, 9, 500), (5, 9, 500)])

    def go_on(
        self, *, after: int = 5, upto: int = 12, epoch: int = 0, fresh: bool = False, endpoint: str | None = None
    ) -> list[Any]:
        step = CatchUp(Token(after), Token(upto), epoch, fresh=fresh)
        return begin(self.many.fetch(endpoint, ORDERS, MASTER, step, 500))

    def test_it_is_there_when_it_is_asked_for(self) -> None:
        following = self.go_on()
        self.assertEqual(following, [])
        self.reading.callback(full(7))
        self.assertEqual(following, [full(7)])
        self.assertEqual(self.source.asked[2:], [(7, 12, 500)])

    def test_if_it_failed_meanwhile_it_is_read_again(self) -> None:
        self.reading.errback(CatchUpError("down"))
        self.assertEqual((self.go_on(), self.source.asked[2:]), ([page(9)], [(5, 12, 500)]))

    def test_if_something_else_is_asked_for_it_is_dropped(self) -> None:
        """A writer that has begun anew may have other facts at the same IDs."""
        for other in ({"after": 4}, {"upto": 8}, {"epoch": 1}, {"fresh": True}, {"endpoint": "tcp:elsewhere:9092"}):
            self.setUp()
            self.assertEqual((self.go_on(**other), len(self.source.asked)), ([page(9)], 3))
            self.assertTrue(self.reading.called, "it is given up")

    def test_where_facts_are_told_in_no_order_nothing_is_read_ahead(self) -> None:
        sources, (source,) = self.sources(full(5))
        step = CatchUp(Token(1), Token(9), fresh=True)
        self.assertEqual(begin(sources.fetch(None, ORDERS, MASTER, step, 500)), [full(5)])
        self.assertEqual(len(source.asked), 1)

    def test_when_all_is_closed_it_is_given_up(self) -> None:
        now(self.many.close())
        self.assertTrue(self.reading.called)
        self.assertTrue(self.source.closed)


class ChoiceTests(SynchronousTestCase):
    def test_each_is_made_once_and_at_once(self) -> None:
        made = Sources(Net(), ["http://one:1", "https://two/", "sqlite:///three.db"], {}, "secret")._made
        kinds = [type(each) for each in made.values()]
        self.assertEqual(kinds, [HttpCatchUp, HttpCatchUp, DatabaseCatchUp])

    def test_whatever_else_there_is_is_a_folder_of_segments(self) -> None:
        with TemporaryDirectory() as folder:
            pump = Pump()
            sources = Sources(pump, [folder, f"file://{folder}"], {}, None)
            self.assertEqual([type(each) for each in sources._made.values()], [SegmentCatchUp] * 2)
            pump.wait(sources.close())

    def test_what_cannot_work_is_refused_before_it_is_needed(self) -> None:
        for url in (
            "ftp://one",
            "folder",
            "http://",
            "http://user@host",
            "http://host:99999",
            "sqlite://",
            "postgresql:x",
        ):
            with self.assertRaises(ConfigError) as caught:
                Sources(Net(), ["http://good:1", url], {}, None)
            self.assertIn(url, str(caught.exception))
        with self.assertRaises(ConfigError):
            Sources(Net(), ["http://good:1"], {}, "two\nlines")

    def test_without_any_a_writers_own_http_is_asked(self) -> None:
        """Its own as configured, else what lies beside the endpoint where it was heard."""
        places = {
            "master": {"http": "http://there:7"},
            "other": {"connect": "tcp:x:1"},
            "beside": {"connect": "tcp:beside:1", "http": "http://beside:8"},
        }
        sources = Sources(Net(), [], places, None)
        self.assertEqual(sources._own("tcp:here:9092", MASTER), "http://there:7")
        self.assertEqual(sources._own("tcp:here:9092", InstanceName("other")), "http://here:9093")
        self.assertEqual(sources._own("tcp:here:9092", InstanceName("third")), "http://here:9093")
        self.assertEqual(sources._own("tcp:beside:1", InstanceName("former")), "http://beside:8")

    def test_where_none_is_known_the_error_names_the_cure(self) -> None:
        for endpoint in (None, "unix:/run/r.sock"):
            error = error_of(begin(Sources(Net(), [], {}, None).fetch(endpoint, ORDERS, MASTER, STEP, 5)))
            self.assertIsInstance(error, CatchUpError)
            self.assertIn("give catch_up, or http in [writers.master]", str(error))

    def test_the_same_source_serves_again(self) -> None:
        sources = Sources(Net(), [], {}, None)
        self.assertIs(sources._at("http://one:1"), sources._at("http://one:1"))


class DatabaseTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.pump = Pump()
        folder = TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name, "app.db")
        self.url = f"sqlite:///{self.path}"
        self.source = DatabaseCatchUp(self.url, self.pump)

    def tearDown(self) -> None:
        self.pump.wait(self.source.close())

    def write(self, *facts: Fact, upto: int) -> None:
        async def work() -> None:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(StreamDefinition("orders"))
            await store.transaction().commit([Write(ORDERS, MASTER, Token(upto), facts)])
            await store.close()

        self.pump.wait(work())

    def ask(self, after: int, upto: int, limit: int = 100) -> tuple[Sequence[Fact], int]:
        got = self.pump.wait(self.source.facts(ORDERS, MASTER, after=Token(after), upto=Token(upto), limit=limit))
        return [*got.facts], got.upto

    def test_it_reads_what_another_process_writes(self) -> None:
        two, three = Fact(Token(2), ("[1]",)), Fact(Token(3), ("[2]", "[3]"))
        self.write(two, three, upto=5)
        self.assertEqual(self.ask(0, 5), ([two, three], 5))
        self.assertEqual(self.ask(2, 3), ([three], 3))
        self.assertEqual(self.ask(0, 5, limit=1), ([two], 2))

    def test_how_far_it_reaches_is_asked_once_for_many_pages(self) -> None:
        self.write(*[Fact(Token(each), ("[]",)) for each in range(2, 8)], upto=7)
        asked: list[str] = []
        positions = self.source._store.positions

        def note(stream: StreamName) -> Any:
            asked.append(stream)
            return positions(stream)

        self.patch(self.source._store, "positions", note)
        for after in (1, 3, 5):
            self.assertEqual(self.ask(after, 7, limit=2)[1], after + 2)
        self.assertEqual(asked, ["orders"])
        self.write(Fact(Token(8), ("[]",)), upto=8)
        self.assertEqual((self.ask(7, 8)[1], asked), (8, ["orders"] * 2))

    def test_a_copy_that_went_back_between_two_pages_is_not_believed_further_than_it_is_now(self) -> None:
        self.write(*[Fact(Token(each), ("[]",)) for each in range(2, 8)], upto=7)
        self.assertEqual(self.ask(1, 9, limit=2)[1], 3)

        async def go_back() -> None:
            store = open_store(self.url, self.pump)
            await store.open()
            await store.declare(StreamDefinition("orders"))
            await store.transaction().commit([Write(ORDERS, MASTER, Token(3), reset=True)])
            await store.close()

        self.pump.wait(go_back())
        self.write(Fact(Token(4), ("[]",)), upto=4)
        self.assertEqual(self.ask(3, 9, limit=2), ([Fact(Token(4), ("[]",))], 4))

    def test_a_copy_that_is_behind_says_so_and_goes_on_later(self) -> None:
        self.write(Fact(Token(2), ("[1]",)), upto=2)
        self.assertEqual(self.ask(1, 9), ([Fact(Token(2), ("[1]",))], 2))
        self.assertEqual(self.ask(2, 9), ([], 2))
        self.write(Fact(Token(7), ("[2]",)), upto=7)
        self.assertEqual(self.ask(2, 9), ([Fact(Token(7), ("[2]",))], 7))

    def test_a_database_that_is_not_there_is_not_made_and_is_found_once_it_is(self) -> None:
        with self.assertRaisesRegex(StoreError, str(self.path)):
            self.ask(1, 9)
        self.assertFalse(self.path.exists())
        self.write(upto=4)
        self.assertEqual(self.ask(1, 9), ([], 4))

    def test_a_stream_that_it_does_not_have_is_its_fault(self) -> None:
        self.write(upto=4)
        with self.assertRaises(StoreError):
            self.pump.wait(self.source.facts(StreamName("unknown"), MASTER, after=Token(1), upto=Token(9), limit=1))
