"""Checks of ``replication doctor`` on this machine: files, certificates, the database and folders.  They only read."""

from __future__ import annotations

import os
import shutil
import stat
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replication.cli.findings import Finding
from replication.cli.source_checks import database_cure, declare_all
from replication.errors import (
    TLS_CURE,
    CatchUpError,
    ConfigError,
    ReplicationError,
    SchemaError,
    StoreError,
    did_you_mean,
)
from replication.follower.app_module import no_module
from replication.follower.catch_up import DATABASES, HTTP
from replication.follower.sources import is_standby
from replication.net.access import ALL, Access
from replication.net.endpoints import SSL_ARGUMENTS, has_tls, split_endpoint
from replication.net.files import refuse_pipes
from replication.segments.compression import check_compression
from replication.segments.folders import open_folder
from replication.segments.manifest import MANIFEST, read_manifest
from replication.service import make_master, make_rooms, make_worker
from replication.storage import path_of
from replication.storage.blocking import use_store
from replication.storage.contract import refuse_another_writer
from replication.storage.mapping_checks import check
from replication.storage.sqlite.session import MEMORY
from replication.streams.definitions import CACHES, StreamDefinition
from replication.wire import grammar
from replication.wire.grammar import StreamName
from replication.writer.former_writers import find_left, find_unwritten
from replication.writer.rooms import Rooms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.config import Config
    from replication.net.listening import Socket
    from replication.streams.definitions import Dialect
    from replication.streams.interfaces import IStreamStore
    from replication.wire.grammar import InstanceName, Token

    StoredPositions = Mapping[StreamName, Mapping[InstanceName, Token]]

RENEW_BEFORE: Final = timedelta(days=14)
HIGHEST_PORT: Final = 65_535
MAX_CLOCK_DIFFERENCE: Final = 60.0  # seconds
POSITIONS_EXIST: Final[Mapping[str, str]] = {
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'stream_positions'",
    "postgresql": "SELECT to_regclass('stream_positions') IS NOT NULL",
}
MAY_START: Final = """
    SELECT to_regclass('replication_schema') IS NOT NULL
        OR coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)
"""
_NOT_OURS: Final = "so it is not one of ours"  # in the error for a table ``stream_NAME`` with other columns
_READABLE_BY_OTHERS: Final = stat.S_IRGRP | stat.S_IROTH


def check_start(config: Config, file: str) -> Iterator[Finding]:
    """Find why a master or a worker with this configuration is refused before its database is opened."""
    try:
        if config.role == "worker":
            make_worker(None, config)
        else:
            make_rooms(make_master(None, config), config)
    except ReplicationError as error:
        yield Finding(file, str(error), "correct this key or file; the daemon does not start before")


def check_files(files: Sequence[str | None]) -> Iterator[Finding]:
    """Find files with a secret that other users may read."""
    for each in files:
        if each is None or not Path(each).exists():
            continue
        mode = Path(each).stat().st_mode
        if mode & _READABLE_BY_OTHERS:
            yield Finding(each, f"other users may read this secret (mode {stat.S_IMODE(mode):o})", f"chmod 600 {each}")


def check_sockets(sockets: Sequence[Socket], *, insecure: bool) -> Iterator[Finding]:
    """Find endpoints to listen on that a start refuses, and certificates that have expired or soon will."""
    yield from _check_places(sockets)
    for each in sockets:
        if each.endpoint.startswith("systemd:"):
            continue  # systemd opens the socket; this command cannot
        try:
            each.parse(None, insecure=insecure)
        except ConfigError as error:
            yield Finding(each.key, str(error), "correct this endpoint, or its files")
            continue
        if has_tls(each.endpoint):
            _, named = split_endpoint(each.endpoint, *SSL_ARGUMENTS)
            key = named.get("privateKey", "server.pem")
            yield from check_files([key])
            yield from _check_certificate(Path(named.get("certKey", key)), "renew it, and send SIGHUP to the process")


