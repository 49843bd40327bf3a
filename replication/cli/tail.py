"""``replication tail``: follow a process over the wire and print its facts; missed facts are fetched over HTTP.

It prints whole facts only, each once and in order, also over several connections (docs/command-line.md).
"""

from __future__ import annotations

import os
import re
import select
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall
from twisted.logger import LogLevel, formatEvent, globalLogPublisher
from twisted.python.failure import Failure

from replication.cli.fact_lines import ColouredLines, encode_json, encode_rdata, encode_typed
from replication.cli.output import report
from replication.cli.parser import Parser
from replication.config import DEFAULT_CONNECT
from replication.deferreds import Lifetime
from replication.errors import CatchUpError, ConfigError, FactsGoneError, ReplicationError, did_you_mean
from replication.follower.history import FollowedHistories
from replication.follower.links import FollowedLinks, is_open
from replication.follower.stream import FollowMode, StreamFollower
from replication.net.client import WriterClient
from replication.net.clock import use_monotonic_clock
from replication.net.endpoints import default_http_url, is_redis
from replication.net.protocol import Limits
from replication.session.connection import Rows
from replication.storage import open_store
from replication.streams.access_tokens import hide_access_tokens
from replication.streams.cursor import Reset
from replication.streams.interfaces import Page
from replication.web.address import read_secret
from replication.web.client import HttpCatchUp
from replication.web.response import NotAllowedError
from replication.wire import grammar
from replication.wire.commands import Position
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.logger import ILogObserver, LogEvent

    from replication.session.connection import Fault, Received
    from replication.streams.cursor import Apply, CatchUp
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.streams.interfaces import ICatchUp

PATIENCE: Final = 60.0  # seconds in which a writer must send the first SERVER
POLL_INTERVAL: Final = 1.0  # seconds between two checks of the output and of the peer
POLLS: Final = 2  # checks after which a writer has sent SERVER and its first POSITIONs
DEFAULT_ENDPOINT: Final = str(DEFAULT_CONNECT[0])
_HTTP: Final = "unknown command: 'HTTP/"  # the fault in the first line of a web server
_REDIS: Final = "unknown command: '-"  # and of a Redis, whose errors begin with a minus
_NO_REDIS: Final = (
    "tail follows no Redis: start a worker that follows it and has listen=tcp:HOST:PORT, and tail that worker "
    "(docs/how-to/relay.md)"
)


class TailError(ReplicationError):
    """The process cannot be followed; the message has the reason."""


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication tail",
        description="Follow a process over the wire, and print facts as they arrive.",
        epilog="example: replication tail tcp:127.0.0.1:9092 --stream orders --from beginning",
    )
    parser.add_argument(
        "endpoint",
        nargs="?",
        default=DEFAULT_ENDPOINT,
        metavar="ENDPOINT",
        help=f"wire of the process: tcp:HOST:PORT, unix:PATH, tls:… [{DEFAULT_ENDPOINT}]",
    )
    parser.add_argument("--stream", metavar="S", action="append", default=[], help="this stream only; may be repeated")
    parser.add_argument(
        "--from", metavar="TOKEN", dest="start", help="first print the facts after TOKEN or `beginning`"
    )
    parser.add_argument("--http", metavar="URL", help="where missed facts are fetched [the wire's host, next port]")
    parser.add_argument("--secret-file", metavar="FILE", help="file with the secret that this HTTP requires")
    parser.add_certificate_options()
    parser.add_argument(
        "--access-tokens", action="store_true", help="print the access tokens in a Synapse's caches stream, too"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a line per row: {stream, instance, token, row, fields}")
    form.add_argument("--typed", action="store_true", help="a line per row, with field names (streams of a Synapse)")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print facts until interrupted."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if is_redis(found.endpoint):
        parser.error(_NO_REDIS)
    certificate = parser.certificate_of(found)
    from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)

    try:
        url = found.http or default_http_url(found.endpoint)
        secret = None if found.secret_file is None else read_secret(found.secret_file)
        source = HttpCatchUp(reactor, url, secret, certificate=certificate) if url else None
        coloured = ColouredLines(source) if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
        tail = Tail(
            reactor,
            found.endpoint,
            certificate=certificate,
            streams=[grammar.stream_name(each) for each in found.stream],
            after=read_start(found.start),
            source=source,
            encode=encode_json if found.json else encode_typed if found.typed else coloured or encode_rdata,
            access_tokens=found.access_tokens,
        )
    except ReplicationError as error:
        parser.error(str(error))
    use_monotonic_clock(reactor)
    if coloured is not None:
        cast("Any", reactor).callWhenRunning(coloured.read_names)
    return tail.run()


def read_start(text: str | None) -> Token | None:
    """Return the token of ``--from``; ConfigError if it is not one."""
    if text is None:
        return None
    token = Token(int(text)) if text.isascii() and text.isdigit() else None
    if text != "beginning" and token is None:
        raise ConfigError(f"--from takes a token or `beginning`, not {text!r}")
    return token or Token(0)


