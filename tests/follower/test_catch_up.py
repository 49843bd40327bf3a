"""Catch-up: sources are tried in order, and the error has the reason of each."""

from __future__ import annotations

import json
from errno import EACCES
from os import strerror
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from msgspec.structs import replace
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import CatchUpError, ConfigError, FactsGoneError, StoreError
from replication.follower.catch_up import LARGE_GAP, PUT_OFF, SLOW, CatchUpSources
from replication.follower.doubts import count_with_rows
from replication.follower.sources import DatabaseCatchUp, SegmentCatchUp
from replication.segments.folders import LocalFolder
from replication.segments.histories import HISTORIES
from replication.segments.manifest import MANIFEST, Manifest, write_manifest
from replication.storage import open_store
from replication.streams.cursor import CatchUp
from replication.streams.definitions import StreamDefinition
from replication.streams.facts import Fact
from replication.streams.history import Epoch
from replication.streams.interfaces import Page, Write
from replication.streams.retention import SegmentChain
from replication.urls import Url
from replication.web.client import HttpCatchUp, StreamLackingError
from replication.wire.grammar import InstanceName, StreamName, Token
from tests.doubles import Net, begin, error_of, logged, now
from tests.segments.histories import replace_lines, write_segment
from tests.storage.pump import PumpedClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from replication.streams.history import History

ORDERS, MASTER = StreamName("orders"), InstanceName("master")
STEP_AFTER = Token(1), Token(1)
STEP = CatchUp(Token(1), Token(9))
Answer = Page | Exception | Deferred[Page]


class FakeSource:
    """Returns ``answer``; the items of a list one after the other."""

    def __init__(self, answer: Answer | list[Answer]) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int, int]] = []
        self.closed = False
        self.epochs: History = ()
        self.histories_requested = 0

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        self.asked.append((after, upto, limit))
        answer = self.answer.pop(0) if isinstance(self.answer, list) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return await answer if isinstance(answer, Deferred) else answer

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        assert (stream, writer) == (ORDERS, MASTER)
        self.histories_requested += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.epochs

    async def close(self) -> None:
        self.closed = True


def page(upto: int) -> Page:
    return Page([], Token(upto), limited=False)


def full(upto: int) -> Page:
    return Page([Fact(Token(upto), ("[]",))], Token(upto), limited=True)


class SourcesCase(SynchronousTestCase):
    def sources(self, *answers: Answer | list[Answer]) -> tuple[CatchUpSources, list[FakeSource]]:
        urls = [Url(f"http://source{number}:1") for number in range(len(answers))]
        sources = CatchUpSources(Net(), urls, {}, None)
        fakes = [FakeSource(answer) for answer in answers]
        sources._sources = dict(zip(urls, fakes, strict=True))  # type: ignore[arg-type]
        return sources, fakes

    def fetch(self, sources: CatchUpSources, endpoint: str | None = None) -> list[Any]:
        return begin(sources.fetch(endpoint, ORDERS, MASTER, STEP, 500))


class GoneTests(SourcesCase):
    """A source that has deleted the facts, or never had them, is not waited for."""

    def gone(self, upto: int | None) -> FactsGoneError:
        return FactsGoneError(f"gone up to {upto}", upto=upto)

    def test_another_source_that_has_them_is_used(self) -> None:
        sources, _ = self.sources(self.gone(5), page(9))
        self.assertEqual(self.fetch(sources), [page(9)])

    def test_a_source_that_does_not_have_the_stream_is_not_logged_if_another_one_has_the_facts(self) -> None:
        """Each of two writers has its own streams, and ``catch_up`` lists the HTTP of both."""
        sources, _ = self.sources(StreamLackingError("no stream 'orders' here"), page(9))
        with logged() as messages:
            self.assertEqual(self.fetch(sources), [page(9)])
        self.assertEqual([each for each in messages if "fails" in each], [])

    def test_if_they_are_gone_everywhere_the_smallest_range_is_named_with_the_cure(self) -> None:
        sources, _ = self.sources(self.gone(7), self.gone(5), self.gone(None))
        error = cast("FactsGoneError", error_of(self.fetch(sources)))
        self.assertEqual(error.upto, 5)
        self.assertRegex(str(error), "gone up to 7; gone up to 5; gone up to None; .* --skip-gone, .* gone up to 5")

    def test_the_range_ends_with_a_fact_of_which_segments_have_only_the_id(self) -> None:
        """They have the facts after it: with --skip-gone, those up to 8 were left out, too."""
        folder, lacks = Url("segments"), Page([], Token(1), limited=True, lacking=Token(3))
        sources = CatchUpSources(Net(), [], {}, None)
        for answers, gone in (([self.gone(8), lacks], True), ([lacks, self.gone(None)], False)):
            urls = [Url("http://source:1"), folder] if gone else [folder, Url("http://source:1")]
            sources._urls = urls
            sources._sources = {url: FakeSource(answer) for url, answer in zip(urls, answers, strict=True)}  # type: ignore[arg-type, misc]
            error = error_of(self.fetch(sources))
            self.assertIn("segments lacks fact 3: a row of it is too long for a line", str(error))
            self.assertEqual(getattr(error, "upto", None), 3 if gone else None)

    def test_a_source_that_may_have_them_later_is_waited_for(self) -> None:
        for other in (CatchUpError("down"), StoreError("locked"), page(1), self.gone(None)):
            sources, _ = self.sources(self.gone(None), other)
            self.assertNotIsInstance(error_of(self.fetch(sources)), FactsGoneError)
            sources, _ = self.sources(self.gone(5), other)
            is_gone = isinstance(error_of(self.fetch(sources)), FactsGoneError)
            self.assertEqual(is_gone, isinstance(other, FactsGoneError))