def _check_places(sockets: Sequence[Socket]) -> Iterator[Finding]:
    """Find ports that do not exist or are given twice, and UNIX sockets without a folder."""
    used: list[tuple[str, str, str]] = []  # key, interface and port of each endpoint
    for each in sockets:
        kind, named = split_endpoint(
            each.endpoint, "port", *SSL_ARGUMENTS[1:] if has_tls(each.endpoint) else ("interface",)
        )
        interface, port = named.get("interface", "").replace("0.0.0.0", ""), named.get("port", "")  # noqa: S104
        if kind == "unix":
            folder = Path(named.get("address", port)).parent
            if not folder.is_dir():
                yield Finding(each.key, f"there is no folder {folder} for this socket", f"mkdir -p {folder}")
        elif port.isdecimal() and int(port) > HIGHEST_PORT:
            yield Finding(each.key, f"there is no port {port}: {HIGHEST_PORT} is the highest", "correct this endpoint")
        elif port.isdecimal() and int(port):
            for key, used_interface, used_port in used:
                if port == used_port and (interface == used_interface or not interface or not used_interface):
                    yield Finding(each.key, f"{key} has the port {port}, too", "give each endpoint its own")
            used.append((each.key, interface, port))


def check_app(app: str | None) -> Iterator[Finding]:
    """Find that there is no module of the application; it is not imported, because that runs it."""
    if app is None:
        return
    module = app.partition(":")[0]
    package, dot, _ = module.partition(".")
    try:
        found = PathFinder.find_spec(package, [str(Path.cwd())]) or find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or (dot and found.submodule_search_locations is None):  # no package, so nothing is inside
        cure = "correct app, install the module, or start the worker in its folder"
        near = f"; did you mean {package}?" if found is not None and module.endswith(".py") else ""
        yield Finding("app", no_module(module), cure + near)


def check_certificates(config: Config) -> Iterator[Finding]:
    """Find that the authority of the clients, or the certificate that this process shows, has expired or soon will."""
    shown = config.tls.certificate
    for file, cure in (
        (
            config.tls.client_ca,
            "add a new authority to the file, or remove the old one; send SIGHUP to the process",
        ),
        (shown, "renew it; the worker reads it for each connection"),
    ):
        if file is None:
            continue
        try:
            yield from _check_certificate(Path(file), cure)
        except (OSError, ValueError) as error:
            yield Finding(file, f"no certificate can be read: {error}", "correct [tls], or the file")
        except ImportError:
            yield Finding(file, f"no certificate can be read: {TLS_CURE}", "install it")
    yield from check_files([config.tls.private_key])


def check_access(config: Config) -> Iterator[Finding]:
    """Find tables of ``[access]`` that give less than they seem to: no such stream, or no such certificate."""
    written = _written(config)
    for grant in config.grants:
        where, rights = f"access.{grant.name}", grant.rights
        keys = [("append", rights.append)] if config.relays else [("append", rights.append), ("read", rights.read)]
        for key, names in keys:
            for name in sorted(names - {ALL, *written}):
                near = did_you_mean(name, written)
                yield Finding(where, f"{key}: this process writes no stream {name!r}", f"correct {key}{near}")
        try:
            Access([grant])
        except ConfigError as error:
            yield Finding(where, str(error), "correct certificates")
        for name in grant.certificates if config.tls.allow else ():
            if not {name.lower(), f"*.{name.lower().partition('.')[2]}"} & {each.lower() for each in config.tls.allow}:
                what = f"tls.allow does not accept {name!r}, so no peer has these rights by that name"
                yield Finding(where, what, "add the name to allow, or correct it")


def check_instance_name(config: Config) -> Iterator[Finding]:
    """Find that a process would write none of its streams, because it has the name of no writer."""
    described = {each.name: each for each in config.streams}
    names = _written(config) & {*config.writes} if config.role == "worker" else _written(config)
    streams = [described.get(name) or StreamDefinition(name) for name in sorted(names)]
    for what, cure in find_unwritten(grammar.instance_name(config.instance_name), streams):
        yield Finding("instance_name", what, cure)


