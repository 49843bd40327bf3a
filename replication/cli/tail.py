"""``replication tail``: facts as they come, from any writer's wire, with what was missed fetched over HTTP.

Only whole facts are printed, each once and in order, over as many connections as it takes.
"""

from __future__ import annotations

import os
import re
import select
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import LogLevel, formatEvent, globalLogPublisher

from replication.cli.parser import Parser
from replication.config import read_secret
from replication.errors import CatchUpError, ConfigError, ReplicationError, RowError
from replication.net.link import WriterLink, http_beside
from replication.net.protocol import Limits
from replication.session.connection import Rows
from replication.session.feed import spell_facts
from replication.streams.cursor import CatchUp, Cursor, Reset
from replication.streams.seams import Page
from replication.synapse import STREAMS
from replication.web.client import HttpCatchUp, NotAllowedError
from replication.wire import grammar
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twisted.logger import ILogObserver, LogEvent
    from twisted.python.failure import Failure

    from replication.net.protocol import ReplicationProtocol
    from replication.session.connection import Fault, Heard
    from replication.streams.facts import Fact
    from replication.streams.seams import ICatchUp
    from replication.streams.typed import Row, TypedStream

PAGE_ROWS: Final = 5_000
PATIENCE: Final = 60.0  # seconds in which somebody must have said SERVER for the first time
LOOK_EVERY: Final = 1.0  # seconds between two looks at our output and at the peer
LOOKS: Final = 2  # after which a peer has said SERVER, and the first POSITIONs: a writer says them at once
FIRST_DELAY: Final = 0.25  # seconds until a fetch that failed is tried again; doubled at each failure in a row
LAST_DELAY: Final = 5.0
_TYPED: Final[Mapping[str, TypedStream[Row]]] = {each.name: each for each in STREAMS}
_HTTP: Final = "unknown command: 'HTTP/"  # what a web server's first line is to us


class TailError(ReplicationError):
    """Nothing can be followed there; the message says why."""


def main(arguments: Sequence[str]) -> int:
    """Print facts until interrupted."""
    parser = Parser(
        prog="replication tail",
        description="Print facts as they come.",
        epilog="example: replication tail tcp:127.0.0.1:9092 --stream orders --from beginning",
    )
    parser.add_argument("endpoint", metavar="ENDPOINT", help="the wire of a writer: tcp:HOST:PORT, unix:PATH, tls:…")
    parser.add_argument("--stream", metavar="S", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--from", metavar="TOKEN", dest="start", help="print what follows TOKEN, or `beginning`, first")
    parser.add_argument("--http", metavar="URL", help="where what was missed is fetched [the wire's host, next port]")
    parser.add_argument("--secret-file", metavar="FILE", help="holds the secret that this HTTP wants")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a line per row: {stream, instance, token, row, fields}")
    form.add_argument(
        "--typed", action="store_true", help="a line per row, with its fields by name (a Synapse's streams)"
    )
    found = parser.parse_args(arguments)
    from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)

    try:
        url = found.http or http_beside(found.endpoint)
        secret = None if found.secret_file is None else read_secret(found.secret_file)
        tail = Tail(
            reactor,
            found.endpoint,
            streams=[grammar.stream_name(each) for each in found.stream],
            start=read_start(found.start),
            source=HttpCatchUp(reactor, url, secret) if url else None,
            spell=spell_json if found.json else spell_typed if found.typed else spell_rdata,
        )
    except ReplicationError as error:
        parser.error(str(error))
    return tail.run()


def read_start(text: str | None) -> Token | None:
    """Return what ``--from`` says; ConfigError if it is no token."""
    if text is None:
        return None
    token = Token(int(text)) if text.isascii() and text.isdigit() else None
    if text != "beginning" and token is None:
        raise ConfigError(f"--from takes a token or `beginning`, not {text!r}")
    return token or Token(0)


