"""``twistd replication master`` and ``twistd replication worker``: the options, and a daemon made from them.

``replication.config`` defines what an option means; ``Master`` and ``Worker`` do the work (docs/configuration.md).
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
from twisted.application import service
from twisted.internet import defer
from twisted.internet.error import ReactorNotRunning
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure

from replication import __version__, config
from replication.deferreds import Lifetime, share
from replication.errors import ConfigError, ReplicationError, StoreError, did_you_mean, escape
from replication.logs import TroubleLog, add_observers, reopen_log_files
from replication.net import clock, traces
from replication.net.access import Access
from replication.net.admission import allow_open_files
from replication.net.endpoints import format_address
from replication.net.listening import expiry_of
from replication.net.notify import Notifier
from replication.net.protocol import Limits
from replication.session.connection import Keepalive
from replication.streams.definitions import CACHES
from replication.urls import hide_arguments, hide_secrets
from replication.web.health import Health
from replication.web.site import make_site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from twisted.internet.interfaces import IListeningPort

    from replication.follower.worker import Worker
    from replication.net.listening import Socket
    from replication.writer.master import Master
    from replication.writer.rooms import Rooms

RETRY_AFTER: Final = 2.0  # seconds until the database is tried again at the start
WAITING: Final = "the start waits: {error}; next attempt in {delay:.0f} s"
SILENT_AFTER: Final = 10.0  # seconds until the sockets are opened while the database does not answer; SQLite has 5
SILENT: Final = "the start waits: the database has not answered for {delay:.0f} s"


# ---- options


def _repeated(key: str, meaning: str) -> Callable[[usage.Options, str], None]:
    """Return an ``opt_…`` method for an option that may be given several times."""

    def take(self: usage.Options, value: str) -> None:
        self.setdefault(key, []).append(value)

    take.__doc__ = meaning
    return take


class _StrictOptions(usage.Options):
    """Options that end a wrong command line with one line and status 2; twistd prints a page, and its status is 1."""

    command: str
    synopsis: str

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Read the command line."""
        try:
            usage.Options.parseOptions(self, options)
        except usage.UsageError as error:
            wrong = re.match(r"option (--\S+) not recognized|Unknown command: (\S+)", str(error))
            roles = [each[0] for each in getattr(self, "subCommands", ())]
            known = [*(f"--{each.rstrip('=')}" for each in self.longOpt), *roles]
            near = did_you_mean(wrong[1] or wrong[2], known) if wrong else ""
            _complain(f"{hide_secrets(str(error))}{near}; see twistd {self.command} --help")
            raise SystemExit(2) from None

    def getSynopsis(self) -> str:
        """Return the first line of the help; by itself twistd joins those of all levels."""
        return self.synopsis

    def opt_version(self) -> NoReturn:
        """Print the version, and stop."""
        print(f"replication {__version__}")  # noqa: T201
        raise SystemExit(0)


class _RoleOptions(_StrictOptions):
    """The options of both roles.  None has a default, so that an option that is not given leaves the file's value."""

    longdesc = (
        "Options of twistd stand before `replication`: -n stays in the foreground, --pidfile= writes no PID file."
    )
    optParameters = [
        ["config", None, None, "TOML file with any of these options, _ for -; an option given here wins"],
        ["server-name", None, None, "name in SERVER; a worker requires it [localhost]"],
        ["retention", None, None, "what is kept of what it writes: 30d, 10 GiB [all]"],
        ["secret-file", None, None, "file with the secret of HTTP; none: loopback only"],
    ]

    def opt_insecure(self) -> None:
        """listen beyond loopback without TLS or secret"""  # noqa: D403, D400 (the text of --help)
        self["insecure"] = True


class MasterOptions(_RoleOptions):
    """``twistd replication master``."""

    command = "replication master"
    synopsis = "Usage: twistd [-n] replication master [options]        (* may be given several times)"
    optParameters = [
        ["instance-name", None, None, "name of this writer in RDATA and POSITION [master]"],
        ["database", None, None, "sqlite:///FILE, sqlite:// (memory), postgresql://… [sqlite:///replication.db]"],
        ["http", None, None, "endpoint of the HTTP API [tcp:9093:interface=127.0.0.1]"],
    ]
    opt_listen = _repeated("listen", "endpoint that workers connect to [tcp:9092:interface=127.0.0.1] *")
    opt_stream = _repeated("stream", "declare this stream, with a generic table *")

    def opt_rooms(self) -> None:
        """keep rooms: declare the streams events and backfill, serve /v1/rooms"""  # noqa: D403, D400 (the text of --help)
        self["rooms"] = True