class SlowFailureTests(SourcesCase):
    """A source that does not answer delays one page, not each."""

    def fetch_after(self, sources: CatchUpSources, seconds: float, *, fails: Deferred[Page]) -> None:
        fetching = begin(sources.page(None, ORDERS, MASTER, STEP, 500))
        sources._reactor.advance(seconds)
        fails.errback(CatchUpError("no answer"))
        self.assertEqual(fetching, [page(9)])

    def test_it_is_asked_after_the_others_for_a_while(self) -> None:
        for seconds, asked in ((SLOW + 0.1, 1), (SLOW - 0.1, 2)):
            failing: Deferred[Page] = Deferred()
            sources, (first, second) = self.sources([failing, page(9), page(9)], page(9))
            with logged():
                self.fetch_after(sources, seconds, fails=failing)
                self.fetch(sources)
                self.assertEqual(len(first.asked), asked)
                sources._reactor.advance(PUT_OFF)
                self.fetch(sources)
                self.assertEqual(len(first.asked), asked + 1)
            self.assertEqual(len(second.asked), 3 - asked)

    def test_it_is_asked_if_no_other_has_the_facts(self) -> None:
        failing: Deferred[Page] = Deferred()
        sources, (first, second) = self.sources([failing, page(9)], [page(9), CatchUpError("down")])
        with logged():
            self.fetch_after(sources, SLOW + 0.1, fails=failing)
            self.assertEqual(self.fetch(sources), [page(9)])
        self.assertEqual((len(first.asked), len(second.asked)), (2, 2))


class HistoryTests(SourcesCase):
    HISTORY = (Epoch("a", Token(1), Token(1)),)

    def history(self, sources: CatchUpSources) -> list[Any]:
        return begin(sources.history(None, ORDERS, MASTER))

    def test_the_first_source_that_knows_a_history_is_used(self) -> None:
        sources, fakes = self.sources(CatchUpError("down"), page(1), page(1))
        fakes[2].epochs = self.HISTORY
        self.assertEqual(self.history(sources), [self.HISTORY])

    def test_without_a_history_the_error_has_the_reason_of_each_source_that_fails(self) -> None:
        sources, _ = self.sources(CatchUpError("down"), page(1), CatchUpError("locked"))
        self.assertEqual(str(error_of(self.history(sources))), "down; locked")

    def test_if_every_source_answers_and_none_knows_one_there_is_none(self) -> None:
        sources, _ = self.sources(page(1), page(1))
        self.assertEqual(self.history(sources), [()])

    def test_a_writer_whose_http_is_not_known_is_named(self) -> None:
        sources, _ = self.sources()
        error = "no HTTP is known for 'master' at None: give catch_up, or http in [writers.master]"
        self.assertEqual(str(error_of(self.history(sources))), error)

    def test_http_is_requested_before_databases_which_may_be_older_copies(self) -> None:
        sources, (database, _, http) = self.sources(page(1), CatchUpError("down"), page(1))
        database.epochs, http.epochs = (), self.HISTORY
        older = Url("sqlite:///copy.db")
        sources._urls = [older, *sources._urls[1:]]
        sources._sources[older] = cast("Any", FakeSource(page(1)))
        cast("Any", sources._sources[older]).epochs = (Epoch("old", Token(1), Token(1)),)
        self.assertEqual(self.history(sources), [self.HISTORY])

    def beside_a_copy(
        self,
        own: History | None,
        *,
        sent: History | None = (),
        old: History | None = None,
        url: str = "http://copy:1",
        given: str | None = None,
        database: History = (),
    ) -> tuple[list[Any], int]:
        """Return what is found if a copy has an older history, and how often HTTP was requested.

        ``sent`` is the history that comes over the connection to the writer.
        """
        urls = [url, *(["sqlite:///other.db"] if database else [])]
        writers = {"master": {"connect": "tcp:writer:1", **({"http": given} if given else {})}}
        sources = CatchUpSources(Net(), urls, writers, None)
        sources.sent_history = lambda *_: succeed(sent)
        copy, writer = FakeSource(page(1)), FakeSource(CatchUpError("down") if own is None else page(1))
        copy.epochs, writer.epochs = self.OLD if old is None else old, own or ()
        other = FakeSource(page(1))
        other.epochs = database
        fakes = {url: copy, given or "http://writer:2": writer, "sqlite:///other.db": other}
        sources._sources = {Url(each): cast("Any", fake) for each, fake in fakes.items()}
        found = begin(sources.history("tcp:writer:1", ORDERS, MASTER))
        return found, copy.histories_requested + writer.histories_requested

    OLD = (Epoch("old", Token(1), Token(1)),)

    def test_the_history_of_a_copy_without_the_newest_epoch_is_not_used(self) -> None:
        """It may be older than a restore of the writer."""
        sent = [Epoch("a", Token(1), Token(1))]
        self.assertEqual(self.beside_a_copy(self.HISTORY, sent=sent), ([self.HISTORY], 2))
        self.assertEqual(self.beside_a_copy(None, sent=sent, database=self.HISTORY), ([self.HISTORY], 2))

    def test_a_copy_with_the_newest_epoch_is_enough(self) -> None:
        """It may be newer than the process that sends the position: of two relays, one may be left behind."""
        newer = [*self.OLD, *self.HISTORY]
        self.assertEqual(self.beside_a_copy(self.HISTORY, sent=self.OLD, old=newer), ([newer], 1))

    def test_without_that_epoch_in_any_source_the_history_that_the_writer_sends_is_used(self) -> None:
        """No HTTP may be reachable."""
        for own, database in ((None, ()), (None, self.OLD), ((), ())):
            found, _ = self.beside_a_copy(own, sent=self.HISTORY, database=database)
            self.assertEqual(found, [self.HISTORY])

    def test_while_the_writer_cannot_read_its_history_no_source_is_requested(self) -> None:
        sources = CatchUpSources(Net(), ["http://copy:1"], {}, None)
        sources.sent_history = lambda *_: fail(CatchUpError("locked"))
        self.assertEqual(str(error_of(begin(sources.history("tcp:writer:1", ORDERS, MASTER)))), "locked")

    def test_if_no_process_sends_a_history_the_first_one_is_used(self) -> None:
        for sent in ((), None):
            self.assertEqual(self.beside_a_copy(self.HISTORY, sent=sent), ([self.OLD], 1))

    def test_the_secret_of_an_https_source_is_not_sent_to_a_default_url(self) -> None:
        self.assertEqual(self.beside_a_copy(self.HISTORY, old=(), url="https://copy:1"), ([()], 1))
        given = self.beside_a_copy(self.HISTORY, old=(), url="https://copy:1", given="https://writer:7")
        self.assertEqual(given, ([self.HISTORY], 2))

    def test_a_database_has_histories_and_segments_are_left_out(self) -> None:
        with TemporaryDirectory() as folder:
            pump, url = PumpedClock(), f"sqlite:///{folder}/writer.db"
            store = open_store(url, pump)
            pump.wait(store.open())
            pump.wait(store.store_histories(MASTER, {ORDERS: self.HISTORY}))
            sources = CatchUpSources(pump, [folder, url], {}, None)
            self.assertEqual([*pump.wait(sources.history(None, ORDERS, MASTER))], [*self.HISTORY])
            pump.wait(sources.close())
            pump.wait(store.close())


