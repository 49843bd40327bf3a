"""``replication append``: rows to a stream, from the command line or a line each from standard input.

Lines travel in batches, each under an Idempotency-Key of its own: a batch whose answer was lost is sent again, but not
appended twice.  An ID is printed per line once the master has made it durable.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import stat
import sys
import time
import uuid
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import attrs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from replication.cli.http import HttpApi, HttpError, add_http_options, open_api
from replication.cli.parser import Parser
from replication.errors import RemoteProtocolError, ReplicationError
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

BATCH_LINES: Final = 1_000
BATCH_BYTES: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024  # a pipe gives no more at once
LAST_DELAY: Final = 2.0  # seconds between two attempts, at most


class AppendError(ReplicationError):
    """Not everything was appended; the message says what was."""


@attrs.frozen
class Batch:
    """Lines that are sent in one call, blank ones left out; ``numbers`` says where each stood, counted from 1.

    The row of the command line is number 0.  ``size`` in bytes, as they were read.
    """

    numbers: Sequence[int]
    lines: Sequence[bytes]
    size: int


def main(arguments: Sequence[str]) -> int:
    """Append, and print IDs."""
    parser = Parser(
        prog="replication append",
        description="Append rows to a stream; print the ID of each once it is durable.",
        epilog="""example: replication append orders '["o1","placed"]'""",
    )
    parser.add_argument("stream", metavar="STREAM")
    parser.add_argument("row", metavar="ROW", nargs="?", default="-", help="JSON; -, the default: a row per input line")
    parser.add_argument("--facts", action="store_true", help="""a line is not a row but a fact: {"rows": [row, …]}""")
    parser.add_argument(
        "--retry",
        metavar="SECONDS",
        type=read_patience,
        default=60.0,
        help="how long to try again while the master is away [%(default)g]",
    )
    add_http_options(parser)
    found = parser.parse_args(arguments)
    if found.row == "-":
        batches = read_batches(sys.stdin.fileno())
    else:
        line = os.fsencode(found.row)
        try:
            check_json(line)
        except RemoteProtocolError as error:
            parser.error(f"""ROW: {error}; quote JSON for the shell, as in '["o1","placed"]'""")
        batches = iter([Batch([0], [line], len(line))])
    template = b"%b" if found.facts else b'{"rows":[%b]}'
    shown = found.row == "-" and sys.stderr.isatty() and not sys.stdin.isatty()
    with closing(open_api(parser, found)) as api, _progress(shown=shown) as advance, _sigterm_as_interruption():
        Appender(api, found.stream, template, found.retry).run(batches, advance)
    return 0


def read_patience(text: str) -> float:
    """Return a number of seconds, which may be infinite."""
    seconds = float(text)
    if not seconds >= 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"not a number of seconds from 0 up: {text}")
    return seconds


def check_json(line: bytes) -> None:
    """Return if ``line`` is one JSON value, else RemoteProtocolError."""
    try:
        grammar.row_text(line.decode())
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"not UTF-8: {error}") from error


def read_batches(source: int) -> Iterator[Batch]:
    """Yield the lines of a file descriptor: many at once if many are there, and none is kept waiting for more."""
    rest, lines, number = b"", list[bytes](), 0

    def take() -> Batch:
        nonlocal number
        size = count = 0
        for line in lines[:BATCH_LINES]:
            if count and size + len(line) > BATCH_BYTES:
                break
            size += len(line) + 1
            count += 1
        taken = [(number + index, line) for index, line in enumerate(lines[:count], 1) if line and not line.isspace()]
        del lines[:count]
        number += count
        return Batch([each for each, _ in taken], [line for _, line in taken], size)

    while data := os.read(source, READ_BYTES):
        *whole, rest = (rest + data).split(b"\n")
        lines += whole
        while len(lines) >= BATCH_LINES or (lines and not select.select([source], [], [], 0)[0]):
            yield take()
    if rest:
        lines.append(rest)
    while lines:
        yield take()


class Appender:
    """Sends batches to one stream, and knows what was acknowledged."""

    def __init__(self, api: HttpApi, stream: str, template: bytes, patience: float) -> None:
        """Append to ``stream``; ``template`` makes a fact of a line.  A master may be away for ``patience`` seconds."""
        self._api = api
        self._path = f"/v1/streams/{quote(stream, safe='')}/facts"
        self._template = template
        self._patience = patience
        self._so_far = "nothing was appended"
        self._count = 0

    def run(self, batches: Iterable[Batch], advance: Callable[[int, int], None]) -> None:
        """Append all, and print an ID per line; AppendError says what was wrong, and how far it got."""
        try:
            for batch in batches:
                ids = self._append(batch)
                self._print(ids)
                advance(len(ids), batch.size)
        except KeyboardInterrupt as error:
            raise AppendError(f"interrupted; {self._so_far}") from error

    def _print(self, ids: Sequence[int]) -> None:
        try:
            print("".join([f"{each}\n" for each in ids]), end="", flush=True)
        except BrokenPipeError as error:
            raise AppendError(f"standard output is closed; {self._so_far}") from error
        except OSError as error:
            raise AppendError(f"cannot write to standard output: {error.strerror}; {self._so_far}") from error

    def _append(self, batch: Batch) -> Sequence[int]:
        for number, line in zip(batch.numbers, batch.lines, strict=True):
            try:
                check_json(line)
            except RemoteProtocolError as error:
                raise AppendError(f"line {number}: {error}; {self._so_far}") from error
        if not batch.lines:
            return []
        try:
            ids: list[int] = self._send(b"\n".join([self._template % line for line in batch.lines]))["ids"]
        except HttpError as error:
            text = re.sub(r"\bline (\d+)", lambda found: _place(batch.numbers[int(found[1]) - 1]), str(error), count=1)
            after = f"{_place(batch.numbers[0])} and what follows are not acknowledged" if error.passing else ""
            raise AppendError("; ".join(filter(None, [text, self._so_far, after]))) from error
        self._count += len(ids)
        self._so_far = f"appended: {self._count}, up to {_place(batch.numbers[-1])} with ID {ids[-1]}"
        return ids

    def _send(self, body: bytes) -> Any:
        """Post ``body`` until there is an answer, always under one key: it is appended once, however often it goes."""
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": uuid.uuid4().hex}
        deadline, delay = time.monotonic() + self._patience, 0.1
        while True:
            try:
                return self._api.call("POST", self._path, body, headers)
            except HttpError as error:
                left = deadline - time.monotonic()
                if not error.passing or left <= 0:
                    raise
                if sys.stderr.isatty():
                    print(f"{error}; trying again", file=sys.stderr)
            time.sleep(min(delay, left))
            delay = min(delay * 2, LAST_DELAY)


def _place(number: int) -> str:
    return f"line {number}" if number else "ROW"


@contextmanager
def _sigterm_as_interruption() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt as SIGINT does: whoever ends us wants to know how far we got."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, if at all; what it yields takes how many facts and bytes are done more.

    The end of a file is known, so that it can be a percentage; a pipe's is not.
    """
    if not shown:
        yield lambda _facts, _bytes: None
        return
    source = os.fstat(sys.stdin.fileno())
    total = source.st_size if stat.S_ISREG(source.st_mode) else None
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[facts]} facts"), TimeElapsedColumn())
    # Where IDs go to the same terminal, rich prints them above the bar.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=total, facts=0)
        yield lambda facts, size: bar.update(task, advance=size, facts=bar.tasks[0].fields["facts"] + facts)
