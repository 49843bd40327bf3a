"""docs/command-line.md has every command and every option of ``replication``, as ``--help`` has them."""

from __future__ import annotations

import re

import pytest

from replication.cli.main import COMMANDS, main
from tests.docs.pages import code, page, table

PAGE = page("command-line.md")
OPTION = re.compile(r"--[a-z][a-z-]+")


def help_of(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what ``replication COMMAND --help`` prints."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


def test_every_command_has_a_section() -> None:
    assert re.findall(r"^## `replication (\w+)`$", PAGE, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_help(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = [code(row["option"])[0] for row in table(PAGE, f"## `replication {command}`")]
    usage = help_of(command, capsys, monkeypatch)
    options = usage[usage.index("\noptions:\n") :].partition("\n\n")[0]
    found = {each for each in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", options, re.MULTILINE) if each != "--help"}
    assert {each.partition(" ")[0] for each in shown if each.startswith("--")} == found
    for each in shown:  # and what each takes
        name, _, taken = each.partition(" ")
        if name in found and not taken.startswith("["):
            assert re.search(rf"^  {name}(?: {re.escape(taken)})?(?:  |$)", options, re.MULTILINE), each


@pytest.mark.parametrize("command", COMMANDS)
def test_a_default_of_the_help_is_the_one_of_the_page(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the help has a number or a URL in brackets."""
    usage = help_of(command, capsys, monkeypatch)
    for row in table(PAGE, f"## `replication {command}`"):
        name = code(row["option"])[0].partition(" ")[0]
        found = re.search(rf"^  {re.escape(name)}\b.*\[(\d+|http\S+)\]$", usage, re.MULTILINE)
        if found:
            assert row["default"].strip("`") == found[1], name
