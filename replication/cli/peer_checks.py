"""Checks of ``replication doctor`` on processes: this one, if it runs, and its writers.  They only read."""

from __future__ import annotations

import secrets
import socket
import ssl
import time
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypedDict

from twisted.internet.endpoints import clientFromString

from replication.cli import tls_checks
from replication.cli.findings import Finding, in_thread, together
from replication.cli.own_checks import MAX_CLOCK_DIFFERENCE, RENEW_BEFORE
from replication.cli.status import fetch
from replication.cli.tls_checks import check_https, describe_tls_failure, first_line
from replication.errors import ConfigError, did_you_mean
from replication.follower.catch_up import HTTP
from replication.net.access import ALL
from replication.net.endpoints import default_http_url, is_redis, show_certificate, split_endpoint
from replication.streams.definitions import CACHES
from replication.web.blocking_client import HttpClient, HttpError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from replication.config import Config
    from replication.urls import Url

MAX_LAG: Final = 1_000  # IDs
_NOT_READY: Final = {  # by words of the reason
    "is stopped": "that of the finding of each stopped stream",
    "no connection to the writer": "start the writer, or correct connect",
    "[writers.": "correct the address in this table, and restart the worker",
    "timers have not run": "restart the process",
}
_AWAY: Final = ("no connection to the writer", "[writers.")  # words of these reasons
_GOES_ON: Final = "correct what the error names; the stream then goes on without a restart"
_WRITE_SEGMENTS: Final = "run `replication replay --out` with this folder regularly"
_STOPPED: Final = {  # by words of the error
    "@worker.on_reset(": "do what the error names, and restart the worker",
    "--accept-new-history": "do what the error names; if you change an option, restart the worker",
    "--skip-gone": "do what the error names, and restart the worker",
    "applying ": f"if the function is wrong, correct it and restart the worker; else {_GOES_ON}",
}
_NO_SERVER: Final = "name a writer's --listen port, not --http; or tls: for TLS; or restart that process, if it hangs"
ELSEWHERE: Final = "elsewhere"  # the state of a writer that publishes its facts itself, into the same database
_OF_WRITERS: Final = frozenset(
    {"writing", "opening", "stopped", "former", ELSEWHERE}
)  # states where a stream is written
LOOK_AGAIN: Final = 1.0  # seconds; a lag that falls is no finding
WHOLE: Final = 15.0  # seconds for a whole answer of HTTP


class _Updates(TypedDict):
    upto_token: int
    updates: list[Any]


