"""Tests of what the Spark source can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replication.errors import ConfigError
from replication.replay.api import StreamInfo
from replication.replay.options import KNOWN, Question
from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "the option stream says"),
        ({"stream": ""}, "the option stream says"),
        ({"stream": "a b"}, "option stream: not a stream name: 'a b'"),
        ({"steam": "x"}, "unknown option 'steam'; did you mean stream?"),
        ({"secretfil": "x"}, "unknown option 'secretfil'; did you mean secretFile?"),
        ({"colour": "x"}, "unknown option 'colour'; known are http, stream, secretFile"),
        ({"path": "orders"}, "a stream has no path: .* by the option stream"),
        (
            {"http": "localhost:9093"},
            "option http: not the URL of an HTTP API: 'localhost:9093'; it looks like http://",
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
        ({"secretFile": "/no/such/file"}, "option secretFile: cannot read /no/such/file: No such file"),
    ],
)
def test_an_option_that_cannot_be_is_named_with_what_can(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{text}"):
        Question.read({"stream": "orders", **options} if options else {})


@pytest.mark.parametrize("content", [b"", b" \n", b"one\ntwo\n", b"\xff"])
def test_a_secret_is_one_line_of_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^option secretFile: "):
        Question.read({"stream": "orders", "secretFile": str(tmp_path / "secret")})


def test_options_are_known_in_any_case_and_have_defaults(tmp_path: Path) -> None:
    assert Question.read({"stream": "orders"}) == Question(stream="orders")
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
    }
    assert {*given} == {*KNOWN}
    want = Question("orders", "https://here:7", "abc", "worker2", 7, False, 9, True, 10, 1.5)
    assert Question.read(given) == want
    assert Question.read({key.upper(): value for key, value in given.items()}) == want
    assert Question.read({"stream": "orders", "from": "latest"}) == Question("orders", latest=True)
    assert Question.read({"stream": "orders", "from": "beginning", "fields": "False"}) == Question("orders")


def test_a_secret_is_not_shown_to_whoever_prints_it() -> None:
    assert "abc" not in repr(Question("orders", secret="abc"))


def test_positions_are_those_of_the_writer_that_is_asked_for() -> None:
    info = StreamInfo(None, {InstanceName("b"): Token(3), InstanceName("a"): Token(4)})
    assert list(Question("orders").positions(info).items()) == [("a", 4), ("b", 3)]
    assert Question("orders", instance="b").positions(info) == {"b": 3}
    Question("orders", instance="b").check_instance(info)
    with pytest.raises(ConfigError, match="no writer 'a'; it has none yet"):
        Question("orders", instance="a").check_instance(StreamInfo(None, {}))


def test_a_connection_waits_no_longer_than_it_may() -> None:
    asked = Question("orders", patience=5.0)
    assert [asked.api()._patience, asked.api(2.0)._patience, asked.api(9.0)._patience] == [5.0, 2.0, 5.0]
