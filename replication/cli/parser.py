"""The parser of all commands, and the options that several of them have."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

from replication.errors import ConfigError, did_you_mean, escape
from replication.urls import hide_secrets
from replication.web.address import DEFAULT_URL, read_secret

if TYPE_CHECKING:
    from replication.web.blocking_client import HttpClient


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, and ends the process with status 2."""

    def error(self, message: str) -> NoReturn:
        """End the process; for an unknown option or word the message has the nearest known one."""
        near = ""
        if unknown := re.match(r"unrecognized arguments: +([^ =]+)", message):
            near = did_you_mean(unknown[1], re.findall(r"--[a-z-]+", self.format_usage()))
            message = hide_secrets(message)
        elif unknown := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = did_you_mean(unknown[1], re.findall(r"[\w-]+", unknown[2]))
            message = hide_secrets(message)
        self.exit(2, f"{self.prog}: {escape(message)}{near}; see {self.prog} --help\n")

    def add_http_options(self) -> None:
        """Add ``--http``, ``--secret-file`` and the options of a certificate."""
        self.add_argument(
            "--http", metavar="URL", default=DEFAULT_URL, help="HTTP API of a master or worker [%(default)s]"
        )
        self.add_argument("--secret-file", metavar="FILE", help="file with the secret that this API requires")
        self.add_certificate_options()

    def add_certificate_options(self) -> None:
        """Add ``--certificate`` and ``--private-key``."""
        self.add_argument("--certificate", metavar="FILE", help="file with the certificate that TLS shows")
        self.add_argument("--private-key", metavar="FILE", help="file with the key of that certificate")

    def certificate_of(self, found: argparse.Namespace) -> tuple[str, str] | None:
        """Return both files, or None; end if only one is given."""
        if (found.certificate is None) != (found.private_key is None):
            self.error("--certificate and --private-key belong together: give both")
        return None if found.certificate is None else (found.certificate, found.private_key)

    def open_client(self, found: argparse.Namespace, **options: Any) -> HttpClient:
        """Return a client for the API that ``found`` names, with the ``options`` of HttpClient."""
        from replication.web.blocking_client import HttpClient  # noqa: PLC0415 (takes most of a start; help needs no client)

        secret = None if found.secret_file is None else read_secret(found.secret_file)
        certificate = self.certificate_of(found)
        try:
            return HttpClient(found.http, secret, certificate=certificate, **options)
        except ConfigError as error:
            self.error(str(error))