class WorkerOptions(_RoleOptions):
    """``twistd replication worker``."""

    command = "replication worker"
    synopsis = "Usage: twistd [-n] replication worker [options]        (* may be given several times)"
    optParameters = [
        ["instance-name", None, None, "name of this process; no two processes may share it [worker1]"],
        ["database", None, None, "own database [sqlite:///replication-INSTANCE.db]"],
        ["http", None, None, "endpoint of the HTTP API [none]"],
        ["redis-password-file", None, None, "file with the password of Redis"],
        ["app", None, None, "MODULE[:NAME]: import MODULE, call NAME [register] with the Worker"],
    ]
    opt_listen = _repeated(
        "listen", "endpoint that followers connect to: they get what it writes, or what it follows [none] *"
    )
    opt_connect = _repeated("connect", "writer to follow: endpoint or redis://… [tcp:127.0.0.1:9092] *")
    opt_stream = _repeated("stream", "follow this stream only *")
    opt_catch_up = _repeated(
        "catch_up", "source of missed facts: http://…, a database URL, a folder of segments [the writer's HTTP] *"
    )

    def opt_accept_new_history(self) -> None:
        """follow an emptied or exchanged database from the beginning; go back without on_reset"""  # noqa: D403, D400 (the text of --help)
        self["accept_new_history"] = True

    def opt_skip_gone(self) -> None:
        """leave out facts that no source has any more"""  # noqa: D403, D400 (the text of --help)
        self["skip_gone"] = True


class Options(_StrictOptions):
    """``twistd replication``."""

    command = "replication"
    synopsis = "Usage: twistd [-n] replication {master|worker} [options]"
    subCommands = [
        ["master", None, MasterOptions, "Write streams, and publish their facts to followers."],
        ["worker", None, WorkerOptions, "Follow the streams of a master or of several writers."],
    ]

    def postOptions(self) -> None:
        """Require a role."""
        if self.subCommand is None:
            raise usage.UsageError("a role is missing: write master or worker")


# ---- wiring