class OtherHistoryTests(SourcesCase):
    """A source may be older than a restore of the writer's database: facts that the writer has lost are not used."""

    OLD = (Epoch("a", Token(1), Token(1)),)
    NEW = (*OLD, Epoch("b", Token(6), Token(6)))
    STALE = Page([Fact(Token(token), ("[]",)) for token in (5, 6, 7)], Token(7), limited=False)

    def ask(self, answer: Page, epochs: History, followed: History, *, own: History = ()) -> tuple[object, list[str]]:
        """Return what is fetched from a source with these epochs, else from another one; and what is logged."""
        sources, (copy, writer) = self.sources(answer, page(9))
        copy.epochs, writer.epochs = epochs, own
        sources._urls = [Url("sqlite:///copy.db"), sources._urls[1]]
        sources._sources[sources._urls[0]] = copy  # type: ignore[assignment]
        with logged() as lines:
            (fetched,) = begin(sources.page(None, ORDERS, MASTER, STEP, 500, followed=followed))
        return fetched, lines

    def test_the_page_ends_where_the_restore_began(self) -> None:
        expected = Page(self.STALE.facts[:2], Token(6), limited=True)
        self.assertEqual(self.ask(self.STALE, self.OLD, self.NEW), (expected, []))

    def test_the_page_ends_before_facts_that_were_open_in_the_restored_backup(self) -> None:
        """The backup has the larger ID 7, and may lack the ID 6, so the new epoch begins where the page ends."""
        old = (Epoch("a.1", Token(1), Token(1)),)
        new = (*old, Epoch("b.2", Token(5), Token(7)))
        self.assertEqual(self.ask(self.STALE, old, new), (Page(self.STALE.facts[:1], Token(5), limited=True), []))

    def test_the_writers_history_is_requested_if_none_was_followed(self) -> None:
        expected = Page(self.STALE.facts[:2], Token(6), limited=True)
        self.assertEqual(self.ask(self.STALE, self.OLD, (), own=self.NEW), (expected, []))

    def test_the_writers_history_is_requested_once_a_connection(self) -> None:
        sources, (copy, writer) = self.sources(self.STALE, page(9))
        sources._urls = [Url("sqlite:///copy.db"), sources._urls[1]]
        sources._sources[sources._urls[0]] = copy  # type: ignore[assignment]
        copy.epochs, writer.epochs = self.OLD, self.OLD
        requested = []
        for lost in (False, False, True):
            if lost:
                writer.epochs = self.NEW  # the writer's database was restored
                sources.connection_lost()
            (fetched,) = begin(sources.page(None, ORDERS, MASTER, STEP, 500))
            requested.append((writer.histories_requested, fetched.upto))
        self.assertEqual(requested, [(1, 7), (1, 7), (2, 6)])

    def test_without_a_connection_the_history_is_requested_each_time(self) -> None:
        """It may be that of an old copy."""
        sources, (copy, writer) = self.sources(self.STALE, page(9))
        sources._urls = [Url("sqlite:///copy.db"), sources._urls[1]]
        sources._sources[sources._urls[0]] = copy  # type: ignore[assignment]
        sources.sent_history = lambda *_: succeed(None)
        copy.epochs, writer.epochs = self.OLD, self.OLD
        requested = []
        for history in (self.OLD, self.NEW):
            writer.epochs = history
            (fetched,) = begin(sources.page(None, ORDERS, MASTER, STEP, 500))
            requested.append(fetched.upto)
        self.assertEqual(requested, [7, 6])

    def test_a_history_that_arrives_after_its_connection_is_lost_is_not_used_again(self) -> None:
        sources, (copy, writer) = self.sources(self.STALE, page(9))
        sources._urls = [Url("sqlite:///copy.db"), sources._urls[1]]
        sources._sources[sources._urls[0]] = copy  # type: ignore[assignment]
        copy.epochs = self.OLD
        arrives: Deferred[History] = Deferred()
        with patch.object(writer, "history", lambda *_: arrives):
            fetched = begin(sources.page(None, ORDERS, MASTER, STEP, 500))
            sources.connection_lost()
            arrives.callback(self.OLD)
        writer.epochs = self.NEW
        fetched += begin(sources.page(None, ORDERS, MASTER, STEP, 500))
        self.assertEqual([each.upto for each in fetched], [7, 6])

    def test_facts_of_a_source_with_a_history_wait_for_that_of_the_writer(self) -> None:
        sources, (copy, writer) = self.sources(self.STALE, CatchUpError("down"))
        sources._urls = [Url("s3://folder"), sources._urls[1]]
        sources._sources[sources._urls[0]] = copy  # type: ignore[assignment]
        copy.epochs = self.OLD
        for _ in range(2):
            error = error_of(begin(sources.page(None, ORDERS, MASTER, STEP, 500)))
            self.assertEqual(str(error), "the history of master is needed, and not known: down; down")
        writer.answer, writer.epochs = page(1), self.NEW
        (fetched,) = begin(sources.page(None, ORDERS, MASTER, STEP, 500))
        self.assertEqual(fetched.upto, 6)

    def test_a_source_without_common_facts_is_skipped_and_logged(self) -> None:
        for epochs, upto in ((self.OLD, 0), ((Epoch("other", Token(1), Token(1)),), 0)):
            new = (Epoch("b", Token(0), Token(0)),) if epochs is not self.OLD else (*self.OLD, Epoch("b", *STEP_AFTER))
            fetched, lines = self.ask(self.STALE, epochs, new)
            self.assertEqual(fetched, page(9))
            why = "the source is older than a restore of that database, or of another database"
            above = 1 if epochs is self.OLD else upto
            what = f": sqlite:///copy.db: facts of orders by master above {above} are not those that the writer has"
            self.assertIn(f"{what}: {why}", lines[0])

    def test_other_sources_are_used_whole(self) -> None:
        restarted = (*self.OLD, Epoch("b", Token(5), Token(7)))  # as after a kill, while 6 was open
        for epochs, followed in ((self.NEW, self.NEW), (self.OLD, restarted), ((), self.NEW), (self.OLD, ())):
            self.assertEqual(self.ask(self.STALE, epochs, followed), (self.STALE, []))

    def test_segments_have_the_history_of_their_facts(self) -> None:
        with TemporaryDirectory() as name:
            folder, pump = LocalFolder(Path(name)), PumpedClock()
            facts = [Fact(Token(token), (f"[{token}]",)) for token in range(2, 8)]
            write_manifest(folder, Manifest([write_segment(folder, facts)]))
            sources = CatchUpSources(pump, [name], {"master": {"http": "http://m:1"}}, None)
            own = sources._sources[Url("http://m:1")] = cast("Any", FakeSource(page(9)))
            own.epochs = self.NEW

            def fetch(after: int) -> Page:
                return pump.wait(
                    sources.fetch(None, ORDERS, MASTER, CatchUp(Token(after), Token(9)), 500, followed=self.NEW)
                )

            self.assertEqual(fetch(0).upto, 7)
            index = [[ORDERS, MASTER, '[["a",1,1]]'], [ORDERS, "other", "[]"]]
            (folder.path / HISTORIES).write_text(json.dumps(index))
            self.assertEqual(fetch(0), Page(facts[:5], Token(6), limited=True))
            with logged() as lines:
                self.assertEqual(fetch(6), page(9))
                (folder.path / HISTORIES).write_text("[")
                self.assertEqual(fetch(0), page(9))
            self.assertEqual(["are not those" in lines[0], "histories.json cannot be read" in lines[1]], [True, True])
            pump.wait(sources.close())

    def test_a_compacted_segment_is_not_used_if_the_restore_began_within_its_range(self) -> None:
        """Facts below may have been replaced by facts above, which the writer has lost."""
        facts = [Fact(Token(token), (f"[{token}]",)) for token in range(2, 10)]
        restored = (*self.OLD, Epoch("b", Token(6), Token(6)))
        later = (*self.OLD, Epoch("b", Token(9), Token(9)))
        for range_end, followed, expected in ((9, restored, 12), (5, restored, 5), (9, later, 5), (0, restored, 12)):
            with TemporaryDirectory() as name:
                folder, pump = LocalFolder(Path(name)), PumpedClock()
                segments = [write_segment(folder, facts[:4]), write_segment(folder, facts[4:], after=5)]
                ends = [Token(range_end and max(range_end, each.upto)) for each in segments]  # 0: an older version
                compacted = [
                    replace(each, compacted=True, compacted_upto=end) for each, end in zip(segments, ends, strict=True)
                ]
                write_manifest(folder, Manifest(compacted))
                (folder.path / HISTORIES).write_text(json.dumps([[ORDERS, MASTER, '[["a",1,1]]']]))
                sources = CatchUpSources(pump, [name], {"master": {"http": "http://m:1"}}, None)
                sources._sources[Url("http://m:1")] = cast("Any", FakeSource(page(12)))
                with logged() as lines:
                    step = CatchUp(Token(0), Token(12))
                    found = pump.wait(sources.page(None, ORDERS, MASTER, step, 500, followed=followed))
                self.assertEqual((found.upto, bool(lines)), (expected, expected == 12))
                self.assertEqual(["segments are compacted up to 9" in line for line in lines], [True] * len(lines))
                pump.wait(sources.close())


