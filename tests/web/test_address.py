"""URLs of HTTP APIs, and secrets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replication.errors import ConfigError
from replication.web.address import bearer, read_secret, split_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:9093", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a:0", "", "http://[here"),
        *("http://me@here", "http://a?b", "http://a#b", "http://a b", "http://\u00e4", "http://a\r\nb"),
        *("http://a..b:1", "http://.a", f"https://{'a' * 64}.example"),
    ],
)
def test_an_url_that_is_not_of_an_api_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match=r"not the URL of an HTTP API: .*; write http://HOST:PORT, as in http://127"):
        split_url(url)


@pytest.mark.parametrize("url", ["http://h", "https://h:1", "http://h.:1", "http://[::1]:9093/behind/proxy/"])
def test_a_path_and_both_schemes_are_allowed(url: str) -> None:
    assert split_url(url).hostname


def test_a_secret_is_the_text_of_its_file_without_white_space_around_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  gr\u00fc\u00df \n", encoding="utf-8")
    assert read_secret(str(tmp_path / "secret")) == "gr\u00fc\u00df"


@pytest.mark.parametrize("content", [b"", b" \n", b"one\ntwo\n", b"\xff"])
def test_a_file_without_one_line_of_text_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"the secret file .*secret"):
        read_secret(str(tmp_path / "secret"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the secret file .*absent: No such file"):
        read_secret(str(tmp_path / "absent"))


@pytest.mark.parametrize("secret", ["", " ", "a\n", " a", "a ", "a\rb", "a\x00", "\udc80"])
def test_a_secret_that_no_header_can_carry_is_a_configuration_error(secret: str) -> None:
    """An empty file must not become a secret that every client has."""
    with pytest.raises(ConfigError, match="one line of printable text"):
        bearer(secret)