@attrs.define(eq=False, slots=False)
class Daemon(service.Service):
    """One server with its sockets, as twistd runs it; ConfigError names a wrong endpoint.

    Sockets are opened after the database.  A failed start therefore opens none, and the error is the last line.
    While the database is in trouble that may pass, the start waits; sockets are open then, and show why.
    With ``drops_privileges`` sockets are opened first, because afterwards this user may not open them.  With
    ``log_errors`` the error of a failed start is logged too, not only written to standard error.  A socket that is not
    safe is refused, unless ``insecure``.  ``notifier`` notifies systemd that the start has succeeded, and that the
    process lives.  ``read_access`` reads secrets and rights again; ConfigError changes nothing.
    """

    log = Logger()

    reactor: Any
    server: Master | Worker
    sockets: Sequence[Socket]
    notifier: Notifier
    insecure: bool = attrs.field(default=False, kw_only=True)
    read_access: Callable[[], None] = attrs.field(default=lambda: None, kw_only=True)
    drops_privileges: bool = attrs.field(default=False, kw_only=True)
    log_errors: bool = attrs.field(default=True, kw_only=True)
    _ports: list[defer.Deferred[IListeningPort]] = attrs.field(factory=list, init=False)
    _serving: bool = attrs.field(default=False, init=False)
    _stopping: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._lifetime = Lifetime(self.reactor)
        self._trouble = TroubleLog(self.log)
        self._health = Health(self.server.served, self.reactor)
        self._endpoints = [each.parse(self.reactor, insecure=self.insecure) for each in self.sockets]

    def privilegedStartService(self) -> None:
        """Open the sockets if twistd drops its privileges next; nothing is accepted before the reactor runs."""
        if self.drops_privileges:
            self._open_sockets()

    def startService(self) -> None:
        """Start the server, then open the sockets; if either fails, end twistd with one line and status 1."""
        service.Service.startService(self)
        signal.signal(signal.SIGHUP, lambda *_: self.reactor.callFromThread(self._reopen))
        self.reactor.callWhenRunning(self._take_sigterm)
        starting = defer.Deferred.fromCoroutine(self._start())
        starting.addErrback(lambda failure: self.reactor.callWhenRunning(self._give_up, failure))

    def stopService(self) -> defer.Deferred[None]:
        """Close the sockets, then stop the server."""
        service.Service.stopService(self)
        self._stopping = True
        self.notifier.stopping()
        self._health.stop()
        self._lifetime.end()
        return defer.Deferred.fromCoroutine(self._stop())

    def _take_sigterm(self) -> None:
        """End with status 0 after SIGTERM: with the reactor's own handler twistd would end with the signal."""
        signal.signal(signal.SIGTERM, lambda *_: self.reactor.callFromThread(self._end))

    def _end(self) -> None:
        if not self._stopping:
            self._stop_reactor()

    def _stop_reactor(self) -> None:
        with suppress(ReactorNotRunning):  # another signal has stopped it, and ``stopService`` is called next
            self.reactor.stop()

    def _open_sockets(self) -> None:
        opening = zip(self.sockets, self._endpoints, strict=True)
        self._ports = [
            defer.Deferred.fromCoroutine(each.open(endpoint, insecure=self.insecure)) for each, endpoint in opening
        ]

    async def _start(self) -> None:
        await self._open_database()
        if self._stopping:
            return
        await self._serve()
        if self._stopping:
            return
        self.server.failed.addCallback(self._end_with)
        self.notifier.ready(self._health.process_fault, lambda: "; ".join(self._health.stream_faults()) or "ready")
        await self.server.start()

    async def _open_database(self) -> None:
        """Start the server; while its database is in trouble that may pass, wait, and serve what shows that."""
        while not self._stopping:
            silent = self.reactor.callLater(SILENT_AFTER, self._serve_meanwhile)
            try:
                await self.server.started()
            except StoreError as error:
                if not error.temporary:
                    raise
                if self._trouble.report(WAITING, error=error, delay=RETRY_AFTER):
                    self.notifier.status(WAITING.format(error=error, delay=RETRY_AFTER))
            else:
                self._trouble.end("the database works, the start goes on")
                return
            finally:
                if silent.active():
                    silent.cancel()
            await self._serve()
            await self._lifetime.sleep(RETRY_AFTER)

    def _serve_meanwhile(self) -> None:
        """Serve what shows that the start waits for a statement; PostgreSQL may let COMMIT wait without a limit."""
        if self._stopping:
            return
        text = SILENT.format(delay=SILENT_AFTER)
        if self._trouble.report("{error}", error=text):
            self.notifier.status(text)
        serving = defer.Deferred.fromCoroutine(self._serve())
        serving.addErrback(lambda failure: self.reactor.callWhenRunning(self._give_up, failure))

    async def _serve(self) -> None:
        """Open the sockets, once; ConfigError if one cannot be opened."""
        if self._serving:
            return
        self._serving = True
        if not self._ports:
            self._open_sockets()
        opened = await defer.DeferredList([share(each) for each in self._ports], consumeErrors=True)
        for _, port in opened:
            if isinstance(port, Failure):
                port.raiseException()
        for socket, endpoint, (_, port) in zip(self.sockets, self._endpoints, opened, strict=True):
            address = port.getHost()
            self.log.info("{what} is served at {address}", what=socket.what, address=format_address(address))
            socket.warn_of_certificate(endpoint)
            if socket.risk_at(address):
                text = "{endpoint} ({key}) is open to other hosts {risk}"
                self.log.warn(text, endpoint=socket.endpoint, key=socket.key, risk=socket.open_risk)

    async def _stop(self) -> None:
        for each in self._ports:
            each.cancel()
        ports = await defer.DeferredList(self._ports, consumeErrors=True)
        await defer.DeferredList([defer.maybeDeferred(port.stopListening) for opened, port in ports if opened and port])
        await self.server.stop()

    def _give_up(self, failure: Failure) -> None:
        """End twistd, unless it is ending already."""
        if self._stopping:
            return
        if not failure.check(ReplicationError):
            self.log.failure("cannot start", failure)
        elif self.log_errors:
            self.log.critical("cannot start: {why}", why=failure.getErrorMessage())
        self._end_with(failure.value)

    def _end_with(self, error: BaseException | None) -> None:
        """End twistd with status 1, so that a supervisor starts it again; do nothing if it is ending already."""
        if not self._stopping:
            self._stopping = True
            self.notifier.status(str(error))
            atexit.register(_exit_with_status_1, str(error))
            self._stop_reactor()

    def _reopen(self) -> None:
        """Open log files again, after logrotate has moved them; read certificates, secrets and rights again."""
        self.log.info("SIGHUP: opened {count} log files again", count=reopen_log_files())
        for socket, endpoint in zip(self.sockets, self._endpoints, strict=True):
            socket.read_certificates(endpoint)
        try:
            self.read_access()
        except ConfigError as error:
            self.log.error("secrets and rights stay as they were: {error}", error=str(error))


def _complain(text: str) -> None:
    """Write why the process ends to the real standard error: twistd logs what is written to ``sys.stderr``.

    If that is on a full disk, or its reader has ended, the status still shows that the process has failed.
    """
    if sys.__stderr__ is not None:
        with suppress(OSError):
            sys.__stderr__.write(f"replication: {escape(text)}\n")
            sys.__stderr__.flush()


def _exit_with_status_1(text: str) -> None:
    """End the process, with the error as its last line: after a service that failed, twistd's own status is 0."""
    _complain(text)
    os._exit(1)