class CountTests(SourcesCase):
    """The facts of a range, from a source that has the history of the writer."""

    HISTORY = (Epoch("a.1", Token(1), Token(1)),)

    def count(self, *answers: Answer | list[Answer], stale: int = 0) -> list[Any]:
        sources, fakes = self.sources(*answers)
        for each in fakes[stale:]:
            each.epochs = self.HISTORY
        return begin(sources.count(None, ORDERS, MASTER, self.HISTORY, after=Token(5), upto=Token(9)))

    def test_pages_are_counted_up_to_the_end(self) -> None:
        facts = [Fact(Token(token), ("[]",)) for token in (6, 7, 9)]
        first = Page(facts[:2], Token(8), limited=True)
        self.assertEqual(
            self.count([first, Page(facts[2:], Token(9), limited=False)]), [count_with_rows(ORDERS, facts)]
        )

    def test_a_source_with_another_history_or_without_the_end_is_passed_over(self) -> None:
        facts = [Fact(Token(9), ("[]",))]
        whole, count = Page(facts, Token(9), limited=False), count_with_rows(ORDERS, facts)
        self.assertEqual(self.count(Page((), Token(9), limited=False), whole, stale=1), [count])
        self.assertEqual(self.count(Page((), Token(5), limited=False), whole), [count])
        self.assertEqual(self.count(CatchUpError("down"), whole), [count])
        (failure,) = self.count(*[Page((), Token(each), limited=False) for each in (9, 5)], stale=1)
        what = "source0:1 does not have what master has of orders up to 9; the source has nothing after 5"
        self.assertIn(what, str(failure.value))

    def test_nothing_is_counted_where_facts_are_gone(self) -> None:
        gone = FactsGoneError("gone", stream="orders", writer="master", upto=6)
        self.assertEqual(self.count(gone, Page((), Token(9), limited=False)), [None])

    def test_without_any_source_nothing_is_counted(self) -> None:
        """A follower over a Unix socket alone would otherwise stop at each kill of its writer."""
        self.assertEqual(self.count(), [None])


