"""The doctor behind mutual TLS: nothing is found where all is well, and each mistake has a line of its own."""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import closing
from typing import TYPE_CHECKING

import attrs
import pytest

from replication.cli.main import main
from replication.cli.tls_checks import describe_tls_failure, limit_wait
from tests.certificates import DAY, Authority, Identity
from tests.system.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VALID = (-DAY, 100 * DAY)


@attrs.frozen
class Place:
    """A master that demands certificates and a secret, and what its clients have."""

    folder: Path
    master: Daemon
    authority: Authority

    def doctor(self, shown: Identity | None, *words: str, secret: str = "xyz", http: bool = True) -> int:
        """Run the doctor with the configuration of a worker that shows a certificate."""
        (self.folder / "secret").write_text(secret)
        (self.folder / "secret").chmod(0o600)
        wire, api = (self.master.address(each).replace("127.0.0.1", "localhost") for each in ("the wire", "HTTP"))
        lines = [f'database = "sqlite:///{self.folder}/worker.db"', f'secret_file = "{self.folder}/secret"']
        lines += ["[writers.master]", f'connect = "tls:{wire}"']
        if http:
            lines += [f'http = "https://{api}"']
        if shown is not None:
            shown.key.chmod(0o600)
            lines += ["[tls]", f'certificate = "{shown.certificate}"', f'private_key = "{shown.key}"']
        file = self.folder / "worker.toml"
        file.write_text("\n".join(lines) + "\n")
        return main(["doctor", "--config", str(file), "--min-free", "1", *words])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Start the master."""
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, valid=VALID)
    server = authority.issue("server", "localhost", "127.0.0.1", valid=VALID)
    (folder / "master-secret").write_text("xyz")
    (folder / "master-secret").chmod(0o600)
    (folder / "master.toml").write_text(
        f'stream = ["orders"]\nlisten = "{server.listen()}"\nhttp = "{server.listen()}"\n'
        f'secret_file = "master-secret"\n[tls]\nclient_ca = "{authority.certificate}"\nallow = ["worker1"]\n'
    )
    with Daemon(folder, "master", "--config=master.toml") as master:
        master.address("HTTP")
        yield Place(folder, master, authority)


@pytest.fixture(autouse=True)
def _trust(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(place.authority.certificate))


def test_nothing_is_found_where_the_certificate_is_accepted(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    good = place.authority.issue("worker1", "worker1", valid=VALID)
    assert (place.doctor(good), capsys.readouterr().out) == (0, "")
    options = "--certificate", str(good.certificate), "--private-key", str(good.key)
    assert (place.doctor(None, *options), capsys.readouterr().out) == (0, "")
    wire = f"tls:{place.master.address('the wire')}"
    assert main(["doctor", "--connect", wire, *options]) == 0


def test_each_mistake_is_named_with_its_cure_on_the_wire_and_over_http(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = Authority(place.folder, "stranger", valid=VALID).issue("strange", "worker1", valid=VALID)
    for shown, what, cure in (
        (None, "it demands a client certificate, and none was shown", "give certificate and private_key in [tls]"),
        (strange, f"it does not trust the authority of the certificate in {strange.certificate}", "tls.client_ca"),
        (
            other := place.authority.issue("other", "other", valid=VALID),
            f"it refuses the name in the certificate in {other.certificate}",
            "add its DNS name to tls.allow there",
        ),
    ):
        assert place.doctor(shown) == 1
        lines = capsys.readouterr().out.splitlines()
        assert [each.partition("localhost:")[0] for each in lines] == ["tls:", "https://"], lines
        for line in lines:
            assert (what in line, cure in line.partition("; cure: ")[2]) == (True, True), lines


def test_a_wrong_secret_is_found_behind_the_certificate(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    good = place.authority.issue("worker1", "worker1", valid=VALID)
    assert place.doctor(good, secret="abc") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("https://localhost:")
    assert "answers 401: a wrong secret" in line
    assert "cure: name the file with its secret in secret_file" in line


def test_a_certificate_that_cannot_be_used_is_named(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    good = place.authority.issue("worker1", "worker1", valid=VALID)
    mixed = Identity(place.authority.issue("other", "other", valid=VALID).key, good.certificate)
    assert place.doctor(mixed, http=False) == 1
    line, no_http, at_start = capsys.readouterr().out.splitlines()
    assert f"the key in {mixed.key} is not that of the certificate in {good.certificate}" in at_start
    assert "no HTTP is known" in no_http
    assert f"cannot use {good.certificate} and {mixed.key}, a certificate and its key" in line


def test_a_private_key_with_a_password_is_refused_and_no_terminal_is_asked(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    good = place.authority.issue("locked", "worker1", valid=VALID)
    good.lock()
    words = f"the private key in {good.key} has a password: write it without one, with openssl pkey -in {good.key}"
    shown = "--http", "https://localhost:1", "--certificate", str(good.certificate), "--private-key", str(good.key)
    for command in (["status"], ["append", "orders", "[1]"], ["rooms", "!abc:h"]):
        with pytest.raises(SystemExit):
            main([*command, *shown])
        assert words in capsys.readouterr().err
    assert place.doctor(good, http=False) == 1
    assert f"{words} -out FILE; cure: correct [tls], the endpoint or the file" in capsys.readouterr().out


def test_a_deadline_that_has_passed_has_the_words_of_a_wait_that_ended() -> None:
    """Which of the two comes first is chance, and both are shown."""
    with closing(socket.socket()) as reading, pytest.raises(TimeoutError, match="timed out"):
        limit_wait(reading, time.monotonic() - 1)


def test_a_refusal_of_this_ends_certificate_names_that_and_no_other_port() -> None:
    """The cure of BAD_CERTIFICATE was to write tcp: for tls:."""
    error = ssl.SSLError(1, "")
    error.reason = "TLSV1_ALERT_BAD_CERTIFICATE"
    found = describe_tls_failure("tls:h:1", ("h", 1), error, ("w.pem", "w.key"))
    assert found.what == "it refuses the certificate in w.pem"
    assert found.cure.startswith("its log has the reason: correct what it names")
