"""``twistd replication master`` and ``twistd replication worker``: options, and the wiring of a daemon.

Only wiring: what a master or a worker does is in ``master`` and ``worker``, what a key means in ``config``.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import inspect
import os
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import attrs
from twisted.application import service
from twisted.internet import defer
from twisted.internet.address import UNIXAddress
from twisted.internet.endpoints import serverFromString
from twisted.internet.error import CannotListenError
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure
from twisted.python.logfile import BaseLogFile

from replication import __version__, config
from replication.errors import ConfigError, ReplicationError
from replication.master import Master
from replication.net.link import endpoint_trouble
from replication.net.protocol import Limits
from replication.roomkeeper import Rooms
from replication.streams.registry import CACHES
from replication.web.site import make_site
from replication.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.internet.interfaces import IListeningPort, IProtocolFactory

    from replication.streams.registry import StreamDefinition


# ---- options


def _repeated(key: str, meaning: str) -> Callable[[usage.Options, str], None]:
    """Return an ``opt_…`` method for an option that may be given several times."""

    def take(self: usage.Options, value: str) -> None:
        self.setdefault(key, []).append(value)

    take.__doc__ = meaning
    return take


class _StrictOptions(usage.Options):
    """Options that end a wrong command line with one line and status 2; twistd would print a page, and say 1."""

    command: str
    synopsis: str

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Read the command line."""
        try:
            usage.Options.parseOptions(self, options)
        except usage.UsageError as error:
            _complain(f"{error}; see twistd {self.command} --help")
            raise SystemExit(2) from None

    def getSynopsis(self) -> str:
        """Return the first line of the help; by itself twistd would string those of all levels together."""
        return self.synopsis

    def opt_version(self) -> NoReturn:
        """Show the version, and stop."""
        print(f"replication {__version__}")  # noqa: T201
        raise SystemExit(0)


class _RoleOptions(_StrictOptions):
    """What both roles take; nothing has a default here, so that the file can tell what was given."""

    optParameters = [
        ["config", None, None, "TOML file with any of these options, _ for -; an option given here wins"],
        ["server-name", None, None, "what SERVER says or, to a worker, must say [localhost]"],
        [
            "secret-file",
            None,
            None,
            "HTTP wants this file's content as a bearer token; without, it serves loopback only",
        ],
    ]

    opt_stream = _repeated(
        "stream", "a stream: a master declares it, with a table of its own; a worker follows only it *"
    )


class MasterOptions(_RoleOptions):
    """``twistd replication master``."""

    command = "replication master"
    synopsis = "Usage: twistd [-n] replication master [options]        (* may be given several times)"
    optParameters = [
        ["instance-name", None, None, "the writer's name in RDATA and POSITION [master]"],
        ["database", None, None, "sqlite:///FILE or, to forget all, sqlite:// [sqlite:///replication.db]"],
        ["http", None, None, "server endpoint of appends, catch-up, status, metrics [tcp:9093:interface=127.0.0.1]"],
    ]
    opt_listen = _repeated("listen", "server endpoint that workers connect to [tcp:9092:interface=127.0.0.1] *")

    def opt_rooms(self) -> None:
        """Keep rooms: the streams events and backfill, and /v1/rooms over HTTP."""
        self["rooms"] = True


class WorkerOptions(_RoleOptions):
    """``twistd replication worker``."""

    command = "replication worker"
    synopsis = "Usage: twistd [-n] replication worker [options]        (* may be given several times)"
    optParameters = [
        ["instance-name", None, None, "what NAME says; no two processes may share it [worker1]"],
        ["database", None, None, "where facts and positions are kept [sqlite:///replication-INSTANCE.db]"],
        ["http", None, None, "server endpoint of status and metrics [none]"],
        ["app", None, None, "MODULE[:NAME]: import MODULE, call NAME [register] with the Worker"],
    ]
    opt_listen = _repeated("listen", "server endpoint that others connect to, of a worker that writes streams [none] *")
    opt_connect = _repeated("connect", "client endpoint of a writer to follow [tcp:127.0.0.1:9092] *")
    opt_catch_up = _repeated(
        "catch_up", "where missed facts come from: http://…, a database URL, a folder of segments [the writer's HTTP] *"
    )


class Options(_StrictOptions):
    """``twistd replication``."""

    command = "replication"
    synopsis = "Usage: twistd [-n] replication {master|worker} [options]"
    subCommands = [
        ["master", None, MasterOptions, "Write streams, and tell those who follow."],
        ["worker", None, WorkerOptions, "Follow what a master writes."],
    ]

    def postOptions(self) -> None:
        """Insist on a role."""
        if self.subCommand is None:
            raise usage.UsageError("say master or worker")


# ---- wiring