class SegmentTests(SourcesCase):
    """A segment under a right checksum is wrong: the next source has all facts, and the stream goes on."""

    FACTS = tuple(Fact(Token(token), (f"[{token}]",)) for token in range(2, 52))

    def fetched(self, spoil: Callable[[bytes], bytes], manifest: str | None = None) -> list[Fact]:
        with TemporaryDirectory() as folder:
            pump, url = PumpedClock(), f"sqlite:///{folder}/writer.db"
            store = open_store(url, pump)
            pump.wait(store.open())
            pump.wait(store.declare(StreamDefinition(ORDERS)))
            pump.wait(store.transaction().commit([Write(ORDERS, MASTER, Token(51), self.FACTS)]))
            segments = LocalFolder(Path(folder, "segments"))
            whole = write_segment(segments, self.FACTS)
            lines = (segments.path / whole.name).read_bytes()
            write_manifest(segments, Manifest([replace_lines(segments, whole, spoil(lines))]))
            if manifest is not None:
                (segments.path / MANIFEST).write_text(manifest)
            sources = CatchUpSources(pump, [segments.url, url], {}, None)
            found = pump.wait(sources.fetch(None, ORDERS, MASTER, CatchUp(Token(0), Token(51)), 500))
            pump.wait(sources.close())
            pump.wait(store.close())
            return [*found.facts]

    def test_whatever_is_wrong_in_a_folder_the_next_source_is_used(self) -> None:
        wrong: dict[str, Callable[[bytes], bytes]] = {
            "descending tokens": lambda lines: b"".join(lines.splitlines(keepends=True)[::-1]),
            "a token beyond the range": lambda lines: lines.replace(b" master 8 ", b" master 52 "),
            "no JSON": lambda lines: lines.replace(b"[8]", b"[8"),
            "fewer facts": lambda lines: lines.replace(b"RDATA orders master 8 [8]\n", b""),
        }
        for name, spoil in wrong.items():
            with logged() as lines:
                self.assertEqual(self.fetched(spoil), [*self.FACTS], name)
            self.assertEqual([line[:33] for line in lines], ["a source of missed facts fails: /"], name)

    def test_what_each_folder_has_is_shown(self) -> None:
        with TemporaryDirectory() as name:
            pump, rows = PumpedClock(), len(self.FACTS)
            places = [str(Path(name, each)) for each in ("empty", "one", "two")]
            expected = []
            for place in places:
                folder = LocalFolder(Path(place))
                folder.path.mkdir()
                if not place.endswith("empty"):
                    segment = write_segment(folder, self.FACTS)
                    write_manifest(folder, Manifest([segment]))
                    chain = SegmentChain(place, ORDERS, MASTER, Token(0), Token(51), rows, segment.stored_size)
                    expected.append(chain)
            sources = CatchUpSources(pump, ["http://m:1", f"sqlite:///{name}/a.db", *places], {}, None)
            self.assertEqual(pump.wait(sources.segments()), expected)
            Path(places[0], MANIFEST).write_text("[")
            with self.assertRaises(CatchUpError):
                pump.wait(sources.segments())
            pump.wait(sources.close())

    def test_a_deep_manifest_leads_to_the_next_source(self) -> None:
        self.assertEqual(self.fetched(lambda lines: lines, "[" * 100_000), [*self.FACTS])


