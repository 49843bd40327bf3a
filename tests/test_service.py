"""The daemon's wiring: what is listened on, in which order things start and stop, and how each failure ends."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast
from unittest import mock

from twisted.internet.address import IPv4Address, IPv6Address, UNIXAddress
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.error import CannotListenError, ReactorNotRunning
from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactorClock
from twisted.logger import capturedLogs, formatEvent
from twisted.python.logfile import LogFile
from twisted.trial.unittest import SynchronousTestCase

from replication import __version__, config, service
from replication.errors import ConfigError, StoreError
from replication.follower.worker import Worker
from replication.net.listening import Socket
from replication.net.notify import Notifier
from replication.writer.master import Master
from tests.web.served import FakeServed
from twisted import internet

if TYPE_CHECKING:
    from collections.abc import Callable


P = ParamSpec("P")


def temporary_folder(case: SynchronousTestCase) -> Path:
    """Return a folder that goes with the test; trial's own mktemp() would leave it in the checkout."""
    folder = tempfile.TemporaryDirectory()
    case.addCleanup(folder.cleanup)
    return Path(folder.name)


class OptionsTests(SynchronousTestCase):
    """What the command line means."""

    def setUp(self) -> None:
        self.stderr = io.StringIO()
        self.patch(sys, "__stderr__", self.stderr)

    def refusal(self, *arguments: str) -> str:
        """Return the one line that ends a wrong command line, whose status is 2."""
        stopped = self.assertRaises(SystemExit, service.Options().parseOptions, arguments)
        self.assertEqual(stopped.code, 2)
        output = self.stderr.getvalue()
        self.assertEqual(output.count("\n"), 1)
        return output

    def test_every_option_of_a_role_is_taken_and_none_has_a_default(self) -> None:
        """Else an option that was not given would win over the file."""
        for role, options in (("master", service.MasterOptions()), ("worker", service.WorkerOptions())):
            options.parseOptions([])
            self.assertEqual({value for value in options.values() if value}, set())
            keys = {field.name for field in config._KEYS.values() if field.metadata.get("role", role) == role}
            offered = {each.rstrip("=").replace("-", "_") for each in options.longOpt} - {"help", "version", "config"}
            self.assertEqual(offered - keys, set())

    def test_the_contracts_options_are_there(self) -> None:
        both = {"config", "server-name", "instance-name", "database", "http", "stream", "secret-file"}
        self.assertLessEqual(both | {"listen"}, {each.rstrip("=") for each in service.MasterOptions().longOpt})
        offered = {each.rstrip("=") for each in service.WorkerOptions().longOpt}
        self.assertLessEqual(both | {"connect", "catch-up", "app"}, offered)

    def test_an_option_may_be_repeated(self) -> None:
        options = service.Options()
        options.parseOptions(["worker", "--connect", "tcp:a:1", "--connect=tcp:b:2", "--catch-up", "http://c:3"])
        self.assertEqual(options.subOptions["connect"], ["tcp:a:1", "tcp:b:2"])
        self.assertEqual(options.subOptions["catch_up"], ["http://c:3"])

    def test_the_help_of_each_role_fits_a_screen_and_explains_every_option(self) -> None:
        for options in (service.MasterOptions(), service.WorkerOptions()):
            lines = options.getUsage(80).splitlines()
            self.assertLess(len(lines), 30)
            self.assertLessEqual(max(map(len, lines)), 80)
            for line in lines:
                if line.lstrip().startswith("--"):
                    self.assertRegex(line, r"--[\w-]+=? +\S")

    def test_a_role_is_required(self) -> None:
        self.assertEqual(
            self.refusal(), "replication: a role is missing: write master or worker; see twistd replication --help\n"
        )

    def test_an_unknown_role_is_refused_with_the_nearest(self) -> None:
        self.assertIn("Unknown command: wroker; did you mean worker?", self.refusal("wroker"))

    def test_an_unknown_option_is_refused_with_the_nearest(self) -> None:
        self.assertEqual(
            self.refusal("master", "--lisen", "tcp:1"),
            "replication: option --lisen not recognized; did you mean --listen?;"
            " see twistd replication master --help\n",
        )

    def test_the_version_is_the_packages(self) -> None:
        out = io.StringIO()
        self.patch(sys, "stdout", out)
        self.assertRaises(SystemExit, service.Options().parseOptions, ["--version"])
        self.assertEqual(out.getvalue(), f"replication {__version__}\n")


