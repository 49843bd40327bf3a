"""``replication doctor``: find what is wrong, and name the cure (docs/command-line.md).  It changes nothing.

Exit status 0: nothing was found; 1: one line for each finding; 2: it cannot run.
"""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from replication import config
from replication.cli.findings import Finding, together
from replication.cli.output import report, write_line
from replication.cli.own_checks import (
    check_access,
    check_app,
    check_certificates,
    check_database,
    check_files,
    check_folders,
    check_instance_name,
    check_sockets,
    check_start,
)
from replication.cli.parser import Parser
from replication.cli.peer_checks import check_endpoint, check_process, check_wire, check_writers, open_client
from replication.cli.source_checks import check_followed, check_redis, check_redis_url, check_sources
from replication.errors import ConfigError
from replication.net.endpoints import is_redis
from replication.urls import Url
from replication.web.address import DEFAULT_URL, read_secret

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

MIN_FREE: Final = 256  # MiB


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="replication doctor",
        description="Find what is wrong with a configuration, its database, its writers and a process that runs.",
        epilog="It only reads.  Exit status 0: nothing was found; 1: findings; 2: it cannot run.",
    )
    parser.add_argument("--config", metavar="FILE", help="the TOML file of a master or worker")
    parser.add_argument(
        "--http", metavar="URL", help="the HTTP API of a process that runs; without --config the default"
    )
    parser.add_argument("--secret-file", metavar="FILE", help="file with the secret that this API requires")
    parser.add_certificate_options()
    parser.add_argument("--connect", metavar="ENDPOINT", action="append", default=[], help="the wire of a writer")
    parser.add_argument("--server-name", metavar="NAME", default="localhost", help="its server name [%(default)s]")
    parser.add_argument(
        "--min-free", metavar="MIB", type=int, default=MIN_FREE, help="MiB that must be free on the disk [%(default)s]"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object: {findings: [{where, what, cure}, …]}")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Print one line for each finding."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    if found.config is not None and not Path(found.config).exists():
        report(f"replication doctor: there is no file {found.config}: give --config FILE")
        return 2
    certificate = parser.certificate_of(found)
    findings = [*_diagnose(found, certificate)]
    if found.json:
        write_line(json.dumps({"findings": [msgspec.structs.asdict(each) for each in findings]}, separators=(",", ":")))
    else:
        for each in findings:
            write_line(str(each))
        if not findings:
            report("replication doctor: nothing was found")
    return 1 if findings else 0


def _diagnose(found: argparse.Namespace, certificate: tuple[str, str] | None) -> Iterator[Finding]:
    secret_file, shown = found.secret_file, certificate
    if found.config is not None:
        try:
            configured = config.load(None, found.config)
        except ConfigError as error:
            what = str(error).removeprefix(f"{found.config}: ")
            yield Finding(found.config, what, "correct this key or file; the daemon does not start before")
            return
        secret_file, shown = secret_file or configured.secret_file, shown or configured.tls.shown
        sockets = config.sockets_of(configured, _no_factory, _no_factory)
        secrets = [each.secret_file for each in configured.access.values()]
        own = [
            *check_files([configured.secret_file, configured.redis_password_file, *secrets]),
            *check_certificates(configured),
            *check_instance_name(configured),
            *check_access(configured),
            *check_sockets(sockets, insecure=configured.insecure),
            *check_app(configured.app),
            *check_followed(configured),
            *together(  # those that may wait for an answer
                (
                    partial(check_database, configured, found.min_free * 2**20),
                    partial(check_folders, configured),
                    partial(check_writers, configured, shown),
                    partial(check_sources, configured),
                    partial(check_redis, configured),
                )
            ),
        ]
        yield from own
        for each in check_start(configured, found.config):
            if not any(each.what in other.what for other in own):  # else its own check has the better cure
                yield each
    for each in found.connect:
        yield from check_endpoint(Url(each))
        yield from check_wire(Url(each), found.server_name, shown)
        if is_redis(each):
            yield from check_redis_url(Url(each), found.server_name, None, shown)
    if found.http is None and (found.config is not None or found.connect):
        return
    try:
        secret = None if secret_file is None else read_secret(secret_file)
        with closing(open_client(found.http or DEFAULT_URL, secret, certificate)) as client:
            yield from check_process(client)
    except ConfigError as error:
        yield Finding(found.http or DEFAULT_URL, str(error), "correct the option")


def _no_factory(*_: Any) -> Any:
    """Stand for the factory of a socket that is never opened."""
