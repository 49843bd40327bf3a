"""``replication append``: append rows to a stream, from the command line or from the lines of standard input.

Lines of standard input are sent in one request, and their IDs arrive while it runs.  To a server of an earlier version
they are sent in batches.  A request has an idempotency key, so what was sent and not answered is sent again, and
appended once (docs/http.md, Idempotency keys).  One ID is printed per line, once its fact is durable.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import stat
import sys
import uuid
from collections import deque
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import quote

import attrs
import msgspec

from replication.cli.output import interrupted_by_sigterm, report
from replication.cli.parser import Parser
from replication.errors import RemoteProtocolError, ReplicationError
from replication.streams.facts import MAX_FACT_BYTES
from replication.web.blocking_client import HttpClient, HttpError, UnavailableError
from replication.web.line_upload import LineUpload
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

BATCH_LINES: Final = 1_000
BATCH_BYTES: Final = 1024 * 1024
READ_BYTES: Final = 64 * 1024  # bytes: the most that one read of a pipe returns


class AppendError(ReplicationError):
    """Not all rows were appended; the message states how many were."""


class _Appended(TypedDict):
    ids: list[int]


class Batch(msgspec.Struct, frozen=True):
    """Lines that are sent in one request, without blank ones.

    ``numbers`` are the lines' numbers, counted from 1; a row from the command line has number 0.  ``size`` is in bytes,
    with the blank lines.
    """

    numbers: Sequence[int]
    lines: Sequence[bytes]
    size: int


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication append",
        description="Append rows to a stream. Print the ID of each fact once it is durable.",
        epilog="""example: replication append orders '["o1","placed"]'""",
    )
    parser.add_argument("stream", metavar="STREAM", help="name of the stream")
    parser.add_argument("row", metavar="ROW", nargs="?", default="-", help="one row, JSON; -: one per input line [-]")
    parser.add_argument("--facts", action="store_true", help="""an input line is a fact: {"rows": [row, …]}""")
    parser.add_argument(
        "--retry",
        metavar="SECONDS",
        type=read_patience,
        default=60.0,
        help="how long to retry while the master does not answer [%(default)g]",
    )
    parser.add_http_options()
    return parser


def main(arguments: Sequence[str]) -> int:
    """Append rows, and print the IDs of their facts."""
    parser = make_parser()
    found = parser.parse_intermixed_args(arguments)  # options may stand before ROW
    if found.row == "-":
        if sys.stdin.isatty():
            rows = "facts" if found.facts else "rows"
            report(f"{parser.prog}: reading {rows}, one a line, until Ctrl-D")
        batches = None
    else:
        line = os.fsencode(found.row)
        try:
            check_json(line)
        except RemoteProtocolError as error:
            parser.error(f"""ROW: {error}; quote JSON for the shell, as in '["o1","placed"]'""")
        batches = iter([Batch([0], [line], len(line))])
    template = b"%b" if found.facts else b'{"rows":[%b]}'
    shown = found.row == "-" and sys.stderr.isatty() and not sys.stdin.isatty()
    client = parser.open_client(found, patience=found.retry, on_retry=retry_reporter())
    with closing(client), _progress(shown=shown) as advance, interrupted_by_sigterm():
        if batches is not None:
            Appender(client, found.stream, template).run(batches, advance)
        else:
            append_lines(client, found.stream, template, sys.stdin.fileno(), advance)
    return 0


def append_lines(
    client: HttpClient, stream: str, template: bytes, source: int, advance: Callable[[int, int], None]
) -> None:
    """Append the lines of a file descriptor, in one request if the server has that call."""
    appender = LineAppender(client, stream, template)
    if appender.is_offered():
        appender.run(read_batches(source, appender.wait_for), advance)
    else:
        Appender(client, stream, template).run(read_batches(source), advance)


def retry_reporter() -> Callable[[UnavailableError], None]:
    """Return a function that reports each retry on a terminal, and each reason once in a log."""
    reported = set[str]()

    def report_retry(error: UnavailableError) -> None:
        text = f"replication append: {error}; retrying"
        if sys.stderr.isatty() or text not in reported:
            reported.add(text)
            report(text)

    return report_retry


def read_patience(text: str) -> float:
    """Return a number of seconds, perhaps infinite."""
    seconds = float(text)
    if not seconds >= 0:  # nor NaN
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, 0 or more")
    return seconds


def check_json(line: bytes) -> None:
    """Return if ``line`` is one JSON value that is not too long, else RemoteProtocolError."""
    if len(line) > MAX_FACT_BYTES:
        raise RemoteProtocolError(f"more than {MAX_FACT_BYTES} bytes, the most that a fact has; divide it")
    try:
        grammar.row_text(line.decode())
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"not UTF-8: {error}") from error


def read_batches(source: int, wait_for: Callable[[int], None] = lambda _: None) -> Iterator[Batch]:
    """Yield the lines of a file descriptor, in batches of those that can be read without waiting.

    ``wait_for`` is called before each read, and may wait until ``source`` can be read.  A line of more than
    MAX_FACT_BYTES is cut, and is the last one: the input may have no further end of a line.
    """
    part, lines, number = bytearray(), list[bytes](), 0  # part: of the line that has no end yet

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

    while True:
        wait_for(source)
        data = os.read(source, READ_BYTES)
        if not data:
            break
        first, *others = data.split(b"\n")
        part += first
        if others:
            lines += [bytes(part), *others[:-1]]
            part = bytearray(others[-1])
        if len(part) > MAX_FACT_BYTES:
            part[:0] = b"-"  # so that it is refused, also if it is blank: the lines after it are not read
            break
        while len(lines) >= BATCH_LINES or (lines and not select.select([source], [], [], 0)[0]):
            yield take()
    if part:
        lines.append(bytes(part))
    while lines:
        yield take()


@attrs.define
class Appender:
    """Sends batches to one stream, and records what is acknowledged; ``template`` makes a fact's JSON from a line."""

    client: HttpClient
    stream: str
    template: bytes
    _count: int = 0
    _so_far: str = "nothing is acknowledged"
    _posts: int = 0  # that the client had sent before the lines without an ID

    def run(self, batches: Iterable[Batch], advance: Callable[[int, int], None]) -> None:
        """Append all batches and print their IDs; AppendError states the reason and what was appended.

        ``advance`` is called after each batch with its number of facts and bytes.
        """
        try:
            for batch in batches:
                ids = self._append(batch)
                self._print(ids)
                advance(len(ids), batch.size)
        except KeyboardInterrupt as error:
            raise AppendError(f"interrupted; {self._so_far}") from error

    def _print(self, ids: Sequence[int]) -> None:
        try:
            print("".join([f"{each}\n" for each in ids]), end="", flush=True)  # noqa: T201 (numbers)
        except BrokenPipeError as error:
            raise AppendError(f"standard output is closed; {self._so_far}") from error
        except OSError as error:
            raise AppendError(f"cannot write to standard output: {error.strerror}; {self._so_far}") from error

    @staticmethod
    def _check(batch: Batch) -> tuple[int, str]:
        """Return the number of lines before the first one that is not JSON, and what is wrong with that line."""
        for index, (number, line) in enumerate(zip(batch.numbers, batch.lines, strict=True)):
            try:
                check_json(line)
            except RemoteProtocolError as error:
                return index, f"line {number}: {error}"
        return len(batch.lines), ""

    def _note(self, ids: Sequence[int], number: int) -> None:
        """Note that facts up to line ``number`` were acknowledged."""
        self._count += len(ids)
        self._so_far = f"appended: {self._count}, up to {_place(number)} with ID {ids[-1]}"

    def _given_up(self, error: UnavailableError, first: int | None) -> AppendError:
        """Return the error for a server that did not answer in time; ``first`` is the first line without an ID."""
        patience = f"gave up after {self.client.patience:g} s (--retry)"
        return AppendError(f"{error}; {patience}; {self._so_far}{self._not_acknowledged(first)}")

    def _not_acknowledged(self, first: int | None) -> str:
        """Return what has no ID, and whether it was sent: ``first`` is its first line, 0 for ROW."""
        if first is None:
            return ""
        what = f"{_place(first)} and what follows were" if first else "ROW was"
        if self.client.posts == self._posts:
            return f"; {what} neither sent nor appended"
        return f"; it is not known whether {what} appended"

    def _append(self, batch: Batch) -> Sequence[int]:
        _, wrong = self._check(batch)
        if wrong:
            raise AppendError(f"{wrong}; {self._so_far}")
        if not batch.lines:
            return []
        body = b"\n".join([self.template % line for line in batch.lines])
        path = f"/v1/streams/{quote(self.stream, safe='')}/facts"
        headers = {"Content-Type": "application/x-ndjson", "Idempotency-Key": uuid.uuid4().hex}
        self._posts = self.client.posts
        try:
            ids: list[int] = self.client.call("POST", path, body, headers, form=_Appended)["ids"]
        except UnavailableError as error:
            raise self._given_up(error, batch.numbers[0]) from error
        except HttpError as error:
            text = re.sub(r"\bline (\d+)", lambda found: _place(batch.numbers[int(found[1]) - 1]), str(error), count=1)
            raise AppendError(f"{text}; {self._so_far}") from error
        if len(ids) != len(batch.lines):
            what = f"{len(ids)} IDs for {len(batch.lines)} lines"
            raise AppendError(f"{self.client.url} answers {what}; is that a replication daemon?; {self._so_far}")
        self._note(ids, batch.numbers[-1])
        return ids


