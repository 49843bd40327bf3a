"""How a wrong command line ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replication.cli.parser import Parser
from replication.errors import ConfigError
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from replication.web.blocking_client import HttpClient


def test_wrong_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="replication tail")
    parser.add_argument("endpoint")
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args([])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (
        "replication tail: the following arguments are required: endpoint; see replication tail --help\n"
    )


def test_an_unknown_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="replication tail")
    parser.add_argument("--stream")
    parser.add_argument("what", choices=("check", "install"))
    for arguments, near in (
        (["check", "--strem=x"], "--strem=x; did you mean --stream?; see replication tail --help\n"),
        (["chekc"], "; did you mean check?; see replication tail --help\n"),
        (["check", "--frobnicate"], "unrecognized arguments: --frobnicate; see replication tail --help\n"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(arguments)
        assert capsys.readouterr().err.endswith(near)


def test_a_url_in_the_wrong_place_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="replication tail")
    for argument in ("postgresql://me:hunter2@h/db", " postgresql://me:hunter2@h/db"):
        with pytest.raises(SystemExit):
            parser.parse_args([argument])
        assert "postgresql://me@h/db; see" in capsys.readouterr().err


def client(*arguments: str) -> HttpClient:
    parser = Parser(prog="replication status")
    parser.add_http_options()
    return parser.open_client(parser.parse_args(arguments))


def test_options_name_the_url_and_the_file_of_the_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hush\n")
    found = client("--http", "https://h:1", "--secret-file", str(tmp_path / "secret"))
    assert found.url == "https://h:1"
    assert found._headers == {"Authorization": b"Bearer hush"}
    assert client().url == "http://127.0.0.1:9093"


def test_a_certificate_and_its_key_belong_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Authority(tmp_path).issue("admin", "admin")
    options = ("--http=https://h:1", f"--certificate={shown.certificate}")
    assert client(*options, f"--private-key={shown.key}").certificate == shown.files
    for wrong, why in (
        (options, "--certificate and --private-key belong together: give both"),
        ((*options, "--private-key=/no/such"), "a certificate and its key: No such file or directory"),
        ((*options, f"--private-key={shown.certificate}"), "a certificate and its key: "),
    ):
        with pytest.raises(SystemExit) as stopped:
            client(*wrong)
        assert stopped.value.code == 2
        assert why in capsys.readouterr().err


def test_a_wrong_url_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        client("--http", "h:1")
    assert stopped.value.code == 2
    assert "write http://HOST:PORT" in capsys.readouterr().err


def test_a_secret_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the secret file"):
        client("--secret-file", str(tmp_path / "absent"))
