"""What one entrance accepts as a row, every exit can read: each pair of them (docs/configuration.md, Fixed limits)."""

from __future__ import annotations

import json
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replication.errors import RemoteProtocolError, RoomError, RowError, StoreError
from replication.rooms.event import Event
from replication.segments.files import SegmentReader
from replication.segments.manifest import read_manifest
from replication.session.connection import ReplicationConnection, Role, Rows
from replication.session.encoder import encode_facts
from replication.storage.joined import JoinedRows
from replication.storage.mapped import MappedRows
from replication.storage.sqlite.store import SqliteStore
from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.facts import Fact
from replication.streams.interfaces import Page, Write
from replication.streams.merged_page import MergedPage, WrittenFact
from replication.streams.positions import MultiWriterToken
from replication.web.pages import encode_page, encode_since, read_addition, read_page
from replication.wire import grammar
from replication.wire.grammar import MAX_NESTING, InstanceName, StreamName, Token
from tests import strategies
from tests.segments.histories import write_folder
from tests.storage.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from replication.streams.interfaces import IStreamStore
    from tests.postgres import PostgresServer

ORDERS, ME = StreamName("orders"), InstanceName("master")
MAPPED = MappedRows[Any](StreamDefinition("m", table="m", row=["value"]), mark="?", order="rowid")
UNLIMITED = 2**40


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


ODD = [
    *("1e999", "-1E+999", "[1e999]", "9" * 4300, "0.1", "-0.0", "1E5", "5e-324"),
    *('"\\ud800"', '["\\udfff\\ud800"]', '{"\\ud800":1e999}', '"\\u0000"', '{"\\u0000":[]}', '"\x7f"', '"é\u2028"'),
    *('{"a":1,"a":2}', '{"":null}', '"Infinity"', '["\\"Infinity",1e999]', " [1,\t2] ", "[1,\r2]"),
    *(nested(depth) for depth in (MAX_NESTING - 1, MAX_NESTING, MAX_NESTING + 1, 200, 957)),
    '{"a":' * (MAX_NESTING - 1) + nested(1) + "}" * (MAX_NESTING - 1),
    f'"{nested(400)}"',
    f"[{','.join(['[]'] * 400)}]",
]
texts = st.sampled_from(ODD) | strategies.row_texts
rows_of_a_fact = st.lists(texts, min_size=1, max_size=3)


# ---- entrances: JSON texts to the rows of a fact, or an error that refuses them


def append_in_python(some: list[str]) -> list[str]:
    return [StreamDefinition(ORDERS).encode(json.loads(text)) for text in some]


def append_over_http(some: list[str]) -> list[str]:
    rows = read_addition(f'{{"rows":[{",".join(some)}]}}'.encode())
    return [StreamDefinition(ORDERS).encode(row) for row in rows]


def rdata(some: list[str]) -> list[str]:
    places = [*["batch"] * (len(some) - 1), "5"]
    lines = "".join([f"RDATA orders master {place} {text}\n" for place, text in zip(places, some, strict=True)])
    found: list[str] = []
    for received in ReplicationConnection(Role.WORKER, 0.0).receive_data(lines.encode(), 0.0):
        if not isinstance(received, Rows):
            raise RemoteProtocolError(str(received))
        found += received.texts
    return found


def mapped_table(some: list[str]) -> list[str]:
    return MAPPED.encode_rows([(5, json.loads(text)) for text in some])


def joined_tables(some: list[str]) -> list[str]:

    source = SourceTable(table="j", row=["value"])
    joined = JoinedRows[Any](
        StreamDefinition("j", row=["value"], tables=[source], json_fields=["value"]), [source], mark="?", order="rowid"
    )
    return [joined._encode(joined.queries[0], 5, [text]) for text in some]


def page_of_a_synapse(some: list[str]) -> list[str]:
    updates = ", ".join([f"[5, {text}]" for text in some])
    body = f'{{"updates": [{updates}], "upto_token": 5, "limited": false}}'.encode()
    (fact,) = read_page(body, after=Token(0), upto=Token(5), foreign=True).facts
    grammar.check_nesting(fact.texts)  # pages of older masters may be deeper: docs/configuration.md, Fixed limits
    return list(fact.texts)


ENTRANCES = [append_in_python, append_over_http, rdata, mapped_table, joined_tables, page_of_a_synapse]

# ---- exits: the rows of a fact to their values