def spell_rdata(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return the lines that a master sends for ``facts``."""
    zero = Token(0)  # no POSITION beside them
    return b"".join(
        [each.data for each in spell_facts(stream, instance, facts, after=zero, upto=zero, line_limit=sys.maxsize)]
    )


def spell_json(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return a JSON object per row and line; a row is the text that it always was.

    Rows of a Synapse's streams have ``fields``, too: the same by name.
    """
    head = f'{{"stream":{grammar.spell_row(stream)},"instance":{grammar.spell_row(instance)},"token":'
    lines = []
    for token, texts in facts:
        for text in texts:
            row = _read_row(stream, text)
            fields = "" if row is None else f',"fields":{grammar.spell_row(row.named())}'
            lines.append(f'{head}{token},"row":{text}{fields}}}\n')
    return "".join(lines).encode()


def spell_typed(stream: StreamName, instance: InstanceName, facts: Sequence[Fact]) -> bytes:
    """Return a line per row: where it stands, and its fields by name; of streams that only others know, its text."""
    lines = [
        f"{stream} {instance} {token} {_read_row(stream, text) or text}\n" for token, texts in facts for text in texts
    ]
    return "".join(lines).encode(errors="backslashreplace")


def _read_row(stream: StreamName, text: str) -> Row | None:
    """Return a typed row, None if the stream is none of a Synapse's or has another row of that name."""
    typed = _TYPED.get(stream)
    try:
        return None if typed is None else typed.read_row(text)
    except RowError:
        return None


class Tail:
    """Follows the writer at one endpoint, whatever its server is called, and prints what it writes."""

    def __init__(
        self,
        reactor: Any,
        endpoint: str,
        *,
        streams: Sequence[StreamName],
        start: Token | None,
        source: ICatchUp | None,
        spell: Callable[[StreamName, InstanceName, Sequence[Fact]], bytes],
        output: int = 1,
    ) -> None:
        """Print, on the file descriptor ``output``, what follows ``start`` or else is new; ConfigError: no endpoint.

        A stream that has not got as far as ``start``, which is one token for all, is followed from where it is.
        """
        if source is None and start is not None:
            raise ConfigError(f"--from: it cannot be told where the HTTP of {endpoint} is; say --http URL")
        self._reactor = reactor
        self._streams = frozenset(streams)
        self._start = start
        self._source = source
        self._spell = spell
        self._output = output
        self._cursors: dict[tuple[StreamName, InstanceName], Cursor] = {}
        self._driving: set[tuple[StreamName, InstanceName]] = set()
        self._error: ReplicationError | None = None
        self._welcome = False  # somebody has said SERVER
        self._looks = 0  # at the present peer
        self._ending = False
        self._told: dict[object, set[str]] = {}  # by what it is about, until that works again
        self._link = WriterLink(
            reactor,
            endpoint,
            server_name=None,
            instance_name=InstanceName(f"tail-{os.getpid()}"),
            streams=streams,
            limits=Limits(),
            on_heard=self._heard,
            on_lost=self._lost,
            on_fault=self._faulted,
        )
        self._looking = LoopingCall(self._look)
        self._looking.clock = reactor

    def run(self) -> int:
        """Print until a signal comes or nobody reads any more (0), or TailError."""
        observer = cast("ILogObserver", self._log)
        globalLogPublisher.addObserver(observer)
        self._reactor.callWhenRunning(self.start)
        self._reactor.addSystemEventTrigger("before", "shutdown", self.stop)
        try:
            self._reactor.run()
        finally:
            globalLogPublisher.removeObserver(observer)
        if self._error is not None:
            raise self._error
        return 0

    def start(self) -> None:
        """Begin to connect."""
        self._since = self._reactor.seconds()
        self._link.start()
        self._looking.start(LOOK_EVERY, now=False)

    def stop(self) -> Deferred[None]:
        """Hang up."""
        if self._looking.running:
            self._looking.stop()
        return self._link.stop()

    # ---- what the link says

    def _heard(self, link: WriterLink, heard: Sequence[Heard]) -> None:
        self._welcome = True
        for each in heard:
            if not isinstance(each, Rows | Position) or (self._streams and each.stream not in self._streams):
                continue
            key = each.stream, each.instance
            cursor = self._cursors.get(key)
            if isinstance(each, Position):
                if cursor is None:
                    start = each.new if self._start is None else min(self._start, each.new)
                    cursor = self._cursors[key] = Cursor(start)
                self._told.pop(None, None)
                cursor.position_heard(link, each.prev, each.new)
            elif cursor is not None:
                cursor.rows_heard(link, each.places, each.texts)
            if cursor is not None and key not in self._driving:
                self._driving.add(key)
                Deferred.fromCoroutine(self._drive(*key, cursor)).addErrback(self._failed)

    def _lost(self, link: WriterLink) -> None:
        self._looks = 0
        for cursor in self._cursors.values():
            cursor.link_lost(link)

    def _faulted(self, fault: Fault) -> None:
        if _HTTP in fault.text and not self._welcome:
            self._end(TailError(f"{self._link.endpoint} is an HTTP port; the wire is usually the port before it"))

    # ---- what is done about it

    async def _drive(self, stream: StreamName, instance: InstanceName, cursor: Cursor) -> None:
        delay = FIRST_DELAY
        while (step := cursor.step()) is not None:
            if isinstance(step, CatchUp):
                try:
                    cursor.fetched(step, await self._fetch(stream, instance, step))
                except NotAllowedError as error:
                    self._end(TailError(str(error)))
                    return
                except CatchUpError as error:
                    text = f"{stream} of {instance} waits at {step.after}: {error}; trying again"
                    self._tell(text, about=(stream, instance))
                    await deferLater(self._reactor, delay)
                    delay = min(delay * 2, LAST_DELAY)
                else:
                    delay = FIRST_DELAY
                    self._told.pop((stream, instance), None)
                continue
            if isinstance(step, Reset):
                self._tell(f"{stream} of {instance} went back from {step.after} to {step.to}; following from there")
            elif step.facts and not self._print(self._spell(stream, instance, step.facts)):
                return
            cursor.applied(step)
        self._driving.discard((stream, instance))

    async def _fetch(self, stream: StreamName, instance: InstanceName, step: CatchUp) -> Page:
        if self._source is None:
            self._tell(f"{stream} of {instance}: ({step.after}, {step.upto}] was missed; say --http URL to have such")
            return Page((), step.upto, limited=False)
        return await self._source.facts(stream, instance, after=step.after, upto=step.upto, limit=PAGE_ROWS)

    def _print(self, lines: bytes) -> bool:
        """Write all of it; whether anybody reads."""
        try:
            while lines:
                lines = lines[os.write(self._output, lines) :]
        except BrokenPipeError:
            self._end(None)
            return False
        except OSError as error:
            self._end(TailError(f"cannot write to standard output: {error.strerror}"))
            return False
        return True

    def _look(self) -> None:
        """Notice what nothing tells us: that nobody reads our output, or that the peer has nothing to say."""
        poll = select.poll()
        poll.register(self._output, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            self._end(None)
        elif not self._welcome and self._reactor.seconds() - self._since > PATIENCE:
            self._end(TailError(f"no writer answers at {self._link.endpoint}: is its daemon running there?"))
        elif self._link.peer is not None:
            self._looks += 1
            if self._looks == LOOKS:
                self._judge(self._link.peer)

    def _judge(self, peer: ReplicationProtocol) -> None:
        """Say what a peer should have said by now."""
        if not self._welcome:
            peer.write(b"\r\n\r\n", 0)  # blank lines to a writer; HTTP takes them for the end of a bad request
            return
        for stream in sorted(self._streams - {stream for stream, _ in self._cursors}):
            self._tell(f"the writer at {self._link.endpoint} has no stream {stream!r}; waiting for it", about=stream)

    def _log(self, event: LogEvent) -> None:
        """Show what the link has to say, but not what Twisted says of its work."""
        text = formatEvent(event)
        if event.get("log_level", LogLevel.debug) >= LogLevel.warn and not (_HTTP in text and not self._welcome):
            self._tell(text)

    def _tell(self, text: str, about: object = None) -> None:
        """Say it, but once until what it is about works again; how far was asked for in a URL makes no difference."""
        told, gist = self._told.setdefault(about, set()), re.sub(r"\?\S*", "", text)
        if gist not in told:
            told.add(gist)
            print(f"replication tail: {text}", file=sys.stderr)

    def _failed(self, failure: Failure) -> None:
        self._end(TailError(f"a bug: {failure.getTraceback()}"))

    def _end(self, error: ReplicationError | None) -> None:
        if self._error is None:
            self._error = error
        if self._reactor.running and not self._ending:
            self._ending = True
            self._reactor.stop()