class IServer(Protocol):
    """What a daemon needs of a master or a worker."""

    def start(self) -> defer.Deferred[None]:
        """Begin; the Deferred fails if that cannot be."""
        ...

    def stop(self) -> defer.Deferred[None]:
        """Finish what is open, say goodbye, and fire."""
        ...


@attrs.frozen
class Socket:
    """Something to listen on: ``key`` is what the configuration calls it, ``what`` what the log calls it."""

    key: str
    what: str
    endpoint: str
    make_factory: Callable[[], IProtocolFactory]


class Daemon(service.Service):
    """One server with its sockets, as twistd runs it."""

    log = Logger()

    def __init__(self, reactor: Any, server: IServer, sockets: Sequence[Socket]) -> None:
        """Check the endpoints; ConfigError names one that is none."""
        self._reactor = reactor
        self._server = server
        self._sockets = [(each, _server_endpoint(reactor, each)) for each in sockets]
        self._listening: list[defer.Deferred[IListeningPort]] = []
        self._ports: list[IListeningPort] = []
        self._stopping = False

    def privilegedStartService(self) -> None:
        """Bind the sockets, while we may still be root; nothing is accepted before the reactor runs."""
        for socket, endpoint in self._sockets:
            listening = defer.maybeDeferred(endpoint.listen, socket.make_factory())
            self._listening.append(listening.addCallback(self._keep))

    def startService(self) -> None:
        """Say where we listen, and start the server; if either fails, twistd ends with one line and status 1."""
        service.Service.startService(self)
        signal.signal(signal.SIGHUP, lambda *_: self._reactor.callFromThread(self._reopen_logs))
        self._reactor.callWhenRunning(self._take_sigterm)
        starting = defer.Deferred.fromCoroutine(self._start())
        starting.addErrback(lambda failure: self._reactor.callWhenRunning(self._give_up, failure))

    def stopService(self) -> defer.Deferred[None]:
        """Accept no more, then let the server finish."""
        service.Service.stopService(self)
        self._stopping = True
        return defer.Deferred.fromCoroutine(self._stop())

    def _take_sigterm(self) -> None:
        """End with status 0 after SIGTERM: the reactor's own answer to it makes twistd die of it in the end."""
        signal.signal(signal.SIGTERM, lambda *_: self._reactor.callFromThread(self._end))

    def _end(self) -> None:
        if not self._stopping:
            self._reactor.stop()

    def _keep(self, port: IListeningPort) -> IListeningPort:
        self._ports.append(port)
        return port

    async def _start(self) -> None:
        outcomes = await defer.DeferredList(self._listening, consumeErrors=True)
        for (socket, _), (_, outcome) in zip(self._sockets, outcomes, strict=True):
            if isinstance(outcome, Failure):
                raise ConfigError(
                    f"cannot listen on {socket.endpoint} ({socket.key}): {_reason(socket, outcome.value)}"
                )
            self.log.info("{what} is served at {address}", what=socket.what, address=_spell_address(outcome.getHost()))
        await self._server.start()

    async def _stop(self) -> None:
        for listening in self._listening:
            listening.cancel()
        await defer.DeferredList([defer.maybeDeferred(port.stopListening) for port in self._ports])
        await self._server.stop()

    def _give_up(self, failure: Failure) -> None:
        """End twistd, unless it is ending already."""
        if self._stopping:
            return
        if failure.check(ReplicationError):
            self.log.critical("cannot start: {why}", why=failure.getErrorMessage())
        else:
            self.log.failure("cannot start", failure)
        _complain(failure.getErrorMessage())
        atexit.register(_exit_with_status_1)
        self._reactor.stop()

    def _reopen_logs(self) -> None:
        """Open log files again under their names, after somebody (logrotate) has moved them away.

        twistd keeps its log file to itself, so the garbage collector is asked who is one.
        """
        gc.unfreeze()  # it keeps what is frozen to itself
        files = [each for each in gc.get_objects() if issubclass(type(each), BaseLogFile) and not each.closed]
        gc.freeze()
        for each in files:
            each.reopen()
        self.log.info("SIGHUP: opened {count} log files again", count=len(files))