class LineAppender(Appender):
    """Appends all batches in one request."""

    def __init__(self, client: HttpClient, stream: str, template: bytes) -> None:
        super().__init__(client, stream, template)
        self._upload = LineUpload(client, stream, self._acknowledge)
        self._waiting: deque[tuple[int, int]] = deque()  # of lines without an ID, their numbers and bytes
        self._advance: Callable[[int, int], None] = lambda _facts, _bytes: None

    def is_offered(self) -> bool:
        """Whether the server has the call; HttpError as in LineUpload."""
        try:
            return self._upload.is_offered()
        except UnavailableError as error:
            raise self._given_up(error, None) from error
        except HttpError as error:
            raise AppendError(f"{error}; {self._so_far}") from error

    def wait_for(self, source: int) -> None:
        """Receive IDs until ``source`` can be read."""
        self._upload.wait_for(source)

    def run(self, batches: Iterable[Batch], advance: Callable[[int, int], None]) -> None:
        """Append all batches, and print their IDs as they arrive; AppendError as in Appender."""
        self._advance = advance
        try:
            for batch in batches:
                good, wrong = self._check(batch)
                lines = batch.lines[:good]
                self._waiting.extend(zip(batch.numbers[:good], [len(line) + 1 for line in lines], strict=True))
                self._upload.add([self.template % line for line in lines])
                if wrong:
                    self._upload.finish()
                    raise AppendError(f"{wrong}; {self._so_far}")
            self._upload.finish()
        except KeyboardInterrupt as error:
            unknown = self._waiting[0][0] if self._waiting else None
            raise AppendError(f"interrupted; {self._so_far}{self._not_acknowledged(unknown)}") from error
        except UnavailableError as error:
            raise self._given_up(error, self._waiting[0][0] if self._waiting else None) from error
        except HttpError as error:
            text = re.sub(r"\bline (\d{1,18})\b", self._place_in_request, str(error), count=1)
            raise AppendError(f"{text}; {self._so_far}") from error

    def _acknowledge(self, ids: Sequence[int]) -> None:
        some = [self._waiting.popleft() for _ in ids]
        self._note(ids, some[-1][0])
        self._print(ids)
        self._advance(len(ids), sum([size for _, size in some]))

    def _place_in_request(self, found: re.Match[str]) -> str:
        """Return the place of a line that the server has counted, in the request that it has refused."""
        index = self._upload.first + int(found[1]) - 1 - self._count
        return _place(self._waiting[index][0]) if 0 <= index < len(self._waiting) else found[0]


def _place(number: int) -> str:
    return f"line {number}" if number else "ROW"


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error; yield a function that advances it by a number of facts and of bytes.

    A file has a known size, so the bar shows a percentage; a pipe has none.
    """
    if not shown:
        yield lambda _facts, _bytes: None
        return
    # This import takes as long as the rest of the command, and only the bar needs it.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    source = os.fstat(sys.stdin.fileno())
    total = source.st_size if stat.S_ISREG(source.st_mode) else None
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[facts]} facts"), TimeElapsedColumn())
    # If the IDs go to the same terminal, rich prints them above the bar.
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=total, facts=0)
        yield lambda facts, size: bar.update(task, advance=size, facts=bar.tasks[0].fields["facts"] + facts)
