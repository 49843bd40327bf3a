"""What functions and copies beside a recorded Synapse have received."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from tests.system.daemons import get_json

if TYPE_CHECKING:
    from pathlib import Path

    from tests.synapse.published import Facts

_APP = """
import json


async def store(facts, txn):
    await txn.execute("CREATE TABLE IF NOT EXISTS effects (stream TEXT, token INTEGER, writer TEXT, rows TEXT)")
    effects = [(txn.stream, each.token, txn.writer_of(each), json.dumps(each.texts)) for each in facts]
    await txn.executemany("INSERT INTO effects VALUES (?, ?, ?, ?)", effects)


def register(worker):
    for stream in STREAMS:
        worker.on(stream)(store)
"""


def app_of(*streams: str) -> str:
    """Return a module for ``--app`` whose function stores the facts of these streams in the table ``effects``."""
    return f"STREAMS = {streams!r}\n{_APP}"


def effects(file: Path) -> dict[str, Facts]:
    """Return the facts with which a function was called, by stream; fail if one came twice."""
    seen: dict[str, Facts] = {}
    with closing(sqlite3.connect(file)) as database:
        for stream, token, writer, texts in database.execute("SELECT * FROM effects"):
            facts = seen.setdefault(stream, {})
            assert token not in facts, (stream, token)
            facts[token] = writer, json.loads(texts)
    return seen


def facts_of(rows: list[tuple[int, str, str]]) -> Facts:
    """Return the facts of a copy."""
    facts: Facts = {}
    for token, writer, text in rows:
        facts.setdefault(token, (writer, []))[1].append(text)
    return facts


def rows(file: Path, stream: str) -> list[tuple[int, str, str]]:
    """Return the rows of a copy."""
    with closing(sqlite3.connect(file)) as database:
        select = f'SELECT stream_id, instance_name, row FROM "stream_{stream}" ORDER BY stream_id, ord'
        return database.execute(select).fetchall()


def positions(http: str) -> dict[tuple[str, str], int]:
    """Return the applied position of each stream and writer."""
    streams = get_json(http, "/v1/streams")["streams"]
    return {(each["name"], writer["instance"]): writer["position"] for each in streams for writer in each["writers"]}
