"""What ``skip``, ``retry`` and ``skipped`` share: a running worker by HTTP, a stopped one by its database."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypedDict
from urllib.parse import quote

from msgspec.structs import replace

from replication.cli.output import write_line
from replication.cli.parser import Parser
from replication.errors import RemoteProtocolError, StoreError, StreamError
from replication.storage.blocking import use_store
from replication.storage.contract import ClaimedError, CopiedError
from replication.streams.facts import Fact
from replication.streams.interfaces import IStreamStore, Write
from replication.streams.skips import COPIED, SkippedFact, SkipState
from replication.web.address import DEFAULT_URL
from replication.web.blocking_client import Moment  # noqa: TC001 (msgspec reads the annotation)
from replication.web.skips import describe_skipped
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

DEFAULT_NAME: Final = "worker1"


class SkippedForm(TypedDict):
    """A skipped fact as a worker answers it."""

    stream: str
    instance: str
    token: int
    state: str
    since: Moment
    decided_by: str
    error: str
    rows: list[Any]


def add_worker_options(parser: Parser) -> None:
    """Add what names a worker: ``--http`` of a running one, or ``--database`` of a stopped one."""
    parser.add_http_options()
    parser.add_argument("--database", metavar="URL", help="the database of a worker that is stopped, instead of --http")
    parser.add_argument(
        "--instance-name", metavar="NAME", default=DEFAULT_NAME, help="its name, for PostgreSQL [%(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def make_fact_parser(command: str, description: str, epilog: str) -> Parser:
    """Return the parser of ``skip`` and ``retry``."""
    parser = Parser(prog=f"replication {command}", description=description, epilog=epilog)
    parser.add_argument("stream", metavar="STREAM", help="the stream")
    parser.add_argument("writer", metavar="WRITER", help="the instance name of the fact's writer")
    parser.add_argument("token", metavar="TOKEN", help="the ID of the fact")
    add_worker_options(parser)
    parser.add_argument(
        "--cancel", action="store_true", help=f"with --database: take back a {command} that no start has done yet"
    )
    return parser


def decide(parser: Parser, arguments: Sequence[str], command: str, requested: SkipState) -> int:
    """Send what is decided about a fact to the worker, or store it for its next start."""
    found = parser.parse_args(arguments)
    check_place(parser, found)
    try:
        stream, writer = grammar.stream_name(found.stream), grammar.instance_name(found.writer)
        token = grammar.token(found.token)
    except RemoteProtocolError as error:
        parser.error(str(error))
    if found.database is None:
        if found.cancel:
            parser.error("--cancel needs --database: a running worker carries out each request at once")
        body = json.dumps({"instance": writer, "token": token}).encode()
        with closing(parser.open_client(found)) as client:
            path = f"/v1/streams/{quote(stream, safe='')}/{command}"
            show(found, client.call("POST", path, body, {"Content-Type": "application/json"}, form=SkippedForm))
        return 0

    async def request(store: IStreamStore) -> SkippedFact:
        change = _cancel if found.cancel else _request
        return await _store_change(
            store, InstanceName(found.instance_name), stream, (writer, token), partial(change, requested)
        )

    try:
        show(found, describe_skipped(use_store(found.database, request, read_only=False)))
    except ClaimedError as error:
        raise StoreError(f"{error}; while the worker runs, give --http URL instead of --database") from error
    return 0


def check_place(parser: Parser, found: argparse.Namespace) -> None:
    """Refuse two places, and a database that does not exist: to open it would create it."""
    if found.database is None:
        return
    if found.http != DEFAULT_URL:
        parser.error("--http and --database: give one of them")
    use_store(found.database, _do_nothing, read_only=True)


def show(found: argparse.Namespace, fact: dict[str, Any]) -> None:
    """Print one fact."""
    if found.json:
        write_line(json.dumps(fact, separators=(",", ":")))
        return
    reason = f": {fact['error']}" if fact["error"] and fact["state"] != SkipState.APPLIED.value else ""
    write_line(f"fact {fact['token']} of {fact['stream']} by {fact['instance']}: {fact['state']}{reason}")


async def _do_nothing(_: IStreamStore) -> None:
    """Open and close."""


async def _store_change(
    store: IStreamStore,
    follower: InstanceName,
    stream: StreamName,
    key: tuple[InstanceName, Token],
    change: Callable[[SkippedFact, SkippedFact | None, Token], SkippedFact | None],
) -> SkippedFact:
    """Store a change for the next start of the worker, which must not run now.

    ``change`` returns what to store, or None: from the fact, what is stored of it, and the writer's position.
    """
    writer, token = key
    await store.claim(follower)  # ClaimedError: the worker runs
    try:
        positions = await store.applied_positions(stream, follower)
    except CopiedError as error:
        raise StreamError(COPIED.format(stream=stream)) from error
    if writer not in positions:
        known = ", ".join(sorted(positions)) or "none"
        raise StreamError(
            f"no position of {writer!r} in stream {stream!r} is stored here for {follower!r} (--instance-name); "
            f"known writers: {known}"
        )
    stored = next(iter(await store.skipped_facts(follower, stream, key, limit=1)), None)
    if stored is not None and stored.state is SkipState.DROPPED:
        stored = None
    position = positions[writer]
    fact = change(SkippedFact(stream, writer, Fact(token, ()), SkipState.DROPPED), stored, position)
    if fact is not None:
        write = Write(stream, writer, position, expected=position, follower=follower, skipped=[fact])
        await store.transaction().commit([write])
    return (await store.skipped_facts(follower, stream, key, limit=1))[0]


def _request(
    requested: SkipState, fact: SkippedFact, stored: SkippedFact | None, position: Token
) -> SkippedFact | None:
    token = fact.fact.token
    if requested is SkipState.RETRY_REQUESTED:
        if stored is None or stored.state is SkipState.SKIP_REQUESTED:
            raise StreamError(f"fact {token} of stream {fact.stream!r} by {fact.writer!r} was not skipped here")
        return replace(stored, state=requested) if stored.state is SkipState.SKIPPED else None
    if stored is None and token <= position:
        raise StreamError(f"fact {token} is applied: the position of {fact.writer!r} in {fact.stream!r} is {position}")
    return replace(fact, state=requested) if stored is None else None


def _cancel(requested: SkipState, fact: SkippedFact, stored: SkippedFact | None, _: Token) -> SkippedFact:
    if stored is None or stored.state is not requested:
        what = "skip" if requested is SkipState.SKIP_REQUESTED else "retry"
        where = f"fact {fact.fact.token} of stream {fact.stream!r} by {fact.writer!r}"
        raise StreamError(f"no {what} of {where} is requested here")
    return replace(stored, state=SkipState.DROPPED if requested is SkipState.SKIP_REQUESTED else SkipState.SKIPPED)
