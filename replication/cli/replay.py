"""``replication replay``: history as segments, written by Spark; and a check of what was written.

On a terminal a bar shows how far it is, read from the receipts that the workers leave in the folder.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from replication import config
from replication.cli.parser import Parser
from replication.replay.folders import open_folder
from replication.replay.history import SEGMENT_ROWS, Shape
from replication.replay.job import do_tasks, open_session
from replication.replay.run import ORIGIN, Request, begin, read_receipt
from replication.replay.segments import SUFFIXES, verify

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from replication.replay.run import Run

LOOK_EVERY: Final = 0.5  # seconds
HERE: Final = "none"  # the --master that is no Spark


def main(arguments: Sequence[str]) -> int:
    """Write segments, or check them."""
    parser = Parser(
        prog="replication replay",
        description="Write the history of streams as RDATA lines in segments, from which workers catch up.",
        epilog="example: replication replay --database sqlite:///replication.db --out segments",
    )
    parser.add_argument("--database", metavar="URL", help="the writer's: sqlite:///FILE or postgresql://…")
    parser.add_argument("--out", metavar="DIR", help="where segments and manifest.json are, or will be")
    parser.add_argument("--config", metavar="FILE", help="the master's TOML file: its database and [[streams]]")
    parser.add_argument("--stream", metavar="S", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--instance", metavar="I", action="append", default=[], help="only this writer; likewise")
    parser.add_argument("--from", metavar="A", dest="after", type=int, default=ORIGIN, help="begin after ID A [0]")
    parser.add_argument("--upto", metavar="B", type=int, help="end with ID B [the streams' current IDs]")
    parser.add_argument(
        "--segment-rows", metavar="N", type=int, default=SEGMENT_ROWS, help="rows in a segment, at most [%(default)s]"
    )
    parser.add_argument("--compression", choices=SUFFIXES, default="zstd", help="[%(default)s]")
    parser.add_argument(
        "--compact", action="store_true", help="of streams that are declared with a key, keep the last fact per key"
    )
    parser.add_argument(
        "--master", metavar="M", help="where Spark runs [local[*]]; none: without Spark, in this process"
    )
    parser.add_argument("--verify", metavar="DIR", help="check sums, order and ranges of what was written, and stop")
    found = parser.parse_args(arguments)
    if found.verify is not None:
        return _verify(found.verify)
    if found.out is None:
        parser.error("--out DIR says where to write to")
    if found.database is None and found.config is None:
        parser.error("--database URL says what to read, or --config FILE")
    return _replay(_request(found), found.master)


def _request(found: argparse.Namespace) -> Request:
    options = {} if found.database is None else {"database": found.database}
    settings = config.load("master", found.config, options)
    return Request(
        settings.database,
        found.out,
        streams=found.stream,
        definitions=settings.streams,
        instances=found.instance,
        after=found.after,
        upto=found.upto,
        shape=Shape(found.segment_rows, found.compression, settings.line_limit, found.compact),
    )


def _replay(request: Request, master: str | None) -> int:
    began = time.monotonic()
    with begin(request) as run:
        if not run.tasks:
            new = run.finish([])
        elif master == HERE:
            with _progress(run, request.out):
                receipts = [task.do() for task in run.tasks]
            new = run.finish(receipts)
        else:
            with open_session(master) as spark, _progress(run, request.out):
                receipts = do_tasks(spark, run.tasks)
            new = run.finish(receipts)
    rows = sum(each.rows for each in new)
    seconds = time.monotonic() - began
    print(f"{request.out}: " + (f"{rows} rows in {len(new)} new segments, {seconds:.1f} s" if new else "up to date"))
    return 0


def _verify(out: str) -> int:
    segments = rows = 0
    faults = []
    for segment, fault in verify(open_folder(out)):
        if segment is not None:
            segments += 1
            rows += segment.rows
        if fault is not None:
            faults.append(fault)
            print(fault, file=sys.stderr)
    if faults:
        cure = "bring its file back from a copy, or replay into a new folder, with another --out"
        print(f"{out}: what is damaged or missing stays so, however often you replay into it: {cure}", file=sys.stderr)
        return 1
    print(f"{out}: {segments} segments with {rows} rows are whole")
    return 0


@contextmanager
def _progress(run: Run, out: str) -> Iterator[None]:
    """Show on a terminal how far ``run`` is, until the block is left."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        BarColumn(),
        TextColumn("{task.fields[rows]} rows, {task.fields[segments]} segments, {task.fields[rate]:.0f} rows/s"),
        TimeRemainingColumn(),
    )
    folder, waiting = open_folder(out), {task.receipt for task in run.tasks}
    ended = Event()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("", total=len(waiting), rows=0, segments=0, rate=0.0)
        began = time.monotonic()

        def look() -> None:
            rows = segments = 0
            while not ended.wait(LOOK_EVERY):
                for name in sorted(waiting):
                    if folder.size(name) is None:
                        continue
                    waiting.remove(name)
                    with folder.open(name) as receipt:
                        written = read_receipt(receipt.read())
                    rows += sum(each.rows for each in written)
                    segments += len(written)
                rate = rows / (time.monotonic() - began)
                bar.update(shown, completed=len(run.tasks) - len(waiting), rows=rows, segments=segments, rate=rate)

        looking = Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()