class FakeServer:
    """Records the calls, and starts and stops when the test fires its Deferreds."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.served = FakeServed()
        self.failed: Deferred[Exception] = Deferred()
        self.opened: Deferred[None] = succeed(None)
        self.running: Deferred[None] = Deferred()
        self.stopped: Deferred[None] = Deferred()

    async def started(self) -> None:
        self.events.append("open")
        await self.opened

    def start(self) -> Deferred[None]:
        self.events.append("start")
        return self.running

    def stop(self) -> Deferred[None]:
        self.events.append("stop")
        return self.stopped


class FakePort:
    """A listening port that records its end."""

    def __init__(self, events: list[str], host: Any) -> None:
        self.events = events
        self.host = host

    def getHost(self) -> Any:
        return self.host

    def stopListening(self) -> Deferred[None]:
        self.events.append("port closed")
        return succeed(None)


class FakeEndpoint:
    """Listens with an outcome that the test gives."""

    def __init__(self, events: list[str], outcome: Deferred[Any]) -> None:
        self.events = events
        self.outcome = outcome

    def listen(self, _: object) -> Deferred[Any]:
        self.events.append("listen")
        return self.outcome


class Reactor(MemoryReactorClock):
    """A reactor that runs at once, without threads, and counts calls of ``stop``."""

    def __init__(self) -> None:
        super().__init__()
        self.stops = 0
        self.stopped: Exception | None = None  # raised by the second ``stop``

    def callWhenRunning(
        self,
        callable: Callable[P, object],  # noqa: A002 (Twisted's name)
        *args: P.args,
        **kw: P.kwargs,
    ) -> None:
        callable(*args, **kw)

    def callFromThread(self, function: Callable[[], None]) -> None:
        function()

    def stop(self) -> None:
        self.stops += 1
        if self.stopped is not None and self.stops > 1:
            raise self.stopped


class DaemonTests(SynchronousTestCase):
    """The life of a service that has sockets and a server."""

    def setUp(self) -> None:
        self.addCleanup(gc.unfreeze)  # SIGHUP freezes
        self.addCleanup(signal.signal, signal.SIGHUP, signal.getsignal(signal.SIGHUP))
        self.events: list[str] = []
        self.reactor = Reactor()
        self.server = FakeServer(self.events)
        self.notifier = Notifier(self.reactor, {})
        self.stderr = io.StringIO()
        self.patch(sys, "__stderr__", self.stderr)
        self.at_exit: list[tuple[object, ...]] = []
        self.patch(atexit, "register", lambda *given: self.at_exit.append(given))

    def daemon(self, *outcomes: Deferred[Any], risk: str = "", **options: Any) -> service.Daemon:
        """Return a daemon with a socket per outcome of listening."""
        host = ":interface=db1.example" if risk else ""  # its address is known once it listens
        sockets = [Socket("listen", "the wire", f"tcp:{n}{host}", Factory, risk) for n, _ in enumerate(outcomes)]
        daemon = service.Daemon(self.reactor, cast("Master", self.server), sockets, self.notifier, **options)
        endpoints = [FakeEndpoint(self.events, each) for each in outcomes]
        daemon._endpoints = cast("Any", endpoints)
        return daemon

    def port(self, host: object = None) -> FakePort:
        return FakePort(self.events, host or IPv4Address("TCP", "127.0.0.1", 4711))

    def start(self, daemon: service.Daemon) -> list[str]:
        """Start as twistd does, and return what is logged."""
        with capturedLogs() as logged:
            daemon.privilegedStartService()
            daemon.startService()
        self.flushLoggedErrors()
        return [formatEvent(each) for each in logged]

    def assert_ended(self, error: str) -> None:
        """The reactor was stopped once, and ``error`` will be the last line."""
        self.assertEqual(self.reactor.stops, 1)
        self.assertEqual(self.at_exit, [(service._exit_with_status_1, error)])
        self.assertEqual(self.stderr.getvalue(), "", "shutdown lines come first")

    def test_sockets_are_opened_once_the_database_is(self) -> None:
        self.server.opened = Deferred()
        self.start(self.daemon(succeed(self.port())))
        self.assertEqual(self.events, ["open"])
        self.server.opened.callback(None)
        self.assertEqual(self.events, ["open", "listen", "start"])

    def test_sockets_are_opened_first_if_twistd_then_drops_its_privileges(self) -> None:
        daemon = self.daemon(succeed(self.port()), drops_privileges=True)
        daemon.privilegedStartService()
        self.assertEqual(self.events, ["listen"])
        self.start(daemon)
        self.assertEqual(self.events[-2:], ["open", "start"])

    def test_the_real_address_of_every_socket_is_logged(self) -> None:
        hosts = [IPv4Address("TCP", "127.0.0.1", 1), IPv6Address("TCP", "::1", 2), UNIXAddress(b"r.sock")]
        logged = self.start(self.daemon(*[succeed(self.port(each)) for each in hosts], risk="without TLS"))
        self.assertEqual(
            logged,
            [
                "the wire is served at 127.0.0.1:1",
                "the wire is served at [::1]:2",
                "the wire is served at unix:r.sock",
            ],
        )

    def test_a_socket_that_other_hosts_could_misuse_is_refused_with_the_cure(self) -> None:
        daemon = self.daemon(succeed(self.port(IPv4Address("TCP", "10.0.0.1", 1))), risk="without TLS: do this")
        self.start(daemon)
        self.assert_ended(
            "cannot listen on tcp:0:interface=db1.example (listen): it is open to other hosts without TLS: do this;"
            " in a network where every host is trusted, insecure = true or --insecure allows it"
        )
        self.assertEqual(self.events, ["open", "listen", "port closed"])
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_it_is_refused_before_the_database_is_opened_where_its_endpoint_shows_that(self) -> None:
        for endpoint in ("tcp:1", "tcp:1:0.0.0.0", "tcp:1:interface=10.0.0.1", "tcp:1:interface=", "ssl:1"):
            with self.assertRaisesRegex(ConfigError, "it is open to other hosts without TLS: do this; in a network"):
                self.one(endpoint)
        for endpoint in ("tcp:1:127.0.0.1", "tcp:1:interface=localhost", "unix:x", r"tcp:1:interface=\:\:1"):
            self.one(endpoint)

    def one(self, endpoint: str) -> None:
        socket = Socket("listen", "the wire", endpoint, Factory, "without TLS: do this")
        service.Daemon(self.reactor, cast("Master", self.server), [socket], self.notifier)

    def test_it_is_refused_at_once_if_sockets_are_opened_first(self) -> None:
        port = self.port(IPv4Address("TCP", "10.0.0.1", 1))
        daemon = self.daemon(succeed(port), risk="without TLS", drops_privileges=True)
        daemon.privilegedStartService()
        self.assertEqual(self.events, ["listen", "port closed"])
        daemon.startService()
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_if_that_is_allowed_it_is_warned_of(self) -> None:
        port = self.port(IPv4Address("TCP", "0.0.0.0", 1))
        daemon = self.daemon(succeed(port), risk="without TLS: do this", insecure=True)
        warning = "tcp:0:interface=db1.example (listen) is open to other hosts without TLS: do this"
        self.assertEqual(self.start(daemon)[1], warning)
        self.assertEqual(self.reactor.stops, 0)

    def test_the_server_starts_once_all_sockets_listen(self) -> None:
        slow: Deferred[Any] = Deferred()
        self.start(self.daemon(succeed(self.port()), slow))
        self.assertEqual(self.events, ["open", "listen", "listen"])
        slow.callback(self.port())
        self.assertEqual(self.events[3:], ["start"])

    def test_stopping_closes_the_sockets_and_then_the_server(self) -> None:
        daemon = self.daemon(succeed(self.port()))
        self.start(daemon)
        stopping = daemon.stopService()
        self.assertEqual(self.events[3:], ["port closed", "stop"])
        self.assertNoResult(stopping)
        self.server.stopped.callback(None)
        self.successResultOf(stopping)

    def test_a_port_in_use_ends_the_daemon_with_one_line_and_status_1(self) -> None:
        in_use = CannotListenError("127.0.0.1", 9092, OSError(98, "Address already in use"))
        daemon = self.daemon(succeed(self.port()), fail(in_use))
        logged = self.start(daemon)
        error = (
            "cannot listen on tcp:1 (listen): Address already in use; if another master or worker runs "
            "there, stop it, or give another --listen"
        )
        self.assert_ended(error)
        self.assertEqual(logged, [f"cannot start: {error}"], "and no address is logged")
        self.assertNotIn("start", self.events)
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())
        self.assertEqual(self.events.count("port closed"), 1)

    def test_a_server_that_cannot_start_opens_no_socket_and_its_error_comes_last(self) -> None:
        daemon = self.daemon(succeed(self.port()))
        self.server.opened = fail(StoreError("the disk is full: make room"))
        logged = self.start(daemon)
        self.assert_ended("the disk is full: make room")
        self.assertEqual(self.events, ["open"])
        self.assertEqual(logged, ["cannot start: the disk is full: make room"])
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_a_start_waits_while_its_database_is_in_trouble_that_may_pass_and_serves_meanwhile(self) -> None:
        daemon = self.daemon(succeed(self.port()))
        self.server.opened = fail(StoreError("database 'a.db': locked", temporary=True))
        with capturedLogs() as logged:
            daemon.startService()
            self.assertEqual(self.events, ["open", "listen"])
            self.server.opened = fail(StoreError("database 'a.db': locked", temporary=True))
            self.reactor.advance(service.RETRY_AFTER)
            self.assertEqual(self.events, ["open", "listen", "open"])
            self.server.opened = succeed(None)
            self.reactor.advance(service.RETRY_AFTER)
        self.assertEqual(self.events, ["open", "listen", "open", "open", "start"])
        waits = "the start waits: database 'a.db': locked; next attempt in 2 s"
        texts = [formatEvent(each) for each in logged]
        self.assertEqual(
            texts, [waits, "the wire is served at 127.0.0.1:4711", "the database works, the start goes on"]
        )
        self.assertEqual(self.reactor.stops, 0)
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_a_start_serves_while_its_database_does_not_answer(self) -> None:
        """PostgreSQL lets COMMIT wait without a limit while a standby of synchronous_standby_names is missing."""
        daemon = self.daemon(succeed(self.port()))
        opened = self.server.opened = Deferred()
        with capturedLogs() as logged:
            daemon.startService()
            self.assertEqual(self.events, ["open"])
            self.reactor.advance(service.SILENT_AFTER)
            self.assertEqual(self.events, ["open", "listen"])
            opened.callback(None)
        self.assertEqual(self.events, ["open", "listen", "start"])
        texts = [formatEvent(each) for each in logged]
        waits = "the start waits: the database has not answered for 10 s"
        self.assertEqual(
            texts, [waits, "the wire is served at 127.0.0.1:4711", "the database works, the start goes on"]
        )
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_a_port_in_use_ends_a_start_whose_database_does_not_answer(self) -> None:
        daemon = self.daemon(fail(CannotListenError("127.0.0.1", 9092, OSError(98, "Address already in use"))))
        self.server.opened = Deferred()
        self.start(daemon)
        self.reactor.advance(service.SILENT_AFTER)
        self.assertEqual(self.reactor.stops, 1)
        self.assertIn("Address already in use", str(self.at_exit))

    def test_a_start_that_waits_ends_when_the_daemon_stops(self) -> None:
        daemon = self.daemon(succeed(self.port()))
        self.server.opened = fail(StoreError("database 'a.db': locked", temporary=True))
        self.start(daemon)
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())
        self.assertEqual(self.events, ["open", "listen", "port closed", "stop"])
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_trouble_that_does_not_pass_ends_a_start_that_has_waited(self) -> None:
        daemon = self.daemon(succeed(self.port()))
        self.server.opened = fail(StoreError("locked", temporary=True))
        self.start(daemon)
        self.server.opened = fail(StoreError("its tables are of another program"))
        self.reactor.advance(service.RETRY_AFTER)
        self.assert_ended("its tables are of another program")
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())

    def test_an_error_on_the_terminal_is_not_logged_there_as_well(self) -> None:
        self.server.opened = fail(StoreError("the disk is full: make room"))
        self.assertEqual(self.start(self.daemon(log_errors=False)), [])
        self.assert_ended("the disk is full: make room")

    def test_a_bug_while_starting_is_logged_with_its_traceback(self) -> None:
        self.server.opened = fail(ZeroDivisionError("oops"))
        daemon = self.daemon(log_errors=False)
        daemon.privilegedStartService()
        daemon.startService()
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(self.reactor.stops, 1)

    def test_a_second_signal_or_an_error_that_comes_before_the_stop_is_no_traceback(self) -> None:
        self.addCleanup(signal.signal, signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        daemon = self.daemon(succeed(self.port()))
        self.start(daemon)
        self.reactor.stopped = ReactorNotRunning("Can't stop reactor that isn't running.")
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        self.assertEqual(self.reactor.stops, 2)
        self.server.failed.callback(StoreError("has lost commits"))
        self.assertEqual(self.at_exit, [(service._exit_with_status_1, "has lost commits")])

    def test_a_full_disk_under_standard_error_hides_no_failure(self) -> None:
        """The process ended with status 0, so no supervisor started it again."""
        full = mock.Mock(write=mock.Mock(side_effect=OSError(28, "No space left on device")))
        with mock.patch.object(sys, "__stderr__", full), mock.patch.object(os, "_exit") as ended:
            service._exit_with_status_1("has lost commits")
        ended.assert_called_once_with(1)

    def test_a_stop_while_starting_is_no_failure(self) -> None:
        slow: Deferred[Any] = Deferred()
        daemon = self.daemon(slow)
        self.start(daemon)
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())
        self.assertEqual((self.reactor.stops, self.at_exit), (0, []))

    def test_a_stop_while_the_database_is_opened_opens_no_socket(self) -> None:
        self.server.opened = Deferred()
        daemon = self.daemon(succeed(self.port()))
        self.start(daemon)
        self.server.stopped.callback(None)
        self.successResultOf(daemon.stopService())
        self.server.opened.callback(None)
        self.assertEqual((self.events, self.at_exit), (["open", "stop"], []))

    def test_an_invalid_endpoint_is_named_with_its_key(self) -> None:
        socket = Socket("http", "HTTP", "tpc:1", Factory)
        error = self.assertRaises(ConfigError, service.Daemon, self.reactor, self.server, [socket], self.notifier)
        self.assertIn("http: cannot listen on 'tpc:1': write tcp:PORT", str(error))

    def test_sighup_opens_log_files_again_and_does_not_kill(self) -> None:
        folder = temporary_folder(self)
        log_file = LogFile("twistd.log", str(folder))
        self.addCleanup(log_file.close)
        closed = LogFile("closed.log", str(folder))
        closed.close()
        self.start(self.daemon())
        path = folder / "twistd.log"
        path.rename(folder / "twistd.log.1")
        with capturedLogs() as logged:
            os.kill(os.getpid(), signal.SIGHUP)
        log_file.write("after")
        log_file.flush()
        self.assertEqual(path.read_text(), "after")
        self.assertTrue(closed.closed)
        self.assertIn("SIGHUP: opened 1 log files again", [formatEvent(each) for each in logged])


class WiringTests(SynchronousTestCase):
    """From options to a master or a worker."""

    def setUp(self) -> None:
        self.reactor = MemoryReactorClock()
        patched = mock.patch.object(internet, "reactor", self.reactor, create=True)  # of makeService
        patched.start()
        self.addCleanup(patched.stop)
        self.stderr = io.StringIO()
        self.patch(sys, "__stderr__", self.stderr)

    def options(self, *arguments: str) -> service.Options:
        options = service.Options()
        options.parseOptions(arguments)
        return options

    def daemon(self, *arguments: str) -> service.Daemon:
        return service.make_daemon(self.reactor, self.options(*arguments))

    def test_a_master_has_the_streams_and_sockets_that_were_asked_for(self) -> None:
        daemon = self.daemon(
            "master", "--database", "sqlite://", "--stream", "a", "--stream", "b", "--listen", "unix:w"
        )
        master = daemon.server
        assert isinstance(master, Master)
        self.assertEqual([each.name for each in master.registry][:2], ["a", "b"])
        self.assertEqual(
            [(socket.key, socket.endpoint) for socket in daemon.sockets],
            [("listen", "unix:w"), ("http", "tcp:9093:interface=127.0.0.1")],
        )

    def test_a_master_keeps_rooms_if_it_is_configured(self) -> None:
        for arguments, kept in ((["--rooms"], True), ([], False)):
            master = self.daemon("master", "--database", "sqlite://", *arguments).server
            assert isinstance(master, Master)
            self.assertEqual({"events", "backfill"} <= {each.name for each in master.registry}, kept)

    def test_a_masters_numbers_reach_its_connections(self) -> None:
        path = temporary_folder(self) / "master.toml"
        path.write_text("ping_after = 2\ngive_up_after = 7\nline_limit = 2048\nmax_queued_bytes = 9\n")
        master = service.make_master(self.reactor, config.load("master", str(path), {"database": "sqlite://"}))
        limits = master.limits
        self.assertEqual((limits.keepalive.ping_after, limits.keepalive.give_up_after), (2.0, 7.0))
        self.assertEqual((limits.line_limit, limits.max_queued_bytes, limits.max_queued_lines), (2048, 9, 100_000))

    def test_a_worker_listens_only_where_it_is_configured(self) -> None:
        daemon = self.daemon("worker", "--database", "sqlite://", "--instance-name", "w3")
        self.assertIsInstance(daemon.server, Worker)
        self.assertEqual(daemon.sockets, [])
        daemon = self.daemon("worker", "--database", "sqlite://", "--http", "unix:h")
        self.assertEqual([socket.key for socket in daemon.sockets], ["http"])

    def test_a_worker_that_writes_has_streams_and_a_socket(self) -> None:
        path = Path(self.mktemp())
        path.write_text(
            """
            database = "sqlite://"
            instance_name = "w4"
            listen = ["unix:w"]
            writes = ["orders", "notes"]
            [[streams]]
            name = "orders"
            row = ["order_id"]
            [[streams]]
            name = "caches"
            writers = ["w4", "w5"]
            [[streams]]
            name = "stock"
            writers = ["w5"]
            [writers.w4]
            connect = "tcp:a:1"
            [writers.w5]
            connect = "tcp:b:1"
            """
        )
        daemon = self.daemon("worker", "--config", str(path))
        worker = daemon.server
        assert isinstance(worker, Worker)
        assert worker._master is not None
        self.assertEqual([each.name for each in worker._master.registry], ["orders", "notes", "caches"])
        self.assertEqual(worker._master.registry["orders"].row, ("order_id",))
        self.assertEqual(worker._master.registry["caches"].writers, ("w4", "w5"))
        self.assertEqual([link.endpoint for link in worker._clients], ["tcp:b:1"])
        self.assertEqual([(socket.key, socket.endpoint) for socket in daemon.sockets], [("listen", "unix:w")])

    def test_a_worker_that_listens_and_writes_nothing_is_a_relay(self) -> None:
        for arguments, relays in (
            (["--listen=unix:w", "--http=unix:h"], True),
            (["--http=unix:h"], False),
        ):
            daemon = self.daemon("worker", "--database=sqlite://", *arguments)
            worker = daemon.server
            assert isinstance(worker, Worker)
            self.assertEqual(worker.served.relay_server is not None, relays)
            self.assertEqual([socket.key for socket in daemon.sockets], ["listen"] * relays + ["http"])

    def test_a_wrong_configuration_is_one_line_and_status_1(self) -> None:
        for arguments in (
            ["master", "--config", "absent.toml"],
            ["master", "--database", "mysql://x"],
            ["master", "--listen", "9092"],
            ["worker", "--connect", "9092"],
            ["worker", "--app", "no.such.module"],
        ):
            self.stderr.truncate(self.stderr.seek(0))
            stopped = self.assertRaises(SystemExit, service.makeService, self.options(*arguments))
            self.assertEqual(stopped.code, 1)
            self.assertRegex(self.stderr.getvalue(), r"\Areplication: .+\n\Z")

    def test_the_daemons_timers_do_not_follow_the_wall_clock(self) -> None:
        self.addCleanup(gc.unfreeze)
        self.assertIsNot(self.reactor.seconds, time.monotonic)
        service.makeService(self.options("master", "--database", "sqlite://"))
        self.assertIs(self.reactor.seconds, time.monotonic)

    def test_objects_from_before_the_start_are_not_garbage_collected(self) -> None:
        self.addCleanup(gc.unfreeze)
        service.makeService(self.options("master", "--database", "sqlite://"))
        self.assertGreater(gc.get_freeze_count(), 0)
