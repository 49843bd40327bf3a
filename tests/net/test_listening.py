"""Which sockets are safe."""

from __future__ import annotations

import pytest

from replication.net.listening import http_risk, wire_risk


def test_the_wire_is_safe_with_tls() -> None:
    assert wire_risk("ssl:9092:privateKey=key.pem") == ""
    for endpoint in ("tcp:9092", "systemd:domain=INET:index=0", "unix:/run/socket"):
        assert wire_risk(endpoint).startswith("without TLS, and all that reach it can read all facts: give an ssl:")


@pytest.mark.parametrize(
    ("endpoint", "has_secret", "risk"),
    [
        ("tcp:9093", False, "without a secret, and their requests are refused: give --secret-file"),
        ("ssl:9093", False, "without a secret"),
        ("tcp:9093", True, "without TLS, and the secret can be read on the way: give an ssl: endpoint"),
        ("ssl:9093", True, ""),
    ],
)
def test_http_is_safe_with_tls_and_a_secret(endpoint: str, risk: str, *, has_secret: bool) -> None:
    found = http_risk(endpoint, has_secret=has_secret)
    assert found.startswith(risk)
    assert bool(found) == bool(risk)