@attrs.define(eq=False, slots=False)
class Tail:
    """Follows the process at one endpoint, which may have any server name, and prints facts.

    ConfigError if ``endpoint`` is not a client endpoint, or if ``after`` is given without a ``source``.

    Attributes:
        reactor: for the connection and all timers.
        endpoint: the wire of the process.
        streams: the streams to print; all if empty.
        after: print the facts after this token first; None prints new facts only.  It is one token for all streams: a
            stream with a lower position is followed from that position.
        source: where missed facts are fetched.
        encode: makes the output from facts.
        access_tokens: print the access tokens in facts of the caches stream (docs/protocol/streams.md C4).
        certificate: the files with the certificate and private key that ``tls:`` shows.
        output: the file descriptor to print on.

    """

    reactor: Any
    endpoint: str
    streams: Sequence[StreamName] = attrs.field(kw_only=True)
    after: Token | None = attrs.field(kw_only=True)
    source: ICatchUp | None = attrs.field(kw_only=True)
    encode: Callable[[StreamName, InstanceName, Sequence[Fact]], bytes] = attrs.field(kw_only=True)
    access_tokens: bool = attrs.field(default=False, kw_only=True)
    certificate: tuple[str, str] | None = attrs.field(default=None, kw_only=True)
    output: int = 1

    def __attrs_post_init__(self) -> None:
        if self.source is None and self.after is not None:
            raise ConfigError(f"--from: the HTTP of {self.endpoint} cannot be derived; give --http URL")
        self._instance_name = InstanceName(f"tail-{os.getpid()}")
        self._lifetime = Lifetime(self.reactor)
        self._followers: dict[StreamName, StreamFollower] = {}
        self._first: dict[tuple[StreamName, InstanceName], Token] = {}  # the first position that was received
        self._error: ReplicationError | None = None
        self._greeted = False  # a SERVER was received, on any connection
        self._polls = 0  # of the present connection
        self._ending = False
        self._reported: dict[object, set[str]] = {}  # the last warning of each subject, until the subject works again
        self._link = WriterClient(
            reactor=self.reactor,
            endpoint=self.endpoint,
            server_name=None,
            instance_name=self._instance_name,
            streams=self.streams,
            limits=Limits(),
            on_received=self._received,
            on_lost=self._lost,
            on_fault=self._faulted,
            certificate=self.certificate,
        )
        self._links = FollowedLinks()
        self._links.add(self._link)
        self._observer = cast("ILogObserver", self._log)
        self._polling = LoopingCall(self._poll)
        self._polling.clock = self.reactor

    def run(self) -> int:
        """Print until a signal arrives or the reader of the output closes it, then return 0; or raise TailError."""
        self.reactor.callWhenRunning(self.start)
        self.reactor.addSystemEventTrigger("before", "shutdown", self.stop)
        self.reactor.run()
        if self._error is not None:
            raise self._error
        return 0

    def start(self) -> None:
        """Start to connect."""
        globalLogPublisher.addObserver(self._observer)
        self._since = self.reactor.seconds()
        self._link.start()
        self._polling.start(POLL_INTERVAL, now=False)

    def stop(self) -> Deferred[None]:
        """Close the connection."""
        if self._polling.running:
            self._polling.stop()
            globalLogPublisher.removeObserver(self._observer)
        self._lifetime.end()
        return self._link.stop()

    # ---- events of the connection

    def _received(self, link: WriterClient, received: Sequence[Received]) -> None:
        self._greeted = True
        for each in received:
            if not isinstance(each, Rows | Position) or (self.streams and each.stream not in self.streams):
                continue
            follower = self._followers.get(each.stream)
            if isinstance(each, Position):
                self._first.setdefault((each.stream, each.instance), each.new)
                self._links.position_received(link, each.stream, each.instance)
                self._reported.pop(None, None)
                if self._reported.pop(link, None):
                    report(f"replication tail: connected to {self.endpoint}")
                (follower or self._follow(each.stream)).position_received(link, each)
            elif follower is not None and follower.rows_received(link, each):
                link.pause_reading()

    def _follow(self, stream: StreamName) -> StreamFollower:
        follower = self._followers[stream] = StreamFollower(
            name=stream,
            mode=FollowMode.POSITION_ONLY,
            instance_name=self._instance_name,
            store=open_store("sqlite://", self.reactor),  # POSITION_ONLY: it is never opened
            lifetime=self._lifetime,
            fetch=self._fetch,
            moved=lambda *_: self._link.resume_reading(),
            # A restored writer may pass the position before it is followed again: only its history shows that.
            histories=FollowedHistories(
                stream=stream, store=None, follower="", lifetime=self._lifetime, fetch=self._history, accept_new=True
            ),
            is_open=is_open,
            first=partial(self._print_step, stream),
            begin=lambda command: command.new if self.after is None else min(self.after, command.new),
        )
        Deferred.fromCoroutine(follower.open())
        return follower

    def _lost(self, link: WriterClient) -> None:
        self._polls = 0
        self._links.lost(link)
        for follower in self._followers.values():
            follower.connection_lost(link)

    def _faulted(self, fault: Fault) -> None:
        if _HTTP in fault.text and not self._greeted:
            self._end(TailError(f"{self.endpoint} is an HTTP port; the wire is usually the port before it"))
        elif _REDIS in fault.text and not self._greeted:
            self._end(TailError(f"{self.endpoint} looks like a Redis: {_NO_REDIS}"))

    # ---- what the followers do

    async def _fetch(self, stream: StreamName, writer: InstanceName, step: CatchUp, limit: int) -> Page:
        """Fetch missed facts, and report an error; the follower retries."""
        if self.source is None:
            missed = f"({step.after}, {step.upto}]"
            self._report(f"{stream} of {writer}: {missed} was missed; give --http URL to fetch missed facts")
            return Page((), step.upto, limited=False)
        try:
            page = await self.source.facts(stream, writer, after=step.after, upto=step.upto, limit=limit)
        except NotAllowedError as error:
            self._end(TailError(str(error)))
            raise
        except FactsGoneError as error:
            if error.upto is None:
                raise
            upto = min(Token(error.upto), step.upto)
            text = f"{stream} of {writer}: facts after {step.after} up to {upto} are gone; printing from there"
            self._report(text, (stream, writer, "gone"))
            return Page((), upto, limited=upto < step.upto)
        except CatchUpError as error:
            self._report(f"{stream} of {writer} waits at {step.after}: {error}; retrying", (stream, writer))
            raise
        self._reported.pop((stream, writer), None)
        return page

    async def _history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the history that the process sends over the connection; report an error, the follower retries."""
        try:
            history = await self._links.history(stream, writer) or ()
        except CatchUpError as error:
            self._report(f"{stream} of {writer}: {error}; retrying", (stream, writer, "history"))
            raise
        self._reported.pop((stream, writer, "history"), None)
        return history

    def _print_step(self, stream: StreamName, writer: InstanceName, step: Apply | Reset) -> None:
        if isinstance(step, Reset):
            self._report(f"{stream} of {writer} went back from {step.after} to {step.to}; following from there")
            return
        try:
            facts = step.facts if self.access_tokens else hide_access_tokens(stream, step.facts)
            self._print(self.encode(stream, writer, facts))
        except BrokenPipeError:
            self._end(None)
        except OSError as error:
            self._end(TailError(f"cannot write to standard output: {error.strerror}"))
        except Exception:  # noqa: BLE001 (the follower would retry it)
            self._end(TailError(f"a bug: {Failure().getTraceback()}"))

    def _print(self, lines: bytes) -> None:
        while lines:
            lines = lines[os.write(self.output, lines) :]

    # ---- checks without an event

    def _poll(self) -> None:
        """Check whether the output is closed, and whether the peer has sent what a writer sends first."""
        poll = select.poll()
        poll.register(self.output, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            self._end(None)
        elif not self._greeted and self.reactor.seconds() - self._since > PATIENCE:
            self._end(TailError(f"no writer answers at {self.endpoint}: is its daemon running there?"))
        elif self._link.peer is not None:
            self._polls += 1
            if self._polls == POLLS and not self._greeted:
                # a web server answers only at the end of a request; a writer ignores blank lines
                self._link.peer.write(b"\r\n\r\n", 0)
            elif self._polls == POLLS:
                self._report_positions()

    def _report_positions(self) -> None:
        """Report streams that the writer does not have, and a ``--from`` that is beyond the end."""
        for stream in sorted({*self.streams} - self._followers.keys()):
            near = did_you_mean(stream, self._followers)
            self._report(f"the writer at {self.endpoint} has no stream {stream!r}{near}; waiting for it", stream)
        short = {key: first for key, first in self._first.items() if first < (self.after or 0)}
        if not self.streams and len(short) < len(self._first):
            return  # some stream has reached the token
        for (stream, instance), first in sorted(short.items(), key=lambda each: each[1])[0 if self.streams else -1 :]:
            text = f"--from {self.after} is beyond {stream} of {instance}, which is at {first}: printing from there"
            self._report(text, (stream, "from"))

    def _log(self, event: LogEvent) -> None:
        """Print warnings of the connection: followers have their own reports, and Twisted logs at a lower level."""
        text = formatEvent(event)
        is_other = not self._greeted and (_HTTP in text or _REDIS in text)  # which has ended it
        is_reported = isinstance(event.get("log_source"), StreamFollower) or is_other
        if event.get("log_level", LogLevel.debug) >= LogLevel.warn and not is_reported:
            self._report(text, self._link)

    def _report(self, text: str, about: object = None) -> None:
        """Print ``text`` to standard error, once until its subject works again; the query of a URL is not compared."""
        reported, gist = self._reported.setdefault(about, set()), re.sub(r"\?\S*", "", text)
        if gist not in reported:
            reported.add(gist)
            report(f"replication tail: {text}")

    def _end(self, error: ReplicationError | None) -> None:
        self._lifetime.end()
        if self._error is None:
            self._error = error
        if self.reactor.running and not self._ending:
            self._ending = True
            self.reactor.stop()