def _written(config: Config) -> set[StreamName]:
    """Return the names of the streams that a process with this configuration writes."""
    written: set[str] = {CACHES, *config.writes, *config.stream, *(each.name for each in config.streams)}
    if config.role == "worker":
        written = {CACHES, *config.writes} if config.writes else set()
    if config.rooms:
        written |= {*Rooms.streams}
    return {StreamName(each) for each in written}


def _check_certificate(file: Path, cure: str) -> Iterator[Finding]:
    """Find that a certificate in a file is not valid now, or soon: the first one, or that of an authority after it."""
    from cryptography.x509 import load_pem_x509_certificates  # noqa: PLC0415 - an extra; parse() has used it

    from replication.net.tls import of_authority, why_not_valid  # noqa: PLC0415 - likewise

    refuse_pipes(str(file))
    for depth, certificate in enumerate(load_pem_x509_certificates(file.read_bytes())):
        until = certificate.not_valid_after_utc
        why = why_not_valid(certificate)
        if why is None and until - datetime.now(UTC) < RENEW_BEFORE:
            why = f"the certificate expires on {until:%Y-%m-%d}"
        if why is not None:
            yield Finding(str(file), of_authority(why, certificate, depth), cure)


def check_database(config: Config, min_free: int) -> Iterator[Finding]:
    """Find what is wrong with the database: whether it can be read and written, versions, space, mapped tables."""
    shown = str(config.database)
    try:
        path = path_of(config.database)
    except ConfigError as error:
        yield Finding(shown, str(error), "correct database")
        return
    if path == MEMORY:
        return
    if path is not None:
        yield from _check_place(Path(path), min_free)
        if not Path(path).exists():
            return  # the first start makes it
    try:
        # Before the first start it may lack our tables, as a foreign one may.
        streams = _generic_streams(config, "postgresql" if path is None else "sqlite")
        read = partial(_read, streams=streams, shown=shown)
        database_time, warnings, stored, may_start, found = use_store(
            config.database, read, read_only=True, foreign=True
        )
    except SchemaError as error:
        other_version = error.version is not None
        cure = "start the daemon of the version that it names" if other_version else "name another database or schema"
        yield Finding(shown, str(error), cure)
        return
    except (StoreError, ConfigError) as error:
        yield Finding(shown, str(error), database_cure(error))
        return
    for warning in warnings:
        yield Finding(shown, warning, "do as the message advises")
    yield from found
    if not may_start:
        cure = "GRANT it USAGE and CREATE on the schema, or set its search_path"
        yield Finding(shown, "this user may not make the tables of this package", cure)
    yield from _check_stored(config, "postgresql" if path is None else "sqlite", stored)
    if abs(database_time - time.time()) > MAX_CLOCK_DIFFERENCE:
        what = f"its clock differs from this machine's by {database_time - time.time():.0f} s"
        yield Finding(shown, what, "set both clocks, for example by NTP")
    if config.role == "master" and any(each.table is not None or each.tables for each in config.streams):
        yield from _check_mappings(config)


def _check_stored(config: Config, dialect: Dialect, stored: StoredPositions) -> Iterator[Finding]:
    """Find streams that this process has written and lacks now, and mapped tables that another instance has written."""
    written, me = _written(config), grammar.instance_name(config.instance_name)
    if written and dialect == "postgresql":  # an SQLite file has one process
        for what, cure in find_left(stored, me, written):
            yield Finding(str(config.database), what, cure)
    for each in config.streams if config.role == "master" else ():
        positions = stored.get(each.name, {})
        if each.maps(dialect) and each.has_one_writer(me) and me not in positions:
            try:
                refuse_another_writer(each, me, positions)
            except StoreError as error:
                yield Finding(f"stream {each.name}", str(error), "do as the message advises")


def _check_place(file: Path, min_free: int) -> Iterator[Finding]:
    folder = file.absolute().parent
    if not folder.is_dir():
        yield Finding(str(folder), "there is no such folder, so the database cannot be made", f"mkdir -p {folder}")
        return
    for each in (file, folder) if file.exists() else (folder,):
        if not os.access(each, os.W_OK):
            yield Finding(str(each), "this user may not write there", "run the daemon as its owner, or change the mode")
    free = shutil.disk_usage(folder).free
    if free < min_free:
        what = f"{free // 2**20} MiB are free on this disk, less than {min_free // 2**20} MiB"
        yield Finding(str(folder), what, "delete what may be deleted (docs/operations.md), or use a larger disk")