class _LimitedClient(HttpClient):
    """A client that waits WHOLE seconds for an answer, however often a byte of it arrives."""

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Send one request, and return the body of the answer; HttpError, also if it is not whole in time."""
        answer = in_thread(partial(HttpClient.request, self, method, path, body, headers))
        try:
            return answer.result(WHOLE)
        except TimeoutError as error:
            if (reading := self._connection.sock) is not None:
                with suppress(OSError):
                    socket.socket.shutdown(reading, socket.SHUT_RDWR)  # else ``close`` waits for the other thread
            raise self.failure(error) from error


def open_client(url: str, secret: str | None, certificate: tuple[str, str] | None) -> HttpClient:
    """Return a client that waits a few seconds for an answer, not a minute."""
    return _LimitedClient(url, secret, certificate=certificate, timeout=tls_checks.PATIENCE)


def check_process(client: HttpClient) -> Iterator[Finding]:
    """Find what the status of a running process shows."""
    try:
        before = fetch(client)
        time.sleep(LOOK_AGAIN)
        status = fetch(client)
    except HttpError as error:
        yield from _describe_http(client, error)
        return
    yield from _check_clock(client)
    if status["not_ready"]:
        why = status["not_ready"]
        cures = [cure for words, cure in _NOT_READY.items() if words in why] or ["correct what it names"]
        yield Finding(client.url, f"it is not ready: {why}", "; ".join(cures))
    if hidden := status.get("hidden"):  # an earlier version answers without it
        what = f"the rights of this secret or certificate hide {hidden} streams, which were not checked"
        yield Finding(
            client.url, what, "use a secret or certificate with the right `admin`, or with `read` of all streams"
        )
    lags = _lags(before)
    for stream in status["streams"]:
        for note in stream.get("notes", ()):
            forget = f"start these followers, or forget one: curl -X DELETE {client.url}/v1/followers/NAME"
            by_note = {"are kept for follower": forget, "are kept for the segments in": _WRITE_SEGMENTS}
            cure = next((cure for words, cure in by_note.items() if words in note), "do as the message advises")
            yield Finding(f"stream {stream['name']}", note.removeprefix(f"stream {stream['name']!r}: "), cure)
        for writer in stream["writers"]:
            where = f"stream {stream['name']} of {writer['instance']}"
            yield from _check_writer(where, stream["name"], writer, client.url)
            if not writer["error"] and MAX_LAG < writer["lag"] >= lags.get((stream["name"], writer["instance"]), 0) > 0:
                what = f"it lags by {writer['lag']} IDs, and the lag does not fall"
                yield Finding(where, what, "see why in `replication status`; a slow function is the usual cause")
    away = any(words in (status["not_ready"] or "") for words in _AWAY)  # a writer that may have the stream
    if status["role"] == "worker" and not away:
        yield from _check_streams(status["streams"], status["instance_name"])
    yield from _check_names(client.url, status)


def _check_streams(streams: Sequence[Mapping[str, Any]], own: str) -> Iterator[Finding]:
    known = [each["name"] for each in streams if each["writers"]]
    for each in streams:
        if not each["writers"]:
            what = "no writer has sent a position of it since the start, so no fact of it arrives"
            cure = f"correct the name in @worker.on, or in stream{did_you_mean(each['name'], known)}"
            yield Finding(f"stream {each['name']}", what, cure)
    # A worker that writes a stream, and follows some of its other writers. One that follows none only writes it.
    missing: dict[str, list[str]] = {}
    for each in streams:
        states = {writer["instance"]: writer["state"] for writer in each["writers"]}
        if each["name"] != CACHES and not _OF_WRITERS.issuperset(states.values()):
            for name in (name for name, state in states.items() if state == ELSEWHERE and name != own):
                missing.setdefault(name, []).append(each["name"])
    yield from (_not_followed(name, names) for name, names in missing.items())


def _check_writer(where: str, stream: str, writer: Mapping[str, Any], url: str) -> Iterator[Finding]:
    if (failed := writer.get("failed")) is not None:
        cure = (
            f"correct the function and restart, or replication skip {stream} {writer['instance']} {failed} --http {url}"
        )
        yield Finding(where, f"its function cannot take fact {failed}: {writer['error']}", cure)
    elif writer["error"]:
        cure = next((cure for words, cure in _STOPPED.items() if words in writer["error"]), _GOES_ON)
        yield Finding(where, f"it is stopped: {writer['error']}", cure)
    if skipped := writer.get("skipped"):
        cure = f"`replication skipped --http {url}` lists them, `replication retry` applies one"
        yield Finding(where, f"facts that were skipped: {skipped}", cure)


def _lags(status: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    return {
        (stream["name"], writer["instance"]): writer["lag"]
        for stream in status["streams"]
        for writer in stream["writers"]
    }


def _check_names(where: str, status: Mapping[str, Any]) -> Iterator[Finding]:
    # A worker's own connections to its writers have the name of the server.
    outgoing = status["server_name"] if status["role"] == "worker" else None
    names = [each["name"] for each in status["connections"] if each["name"] not in ("", outgoing)]
    for name in sorted({each for each in names if names.count(each) > 1}):
        what = f"{names.count(name)} connections have the instance name {name!r}"
        yield Finding(where, what, "give each process its own --instance-name")


def check_writers(config: Config, certificate: tuple[str, str] | None) -> Iterator[Finding]:
    """Find what keeps a worker from following its writers: ports, TLS, names, secrets, streams, clocks.

    A worker does not connect to itself: one file may have the tables ``[writers.NAME]`` of all processes.
    ``certificate``: the files with the certificate and key that TLS shows.
    """
    writers = {name: place for name, place in config.writers.items() if name != config.instance_name}
    places: list[tuple[str | None, Url | None, Url | None]]
    places = [(name, place.connect, place.http) for name, place in writers.items()]
    places += [(None, each, None) for each in config.connect]
    over_http = [each for each in config.catch_up if config.role == "worker" and each.startswith(HTTP)]
    asked = [place.http for place in writers.values()]
    places += [(None, None, each) for each in over_http if each not in asked]
    # Where these sources of missed facts are used instead, several writers may have some of the streams only.
    alone = len(config.connect) + len(writers) == 1
    answers = together(
        partial(_check_place, config, certificate, *each, instead=bool(over_http), alone=alone) for each in places
    )
    for findings, _, _ in answers:
        yield from findings
    if places and all(complete for _, _, complete in answers):
        found = [status for _, status, _ in answers if status is not None]
        yield from _check_names_of_streams(config, found)
        yield from _find_not_followed(config, found)


def _check_place(
    config: Config,
    certificate: tuple[str, str] | None,
    name: str | None,
    connect: Url | None,
    given: Url | None,
    *,
    instead: bool,
    alone: bool,
) -> Iterator[tuple[list[Finding], Mapping[str, Any] | None, bool]]:
    """Yield one answer: findings, the status of the process there if it has one, and whether none is missing.

    ``instead``: HTTP sources of ``catch_up`` are used, not the one beside ``connect``; ``alone``: there is no other
    writer.
    """
    findings: list[Finding] = []
    if connect is not None and not is_redis(connect.reveal()):
        findings += check_wire(connect, config.server_name, certificate)
    url = None if given is None else given.reveal()
    if url is None and instead:
        yield findings, None, alone
        return
    if url is None and connect is not None:
        url = default_http_url(connect.reveal())
    if url is None:
        # A table without ``connect`` is of a writer at one of ``config.connect``, as those of a Synapse are.
        there = [each.http for each in config.writers.values() if each.connect is None and each.http is not None]
        if connect is not None and not (config.catch_up or there):
            findings.append(_no_source(name, connect))
        yield findings, None, False
        return
    status: Mapping[str, Any] | None = None
    try:
        with closing(open_client(url, config.secret, certificate)) as client:
            status, others = _ask_writer(client, config, name)
    except ConfigError as error:
        others = [Finding(url, str(error), "correct the URL, [tls] or the file")]
    yield findings + others, status, status is not None


def _check_names_of_streams(config: Config, found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find names of streams that no writer has; ``found`` are the statuses of all writers."""
    known = {each["name"] for status in found for each in status["streams"]}
    wanted = [(f"stream {name}", "it", name, "stream") for name in config.stream]
    for each in config.grants if config.relays else ():
        names = sorted(each.rights.read - {ALL, *config.writes})
        wanted += [(f"access.{each.name}", f"a stream {name!r}", name, "read") for name in names]
    for where, what, stream, key in wanted:
        if stream not in known:
            near = did_you_mean(stream, known) or f"; known: {', '.join(sorted(known)) or 'none'}"
            yield Finding(where, f"no writer has {what}", f"correct {key}{near}")


