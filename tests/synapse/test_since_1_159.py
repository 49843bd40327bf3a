"""Tests of the streams of Synapse 1.159 to 1.163, over the recorded database and what Redis carried."""

from __future__ import annotations

from contextlib import closing
from threading import Event as Ending
from typing import TYPE_CHECKING, Any

import pytest

from replication.streams.typed_rows import History
from replication.synapse.since_1_159 import (
    DEVICE_LISTS,
    PROFILE_UPDATES,
    QUARANTINED_MEDIA,
    RECEIPTS,
    STICKY_EVENTS,
    STREAMS,
    THREAD_SUBSCRIPTIONS,
    UN_PARTIAL_STATED_EVENT,
    UN_PARTIAL_STATED_ROOM,
    DeviceListsRow,
    ProfileUpdateRow,
    QuarantinedMediaRow,
    ReceiptRow,
    StickyEventRow,
    ThreadSubscriptionRow,
    UnPartialStatedEventRow,
    UnPartialStatedRoomRow,
)
from replication.wire import grammar
from replication.wire.grammar import InstanceName, Token
from tests.synapse.published import NAME, check_facts, published_facts
from tests.synapse.recorded import restore_postgres
from tests.synapse.test_init import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.storage.postgres.session import PostgresSession
    from replication.streams.typed_rows import TypedStream
    from tests.postgres import PostgresServer

BY_NAME: dict[str, TypedStream[Any]] = {each.name: each for each in STREAMS}
PROCESSES = ("master", "persister1", "persister2", "writer1")


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[PostgresSession]:
    """The recorded database."""
    from replication.storage.postgres.address import Address
    from replication.storage.postgres.holder import Holder
    from replication.storage.postgres.session import PostgresSession

    with postgres.database() as name:
        address = Address.parse(restore_postgres(postgres, name, NAME))
        with closing(PostgresSession(address, Ending(), Holder())) as session:
            yield session


def test_every_published_row_is_read_without_loss() -> None:
    facts = published_facts()
    assert facts.keys() == {each.name for each in STREAMS} - {"federation", "presence_federation"}
    for stream, by_token in facts.items():
        for _, texts in by_token.values():
            for text in texts:
                assert plain(BY_NAME[stream].read_row(text)) == grammar.read_json(text)


def test_fields_that_a_later_release_adds_are_dropped() -> None:
    for stream, by_token in published_facts().items():
        for _, texts in by_token.values():
            row = grammar.read_json(texts[0])
            longer = [*row, {"new": 1}] if stream != "events" else [row[0], [*row[1], None]]
            assert BY_NAME[stream].read_row(grammar.encode_row(longer)) == BY_NAME[stream].read_row(texts[0])


@pytest.mark.parametrize("stream", [each.name for each in STREAMS if not each.definition.in_memory])
def test_tables_have_the_rows_that_were_published(database: PostgresSession, stream: str) -> None:
    from replication.storage.postgres.joined import table_of

    table = table_of(BY_NAME[stream].definition)
    table.declare(database, may_create=False)
    found = {}
    for writer in ["writer1"] if stream == "account_data" else PROCESSES:
        span = {"after": Token(0), "upto": Token(10**9), "limit": 10**6}
        for token, texts in table.rows(database, InstanceName(writer), **span).page().facts:  # type: ignore[arg-type]
            assert token not in found
            found[int(token)] = writer, [*texts]
    check_facts(stream, found, published_facts()[stream])


def test_half_a_surrogate_pair_in_a_redacted_event_stops_no_page(database: PostgresSession) -> None:
    """PostgreSQL refuses to parse such JSON; a remote server may send it in the unsigned part of an invitation."""
    redacted = "WHERE event_id IN (SELECT redacts FROM redactions)"
    added = r"""{"unsigned": "\\\ud83d\ude00\ud800 \ude00","""
    database.run(f"UPDATE event_json SET json = %s || substr(json, 2) {redacted}", [added])
    try:
        for stream in ("events", "backfill"):
            test_tables_have_the_rows_that_were_published(database, stream)
    finally:
        database.run(f"UPDATE event_json SET json = '{{' || substr(json, %s) {redacted}", [len(added) + 1])


def test_positions_of_all_streams_are_found_in_the_recorded_database(database: PostgresSession) -> None:
    stored = {name for (name,) in database.run("SELECT DISTINCT stream_name FROM stream_positions")}
    named = {each.definition.stored_name for each in STREAMS if not each.definition.in_memory}
    assert stored == named - {None}
    assert {each.name for each in STREAMS if each.definition.stored_name is None} == {"caches"}


def test_each_stream_states_what_its_tables_keep() -> None:
    assert {each.name for each in STREAMS if each.history is History.WHOLE} == {
        "events", "backfill", "caches", "push_rules", "profile_updates", "quarantined_media", "un_partial_stated_event",
        "un_partial_stated_room",
    }  # fmt: skip
    assert {each.name for each in STREAMS if each.history is History.NONE} == {
        each.name for each in STREAMS if each.definition.in_memory
    }


def test_a_fact_of_most_streams_has_one_row() -> None:
    """As in docs/protocol/redis.md; ``device_lists`` would have more with a second remote server."""
    facts = published_facts()
    several = {stream for stream, of in facts.items() if any(len(texts) > 1 for _, texts in of.values())}
    assert several == {"events", "to_device"}


def test_rows_are_typed() -> None:
    text = '["!r","m.read","@u","$e","$thread",{"ts":1}]'
    assert RECEIPTS.read_row(text) == ReceiptRow("!r", "m.read", "@u", "$e", "$thread", {"ts": 1})
    assert DEVICE_LISTS.read_row('["h.example",false,true]') == DeviceListsRow("h.example", False, True)
    assert STICKY_EVENTS.read_row('["!r","$e"]') == StickyEventRow("!r", "$e")
    assert THREAD_SUBSCRIPTIONS.read_row('["@u","!r","$e"]') == ThreadSubscriptionRow("@u", "!r", "$e")
    assert PROFILE_UPDATES.read_row('["@u","update",["avatar_url"]]') == ProfileUpdateRow(
        "@u", "update", ["avatar_url"]
    )
    assert QUARANTINED_MEDIA.read_row('[null,"m",true]') == QuarantinedMediaRow(None, "m", True)
    assert UN_PARTIAL_STATED_ROOM.read_row('["!r"]') == UnPartialStatedRoomRow("!r")
    assert UN_PARTIAL_STATED_EVENT.read_row('["$e",false]') == UnPartialStatedEventRow("$e", False)