def _check_mappings(config: Config) -> Iterator[Finding]:
    streams = [each for each in config.streams if each.table is not None or each.tables]
    try:
        found = check(config.database, streams, config.streams)
    except ReplicationError as error:
        yield Finding(str(config.database), str(error), "let the database answer")
        return
    for each in found:
        if each.error is not None:
            yield Finding(f"stream {each.stream}", each.error, "correct the mapping or the table")
        for warning in each.warnings:
            yield Finding(f"stream {each.stream}", warning, "do as the message advises")


def check_folders(config: Config) -> Iterator[Finding]:
    """Find folders without readable segments: facts can be neither fetched from them nor deleted because of them."""
    for each in (*config.catch_up, *([config.retention_segments] if config.retention_segments else ())):
        if each.startswith((*DATABASES, *HTTP)):
            continue
        cure = "name a folder that `replication replay --out` has written"
        try:
            folder = open_folder(each)
            manifest = read_manifest(folder)
        except (CatchUpError, ConfigError, StoreError) as error:
            yield Finding(str(each), str(error), cure)
            continue
        for compression in sorted({part.compression for part in (() if manifest is None else manifest.segments)}):
            try:
                check_compression(compression)
            except ConfigError as error:
                yield Finding(folder.url, f"its segments cannot be read: {error}", "install it")
        if manifest is None:
            yield Finding(folder.url, f"it has no {MANIFEST}, so it is no folder of segments", cure)
        elif faults := manifest.faults():
            yield Finding(f"{folder.url}/{MANIFEST}", faults[0], "replication replay into another folder")
        elif missing := [part.name for part in manifest.segments if folder.size(part.name) is None]:
            yield Finding(
                f"{folder.url}/{missing[0]}", "this segment is missing", "restore it, or write another folder"
            )


def _generic_streams(config: Config, dialect: Dialect) -> list[StreamDefinition]:
    """Return the streams that the configuration names and this process stores in tables named stream_NAME."""
    names = _written(config)
    if config.role == "worker" and (config.app is None if config.copy is None else config.copy):
        names |= {StreamName(each) for each in config.stream}
    described = {each.name: each for each in config.streams}
    found = [described.get(name) or StreamDefinition(name) for name in sorted(names)]
    return [each for each in found if not (each.in_memory or each.maps(dialect) or each.sources(dialect))]


async def _read(
    store: IStreamStore, streams: Sequence[StreamDefinition], shown: str
) -> tuple[float, Sequence[str], StoredPositions, bool, Sequence[Finding]]:
    """Return the time of the database's machine, in seconds, the warnings of the store, and the stored positions.

    Then whether our tables exist, or this user may make them: an SQLite file has a mode.  The last value is a finding
    for each of ``streams`` whose table another program has made; one that is missing is made by the first start.  A
    standby is a finding, too.
    """
    warnings = list(store.warnings)
    refused = [(f"stream {name}", why) for name, why in await declare_all(store, streams) if _NOT_OURS in why]
    found = [Finding(where, why, "do as the message advises") for where, why in refused]
    clock = {"sqlite": "SELECT 0.0", "postgresql": "SELECT extract(epoch FROM clock_timestamp())"}
    ((seconds,),) = await store.read(lambda database: database.execute(clock[database.dialect]))
    ((exists,),) = await store.read(lambda database: database.execute(POSITIONS_EXIST[database.dialect]))
    stored = await store.stored_positions() if exists else {}
    if not seconds:
        return time.time(), warnings, stored, True, found
    if await store.read(is_standby):
        found.append(Finding(shown, "it is a standby, so it takes no writes", "name the primary"))
    ((may_start,),) = await store.read(lambda database: database.execute(MAY_START))
    return float(seconds), warnings, stored, may_start, found