def _find_not_followed(config: Config, found: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Find writers of followed streams that share a database with a writer that is followed, and are not themselves."""
    followed = {config.instance_name, *config.writers, *(status["instance_name"] for status in found)}
    followed |= {name for status in found for name, _ in _published_there(status)}
    missing: dict[str, set[str]] = {}
    for status in found:
        for stream in status["streams"]:
            wanted = stream["name"] != CACHES and (not config.stream or stream["name"] in config.stream)
            for each in stream["writers"] if wanted else ():
                if each["state"] == ELSEWHERE and each["instance"] not in followed:
                    missing.setdefault(each["instance"], set()).add(stream["name"])
    for name, streams in sorted(missing.items()):
        yield _not_followed(name, streams)


def _not_followed(name: str, streams: Iterable[str]) -> Finding:
    """Return the finding for a writer whose facts of ``streams`` do not arrive."""
    what = f"it also writes {', '.join(sorted(streams))}, and is not followed: its facts do not arrive"
    cure = f"add a table [writers.{name}], or its endpoint to connect; if it has ended for good, take its name out of"
    return Finding(f"writer {name}", what, f"{cure} the writers of these streams, and restart those that remain")


def _published_there(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the writers whose facts a process sends to its followers, each with a stream."""
    return [
        (each["instance"], stream["name"])
        for stream in status["streams"]
        for each in stream["writers"]
        if each["state"] != ELSEWHERE
    ]


def _no_source(name: str | None, connect: Url) -> Finding:
    """Return the finding for a writer whose HTTP cannot be guessed, while ``catch_up`` has no source either."""
    who = f"the writers at {connect}" if name is None else f"the writer {name!r}"
    what = f"no HTTP is known for {who}: the worker cannot fetch facts that it has missed"
    given = "the URL of Synapse's database in catch_up" if is_redis(connect.reveal()) else "catch_up"
    return Finding(str(connect), what, f"give {given}, or http in [writers.{name or 'NAME'}]")


def _ask_writer(client: HttpClient, config: Config, name: str | None) -> tuple[Mapping[str, Any] | None, list[Finding]]:
    """Return the status of a writer, None if it does not answer, and findings.

    ``name``: that of the table ``[writers.NAME]`` which places it there.
    """
    try:
        status = fetch(client)
    except HttpError as error:
        is_answer = not isinstance(error, UnavailableError) and error.status in {None, HTTPStatus.NOT_FOUND}
        found = _ask_synapse(client) if is_answer else None
        return None, _describe_http(client, error) if found is None else found
    findings = [*_check_clock(client), *_check_names(client.url, status)]
    if status["instance_name"] == config.instance_name:
        what = f"this writer has the instance name of this worker, {config.instance_name!r}"
        findings.append(Finding(client.url, what, "give each process its own --instance-name"))
    if name is not None and name not in {status["instance_name"], *(each for each, _ in _published_there(status))}:
        what = f"the process at {client.url} is {status['instance_name']!r}, and sends no facts of {name!r}"
        findings.append(Finding(f"writers.{name}", what, f"give the address of {name}, or of a relay that follows it"))
    return status, findings


def _ask_synapse(client: HttpClient) -> list[Finding] | None:
    """Return findings about a process of a Synapse, which has none of the paths of a status; None if it is not one."""
    path = f"/_synapse/replication/get_repl_stream_updates/events/{secrets.token_hex(5)}?from_token=0&upto_token=0"
    try:
        client.call("GET", path, form=_Updates)
    except HttpError as error:
        if error.fields.get("errcode") is None:
            return None
        if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # a Synapse's answer to a wrong secret
            what = f"{client.url} is a Synapse's, and answers 500: a missing or wrong secret, or an error there"
            return [Finding(client.url, what, "name the file with its worker_replication_secret in secret_file")]
        cure = "give the URL of a listener of that process with the resource replication"
        return [Finding(client.url, str(error), cure)]
    return []


def _check_clock(client: HttpClient) -> Iterator[Finding]:
    if client.server_time is not None and abs(client.server_time - time.time()) > MAX_CLOCK_DIFFERENCE:
        what = f"its clock differs from this machine's by {client.server_time - time.time():.0f} s"
        yield Finding(client.url, what, "set both clocks, for example by NTP")


def _describe_http(client: HttpClient, error: HttpError) -> list[Finding]:
    if isinstance(error.__cause__, TimeoutError):
        return [Finding(client.url, str(error), "restart the process if it hangs; else correct the URL")]
    if error.status is None and (found := [*check_https(client.url, client.certificate)]):
        return found
    if error.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        cure = "name the file with its secret in secret_file, or give --secret-file; the rights are those of [access]"
    elif isinstance(error, UnavailableError):
        cure = "start the process, or correct the URL" if error.status is None else "do what the answer names"
    else:
        cure = "correct the URL, the secret or the certificate"
    return [Finding(client.url, str(error), cure)]


def check_endpoint(endpoint: Url) -> Iterator[Finding]:
    """Find that what ``--connect`` names is no endpoint; the start of a daemon finds that in a configuration."""
    kind, named = split_endpoint(endpoint.reveal(), "host", "port")
    wrong = kind in {"tcp", "tls"} and not named.get("port", "").isdecimal()
    if kind not in {"tcp", "tls"} and not is_redis(endpoint.reveal()):
        try:
            clientFromString(object(), endpoint.reveal())
        except Exception as error:  # noqa: BLE001 (parsers raise any exception)
            wrong = str(error).startswith("Unknown endpoint type")
    if wrong:
        cure = "write tcp:HOST:PORT, tls:HOST:PORT, unix:PATH or redis://HOST; an IPv6 address as tcp:\\:\\:1:9092"
        yield Finding(str(endpoint), "this is no endpoint", cure)


def check_wire(endpoint: Url, server_name: str, certificate: tuple[str, str] | None) -> Iterator[Finding]:
    """Find why an endpoint of ``connect`` is not followed: it must send SERVER with the right name.

    ``certificate``: the files with the certificate and key that ``tls:`` shows, unless the endpoint names its own.
    """
    kind, named = split_endpoint(show_certificate(endpoint.reveal(), certificate), "host", "port")
    host, port, where = named.get("host", ""), named.get("port", ""), str(endpoint)
    place: tuple[str, int] | str
    if kind == "unix":
        place = named.get("path", host)
    elif kind in {"tcp", "tls"} and port.isdecimal():
        place = host, int(port)
    else:
        return
    shown = None
    if "certificate" in named:
        shown = named["certificate"], named.get("privateKey", named["certificate"])
    try:
        line, days = first_line(place, tls=kind == "tls", certificate=shown)
    except ConfigError as error:
        yield Finding(where, str(error), "correct [tls], the endpoint or the file")
    except ssl.SSLError as error:
        yield describe_tls_failure(where, (host, int(port)), error, shown)
    except TimeoutError:
        yield Finding(where, "no SERVER line arrives", _NO_SERVER)
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
