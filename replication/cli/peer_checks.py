"""Checks of ``replication doctor`` on processes: this one, if it runs, and its writers.  They only read."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from replication.cli.findings import Finding
from replication.cli.own_checks import MAX_CLOCK_DIFFERENCE, RENEW_BEFORE
from replication.cli.status import fetch
from replication.errors import ConfigError, did_you_mean
from replication.net.access import ALL
from replication.net.endpoints import default_http_url, is_redis, split_endpoint
from replication.web.blocking_client import HttpClient, HttpError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from replication.config import Config
    from replication.urls import Url

PATIENCE: Final = 5.0  # seconds for a line of the wire
MAX_LAG: Final = 1_000  # IDs
MAX_LINE: Final = 1_024  # bytes of a first line
LOOK_AGAIN: Final = 1.0  # seconds; a lag that falls is no finding


def check_process(client: HttpClient) -> Iterator[Finding]:
    """Find what the status of a running process shows."""
    try:
        before = fetch(client)
        time.sleep(LOOK_AGAIN)
        status = fetch(client)
    except HttpError as error:
        yield Finding(client.url, str(error), _http_cure(error))
        return
    yield from _check_clock(client)
    if status["not_ready"]:
        yield Finding(
            client.url, f"it is not ready: {status['not_ready']}", "see docs/troubleshooting.md for the reason"
        )
    lags = _lags(before)
    for stream in status["streams"]:
        for note in stream.get("notes", ()):
            yield Finding(f"stream {stream['name']}", note, "do as the message advises")
        for writer in stream["writers"]:
            where = f"stream {stream['name']} of {writer['instance']}"
            yield from _check_writer(where, stream["name"], writer)
            if MAX_LAG < writer["lag"] >= lags.get((stream["name"], writer["instance"]), 0) > 0:
                what = f"it lags by {writer['lag']} IDs, and the lag does not fall"
                yield Finding(where, what, "see why in `replication status`; a slow function is the usual cause")
    yield from _check_names(client.url, status)


def _check_writer(where: str, stream: str, writer: Mapping[str, Any]) -> Iterator[Finding]:
    if (failed := writer.get("failed")) is not None:
        cure = f"correct the function, or replication skip {stream} {writer['instance']} {failed}"
        yield Finding(where, f"its function cannot take fact {failed}: {writer['error']}", cure)
    elif writer["error"]:
        yield Finding(where, f"it is stopped: {writer['error']}", "correct what the error names; it goes on by itself")
    if skipped := writer.get("skipped"):
        cure = "`replication skipped` lists them, `replication retry` applies one"
        yield Finding(where, f"facts that were skipped: {skipped}", cure)


def _lags(status: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    return {
        (stream["name"], writer["instance"]): writer["lag"]
        for stream in status["streams"]
        for writer in stream["writers"]
    }


def _check_names(where: str, status: Mapping[str, Any]) -> Iterator[Finding]:
    names = [each["name"] for each in status["connections"] if each["name"]]
    for name in sorted({each for each in names if names.count(each) > 1}):
        what = f"{names.count(name)} connections have the instance name {name!r}"
        yield Finding(where, what, "give each process its own --instance-name")


def check_writers(config: Config, certificate: tuple[str, str] | None) -> Iterator[Finding]:
    """Find what keeps a worker from following its writers: ports, TLS, names, secrets, streams, clocks."""
    places = [(place.connect, place.http) for place in config.writers.values()]
    places += [(each, None) for each in config.connect]
    known: set[str] = set()
    complete = True
    for connect, given in places:
        if connect is not None and not is_redis(connect.reveal()):
            yield from check_wire(connect, config.server_name)
        url = None if given is None else given.reveal()
        if url is None and connect is not None:
            url = default_http_url(connect.reveal())
        if url is None:
            complete = False
            continue
        found: list[str] | None = None
        try:
            with closing(HttpClient(url, config.secret, certificate=certificate)) as client:
                found, findings = _ask_writer(client, config)
        except ConfigError as error:
            findings = [Finding(url, str(error), "correct the URL")]
        yield from findings
        known.update(found or ())
        complete = complete and found is not None
    wanted = [(f"stream {name}", "it", name, "stream") for name in config.stream]
    for each in config.grants if config.relays else ():
        names = sorted(each.rights.read - {ALL, *config.writes})
        wanted += [(f"access.{each.name}", f"a stream {name!r}", name, "read") for name in names]
    for where, what, name, key in wanted if complete and places else ():
        if name not in known:
            near = did_you_mean(name, known) or f"; known: {', '.join(sorted(known)) or 'none'}"
            yield Finding(where, f"no writer has {what}", f"correct {key}{near}")


def _ask_writer(client: HttpClient, config: Config) -> tuple[list[str] | None, list[Finding]]:
    """Return the names of a writer's streams, None if it does not answer, and findings."""
    try:
        status = fetch(client)
    except HttpError as error:
        return None, [Finding(client.url, str(error), _http_cure(error))]
    findings = [*_check_clock(client), *_check_names(client.url, status)]
    if status["instance_name"] == config.instance_name:
        what = f"this writer has the instance name of this worker, {config.instance_name!r}"
        findings.append(Finding(client.url, what, "give each process its own --instance-name"))
    return [each["name"] for each in status["streams"]], findings


