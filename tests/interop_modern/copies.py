"""The facts of the append-only streams, twice: in Synapse's database by SQL of these tests, and in a worker's copy."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tests.postgres import PostgresServer

Facts = dict[int, tuple[str, list[Any]]]  # by token: the writer and the rows
# Writers of these also send rows of another writer, in their own name; a token is one fact whatever the name.
SENT_BY_ALL = {"quarantined_media", "profile_updates"}

_EVENT = """
    SELECT abs({token}), coalesce({of}.instance_name, 'master'), jsonb_build_array({row})
    FROM events
    {join}
    LEFT JOIN state_events USING (event_id)
    LEFT JOIN redactions USING (event_id)
    LEFT JOIN event_relations USING (event_id)
    LEFT JOIN room_memberships USING (event_id)
    LEFT JOIN rejections USING (event_id)
"""
_PLACE = "event_id, events.room_id, events.type, state_events.state_key, redacts, relates_to_id"
_EV = f"'ev', jsonb_build_array({_PLACE}, membership, rejections.reason IS NOT NULL, events.outlier)"
# An event has a second ID if it was stored outside of its room first.
_IDS = [
    {"token": "stream_ordering", "of": "events", "join": ""},
    {
        "token": "ex_outlier_stream.event_stream_ordering",
        "of": "ex_outlier_stream",
        "join": "JOIN ex_outlier_stream USING (event_id)",
    },
]
_SIMPLE = "SELECT stream_id, coalesce(instance_name, 'master'), jsonb_build_array({row}) FROM {table} ORDER BY 1, ctid"
# The rows of a token: those of `events` before its changes of state, all in the physical order of their table.
SQL = {
    "events": [
        *[f"{_EVENT.format(row=_EV, **each)} WHERE {each['token']} > 0 ORDER BY 1" for each in _IDS],
        _SIMPLE.format(
            row="'state', jsonb_build_array(room_id, type, state_key, event_id)", table="current_state_delta_stream"
        ),
    ],
    "backfill": [f"{_EVENT.format(row=_PLACE, **each)} WHERE {each['token']} < 0 ORDER BY 1" for each in _IDS],
    "caches": [
        _SIMPLE.format(
            # our copies mask access tokens
            row="cache_func, CASE cache_func WHEN 'get_user_by_access_token' THEN NULL ELSE keys END, invalidation_ts",
            table="cache_invalidation_stream_by_instance",
        )
    ],
    "push_rules": [_SIMPLE.format(row="user_id", table="push_rules_stream")],
    "un_partial_stated_room": [_SIMPLE.format(row="room_id", table="un_partial_stated_room_stream")],
    "un_partial_stated_event": [
        _SIMPLE.format(row="event_id, rejection_status_changed", table="un_partial_stated_event_stream")
    ],
    "quarantined_media": [_SIMPLE.format(row="origin, media_id, quarantined", table="quarantined_media_changes")],
    "profile_updates": [_SIMPLE.format(row="user_id, action, affected_fields", table="profile_updates")],
}


def in_database(server: PostgresServer, database: str) -> dict[str, Facts]:
    """Return the facts that Synapse has written, by stream; all tables at one moment."""
    with psycopg.connect(server.url(database)) as opened:
        opened.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return {
            stream: _facts(stream, [row for query in queries for row in opened.execute(query)])
            for stream, queries in SQL.items()
        }


def in_copy(path: Path, streams: Collection[str] = tuple(SQL)) -> dict[str, Facts]:
    """Return the facts that our worker has stored, by stream."""
    found = {}
    with closing(sqlite3.connect(path, timeout=30)) as opened:
        for stream in streams:
            rows = opened.execute(
                f'SELECT stream_id, instance_name, row FROM "stream_{stream}" ORDER BY stream_id, ord'
            )
            found[stream] = _facts(stream, [(at, writer, json.loads(row)) for at, writer, row in rows])
    return found


def in_effects(path: Path) -> tuple[dict[str, Facts], int]:
    """Return the facts with which a worker's function was called, by stream, and how many calls were repeated."""
    found: dict[str, Facts] = defaultdict(dict)
    repeated = 0
    with closing(sqlite3.connect(path, timeout=30)) as opened:
        for stream, token, writer, rows in opened.execute("SELECT stream, token, writer, rows FROM effects"):
            repeated += token in found[stream]
            fact = [_comparable(stream, json.loads(row)) for row in json.loads(rows)]
            found[stream][token] = _writer(stream, writer), fact
    return found, repeated


def published(messages: list[str]) -> dict[str, Facts]:
    """Return the facts that RDATA messages carried, by stream; of each token the first."""
    facts: dict[str, Facts] = defaultdict(dict)
    begun: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for message in messages:
        if message.startswith("RDATA "):
            _, stream, writer, token, row = message.split(" ", 4)
            begun[stream, writer].append(_comparable(stream, json.loads(row)))
            if token != "batch":
                facts[stream].setdefault(int(token), (_writer(stream, writer), begun.pop((stream, writer))))
    return facts


def differences(one: dict[str, Facts], other: dict[str, Facts]) -> dict[str, list[tuple[int, Any, Any]]]:
    """Return the tokens whose facts differ, with both facts, by stream."""
    found = {}
    for stream in SQL:
        here, there = one.get(stream, {}), other.get(stream, {})
        unlike = [token for token in sorted(here.keys() | there.keys()) if here.get(token) != there.get(token)]
        if unlike:
            found[stream] = [(token, here.get(token), there.get(token)) for token in unlike]
    return found


def _facts(stream: str, rows: list[Any]) -> Facts:
    facts: Facts = {}
    for token, writer, row in rows:
        facts.setdefault(token, (_writer(stream, writer), []))[1].append(_comparable(stream, row))
    return facts


def _writer(stream: str, writer: str) -> str:
    return "any" if stream in SENT_BY_ALL else writer


def _comparable(stream: str, row: Any) -> Any:
    if stream == "profile_updates" and row[2] is not None:
        return [*row[:2], sorted(row[2])]  # their order is arbitrary
    if stream == "caches" and row[0] == "get_user_by_access_token":
        return [row[0], None, row[2]]
    return row
