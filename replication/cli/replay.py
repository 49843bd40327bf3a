"""``replication replay``: write streams as segments, or verify segments (docs/command-line.md).

Progress goes to standard error: a bar on a terminal, otherwise a line for every 10 finished ranges.
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
from replication.cli.output import report, write_line
from replication.cli.parser import Parser
from replication.errors import ConfigError, StoreError
from replication.segments.compression import SUFFIXES
from replication.segments.files import verify
from replication.segments.folders import open_folder, read_index
from replication.segments.manifest import WORK
from replication.segments.run import (
    ORIGIN,
    SEGMENT_ROWS,
    ReplayRequest,
    SegmentOptions,
    find_left_out,
    read_receipt,
    start_run,
)
from replication.spark.job import check_installed, do_tasks, open_session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from replication.segments.run import Run

POLL_INTERVAL: Final = 0.5  # seconds
LINE_RANGES: Final = 10  # finished ranges between two lines of progress
IN_PROCESS: Final = "none"  # the --master that stands for no Spark
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count


def make_parser() -> Parser:
    """Return the parser of ``replication replay``."""
    parser = Parser(
        prog="replication replay",
        description="Write the facts of streams as segments, from which workers catch up.",
        epilog="example: replication replay --database sqlite:///replication.db --out segments",
    )
    parser.add_argument("--database", metavar="URL", help="the writer's database: sqlite:///FILE or postgresql://…")
    parser.add_argument("--out", metavar="DIR", help="the folder of segments and manifest.json: a path or URL")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file: a master's database and [[streams]], or a worker's [[streams]]"
    )
    parser.add_argument("--stream", metavar="S", action="append", default=[], help="only this stream; may be repeated")
    parser.add_argument(
        "--instance", metavar="I", action="append", default=[], help="only this writer; may be repeated"
    )
    parser.add_argument(
        "--from", metavar="A", dest="after", type=int, default=ORIGIN, help="begin after ID A where a chain is new [0]"
    )
    parser.add_argument("--upto", metavar="B", type=int, help="end with ID B [the streams' current IDs]")
    parser.add_argument(
        "--segment-rows", metavar="N", type=int, default=SEGMENT_ROWS, help="the most rows in a segment [%(default)s]"
    )
    parser.add_argument("--compression", choices=SUFFIXES, default="zstd", help="[%(default)s]")
    parser.add_argument(
        "--compact", action="store_true", help="of streams with a key, keep the last fact per key within a range"
    )
    parser.add_argument(
        "--access-tokens", action="store_true", help="keep the access tokens in a Synapse's caches stream"
    )
    parser.add_argument(
        "--master", metavar="M", help="where Spark runs [local[*]]; none: in this process, without Spark"
    )
    parser.add_argument("--verify", metavar="DIR", help="check the checksums, order and ranges of a folder, and stop")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Write or verify segments; 130 if interrupted, 1 if a segment is damaged or missing."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.verify is not None:
        return _verify(found.verify)
    if found.out is None:
        parser.error("give --out DIR, the folder to write to")
    if found.database is None and found.config is None:
        parser.error("give --database URL or --config FILE")
    try:
        return _replay(_request(found), found.master)
    except KeyboardInterrupt:
        _report("interrupted; finished ranges are kept: run the same command again to continue")
        return INTERRUPTED


def _request(found: argparse.Namespace) -> ReplayRequest:
    options = {} if found.database is None else {"database": found.database}
    settings = config.load(None, found.config, options)
    if settings.role == "worker" and found.database is None:
        raise ConfigError(f"{found.config} is a worker's: give --database URL, the database of the writers")
    return ReplayRequest(
        settings.database,
        found.out,
        streams=found.stream,
        definitions=settings.streams,
        instances=found.instance,
        after=found.after,
        upto=found.upto,
        options=SegmentOptions(
            found.segment_rows, found.compression, settings.line_limit, found.compact, found.access_tokens
        ),
    )


def _report(text: str) -> None:
    report(f"replication replay: {text}")


def _replay(request: ReplayRequest, master: str | None) -> int:
    check_installed(spark=master != IN_PROCESS)
    began = time.monotonic()
    with start_run(request) as run:
        for each in run.warnings:
            _report(f"warning: {each}")
        if run.tasks:
            streams = sorted({task.range.definition.name for task in run.tasks})
            _report(f"{len(run.tasks)} ranges to write, of {', '.join(streams)}")
        if not run.tasks:
            receipts = []
        elif master == IN_PROCESS:
            with _progress(run, request.out):
                receipts = [task.do() for task in run.tasks]
        else:
            with open_session(master, _report) as spark, _progress(run, request.out):
                receipts = do_tasks(spark, run.tasks)
        new = run.finish(receipts)
    for each in find_left_out(new):
        _report(f"warning: {each}")
    rows = sum(each.rows for each in new)
    seconds = time.monotonic() - began
    write_line(
        f"{request.out}: " + (f"{rows} rows in {len(new)} new segments, {seconds:.1f} s" if new else "up to date")
    )
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
            report(fault)
    if faults:
        cure = "restore the files from a copy, or replay into a new folder"
        report(f"{out}: a replay does not repair damaged or missing segments: {cure}")
        return 1
    write_line(f"{out}: {segments} segments with {rows} rows are whole")
    return 0


@contextmanager
def _progress(run: Run, out: str) -> Iterator[None]:
    """Report finished ranges until the block is left; tasks leave their receipts in the folder."""
    folder, waiting = open_folder(out), {task.receipt for task in run.tasks}
    total, on_terminal = len(waiting), sys.stderr.isatty()
    ended = Event()
    began = time.monotonic()

    def poll() -> None:
        rows = segments = reported = 0
        while not ended.wait(POLL_INTERVAL):
            try:
                for name in waiting.intersection(folder.names(WORK)):
                    written = read_receipt(read_index(folder, name))
                    waiting.remove(name)
                    rows += sum(each.rows for each in written)
                    segments += len(written)
            except (OSError, StoreError):
                continue  # the task that fails for the same reason reports it
            finished, rate = total - len(waiting), rows / (time.monotonic() - began)
            text = f"{rows} rows in {segments} segments, {rate:.0f} rows/s"
            bar.update(shown, completed=finished, text=text)
            if not on_terminal and finished - reported >= LINE_RANGES:
                reported = finished
                _report(f"{finished} of {total} ranges, {text}")

    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not on_terminal) as bar:
        shown = bar.add_task("", total=total, text="")
        polling = Thread(target=poll, daemon=True)
        polling.start()
        try:
            yield
        finally:
            ended.set()
            polling.join()