def _check_clock(client: HttpClient) -> Iterator[Finding]:
    if client.server_time is not None and abs(client.server_time - time.time()) > MAX_CLOCK_DIFFERENCE:
        what = f"its clock differs from this machine's by {client.server_time - time.time():.0f} s"
        yield Finding(client.url, what, "set both clocks, for example by NTP")


def _http_cure(error: HttpError) -> str:
    if isinstance(error, UnavailableError):
        return "start the process, or correct the URL"
    return "correct the URL, the secret or the certificate"


def check_wire(endpoint: Url, server_name: str) -> Iterator[Finding]:
    """Find why an endpoint of ``connect`` is not followed: it must send SERVER with the right name."""
    kind, named = split_endpoint(endpoint.reveal(), "host", "port")
    host, port = named.get("host", ""), named.get("port", "")
    where = str(endpoint)
    if kind not in {"tcp", "tls"} or not port.isdecimal():
        return
    try:
        line, days = _first_line(host, int(port), tls=kind == "tls", named=named)
    except ssl.SSLCertVerificationError as error:
        cure = "connect to a name that it has; else renew the certificate, set the clock, or give SSL_CERT_FILE"
        yield Finding(where, f"its certificate is refused: {error.verify_message}", cure)
    except ssl.SSLError as error:
        what = f"TLS fails: {error.reason or error}"
        yield Finding(where, what, "tls: with ssl:, tcp: with tcp:; it may demand a client certificate")
    except TimeoutError:
        yield Finding(where, "no SERVER line arrives", "name a writer's --listen port; is this its --http port?")
    except OSError as error:
        yield Finding(where, f"cannot connect: {error.strerror or error}", "start the writer, or correct connect")
    else:
        if days is not None and days < RENEW_BEFORE.days:
            yield Finding(where, f"its certificate expires in {days:.1f} days", "renew it there, and send SIGHUP")
        word, _, name = line.partition(" ")
        if word != "SERVER":
            what = f"it sends {line[:60]!r}, which is no SERVER line" if line else "it closes the connection"
            yield Finding(where, what, "name the endpoint of a writer's --listen; tls: if that is ssl:")
        elif name != server_name:
            yield Finding(
                where, f"its server name is {name!r}, not {server_name!r}", "use one server_name on both sides"
            )


def _first_line(host: str, port: int, *, tls: bool, named: Mapping[str, str]) -> tuple[str, float | None]:
    """Return the first line that a peer sends, and in how many days its certificate expires, if it has one.

    TimeoutError after PATIENCE seconds without a line.
    """
    days = None
    reading = socket.create_connection((host, port), PATIENCE)
    if tls:
        context = ssl.create_default_context()
        if "certificate" in named:
            context.load_cert_chain(named["certificate"], named.get("privateKey"))
        secure = context.wrap_socket(reading, server_hostname=host)  # if it fails, it closes the connection
        shown = secure.getpeercert()
        days = None if shown is None else (ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()) / 86_400
        reading = secure
    data = b""
    with closing(reading):
        while b"\n" not in data and len(data) < MAX_LINE and (part := reading.recv(MAX_LINE)):
            data += part
    return data.partition(b"\n")[0].decode("utf-8", "backslashreplace").strip(), days
