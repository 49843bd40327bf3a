"""Which sockets are safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.protocol import Factory
from twisted.internet.testing import MemoryReactor

from replication.net.listening import Socket, expiry_of, http_risk, wire_risk
from tests.certificates import DAY, Authority
from tests.doubles import logged

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("endpoint", "demands", "risk"),
    [
        ("tcp:9092", False, "without TLS, and all that reach it can read all facts: give an ssl: endpoint"),
        ("tcp:9092", True, "without TLS"),
        ("systemd:domain=INET:index=0", True, "without TLS"),
        ("ssl:9092", False, "without client certificates, and all that reach it can read all facts: give client_ca"),
        ("ssl:9092", True, ""),
    ],
)
def test_the_wire_is_safe_if_its_clients_must_show_certificates(endpoint: str, risk: str, *, demands: bool) -> None:
    found = wire_risk(endpoint, demands_certificates=demands)
    assert found.startswith(risk)
    assert bool(found) == bool(risk)


@pytest.mark.parametrize(
    ("endpoint", "has_secret", "demands", "risk"),
    [
        ("tcp:9093", False, False, "without a secret, and their requests are refused: give --secret-file"),
        ("tcp:9093", False, True, "without a secret"),
        ("ssl:9093", False, False, "without a secret"),
        ("tcp:9093", True, False, "without TLS, and the secret can be read on the way: give an ssl: endpoint"),
        ("ssl:9093", True, False, ""),
        ("ssl:9093", False, True, ""),
    ],
)
def test_http_is_safe_with_tls_and_a_secret_or_certificates(
    endpoint: str, risk: str, *, has_secret: bool, demands: bool
) -> None:
    found = http_risk(endpoint, has_secret=has_secret, demands_certificates=demands)
    assert found.startswith(risk)
    assert bool(found) == bool(risk)


def test_a_certificate_has_a_date_as_long_as_it_can_be_read(tmp_path: Path) -> None:
    certificate = Authority(tmp_path).certificate
    assert [*expiry_of(str(certificate))] == [str(certificate)]
    certificate.unlink()
    assert expiry_of(str(certificate)) == expiry_of(None) == {}


def test_a_certificate_that_is_not_valid_is_named_at_the_start(tmp_path: Path) -> None:
    """A master started without a word, and no client could connect."""
    authority = Authority(tmp_path)
    for valid, fault in (
        ((-2 * DAY, -DAY), "has expired on"),
        ((DAY, 2 * DAY), "is not valid before"),
        ((-DAY, DAY), ""),
    ):
        socket = Socket("listen", "the wire", authority.issue("h", "h", valid=valid).listen(), Factory)
        with logged() as lines:
            socket.warn_of_certificate(socket.parse(MemoryReactor(), insecure=True))
        assert len(lines) == bool(fault), lines
        assert all(each.startswith("listen: the certificate ") and f" {fault} " in each for each in lines), lines
        assert all(
            each.endswith("so clients refuse to connect: renew it, and send SIGHUP to this process") for each in lines
        )