class SourcesTests(SourcesCase):
    def test_the_first_source_with_new_facts_is_used(self) -> None:
        sources, (one, two, three) = self.sources(CatchUpError("down"), page(5), page(9))
        self.assertEqual(self.fetch(sources), [page(5)])
        self.assertEqual((one.asked, two.asked, three.asked), ([], [(1, 9, 500)], []))

    def test_a_source_without_new_facts_is_skipped(self) -> None:
        sources, _ = self.sources(page(1), StoreError("locked"), page(9))
        self.assertEqual(self.fetch(sources), [page(9)])

    def test_if_every_source_fails_the_error_has_each_reason(self) -> None:
        sources, _ = self.sources(CatchUpError("down"), StoreError("locked"), page(1))
        error = error_of(self.fetch(sources))
        self.assertIsInstance(error, CatchUpError)
        self.assertEqual(str(error), "down; locked; http://source2:1 has nothing of master after 1")

    def test_a_database_that_is_behind_differs_from_sources_that_fail(self) -> None:
        sources, fakes = self.sources(page(1), CatchUpError("down"))
        self.assertFalse(error_of(self.fetch(sources)).behind)  # type: ignore[attr-defined]
        sources._urls = [Url("postgresql://standby"), Url("http://source1:1")]
        sources._sources = dict(zip(sources._urls, fakes, strict=True))  # type: ignore[arg-type]
        self.assertTrue(error_of(self.fetch(sources)).behind)  # type: ignore[attr-defined]

    def test_an_unexpected_error_is_raised(self) -> None:
        sources, (_, second) = self.sources(TypeError("a bug"), page(9))
        self.assertIsInstance(error_of(self.fetch(sources)), TypeError)
        self.assertEqual(second.asked, [])

    def test_folders_of_segments_are_first_for_a_large_gap_only(self) -> None:
        """The checksum of a segment is checked before its first fact is read: that is slow for a few facts."""
        answers = (page(9), page(9), page(9))
        sources, fakes = self.sources(*answers)
        sources._urls = [Url("http://source0:1"), Url("segments"), Url("http://source2:1")]
        sources._sources = dict(zip(sources._urls, fakes, strict=True))  # type: ignore[arg-type]
        large = CatchUp(Token(1), Token(2 + LARGE_GAP))
        for step, asked in ((STEP, 0), (large, 1)):
            now(sources.fetch(None, ORDERS, MASTER, step, 500))
            self.assertEqual([len(each.asked) for each in fakes], [1, asked, 0])
        small = CatchUp(Token(2 * LARGE_GAP), Token(3 * LARGE_GAP))
        self.assertEqual(sources._in_order(small), sources._urls)

    def test_the_writers_http_is_tried_after_folders(self) -> None:
        """The newest facts are in no segment."""
        sources, (folder, own) = self.sources(page(1), page(9))
        sources._urls = [Url("segments")]
        sources._sources = {Url("segments"): folder, Url("http://here:9093"): own}  # type: ignore[dict-item]
        self.assertEqual(self.fetch(sources, "tcp:here:9092"), [page(9)])
        own.answer = page(1)
        error = error_of(self.fetch(sources, "tcp:here:9092"))
        why = "segments has nothing of master after 1; its own HTTP has nothing of master after 1"
        self.assertEqual(str(error), why)
        error = error_of(self.fetch(sources, "unix:/run/r.sock"))
        self.assertIn("segments has nothing of master after 1; no HTTP is known for 'master'", str(error))

    def test_the_writers_http_is_tried_after_databases(self) -> None:
        """Trap 29: an in-memory stream has no table, and must not stop there."""
        with TemporaryDirectory() as folder:
            pump, url = PumpedClock(), f"sqlite:///{folder}/writer.db"
            store = open_store(url, pump)
            pump.wait(store.open())
            pump.wait(store.declare(StreamDefinition(ORDERS, in_memory=True)))
            pump.wait(store.transaction().commit([Write(ORDERS, InstanceName(""), Token(10_000))]))
            sources, own = CatchUpSources(pump, [url], {}, None), FakeSource(page(9))
            sources._sources[Url("http://here:9093")] = own  # type: ignore[assignment]
            with logged() as messages:
                fetched = pump.wait(sources.fetch("tcp:here:9092", ORDERS, MASTER, STEP, 500))
            self.assertEqual(fetched, page(9))
            self.assertIn("no fact of stream 'orders'", messages[0])
            pump.wait(sources.close())
            pump.wait(store.close())

    def test_a_failing_source_is_logged_once_until_it_answers(self) -> None:
        sources, (first, _) = self.sources(CatchUpError("segment 7 is damaged"), page(9))
        with logged() as lines:
            for answer in ("segment 7 is damaged", "segment 7 is damaged", page(1), "segment 8 is damaged"):
                first.answer = CatchUpError(answer) if isinstance(answer, str) else answer
                self.fetch(sources)
        messages = [
            "a source of missed facts fails: segment 7 is damaged",
            "a source of missed facts fails: segment 8 is damaged",
        ]
        self.assertEqual(lines, messages)

    def test_the_source_of_a_long_catch_up_is_logged_once(self) -> None:
        """A catch-up of LARGE_GAP IDs or fewer is not logged."""
        sources, (first, _) = self.sources(page(9), page(LARGE_GAP + 50))
        long_way = CatchUp(Token(1), Token(LARGE_GAP + 99))
        with logged(LogLevel.info) as messages:
            for step in (STEP, CatchUp(Token(1), Token(1 + LARGE_GAP)), long_way, long_way):
                now(sources.fetch(None, ORDERS, MASTER, step, 10))
            first.answer = CatchUpError("it is gone")
            now(sources.fetch(None, ORDERS, MASTER, long_way, 10))
        texts = [text for text in messages if text.startswith("fetching")]
        self.assertEqual(
            texts,
            [f"fetching orders of master from http://source{n}:1: 100098 IDs to go" for n in (0, 1)],
        )

    def test_the_writers_own_http_is_named_as_the_source_of_a_long_catch_up(self) -> None:
        sources, (own,) = self.sources(page(LARGE_GAP + 50))
        sources._urls, sources._sources = [], {Url("http://here:9093"): own}  # type: ignore[dict-item]
        step = CatchUp(Token(1), Token(LARGE_GAP + 99))
        with logged(LogLevel.info) as messages:
            now(sources.fetch("tcp:here:9092", ORDERS, MASTER, step, 10))
        self.assertEqual(messages, ["fetching orders of master from its own HTTP: 100098 IDs to go"])
        self.assertEqual(sources.source_of(ORDERS, MASTER), "its own HTTP")

    def test_the_end_of_a_long_catch_up_is_logged_with_its_rows_ids_and_seconds(self) -> None:
        upto = LARGE_GAP + 99
        first = Page([Fact(Token(7), ("[]", "[]"))], Token(LARGE_GAP), limited=False)
        sources, _ = self.sources([first, full(upto), page(upto + 5)])
        reactor = cast("Net", sources._reactor)
        with logged(LogLevel.info) as messages:
            now(sources.fetch(None, ORDERS, MASTER, CatchUp(Token(1), Token(upto)), 10))
            reactor.advance(2.5)
            now(sources.fetch(None, ORDERS, MASTER, CatchUp(Token(LARGE_GAP), Token(upto)), 10))
            now(sources.fetch(None, ORDERS, MASTER, CatchUp(Token(upto), Token(upto + 5)), 10))
        self.assertIsNone(sources.source_of(ORDERS, MASTER))
        self.assertEqual(
            messages,
            [
                f"fetching orders of master from http://source0:1: {upto - 1} IDs to go",
                f"fetched orders of master up to {upto}: 3 rows of {upto - 1} IDs in 2.5 s",
            ],
        )

    def test_cancelling_a_fetch_tries_no_other_source(self) -> None:
        sources, (_, second) = self.sources(Deferred(), page(9))
        fetching = Deferred.fromCoroutine(sources.fetch(None, ORDERS, MASTER, STEP, 500))
        outcome = begin(fetching)
        fetching.cancel()
        self.assertIsInstance(error_of(outcome), CancelledError)
        self.assertEqual(second.asked, [])

    def test_close_closes_every_source(self) -> None:
        sources, fakes = self.sources(page(1), page(1))
        now(sources.close())
        self.assertTrue(all(fake.closed for fake in fakes))


