"""The databases of the recorded Synapses, and the lines that they sent.

The SQLite database has only the tables of streams, without the values that no row contains: the content of events
(except redacted ones), messages, account data.
"""

from __future__ import annotations

import gzip
import re
from typing import TYPE_CHECKING

import psycopg

from replication.streams.typed_rows import History
from replication.synapse import STREAMS
from tests.system.daemons import CHECKOUT
from tests.transcripts.recordings import DATA, read_recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.postgres import PostgresServer

Facts = dict[str, dict[int, list[str]]]  # by stream, then by token: the rows

CONFIGURATION = CHECKOUT / "conf/synapse.toml"
NAMES = ("synapse-sqlite", "synapse-postgres")
SERVERS = {"synapse-sqlite": "peer.test", "synapse-postgres": "alpha.test"}
WHOLE: list[str] = [each.name for each in STREAMS if each.history is History.WHOLE]
NEWEST: list[str] = [each.name for each in STREAMS if each.history is History.NEWEST]
# Written before the recorder came, or never sent (docs/protocol/traps.md 12); presence of the moment of the shutdown
UNSENT = {
    ("synapse-postgres", "backfill"): [7, 8, 9, 10, 11, 13, 14, *range(120, 129)],
    ("synapse-postgres", "caches"): [1, 2],
    ("synapse-postgres", "presence"): [255, 256, 257],
}


def restore_sqlite(folder: Path) -> str:
    """Copy the database into a folder, and return its URL."""
    path = folder / "homeserver.db"
    path.write_bytes(gzip.decompress((DATA / "synapse-sqlite/homeserver.db.gz").read_bytes()))
    return f"sqlite:///{path}"


def restore_postgres(server: PostgresServer, database: str, name: str = "synapse-postgres") -> str:
    """Restore the dump in one transaction, which keeps the physical order of rows; return the URL."""
    script = gzip.decompress((DATA / name / "dump.sql.gz").read_bytes()).decode()
    url = server.url(database)
    with psycopg.connect(url, autocommit=True) as connection:  # the script has BEGIN and COMMIT
        end = 0
        for found in re.finditer(r"^(COPY .*?);\n(.*?)^\\\.\n", script, re.MULTILINE | re.DOTALL):
            connection.execute(script[end : found.start()])
            with connection.cursor().copy(found[1]) as copy:
                copy.write(found[2])
            end = found.end()
        connection.execute(script[end:])
    return url


def recorded_facts(name: str) -> Facts:
    """Return the facts that were sent: for each token the first row and its batch, once."""
    facts: Facts = {}
    begun: dict[str, list[str]] = {}
    for line in read_recording(f"{name}/recording.txt").decode().splitlines():
        if line.startswith("RDATA "):
            _, stream, _, token, row = line.split(" ", 4)
            begun.setdefault(stream, []).append(row)
            if token != "batch":
                facts.setdefault(stream, {}).setdefault(int(token), begun.pop(stream))
    return facts


def lines_of(stream: str, facts: Mapping[int, Sequence[str]]) -> list[str]:
    """Return the lines of one stream's facts, ascending."""
    return [
        f"RDATA {stream} master {token if place == len(rows) else 'batch'} {row}"
        for token, rows in sorted(facts.items())
        for place, row in enumerate(rows, 1)
    ]


def check_history(name: str, found: Mapping[str, Sequence[str]]) -> None:
    """Compare lines from a restored database, by stream, with the recording."""
    recorded = recorded_facts(name)
    for stream in WHOLE:
        unsent = UNSENT.get((name, stream), [])
        lines = [line for line in found.get(stream, []) if line.split(" ")[3] not in map(str, unsent)]
        assert lines == lines_of(stream, recorded.get(stream, {})), stream
    for stream in NEWEST:
        # A line is its token and its row: what came with it under that token may be gone.
        sent = {(token, row) for token, rows in recorded[stream].items() for row in rows}
        left: list[tuple[int, str]] = []
        begun: list[str] = []
        for line in found[stream]:
            _, _, _, token, row = line.split(" ", 4)
            begun.append(row)
            if token != "batch":
                left += [(int(token), each) for each in begun]
                begun = []
        unsent = UNSENT.get((name, stream), [])
        assert [each for each in left if each not in sent and each[0] not in unsent] == [], stream
        assert len(left) - len(unsent) == KNOWN[name][stream], stream


# The table of docs/how-to/be-synapse-main-process.md: the facts that remain of streams whose tables keep only the
# newest rows.
KNOWN = {
    "synapse-sqlite": {
        "presence": 10, "receipts": 84, "pushers": 35, "device_lists": 55, "to_device": 16, "tag_account_data": 47,
        "account_data": 148,
    },
    "synapse-postgres": {
        "presence": 75, "receipts": 79, "pushers": 18, "device_lists": 58, "to_device": 14, "tag_account_data": 35,
        "account_data": 82,
    },
}  # fmt: skip
