"""How a wrong command line ends."""

from __future__ import annotations

import pytest

from replication.cli.parser import Parser


def test_wrong_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="replication tail")
    parser.add_argument("endpoint")
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args([])
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "replication tail: the following arguments are required: endpoint; see replication tail --help\n"
    )


def test_help_out_of_a_docstring_has_no_marks_of_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        Parser(prog="replication rooms", description="``replication rooms``: see ``--dot``.").parse_args(["--help"])
    assert "\nreplication rooms: see --dot.\n" in capsys.readouterr().out