class NextPageTests(SourcesCase):
    """While a page is applied, the next page is fetched."""

    def setUp(self) -> None:
        self.reading: Deferred[Page] = Deferred()
        self.many, (self.source,) = self.sources([full(5), self.reading, page(9)])
        self.assertEqual(self.fetch(self.many), [full(5)])
        self.assertEqual(self.source.asked, [(1, 9, 500), (5, 9, 500)])

    def fetch_next(
        self, *, after: int = 5, upto: int = 12, resets: int = 0, fresh: bool = False, endpoint: str | None = None
    ) -> list[Any]:
        step = CatchUp(Token(after), Token(upto), resets, fresh=fresh)
        return begin(self.many.fetch(endpoint, ORDERS, MASTER, step, 500))

    def test_after_the_last_page_no_other_is_fetched(self) -> None:
        sources, (source,) = self.sources([full(9)])
        self.assertEqual(self.fetch(sources), [full(9)])
        self.assertEqual(source.asked, [(1, 9, 500)])

    def test_the_next_page_is_fetched_before_it_is_needed(self) -> None:
        following = self.fetch_next()
        self.assertEqual(following, [])
        self.reading.callback(full(7))
        self.assertEqual(following, [full(7)])
        self.assertEqual(self.source.asked[2:], [(7, 12, 500)])

    def test_a_next_page_that_failed_is_fetched_again(self) -> None:
        self.reading.errback(CatchUpError("down"))
        self.assertEqual((self.fetch_next(), self.source.asked[2:]), ([page(9)], [(5, 12, 500)]))

    def test_a_next_page_that_does_not_match_the_step_is_dropped(self) -> None:
        """A restored writer may have other facts at the same IDs."""
        for other in ({"after": 4}, {"upto": 8}, {"resets": 1}, {"fresh": True}, {"endpoint": "tcp:elsewhere:9092"}):
            self.setUp()
            self.assertEqual((self.fetch_next(**other), len(self.source.asked)), ([page(9)], 3))
            self.assertTrue(self.reading.called, "the next page is cancelled")

    def test_no_next_page_is_fetched_for_a_fresh_step(self) -> None:
        sources, (source,) = self.sources(full(5))
        step = CatchUp(Token(1), Token(9), fresh=True)
        self.assertEqual(begin(sources.fetch(None, ORDERS, MASTER, step, 500)), [full(5)])
        self.assertEqual(len(source.asked), 1)

    def test_a_page_for_another_process_fetches_no_next_page(self) -> None:
        sources, (source,) = self.sources(full(5))
        self.assertEqual(begin(sources.page(None, ORDERS, MASTER, CatchUp(Token(1), Token(9)), 500)), [full(5)])
        self.assertEqual((len(source.asked), sources._next_pages), (1, {}))

    def test_close_cancels_the_next_page(self) -> None:
        now(self.many.close())
        self.assertTrue(self.reading.called)
        self.assertTrue(self.source.closed)


