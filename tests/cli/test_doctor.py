"""The command line of the doctor; tests/cli/test_own_checks.py and test_peer_checks.py plant the mistakes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from replication.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_is_wrong_with_the_sample_of_a_master(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "master.toml").write_text('stream = ["orders"]\n')
    assert main(["doctor", "--config", "master.toml", "--min-free", "1"]) == 0
    assert capsys.readouterr() == ("", "replication doctor: nothing was found\n")
    assert [each.name for each in tmp_path.iterdir()] == ["master.toml"], "it changes nothing"


def test_a_pipe_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``--config <(…)`` of a shell is."""
    reader, writer = os.pipe()
    os.write(writer, b"strem = 1\n")
    os.close(writer)
    assert main(["doctor", "--config", f"/dev/fd/{reader}"]) == 1
    os.close(reader)
    assert "strem: unknown key" in capsys.readouterr().out


def test_without_its_file_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "/no/such.toml"]) == 2
    assert "there is no file /no/such.toml" in capsys.readouterr().err


def test_a_finding_is_one_line_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "master.toml"
    file.write_text("strem = 1\n")
    assert main(["doctor", "--config", str(file)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{file}: strem: unknown key; did you mean stream?")
    assert "; cure: correct this key" in line
    assert main(["doctor", "--json", "--config", str(file)]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert set(found) == {"where", "what", "cure"}


def test_a_redis_that_does_not_answer_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--connect", "redis://:secret@127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "redis://127.0.0.1:1: Redis does not answer: Connection refused; cure: start it, or correct connect"
    )
    assert "secret" not in line


@pytest.mark.parametrize("words", [("--min-free", "x"), ("--certificate", "a.pem"), ("extra",)])
def test_a_wrong_command_line_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *words])
    assert ended.value.code == 2
