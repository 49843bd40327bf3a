"""Invariant I15: wire, HTTP, database and replay give the same facts in the same bytes and order.

Writers take turns, each with a store of its own; the lines that each sends to a follower are recorded.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.internet.testing import MemoryReactorClock

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.follower.sources import DatabaseCatchUp
from replication.net.protocol import Limits
from replication.segments import databases, run, tables
from replication.segments.files import verify
from replication.segments.folders import LocalFolder
from replication.segments.manifest import read_manifest
from replication.segments.run import ReplayRequest, SegmentOptions, run_in_process
from replication.spark.job import replay
from replication.streams.definitions import StreamDefinition
from replication.web.pages import encode_page, read_page
from replication.wire.grammar import InstanceName, StreamName, Token
from replication.writer.master import Master
from tests.doubles import connect
from tests.segments.histories import MASTER, OTHER, lines_of
from tests.storage.pump import Pump
from tests.strategies import rows as any_rows
from tests.system.test_replay import make_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from replication.streams.interfaces import Page
    from tests.postgres import PostgresServer

LIMIT = 300  # bytes of a line, so that rows near it are short
WRITERS = (MASTER, OTHER, InstanceName("wörker.3"))
_T = TypeVar("_T")


class Turns(Pump, MemoryReactorClock):
    """A reactor for stores on real threads and connections in memory; it runs while a test waits."""

    def __init__(self) -> None:
        Pump.__init__(self)
        MemoryReactorClock.__init__(self)

    def wait(self, awaited: Coroutine[Any, Any, _T] | Deferred[_T]) -> _T:
        done = awaited if isinstance(awaited, Deferred) else Deferred.fromCoroutine(awaited)
        while not done.called or done.paused:
            self.turn(0)
        self.advance(0)
        return super().wait(done)

    def turn(self, seconds: float) -> None:
        """Advance the clock, and wait a moment for the result of a thread."""
        self.advance(seconds)
        with suppress(Empty):
            self._calls.get(timeout=0.01)()


class RollBackError(Exception):
    """Raised to roll a transaction back."""


@attrs.frozen
class Turn:
    """The facts of one writer before the next writer's turn, and which of them are rolled back."""

    writer: InstanceName
    facts: Sequence[Sequence[object]]
    rolled_back: frozenset[int] = frozenset()


@attrs.frozen
class Sources:
    """The lines of the same facts, by writer, from each source."""

    live: Mapping[str, list[str]]
    http: Mapping[str, list[str]]
    database: Mapping[str, list[str]]
    segments: Mapping[str, list[str]]


def write_and_record(url: str, definition: StreamDefinition, turns: Sequence[Turn], limit: int) -> dict[str, list[str]]:
    """Write the facts of all turns, and return the lines that each writer has sent."""
    sent: dict[str, list[str]] = {}
    for turn in turns:
        reactor = Turns()
        master = Master(
            instance_name=turn.writer,
            database=url,
            streams=[definition],
            reactor=reactor,
            limits=Limits(line_limit=limit),
        )
        reactor.wait(master.start())
        wire = connect(master.factory(), room=2**30)
        wire.protocol.dataReceived(b"REPLICATE\n")
        reactor.advance(0)
        while b"POSITION caches " not in wire.read():
            reactor.turn(0)  # by then the master knows who of the others is there
        last = 0
        for number, rows in enumerate(turn.facts):
            with suppress(RollBackError):
                token = reactor.wait(write(master, definition.name, rows, fails=number in turn.rolled_back))
                if rows or definition.table is None:  # a fact without rows leaves nothing in a mapped table
                    last = token
        while published(reactor, master, definition.name) < last:
            reactor.turn(0.1)  # until the master polls the table, which others may write
        sent.setdefault(turn.writer, []).extend(filter(is_of_a_fact, wire.read().decode().splitlines()))
        wire.lose()
        reactor.wait(master.stop())
    return sent


def published(reactor: Turns, master: Master, stream: str) -> Token:
    page: Page = reactor.wait(master.served.page(stream, None, after=0, upto=None, limit=1_000_000))
    return page.upto


async def write(master: Master, stream: str, rows: Sequence[object], *, fails: bool) -> Token:
    async with master.stream(stream).reserve() as fact:
        for row in rows:
            await fact.write(row)
        if fails:
            raise RollBackError
    return Token(fact.token)


def is_of_a_fact(line: str) -> bool:
    """Return whether a line is RDATA, or the POSITION of a fact that is too long for a line."""
    word, *rest = line.split(" ")
    return word == "RDATA" or (word == "POSITION" and rest[2] == rest[3])