class ConstructionTests(SynchronousTestCase):
    def test_each_source_is_made_once_at_construction(self) -> None:
        made = CatchUpSources(Net(), ["http://one:1", "https://two/", "sqlite:///three.db"], {}, "secret")._sources
        kinds = [type(each) for each in made.values()]
        self.assertEqual(kinds, [HttpCatchUp, HttpCatchUp, DatabaseCatchUp])

    def test_a_path_is_a_folder_of_segments(self) -> None:
        with TemporaryDirectory() as folder:
            pump = PumpedClock()
            sources = CatchUpSources(pump, [folder, f"file://{folder}"], {}, None)
            self.assertEqual([type(each) for each in sources._sources.values()], [SegmentCatchUp] * 2)
            threads = {each.name for each in enumerate_threads()}
            self.assertLessEqual({f"replication {folder}", f"replication file://{folder}"}, threads)
            pump.wait(sources.close())

    def test_a_folder_below_one_that_may_not_be_read_is_refused_at_construction(self) -> None:
        with (
            patch.object(Path, "is_dir", side_effect=PermissionError(EACCES, strerror(EACCES))),
            self.assertRaisesRegex(ConfigError, "cannot catch up from 'folder': Permission denied; give http"),
        ):
            CatchUpSources(Net(), ["folder"], {}, None)

    def test_an_invalid_source_is_refused_at_construction(self) -> None:
        for url in (
            "ftp://one",
            "folder",
            "http://",
            "http://host/?a=b",
            "http://host:99999",
            "sqlite://",
            "postgresql:x",
        ):
            with self.assertRaises(ConfigError) as caught:
                CatchUpSources(Net(), ["http://good:1", url], {}, None)
            self.assertIn(str(Url(url)), str(caught.exception))
        with self.assertRaises(ConfigError) as caught:
            CatchUpSources(Net(), ["folder"], {}, None)
        self.assertEqual(
            str(caught.exception),
            "cannot catch up from 'folder': there is no such folder; give http://host:port, a database URL, or a "
            "folder of segments",
        )
        with self.assertRaises(ConfigError):
            CatchUpSources(Net(), ["http://good:1"], {}, "two\nlines")

    def test_the_writers_http_is_the_default_source(self) -> None:
        """The writer's configured ``http``, otherwise the next port of the endpoint that sent its POSITION."""
        places = {
            "master": {"http": "http://there:7"},
            "other": {"connect": "tcp:x:1"},
            "beside": {"connect": "tcp:beside:1", "http": "http://beside:8"},
        }
        sources = CatchUpSources(Net(), [], places, None)
        self.assertEqual(sources._writer_http("tcp:here:9092", MASTER), Url("http://there:7"))
        self.assertEqual(sources._writer_http("tcp:here:9092", InstanceName("other")), Url("http://here:9093"))
        self.assertEqual(sources._writer_http("tcp:here:9092", InstanceName("third")), Url("http://here:9093"))
        self.assertEqual(sources._writer_http("tcp:beside:1", InstanceName("former")), Url("http://beside:8"))

    def test_the_http_of_the_process_that_sends_the_position_of_a_former_writer_is_used(self) -> None:
        """The file still has a table of the former writer, whose own HTTP does not answer any more."""
        places = {
            "former": {"connect": "tcp:former:1", "http": "http://former:2"},
            "beside": {"connect": "tcp:beside:1", "http": "http://beside:8"},
        }
        sources = CatchUpSources(Net(), [], places, None)
        for endpoint, url in (
            ("tcp:beside:1", "http://beside:8"),
            ("tcp:relay:9192", "http://relay:9193"),
            ("tcp:former:1", "http://former:2"),
            ("unix:/run/r.sock", "http://former:2"),
            (None, "http://former:2"),
        ):
            self.assertEqual(sources._writer_http(endpoint, InstanceName("former")), Url(url))

    def test_the_error_without_any_source_names_the_options(self) -> None:
        for endpoint in (None, "unix:/run/r.sock"):
            error = error_of(begin(CatchUpSources(Net(), [], {}, None).fetch(endpoint, ORDERS, MASTER, STEP, 5)))
            self.assertIsInstance(error, CatchUpError)
            where = f"no HTTP is known for 'master' at {endpoint}"
            self.assertEqual(str(error), f"{where}: give catch_up, or http in [writers.master]")

    def test_facts_in_a_writers_memory_are_fetched_from_its_http_only(self) -> None:
        definitions = [StreamDefinition("orders", in_memory=True)]
        sources = CatchUpSources(Net(), ["sqlite:///none.db"], {"master": {"http": "http://m:1"}}, None, definitions)
        sources._sources[Url("http://m:1")] = FakeSource(page(9))  # type: ignore[assignment]
        self.assertEqual(begin(sources.fetch("tcp:here:9092", ORDERS, MASTER, STEP, 5)), [page(9)])

    def test_facts_in_the_memory_of_a_writer_without_http_are_skipped_with_one_warning(self) -> None:
        sources = CatchUpSources(Net(), ["sqlite:///none.db"], {}, None, [StreamDefinition("orders", in_memory=True)])
        with logged() as lines:
            for _ in range(2):
                skipped = [Page((), STEP.upto, limited=False)]
                self.assertEqual(begin(sources.fetch("unix:/run/r.sock", ORDERS, MASTER, STEP, 5)), skipped)
        why = "the HTTP of master is not known, and they are in its memory; give http in [writers.master]"
        self.assertEqual(lines, [f"missed facts of orders are skipped: {why}"])

    def test_missed_facts_of_a_stream_that_a_newer_synapse_has_added_are_skipped_with_one_warning(self) -> None:
        sources = CatchUpSources(Net(), ["sqlite:///none.db"], {}, None, [StreamDefinition("stock")])
        skipped = [Page((), STEP.upto, limited=False)]
        with logged() as lines:
            for _ in range(2):
                self.assertEqual(begin(sources.fetch("redis://here", ORDERS, MASTER, STEP, 5)), skipped)
        why = "the HTTP of master is not known, and no definition has this stream; give http in [writers.master]"
        self.assertEqual(lines, [f"missed facts of orders are skipped: {why}"])
        for endpoint, definitions in (("unix:/run/r.sock", sources._definitions), ("redis://here", [])):
            others = CatchUpSources(Net(), [], {}, None, definitions)
            self.assertIsInstance(error_of(begin(others.fetch(endpoint, ORDERS, MASTER, STEP, 5))), CatchUpError)

    def test_the_http_of_several_processes_is_listed_once_and_a_redis_has_none(self) -> None:
        endpoints = ["tcp:a:1", "redis://here", "tcp:b:1", "tcp:a:1"]
        each = CatchUpSources(Net(), [], {}, None)
        self.assertEqual(each.over_http_of(endpoints), [*each.over_http("tcp:a:1"), *each.over_http("tcp:b:1")])
        shared = CatchUpSources(Net(), ["http://c:1"], {}, None)
        self.assertEqual(shared.over_http_of(endpoints), shared.over_http("tcp:a:1"))
        self.assertEqual(len(shared.over_http_of(endpoints)), 1)

    def test_a_source_is_reused(self) -> None:
        sources = CatchUpSources(Net(), [], {}, None)
        self.assertIs(sources._source(Url("http://one:1")), sources._source(Url("http://one:1")))
