"""Pipes and devices in the place of secrets, certificates, keys and configurations: none is waited for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from twisted.internet.protocol import Factory

from replication import config
from replication.cli.main import main
from replication.errors import ConfigError
from replication.net.certificates import ClientRule, TlsEndpoint
from replication.net.files import refuse_pipes
from replication.net.reconnecting import FreshEndpoint
from replication.net.tls import client_tls
from replication.web.address import read_secret
from replication.web.blocking_client import tls_context
from tests.certificates import Authority
from tests.doubles import now

if TYPE_CHECKING:
    from pathlib import Path

WHY = "it is a pipe or a device: name a regular file"


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    """Return a pipe that no process writes."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    return str(tmp_path / "pipe")


def test_a_pipe_and_a_device_are_refused_and_a_file_passes(tmp_path: Path, pipe: str) -> None:
    (tmp_path / "file").touch()
    refuse_pipes(str(tmp_path / "file"), str(tmp_path), None)
    for each in (pipe, "/dev/null"):
        with pytest.raises(OSError, match=WHY) as caught:
            refuse_pipes(str(tmp_path / "file"), each)
        assert caught.value.filename == each


def test_a_pipe_that_the_shell_has_opened_is_read(pipe: str) -> None:
    """As of ``<(…)``: the process has it already."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as sink:
        sink.write("xyz\n")
    try:
        assert read_secret(f"/dev/fd/{reading}") == "xyz"
    finally:
        os.close(reading)
    refuse_pipes("/dev/stdin", "/proc/self/fd/0")
    with pytest.raises(ConfigError, match=f"cannot read the secret file {pipe}: {WHY}"):
        read_secret(pipe)


def test_a_configuration_and_its_secret_are_no_pipes(tmp_path: Path, pipe: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the configuration {pipe}: {WHY}"):
        config.load("master", pipe)
    for key in ("secret_file", "access.shop.secret_file", "redis_password_file"):
        (tmp_path / "x.toml").write_text(f'{key} = "{pipe}"\n')
        with pytest.raises(ConfigError, match=f"cannot read the secret file {pipe}: {WHY}"):
            config.load("worker", str(tmp_path / "x.toml"))


def test_certificates_and_keys_are_no_pipes(tmp_path: Path, pipe: str) -> None:
    good = Authority(tmp_path).issue("good", "127.0.0.1")
    certificate, key = good.files
    for own, own_key, extra, authority in (
        (certificate, pipe, "", certificate),
        (pipe, key, "", certificate),
        (certificate, key, f":extraCertChain={pipe}", certificate),
        (certificate, key, f":dhParameters={pipe}", certificate),
        (certificate, key, "", pipe),
    ):
        with pytest.raises(ConfigError, match=f"cannot read {pipe}: {WHY}"):
            TlsEndpoint(None, f"ssl:0:privateKey={own_key}:certKey={own}{extra}", ClientRule(authority))
    for files in ((pipe, key), (certificate, pipe)):
        with pytest.raises(OSError, match=WHY):
            client_tls("127.0.0.1", files)
        with pytest.raises(ConfigError, match=WHY):
            tls_context(files)
        endpoint = FreshEndpoint(None, f"tls:127.0.0.1:1:certificate={files[0]}:privateKey={files[1]}")
        with pytest.raises(OSError, match=WHY):
            now(endpoint.connect(Factory()))


def test_the_doctor_finds_pipes(
    tmp_path: Path, pipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    worker = f'connect = "unix:x"\n[tls]\ncertificate = "{pipe}"\nprivate_key = "{pipe}"\n'
    for text in (f'secret_file = "{pipe}"\n', worker):
        (tmp_path / "x.toml").write_text(text)
        assert main(["doctor", "--config", "x.toml", "--min-free", "1"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert [WHY in each for each in lines if not each.startswith("unix:x: ")] == [True], lines
    with patch("sys.stdin", None):
        assert main(["status", "--secret-file", pipe]) == 1
    assert WHY in capsys.readouterr().err