def _complain(text: str) -> None:
    """Say why we end, on the real standard error: twistd makes log lines of what goes to ``sys.stderr``."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"replication: {text}\n")
        sys.__stderr__.flush()


def _exit_with_status_1() -> None:
    """End the process when all else is done: twistd cannot be told that a service failed, and would end with 0."""
    os._exit(1)


def _reason(socket: Socket, error: BaseException | None) -> str:
    cause = error.socketError if isinstance(error, CannotListenError) else error
    why = getattr(cause, "strerror", None) or str(cause)
    if getattr(cause, "errno", None) != errno.EADDRINUSE:
        return why
    return f"{why}; if another master or worker runs there, stop it, or give another --{socket.key}"


def _server_endpoint(reactor: Any, socket: Socket) -> Any:
    try:
        return serverFromString(reactor, socket.endpoint)
    except Exception as error:  # endpoint parsers, plugins among them, raise what they like
        why = endpoint_trouble(socket.endpoint, error, "tcp:PORT, tcp:PORT:interface=HOST or unix:PATH")
        raise ConfigError(f"{socket.key}: cannot listen on {socket.endpoint!r}: {why}") from error


def _spell_address(address: Any) -> str:
    if isinstance(address, UNIXAddress):
        return f"unix:{os.fsdecode(address.name or b'')}"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def makeService(options: Options) -> service.IService:
    """Return the service that ``twistd replication`` runs; a wrong configuration is one line and status 1."""
    from twisted.internet import reactor  # noqa: PLC0415 (importing it installs it)

    try:
        daemon = make_daemon(reactor, "worker" if options.subCommand == "worker" else "master", options.subOptions)
    except ReplicationError as error:
        _complain(str(error))
        raise SystemExit(1) from error
    gc.freeze()  # what is loaded by now stays: a fifth of a busy worker's time went into looking through it for garbage
    return daemon


def make_daemon(reactor: Any, role: config.Role, options: usage.Options) -> Daemon:
    """Return a master or a worker with its sockets; ConfigError says what cannot work."""
    given = {key.replace("-", "_"): value for key, value in options.items() if key != "config"}
    found = config.load(role, options["config"], given)
    server = make_master(reactor, found) if role == "master" else make_worker(reactor, found)
    sockets = []
    sockets += [Socket("listen", "the wire", each, server.factory) for each in found.listen]
    if found.http is not None:
        rooms = Rooms(server) if found.rooms and isinstance(server, Master) else None
        make_http = partial(make_site, server, secret=found.secret, reactor=reactor, rooms=rooms)
        sockets.append(Socket("http", "HTTP", found.http, make_http))
    return Daemon(reactor, server, sockets)


def make_master(reactor: Any, found: config.Config) -> Master:
    """Return the master that a configuration describes."""
    return Master(
        server_name=found.server_name,
        instance_name=found.instance_name,
        database=found.database,
        streams=[*found.streams, *found.stream],
        limits=_limits(found),
        reactor=reactor,
    )


def make_worker(reactor: Any, found: config.Config) -> Worker:
    """Return the worker that a configuration describes, with the application's functions."""
    definitions: dict[str, StreamDefinition] = {each.name: each for each in found.streams}
    writes = list(found.writes)
    if writes and CACHES in definitions and CACHES not in writes:  # who writes invalidates, too
        writes.append(CACHES)
    worker = Worker(
        connect=found.connect,
        server_name=found.server_name,
        instance_name=found.instance_name,
        database=found.database,
        streams=found.stream or None,
        catch_up=found.catch_up,
        copy=found.copy,
        secret=found.secret,
        writes=[definitions.get(name, name) for name in writes],
        writers={name: attrs.asdict(place, filter=lambda _, value: value) for name, place in found.writers.items()},
        limits=_limits(found),
        reactor=reactor,
    )
    if found.app is not None:
        register_app(found.app, worker)
    return worker


def _limits(found: config.Config) -> Limits:
    return Limits(found.keepalive, found.line_limit, found.max_queued_bytes, found.max_queued_lines)


def register_app(app: str, worker: Worker) -> None:
    """Import MODULE and call NAME, of ``MODULE[:NAME]``, with ``worker``; the current directory is searched too."""
    module_name, colon, name = app.partition(":")
    name = name if colon else "register"
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigError(f"app: {app!r} is not of the form MODULE or MODULE:NAME, with dots for slashes")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"app: {module_name} needs {error.name}, which is not installed") from error
        raise ConfigError(f"app: there is no module {module_name}, neither here nor installed") from error
    except Exception as error:
        raise ConfigError(f"app: {module_name} cannot be imported: {_describe(error)}") from error
    register = getattr(module, name, None)
    if not callable(register):
        raise ConfigError(f"app: {module_name} ({module.__file__}) has no function {name}")
    if inspect.iscoroutinefunction(register):
        raise ConfigError(f"app: {module_name}:{name} must be a plain function: it is called before the reactor runs")
    try:
        inspect.signature(register).bind(worker)
    except TypeError as error:
        raise ConfigError(f"app: {module_name}:{name} must take one argument, the worker: {error}") from error
    try:
        register(worker)
    except Exception as error:
        raise ConfigError(f"app: {module_name}:{name} failed: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Return what an application raised, and the last place in its own folder from where that came, in one line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} in {error.filename}, line {error.lineno}: {error.msg}"
    not_theirs = ("<", *(f"{Path(inspect.getfile(each)).parent}{os.sep}" for each in (config, importlib)))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(not_theirs)]
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not frames:
        return what
    folder = Path(frames[0].filename).parent
    last = [each for each in frames if Path(each.filename).is_relative_to(folder)][-1]
    return f"{what} ({last.filename}, line {last.lineno})"
