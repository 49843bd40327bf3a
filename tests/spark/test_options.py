"""Tests of the options of the Spark source."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest

from replication.errors import ConfigError
from replication.spark.options import READERS, SourceOptions
from replication.web.blocking_client import StreamInfo
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give the option stream"),
        ({"stream": ""}, "give the option stream"),
        ({"stream": "a b"}, "option stream: not a stream name: 'a b'"),
        ({"steam": "x"}, "unknown option 'steam'; did you mean stream?"),
        ({"secretfil": "x"}, "unknown option 'secretfil'; did you mean secretFile?"),
        ({"colour": "x"}, "unknown option 'colour'; known are http, stream, secretFile"),
        ({"path": "orders"}, "there is no path: .* the option stream"),
        (
            {"http": "localhost:9093"},
            "option http: not the URL of an HTTP API: 'localhost:9093'; write http://HOST:PORT",
        ),
        ({"http": "http://localhost:99999"}, "option http: not the URL"),
        ({"http": "http://me:secret@localhost"}, "option http: not the URL"),
        ({"instance": ""}, "option instance: not an instance name"),
        ({"from": "yesterday"}, "option from: 'yesterday' is neither an ID nor beginning nor latest"),
        ({"from": "-1"}, "option from: '-1' is neither"),
        ({"upto": "-1"}, "option upto: '-1' is not an ID"),
        ({"fields": "yes"}, "option fields: 'yes' is neither true nor false"),
        ({"maxRowsPerBatch": "0"}, "option maxRowsPerBatch: '0' is not a whole number from 1 on"),
        ({"patience": "long"}, "option patience: 'long' is not a number of seconds"),
        ({"patience": "-1"}, "option patience: '-1' is not"),
        ({"patience": "nan"}, "option patience: 'nan' is not"),
        ({"secretFile": "/no/such/file"}, "option secretFile: cannot read the secret file /no/such/file: No such file"),
    ],
)
def test_an_invalid_option_is_refused_with_the_cure(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        SourceOptions.read({"stream": "orders", **options} if options else {})


@pytest.mark.parametrize("content", [b"", b" \n", b"one\ntwo\n", b"\xff"])
def test_a_secret_is_one_line_of_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^option secretFile: "):
        SourceOptions.read({"stream": "orders", "secretFile": str(tmp_path / "secret")})


def test_options_are_case_insensitive_and_have_defaults(tmp_path: Path) -> None:
    assert SourceOptions.read({"stream": "orders"}) == SourceOptions(stream="orders")
    (tmp_path / "secret").write_text("abc\n")
    given = {
        "http": "https://here:7/",
        "stream": "orders",
        "secretFile": str(tmp_path / "secret"),
        "instance": "worker2",
        "from": "7",
        "upto": "9",
        "fields": "TRUE",
        "maxRowsPerBatch": "10",
        "patience": "1.5",
        "accessTokens": "true",
    }
    assert {*given} == {*READERS}
    want = SourceOptions("orders", "https://here:7", "abc", "worker2", 7, False, 9, True, 10, 1.5, True)
    assert SourceOptions.read(given) == want
    assert SourceOptions.read({key.upper(): value for key, value in given.items()}) == want
    assert SourceOptions.read({"stream": "orders", "from": "latest"}) == SourceOptions("orders", latest=True)
    assert SourceOptions.read({"stream": "orders", "from": "beginning", "fields": "False"}) == SourceOptions("orders")


def test_a_secret_is_not_in_the_repr() -> None:
    assert "abc" not in repr(SourceOptions("orders", secret="abc"))


def test_positions_can_be_limited_to_one_writer() -> None:
    info = StreamInfo(None, {InstanceName("b"): Token(3), InstanceName("a"): Token(4)})
    assert list(SourceOptions("orders").positions(info).items()) == [("a", 4), ("b", 3)]
    assert SourceOptions("orders", instance="b").positions(info) == {"b": 3}
    SourceOptions("orders", instance="b").check_instance(info)
    with pytest.raises(ConfigError, match="no writer 'a'; it has none yet"):
        SourceOptions("orders", instance="a").check_instance(StreamInfo(None, {}))


def test_a_client_retries_for_the_smaller_of_two_limits() -> None:
    asked = SourceOptions("orders", patience=5.0)
    assert [asked.client(most).patience for most in (inf, 2.0, 9.0)] == [5.0, 2.0, 5.0]