class Exits:
    def __init__(self, folder: Path) -> None:
        self.pump = Pump()
        self.folder = folder
        self.numbers = count(2)
        self.store: IStreamStore = SqliteStore(str(folder / "facts.db"), self.pump)

    def function(self, some: list[str]) -> list[Any]:
        return Fact(Token(5), tuple(some)).rows

    def wire(self, some: list[str]) -> list[Any]:
        fact = Fact(Token(5), tuple(some))
        lines = encode_facts(ORDERS, ME, [fact], after=Token(0), upto=Token(5), line_limit=UNLIMITED)
        peer = ReplicationConnection(Role.WORKER, 0.0, line_limit=UNLIMITED)
        found: list[str] = []
        for received in peer.receive_data(b"".join(each.data for each in lines), 0.0):
            assert isinstance(received, Rows), received
            found += received.texts
        return grammar.read_rows(found)

    def http_page(self, some: list[str]) -> list[Any]:
        page = Page([Fact(Token(5), tuple(some))], Token(5), limited=False)
        (fact,) = read_page(encode_page(page), after=Token(0), upto=Token(5)).facts
        return fact.rows

    def http_page_read_by_a_synapse(self, some: list[str]) -> list[Any]:
        page = Page([Fact(Token(5), tuple(some))], Token(5), limited=False)
        (fact,) = read_page(encode_page(page), after=Token(0), upto=Token(5), foreign=True).facts
        return fact.rows

    def since(self, some: list[str]) -> list[Any]:
        written = [WrittenFact(ME, Fact(Token(5), tuple(some)))]
        merged = MergedPage(written, MultiWriterToken(Token(5), {}), limited=False)
        return [row for _, _, row in json.loads(encode_since(merged, "5"))["updates"]]

    def database(self, some: list[str]) -> list[Any]:
        token = Token(next(self.numbers))
        write = Write(ORDERS, ME, token, [Fact(token, tuple(some))])
        self.pump.wait(self.store.transaction().commit([write]))
        page = self.pump.wait(self.store.facts(ORDERS, ME, after=Token(token - 1), upto=token, limit=10))
        return page.facts[0].rows

    def segment(self, some: list[str]) -> list[Any]:
        folder = write_folder(self.folder / f"segments{next(self.numbers)}", [Fact(Token(5), tuple(some))], ends=[5])
        manifest = read_manifest(folder)
        assert manifest is not None
        reader = SegmentReader(folder, manifest.segments[0])
        ((fact,),) = reader.facts()
        reader.close()
        return fact.rows


class PostgresExit(Exits):
    """The tables of PostgreSQL."""

    def __init__(self, folder: Path, url: str) -> None:
        from replication.storage.postgres.store import PostgresStore

        super().__init__(folder)
        self.store = PostgresStore(url, self.pump)


@contextmanager
def opened(ways: Exits) -> Iterator[Exits]:
    ways.pump.wait(ways.store.open())
    ways.pump.wait(ways.store.declare(StreamDefinition(ORDERS)))
    yield ways
    ways.pump.wait(ways.store.close())


@pytest.fixture(scope="module")
def exits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Callable[[list[str]], list[Any]]]]:
    with opened(Exits(tmp_path_factory.mktemp("exits"))) as ways:
        yield [
            *(ways.function, ways.wire, ways.http_page, ways.http_page_read_by_a_synapse, ways.since),
            *(ways.database, ways.segment),
        ]


@pytest.fixture(scope="module")
def postgres_exit(
    tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[Callable[[list[str]], list[Any]]]:
    with postgres.database() as name:
        ways = PostgresExit(tmp_path_factory.mktemp("exits"), postgres.url(name))
        with opened(ways):
            yield ways.database


@pytest.mark.parametrize("entrance", ENTRANCES, ids=lambda each: each.__name__)
@given(some=rows_of_a_fact)
@example(some=['"\\ud800"', "1e999"])
@example(some=[nested(MAX_NESTING)])
@example(some=[nested(MAX_NESTING + 1)])
def test_what_is_accepted_anywhere_can_be_read_everywhere(
    exits: list[Callable[[list[str]], list[Any]]], entrance: Callable[[list[str]], list[str]], some: list[str]
) -> None:
    try:
        accepted = entrance(some)
    except (RowError, RemoteProtocolError, StoreError):
        return
    for leave in exits:
        assert repr(leave(accepted)) == repr([json.loads(text) for text in accepted]), leave


@pytest.mark.parametrize("entrance", ENTRANCES, ids=lambda each: each.__name__)
@given(some=rows_of_a_fact)
@example(some=['"\\ud800"', "1e999"])
@example(some=['"\\u0000"'])
@example(some=[nested(MAX_NESTING)])
def test_what_is_accepted_anywhere_can_be_read_from_postgresql(
    postgres_exit: Callable[[list[str]], list[Any]], entrance: Callable[[list[str]], list[str]], some: list[str]
) -> None:
    try:
        accepted = entrance(some)
    except (RowError, RemoteProtocolError, StoreError):
        return
    assert repr(postgres_exit(accepted)) == repr([json.loads(text) for text in accepted])


@pytest.mark.parametrize("entrance", ENTRANCES, ids=lambda each: each.__name__)
def test_every_entrance_has_the_same_limit_of_depth(entrance: Callable[[list[str]], list[str]]) -> None:
    levels = 1 if entrance in (mapped_table, joined_tables) else 0  # the row is an array of columns
    value = nested(MAX_NESTING - levels)
    (text,) = entrance([value])
    assert text in (value, f"[{value}]")
    message = f"arrays and objects of a row may be {MAX_NESTING} levels deep"
    with pytest.raises((RowError, RemoteProtocolError, StoreError), match=message):
        entrance([nested(MAX_NESTING + 1 - levels)])


def test_an_event_of_a_room_has_the_same_limit_of_depth() -> None:
    def read(depth: int) -> Event:
        content = {"a": json.loads(nested(depth - 2))}
        return Event.read("!room", {"event_id": "$1", "type": "m", "prev_event_ids": [], "content": content})

    assert read(MAX_NESTING).content
    with pytest.raises(RoomError, match="levels deep"):
        read(MAX_NESTING + 1)


def test_a_deep_value_in_a_mapped_table_is_named_with_its_column_and_id() -> None:
    with pytest.raises(StoreError, match=r"column 'value' of .*, at ID 7, what is no JSON: arrays and"):
        MAPPED.encode_rows([(5, 1), (7, json.loads(nested(MAX_NESTING)))])
