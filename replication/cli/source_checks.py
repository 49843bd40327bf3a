"""Checks of ``replication doctor`` on a Redis, and on databases that missed facts are read from.  They only read."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote, urlsplit

from replication.cli.findings import Finding, together
from replication.cli.tls_checks import limit_wait
from replication.errors import ConfigError, SchemaError, StoreError, did_you_mean
from replication.follower.catch_up import DATABASES
from replication.follower.local_users import CURE, OtherServerError, check_server_name
from replication.net.endpoints import is_redis
from replication.storage import path_of
from replication.storage.blocking import use_store
from replication.storage.migrations import LIKE_A_SYNAPSE
from replication.web.blocking_client import tls_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from replication.config import Config
    from replication.streams.definitions import Dialect, StreamDefinition
    from replication.streams.interfaces import IStreamStore
    from replication.urls import Url

PATIENCE: Final = 5.0  # seconds for an answer of Redis
BLOCK: Final = 65_536


def check_sources(config: Config) -> Iterator[Finding]:
    """Find databases of ``catch_up`` that cannot be read, and streams that cannot be read there."""
    if config.role == "worker":
        databases = [each for each in config.catch_up if each.startswith(DATABASES)]
        yield from together(partial(_check_source, config, each) for each in databases)


def _check_source(config: Config, url: Url) -> Iterator[Finding]:
    try:
        dialect: Dialect = "sqlite" if path_of(url) is not None else "postgresql"
        mapped = [each for each in config.streams if each.maps(dialect) or each.sources(dialect)]
        followed = [each for each in mapped if not config.stream or each.name in config.stream]
        foreign = any(each.position_name is not None for each in mapped)
        of_synapse = foreign and _has_redis(config)

        async def read(store: IStreamStore) -> tuple[list[tuple[str, str]], set[str]]:
            stored = await store.stored_positions() if of_synapse else {}
            if foreign:
                await check_server_name(store, config.server_name)
            return await declare_all(store, followed), {name for writers in stored.values() for name in writers}

        refused, names = use_store(url, read, read_only=True, foreign=bool(mapped))
    except OtherServerError as error:
        yield Finding(str(url), error.what, CURE.format(server_name=config.server_name))
        return
    except (StoreError, ConfigError) as error:
        yield Finding(str(url), str(error), database_cure(error))
        return
    if config.instance_name in names:
        what = f"{config.instance_name!r} is a process of the Synapse of {url}, which publishes under this name"
        yield Finding("instance_name", what, "give this process a name of its own")
    for name, why in refused:
        cure = "GRANT SELECT to the user of the URL, or correct the definition of the stream"
        yield Finding(f"stream {name}", f"it cannot be read in {url}: {why}", cure)


def check_followed(config: Config) -> Iterator[Finding]:
    """Find streams that are followed over Redis, and that no definition has: a name is wrong, or a Synapse is newer."""
    wires = [*config.connect, *(each.connect for each in config.writers.values() if each.connect is not None)]
    if config.role == "master" or not config.streams or not all(is_redis(each.reveal()) for each in wires):
        return
    known = [each.name for each in config.streams]
    over_http = any(each.http is not None for each in config.writers.values())
    for name in config.stream:
        near = did_you_mean(name, known)
        if name not in known and (near or not over_http):
            cure = near or ", or give http in [writers.NAME], which has its missed facts"
            yield Finding(f"stream {name}", "no definition has this stream", f"correct stream{cure}")


def _has_redis(config: Config) -> bool:
    return any(is_redis(each.reveal()) for each in config.connect)


async def declare_all(store: IStreamStore, streams: Sequence[StreamDefinition]) -> list[tuple[str, str]]:
    """Return the streams that cannot be read, each with the reason."""
    refused: list[tuple[str, str]] = []
    for each in streams:
        try:
            await store.declare(each)
        except (SchemaError, StoreError) as error:
            refused.append((each.name, str(error)))
    return refused


def database_cure(error: StoreError | ConfigError) -> str:
    """Return the cure for a database that cannot be opened; the error for a missing extra names the command."""
    if isinstance(error.__cause__, ImportError):
        return "install it"
    if LIKE_A_SYNAPSE in str(error):
        return 'give definitions = ["replication.synapse.since_1_159"], or correct the URL'
    return "correct the URL, start the database, or let this user read it"


def check_redis(config: Config) -> Iterator[Finding]:
    """Find why a Synapse cannot be followed over its Redis: no answer, or a wrong login, right or channel."""
    for url in config.connect:
        if is_redis(url.reveal()):
            yield from check_redis_url(url, config.server_name, config.redis_password, config.tls.shown)


def check_redis_url(
    url: Url, channel: str, password: str | None, certificate: tuple[str, str] | None
) -> Iterator[Finding]:
    """Find what ``check_redis`` finds of one Redis.

    ``password`` is used if the URL has none; ``certificate``: the files that ``rediss:`` shows.
    """
    if not _is_whole(url):
        return
    try:
        yield from _check_redis(url, channel, password, certificate)
    except ConfigError as error:
        yield Finding(str(url), str(error), "install what is missing, or correct [tls] or the file")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        yield Finding(str(url), f"Redis does not answer: {why}", "start it, or correct connect")


def _is_whole(url: Url) -> bool:
    """Return whether the parts of a URL can be read; an error would quote the URL, and the start refuses it."""
    try:
        _ = urlsplit(url.reveal()).port
    except ValueError:
        return False
    return True


def _check_redis(
    url: Url, channel: str, default_password: str | None, certificate: tuple[str, str] | None
) -> Iterator[Finding]:
    from replication.net.redis_connection import RedisPlace, cure_of, encode  # noqa: PLC0415 (an extra)

    parts = urlsplit(url.reveal())
    password = unquote(parts.password or "") or default_password or ""
    place = RedisPlace(cast("Any", None), unquote(parts.username or ""), password)
    with closing(_connect(url, certificate)) as client:
        counted = refused = None
        count, subscribe = encode(b"PUBSUB", b"NUMSUB", channel.encode()), encode(b"SUBSCRIBE", channel.encode())
        for command in (*place.login(), count, subscribe):
            answer = _ask(client, command)
            if isinstance(answer, list) and answer[0] == channel.encode():
                counted = answer[1]
            elif isinstance(answer, Exception):
                text = place.hide_in(str(answer))[:200]
                if command is count:  # a right that a worker does not need
                    refused = text
                    continue
                cure = cure_of(text, channel) or "correct connect or redis_password_file"
                yield Finding(str(url), f"Redis answers {text!r}", cure)
                return
        if refused is not None:
            what = f"it could not be checked whether a process subscribes to the channel {channel!r}: Redis answers "
            cure = f"ACL SETUSER {place.user or 'default'} '+pubsub|numsub', which only this command needs"
            yield Finding(str(url), f"{what}{refused!r}", cure)
        if counted == 0:
            what = f"no process subscribes to the channel {channel!r}; each worker of a Synapse does"
            yield Finding(str(url), what, "set server_name to that of the homeserver, and start its workers")


def _connect(url: Url, certificate: tuple[str, str] | None) -> socket.socket:
    from replication.net.redis_connection import DEFAULT_PORT  # noqa: PLC0415 (an extra)

    parts = urlsplit(url.reveal())
    if parts.scheme == "redis+unix":
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE)
        try:
            client.connect(unquote(parts.path))
        except OSError:
            client.close()
            raise
        return client
    host = parts.hostname or ""
    context = tls_context(certificate) if parts.scheme == "rediss" else None
    client = socket.create_connection((host, parts.port or DEFAULT_PORT), PATIENCE)
    return client if context is None else context.wrap_socket(client, server_hostname=host)


def _ask(client: socket.socket, command: bytes) -> Any:
    """Return the answer to a command; it is an exception if Redis refuses.

    ValueError: what answers is no Redis.  TimeoutError: there is no whole answer after PATIENCE seconds.
    """
    from replication.net.redis_connection import make_parser  # noqa: PLC0415 (an extra)

    reader, ends = make_parser(), time.monotonic() + PATIENCE
    from hiredis import ProtocolError  # noqa: PLC0415 (an extra; without it, make_parser has raised)

    client.sendall(command)
    try:
        while (answer := reader.gets()) is False:
            limit_wait(client, ends)
            data = client.recv(BLOCK)
            if not data:
                raise ConnectionError("it closes the connection")
            reader.feed(data)
    except ProtocolError as error:
        raise ValueError(f"it is no Redis: {error}") from error
    return answer
