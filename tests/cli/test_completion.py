"""Completion: a shell that is installed reads its script, and completes commands, options and values with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from replication.bench import SCENARIOS
from replication.cli import main

if TYPE_CHECKING:
    from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
CASES = [
    ("", {*main.COMMANDS, "--help", "--version"}),
    ("sta", {"status"}),
    ("tail --s", {"--stream", "--secret-file"}),
    ("replay --compression ", {"none", "gzip", "zstd"}),
    ("streams ch", {"check"}),
    ("bench ", {*SCENARIOS, "--quick"}),
    ("bench i", {"ids", "idle"}),
    ("tail --secret-file sec", {"secret"}),
    ("replay --out se", {"segments/"}),
    ("tail --stream ", set()),
    ("completion ", {*SHELLS}),
]
# Prints the completions of a command line, one a line; fish prints a tab and the help after each.
ASK = {
    "bash": 'COMP_LINE=$1; COMP_POINT=${#1}; _python_argcomplete replication; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": "complete -C $argv[1]",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory: it has a file, a folder, and the program that the scripts run."""
    (tmp_path / "secret").touch()
    (tmp_path / "segments").mkdir()
    program = tmp_path / "bin" / "replication"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m replication "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_that_is_installed_reads_the_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    assert "replication" in script.read_text()
    if program := shutil.which(shell):
        prelude = "compdef() { }; " if shell == "zsh" else ""
        subprocess.run([program, "-c", f"{prelude}source {script}"], check=True)


@pytest.mark.parametrize("shell", ASK)
@pytest.mark.parametrize(("typed", "expected"), CASES)
@pytest.mark.usefixtures("folder")
def test_a_shell_completes(shell: str, typed: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    main.main(["completion", shell])
    script = f"{capsys.readouterr().out}\n{ASK[shell]}"
    if program := shutil.which(shell):
        command = [program, "-c", script, *(["bash"] if shell == "bash" else []), f"replication {typed}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        words = {line.partition("\t")[0].strip() for line in done.stdout.splitlines() if line}
        assert expected <= words
        assert all(each.startswith(typed.rpartition(" ")[2]) for each in words)
        assert expected or not words


def test_an_ordinary_command_does_not_load_argcomplete() -> None:
    code = "import sys; from replication.cli import main; main.main(['tail', '--help'])"
    check = "import atexit, sys; atexit.register(lambda: print('argcomplete' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"{check}; {code}"], check=True, capture_output=True, text=True)
    assert done.stdout.endswith("False\n")
