"""``replication skipped``: list the facts that a worker has left out (docs/command-line.md)."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import urlencode

from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.cli.skipping import SkippedForm, add_worker_options, check_place
from replication.cli.tables import FittingTable, make_console
from replication.storage.blocking import use_store
from replication.web.pages import MAX_PAGE_ROWS
from replication.web.skips import describe_skipped
from replication.wire import grammar
from replication.wire.grammar import InstanceName

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from replication.streams.interfaces import IStreamStore
    from replication.streams.skips import SkippedFact


class _Skipped(TypedDict):
    skipped: list[SkippedForm]


LIMIT: Final = 100  # facts, unless --limit is given


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication skipped",
        description="List the facts that a worker has left out: which, why, since when, and their rows.",
        epilog="`replication retry STREAM WRITER TOKEN` applies one of them.",
    )
    add_worker_options(parser)
    parser.add_argument("--stream", metavar="NAME", help="of this stream only")
    parser.add_argument("--limit", type=int, default=LIMIT, metavar="N", help="the latest N facts [%(default)s]")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print the facts, the latest first."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if not 1 <= found.limit <= MAX_PAGE_ROWS:
        parser.error(f"--limit: {found.limit} is not between 1 and {MAX_PAGE_ROWS}")
    check_place(parser, found)
    facts = _from_http(parser, found) if found.database is None else _from_database(found)
    if found.json:
        write_line(json.dumps({"skipped": facts}, separators=(",", ":")))
        return 0
    table = FittingTable("STREAM", "WRITER", "#TOKEN", "STATE", "SINCE", "BY", "ERROR", "ROWS", optional=["BY", "ROWS"])
    for each in facts:
        since = datetime.fromtimestamp(each["since"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        rows = json.dumps(each["rows"], separators=(",", ":"))
        where = each["stream"], each["instance"], each["token"], each["state"]
        table.add(*where, since, each["decided_by"], each["error"] or "-", rows)
    make_console().print(table)
    return 0


def _from_http(parser: Parser, found: argparse.Namespace) -> list[dict[str, Any]]:
    query = {"limit": found.limit, **({} if found.stream is None else {"stream": found.stream})}
    with closing(parser.open_client(found)) as client:
        answer = client.call("GET", f"/v1/skipped?{urlencode(query)}", form=_Skipped)
    facts: list[dict[str, Any]] = answer["skipped"]
    return facts


def _from_database(found: argparse.Namespace) -> list[dict[str, Any]]:
    stream = None if found.stream is None else grammar.stream_name(found.stream)

    async def read(store: IStreamStore) -> Sequence[SkippedFact]:
        return await store.skipped_facts(InstanceName(found.instance_name), stream, limit=found.limit)

    return [describe_skipped(each) for each in use_store(found.database, read, read_only=True)]