def makeService(options: Options) -> service.IService:
    """Return the service that ``twistd replication`` runs; a wrong configuration ends it with one line and status 1."""
    from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)

    add_observers(reactor)
    hide_arguments()
    clock.use_monotonic_clock(reactor)  # before anything is scheduled: twistd has no timer of its own
    allow_open_files()
    try:
        daemon = make_daemon(reactor, options)
    except ReplicationError as error:
        _complain(str(error))
        raise SystemExit(1) from error
    gc.freeze()  # what is loaded by now stays: without this, garbage collection took a fifth of a busy worker's time
    return daemon


def make_daemon(reactor: Any, options: Options) -> Daemon:
    """Return a master or a worker with its sockets; ConfigError if its configuration cannot work."""
    role: config.Role = "worker" if options.subCommand == "worker" else "master"
    given = {key.replace("-", "_"): value for key, value in options.subOptions.items() if key != "config"}
    file = options.subOptions["config"]
    read = partial(config.load, role, None if file is None else str(Path(file).resolve()), dict(given))
    found = config.load(role, file, given)
    rooms = None
    server: Master | Worker
    if role == "master":
        server = make_master(reactor, found)
        rooms = make_rooms(server, found)
    else:
        server = make_worker(reactor, found)
        if found.app is not None:
            from replication.follower.app_module import register_app  # noqa: PLC0415 (only a worker needs it)

            register_app(found.app, server)
    traces.run(reactor, found.traces, found.instance_name, __version__)
    access = Access(found.grants)
    given = {"reactor": reactor, "rooms": rooms, "bounds": found.bounds, "access": access}
    expires: dict[str, datetime] = {}
    given["expires"] = lambda: {**expires, **expiry_of(found.tls.certificate)}
    make_http = partial(make_site, server.served, secret=found.secret, live_page=found.live_page, **given)
    sockets = config.sockets_of(found, partial(server.factory, access), make_http, expires)
    twistd: Mapping[str, object] = options.parent or {}
    return Daemon(
        reactor,
        server,
        sockets,
        Notifier(reactor, os.environ),
        insecure=found.insecure,
        read_access=partial(config.replace_access, access, found, read),
        drops_privileges=any(twistd.get(each) is not None for each in ("uid", "gid")),
        log_errors=not twistd.get("nodaemon") or twistd.get("logfile") not in (None, "-"),
    )


def make_master(reactor: Any, found: config.Config) -> Master:
    """Return the master of a configuration; ConfigError if it is refused.  Nothing is opened, and no file is made."""
    from replication.writer.master import Master  # noqa: PLC0415 (a worker that writes nothing starts sooner without it)

    master = Master(
        server_name=found.server_name,
        instance_name=found.instance_name,
        database=found.database,
        streams=[*found.streams, *found.stream],
        limits=_limits(found),
        reactor=reactor,
    )
    _set_retention(master, reactor, found)
    return master


def make_rooms(master: Master, found: config.Config) -> Rooms | None:
    """Return the rooms of a master, None if it keeps none; ConfigError if a stream has the name of one of theirs."""
    if not found.rooms:
        return None
    from replication.writer.rooms import Rooms  # noqa: PLC0415 (few masters keep rooms)

    return Rooms(master)


def make_worker(reactor: Any, found: config.Config) -> Worker:
    """Return the worker of a configuration, without the functions of ``app``; ConfigError as ``make_master``."""
    from replication.follower.worker import Worker  # noqa: PLC0415 (a master starts a tenth sooner without it)

    definitions = {str(each.name): each for each in found.streams}
    writes, caches = list(found.writes), definitions.get(CACHES)
    if writes and caches and caches.position_name is None and CACHES not in writes:  # a writer publishes invalidations
        writes.append(CACHES)
    worker = Worker(
        connect=[each.reveal() for each in found.connect],
        server_name=found.server_name,
        instance_name=found.instance_name,
        database=found.database,
        streams=found.stream or None,
        catch_up=found.catch_up,
        copy=found.copy,
        accept_new_history=found.accept_new_history,
        skip_gone=found.skip_gone,
        access_tokens=found.access_tokens,
        audit_interval=found.audit_interval,
        relay=found.relays,
        definitions=found.streams,
        secret=found.secret,
        certificate=found.tls.shown,
        redis_password=found.redis_password,
        writes=[definitions.get(name, name) for name in writes],
        writers={name: place.texts() for name, place in found.writers.items()},
        limits=_limits(found),
        reactor=reactor,
    )
    if writes:
        _set_retention(worker.served.writer(), reactor, found)
    return worker


def _set_retention(master: Master, reactor: Any, found: config.Config) -> None:
    from replication.writer.segment_needs import set_retention  # noqa: PLC0415 (only a process that writes needs it)

    set_retention(master, reactor, found.retention, found.retention_segments, force=found.retention_force)


def _limits(found: config.Config) -> Limits:
    keepalive = Keepalive(ping_after=found.ping_after, give_up_after=found.give_up_after)
    return Limits(keepalive, found.line_limit, found.max_queued_bytes, found.max_queued_lines, found.bounds)