def encode(stream: str, writer: str, page: Page, limit: int) -> Iterator[str]:
    """Yield the lines of a page by docs/protocol/publishing.md D3, with code of this test only."""
    for token, texts in page.facts:
        places = ["batch"] * (len(texts) - 1) + [str(token)]
        lines = [f"RDATA {stream} {writer} {place} {text}" for place, text in zip(places, texts, strict=False)]
        too_long = any(len(line.encode()) > limit for line in lines)
        yield from [f"POSITION {stream} {writer} {token} {token}"] if too_long else lines


def by_pages(
    reactor: Turns, writer: InstanceName, upto: Token, ask: Callable[[Token], Coroutine[Any, Any, Page]]
) -> Iterator[Page]:
    after = Token(0)
    while after < upto:
        page = reactor.wait(ask(after))
        assert page.upto > after, writer
        yield page
        after = page.upto


def read_again(
    url: str, definition: StreamDefinition, writers: Sequence[InstanceName], limit: int, rows: int
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the lines of pages over HTTP, and of pages that a follower reads from the database."""
    reactor = Turns()
    master = Master(instance_name="reader", database=url, streams=[definition], reactor=reactor)
    straight = DatabaseCatchUp(url, reactor)
    reactor.wait(master.start())
    stream, end = definition.name, Token(2**62)
    http: dict[str, list[str]] = {}
    database: dict[str, list[str]] = {}
    for writer in writers:
        upto = reactor.wait(master.store.positions(stream)).get(writer, Token(0))

        async def over_http(after: Token, writer: InstanceName = writer, upto: Token = upto) -> Page:
            page = await master.served.page(stream, writer, after=after, upto=None, limit=rows)
            return read_page(encode_page(page, max_bytes=150), after=after, upto=max(upto, after))

        async def from_database(after: Token, writer: InstanceName = writer) -> Page:
            return await straight.facts(stream, writer, after=after, upto=end, limit=rows)

        for found, ask in ((http, over_http), (database, from_database)):
            if found is database and (definition.table is not None or definition.negative):
                found[writer] = http[writer]  # a follower does not have the stream's definition
                continue
            pages = by_pages(reactor, writer, upto, ask)
            found[writer] = [line for page in pages for line in encode(stream, writer, page, limit)]
    reactor.wait(straight.close())
    reactor.wait(master.stop())
    return http, database


def read_segments(folder: Path, stream: str, writers: Sequence[str]) -> dict[str, list[str]]:
    assert [fault for _, fault in verify(LocalFolder(folder)) if fault] == []
    manifest = read_manifest(LocalFolder(folder))
    assert manifest is not None
    chains = manifest.chains()
    return {
        writer: b"".join(
            lines_of(LocalFolder(folder), each) for each in chains.get((StreamName(stream), InstanceName(writer)), [])
        )
        .decode()
        .splitlines()
        for writer in writers
    }


@contextmanager
def cut_everywhere(rows: int) -> Iterator[None]:
    """Make batches, pages and probes so small that facts span several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(databases, "BATCH_ROWS", rows)
        patch.setattr(databases, "BATCH_BYTES", rows * 20)
        patch.setattr(tables, "PAGE_ROWS", rows)
        patch.setattr(run, "PROBE", max(rows - 1, 1))
        yield


def read_all(
    url: str,
    definition: StreamDefinition,
    turns: Sequence[Turn],
    *,
    rows: int = 2,
    limit: int = LIMIT,
    segment_rows: int = 3,
) -> Sources:
    """Write facts, and read them from every source."""
    live = write_and_record(url, definition, turns, limit)
    http, database = read_again(url, definition, [InstanceName(each) for each in live], limit, rows)
    folder = Path(tempfile.mkdtemp(prefix="same-bytes-"))
    try:
        with cut_everywhere(rows):
            options = SegmentOptions(segment_rows, "none", limit)
            request = ReplayRequest(url, str(folder), [definition.name], [definition], options=options)
            run_in_process(request)
            assert run_in_process(request) == []
        segments = read_segments(folder, definition.name, [*live])
    finally:
        shutil.rmtree(folder)
    return Sources(live, http, database, segments)


def check_equal(sources: Sources) -> None:
    assert sources.http == sources.live
    assert sources.database == sources.live
    assert sources.segments == sources.live


# ---- histories


paddings = st.integers(LIMIT - 60, LIMIT).map(lambda length: "x" * length)
near_the_limit = paddings | paddings.map(lambda text: "é" * (len(text) // 6))
plain = st.lists(any_rows | near_the_limit, max_size=4)
fields = st.none() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8", exclude_characters="\0"))
numbers = st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)  # SQLite has no -0.0
mapped = st.lists(st.tuples(fields, numbers).map(list), max_size=3)


@st.composite
def turns_of(draw: st.DrawFn, facts: st.SearchStrategy[list[Any]]) -> list[Turn]:
    last_value = []
    for _ in range(draw(st.integers(1, 4))):
        some = draw(st.lists(facts, max_size=4))
        lost = draw(st.sets(st.integers(0, len(some) - 1))) if some else set()
        last_value.append(Turn(draw(st.sampled_from(WRITERS)), some, frozenset(lost)))
    return last_value


@settings(max_examples=20)
@given(turns=turns_of(plain), rows=st.integers(1, 4), negative=st.booleans())
def test_any_few_facts_are_the_same_from_every_source_on_sqlite(
    turns: list[Turn], rows: int, *, negative: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/m.db"
        check_equal(read_all(url, StreamDefinition("events", negative=negative), turns, rows=rows))


SHOP = StreamDefinition("shop", table="shop", id_column="n", instance_column="writer", row=("what", "much"))


@settings(max_examples=15)
@given(turns=turns_of(mapped), rows=st.integers(1, 4))
def test_any_few_facts_of_a_mapped_table_are_the_same_from_every_source_on_sqlite(turns: list[Turn], rows: int) -> None:
    import sqlite3

    with tempfile.TemporaryDirectory() as folder:
        opened = sqlite3.connect(f"{folder}/m.db")
        opened.execute("CREATE TABLE shop (n INTEGER, writer TEXT, what, much REAL)")
        opened.execute("CREATE INDEX shop_n ON shop (n)")
        opened.close()
        check_equal(read_all(f"sqlite:///{folder}/m.db", SHOP, turns, rows=rows))


@settings(max_examples=10)
@given(turns=turns_of(plain), rows=st.integers(1, 4), negative=st.booleans())
def test_any_few_facts_are_the_same_from_every_source_on_postgresql(
    postgres: PostgresServer, turns: list[Turn], rows: int, *, negative: bool
) -> None:
    pytest.importorskip("psycopg", reason="pip install '.[postgres]' in the checkout")
    with postgres.database() as name:
        definition = StreamDefinition("events", negative=negative, writers=[] if negative else WRITERS)
        check_equal(read_all(postgres.url(name), definition, turns, rows=rows))


@contextmanager
def database_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/m.db"
        return
    pytest.importorskip("psycopg", reason="pip install '.[postgres]' in the checkout")
    server = request.getfixturevalue("postgres")
    with server.database() as name:
        yield server.url(name)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_facts_are_the_same_from_every_source_and_on_spark(
    kind: str, spark: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Random facts of three writers: several rows per ID, gaps, Unicode, rows around the length limit."""
    import json

    made = make_facts(tmp_path, 1_600, "master,worker2,w\u00f6rker.3")
    turns = []
    for (stream, writer), facts in made.items():
        some = [[json.loads(text) for text in each.texts] for each in facts]
        longer = [*some, ["short", "x" * 20_000, "short"], ["x" * 16_330]]
        turns += [
            Turn(InstanceName(writer), longer[start : start + 200], frozenset({3, 8}))
            for start in range(0, len(longer) if stream == "events" else 400, 200)
        ]
    turns.sort(key=lambda turn: len(turn.facts[0]))  # so that they alternate
    definition = StreamDefinition("events", writers=WRITERS if kind == "postgresql" else [])
    with database_of(kind, tmp_path, request) as url:
        sources = read_all(url, definition, turns, rows=7, limit=16_384, segment_rows=200)
        check_equal(sources)
        assert {each.count("POSITION") for each in map("".join, sources.live.values())} != {0}
        assert min(map(len, sources.live.values())) > 60
        replay(spark, url, str(tmp_path / "spark"), streams=["events"], segment_rows=150)
        assert read_segments(tmp_path / "spark", "events", [*sources.live]) == sources.live
        run_in_process(ReplayRequest(url, str(tmp_path / "here"), ["events"], options=SegmentOptions(150)))
        names = LocalFolder(tmp_path / "here").names()
        assert names == LocalFolder(tmp_path / "spark").names()
        assert len(names) > len(sources.live) * 5
        for each in names:
            assert (tmp_path / "here" / each).read_bytes() == (tmp_path / "spark" / each).read_bytes()
