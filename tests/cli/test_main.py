"""Which command runs, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import replication
from replication.cli import main
from replication.errors import StoreError
from tests.answering import answering

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def install(monkeypatch: pytest.MonkeyPatch, run: Callable[[Sequence[str]], int]) -> None:
    """Make ``run`` the command ``status``."""
    module = ModuleType("status")
    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "replication.cli.status", module)


def raising(error: BaseException) -> Callable[[Sequence[str]], int]:
    def run(_: Sequence[str]) -> int:
        raise error

    return run


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> int:
        seen.append(arguments)
        return 7

    install(monkeypatch, run)
    assert main.main(["status", "--http", "x", "--help", "-"]) == 7
    assert seen == [["--http", "x", "--help", "-"]]


def test_a_failure_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, raising(StoreError("it is full: make room")))
    assert main.main(["status"]) == 1
    assert capsys.readouterr().err == "replication status: it is full: make room\n"


@pytest.mark.parametrize("body", ["null", "[]", "{}", "3", '{"streams": 3}', '{"skipped": [3], "ids": "x"}'])
@pytest.mark.parametrize(
    "command",
    ["append s 1", "rooms !r", "rooms !r --json", "rooms !r --dot", "skip s w 2", "retry s w 2", "skipped", "status"],
)
def test_an_answer_of_another_program_is_one_line_and_status_1(
    command: str, body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(lambda _path, _authorization: (200, body.encode())) as url:
        assert main.main([*command.split(), "--http", url]) == 1
    printed = capsys.readouterr()
    name = command.partition(" ")[0]
    assert printed.err.startswith(f"replication {name}: {url} answers other JSON than a replication daemon: ")
    assert (printed.err.count("\n"), printed.out) == (1, "")


WRITER = {"instance": "m", "position": 2, "lag": 0, "state": "live", "error": None}
STREAM = {"name": "s", "writers": [WRITER], "open": 0, "oldest_open": None}
CONNECTION = {"name": "w", "address": "a:1", "since": 1.0, "lines_out": 1, "bytes_out": 1, "queued_bytes": 0}
CONNECTION |= {"last_command": "PING"}
PROCESS = {"role": "master", "server_name": "h", "instance_name": "m", "status": "ok"}
STATUS: dict[str, object] = {**PROCESS, "streams": [STREAM], "connections": [CONNECTION]}
SKIPPED = {"stream": "s", "instance": "m", "token": 2, "state": "skipped", "since": 1.0}
SKIPPED |= {"decided_by": "me", "error": "", "rows": [1]}


@pytest.mark.parametrize(
    ("command", "body"),
    [
        ("status", STATUS | {"streams": [STREAM | {"oldest_open": True}]}),
        ("status", STATUS | {"streams": [STREAM | {"notes": [None]}]}),
        ("status", STATUS | {"streams": [STREAM | {"writers": [WRITER | {"error": [1]}]}]}),
        ("status", STATUS | {"connections": [CONNECTION | {"last_command": 1}]}),
        ("status", STATUS | {"connections": [CONNECTION | {"since": 1e300}]}),
        ("status", STATUS | {"connections": [CONNECTION | {"queued_bytes": "\ud800"}]}),
        ("status", {key: value for key, value in STATUS.items() if key != "status"}),
        ("skipped", {"skipped": [SKIPPED | {"since": 10**30}]}),
        ("skipped", {"skipped": [SKIPPED | {"since": -1}]}),
    ],
)
def test_an_answer_that_is_nearly_one_of_a_daemon_is_one_line_and_status_1(
    command: str, body: object, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.dumps(body).encode()
    with answering(lambda _path, _authorization: (200, answer)) as url:
        assert main.main([command, "--http", url]) == 1
    assert capsys.readouterr().err.startswith(f"replication {command}: {url} answers ")


@pytest.mark.parametrize(("command", "body"), [("status", STATUS), ("skipped", {"skipped": [SKIPPED]})])
def test_the_answers_that_these_are_made_from_are_shown(
    command: str, body: object, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = json.dumps(body).encode()
    with answering(lambda _path, _authorization: (200, answer)) as url:
        assert main.main([command, "--http", url]) == 0
    assert "1970-01-01 00:00:01Z" in capsys.readouterr().out


def test_the_line_of_a_failure_has_no_control_character(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, raising(StoreError("it has \x1b[2J\nin it")))
    assert main.main(["status"]) == 1
    assert capsys.readouterr().err == "replication status: it has \\x1b[2J\\nin it\n"


def test_an_interruption_is_status_1_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, raising(KeyboardInterrupt()))
    assert main.main(["status"]) == 1
    assert capsys.readouterr().err == ""


def test_without_a_command_the_commands_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is wrong usage for a script, so the status is 2; a person reads what there is."""
    monkeypatch.setattr(sys, "argv", ["replication"])
    assert main.main() == main.main([]) == 2
    shown = capsys.readouterr()
    assert all(f"\n  {name} " in shown.err for name in main.COMMANDS)
    assert shown.out == ""


@pytest.mark.parametrize("arguments", [["frobnicate"], ["--frobnicate"]])
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 2
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("replication: ")


def test_the_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(["--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    for name, meaning in main.COMMANDS.items():
        assert f"{name:10} {meaning}" in output


@pytest.mark.parametrize("name", main.COMMANDS)
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.load(name).main(["--help"])
    assert stopped.value.code == 0
    assert f"replication {name}" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"replication {replication.__version__}\n"


def test_a_reader_that_closes_the_output_is_no_failure() -> None:
    """Neither a traceback nor Python's complaint about its last flush."""
    script = (
        "import sys, types; from replication.cli import main; module = types.ModuleType('fake');"
        "module.main = lambda _: print('x' * 100_000); sys.modules['replication.cli.status'] = module;"
        "sys.exit(main.main(['status']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, check=False, cwd=_checkout()
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_standard_files_that_are_closed_are_no_failure() -> None:
    """Python has None for each of them; the first file that is opened would be standard output."""
    script = (
        "import os, sys, types; from replication.cli import main; module = types.ModuleType('fake');"
        "module.main = lambda _: (print('x'), main.report('y'), sys.stdin.read(), os.open('/', 0))[-1] - 3;"
        "sys.modules['replication.cli.status'] = module; sys.argv[1:] = ['status']; sys.exit(main.main())"
    )
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run(command, check=False, cwd=_checkout()).returncode == 0


def test_an_argument_that_is_not_text_is_one_line_and_status_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["rooms", "!\udcff", "--http", "http://127.0.0.1:1"]) == 1
    assert main.main(["append", "\udcff", "--http", "http://127.0.0.1:1", "[]"]) == 1
    text = "an argument is not text: write it in the encoding of the locale, UTF-8 if possible"
    assert capfd.readouterr().err == f"replication rooms: {text}\nreplication append: {text}\n"


@pytest.mark.parametrize("text", ["'x'", "'x' * 100_000"])
def test_a_full_disk_is_one_line_and_status_1(text: str) -> None:
    """Whether it is found while printing or by the last flush."""
    script = (
        "import sys, types; from replication.cli import main; module = types.ModuleType('fake');"
        f"module.main = lambda _: print({text}) or 0; sys.modules['replication.cli.status'] = module;"
        "sys.exit(main.main(['status']))"
    )
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        ended = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False, cwd=_checkout()
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"replication status: ")
    assert ended.stderr.endswith(b"No space left on device\n")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "unused"),
    [([], {"attrs", "http.client", "msgspec", "rich", "twisted"}), (["append", "--help"], {"rich", "twisted"})],
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], unused: set[str]) -> None:
    script = (
        "import atexit, sys; from replication.cli import main;"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_checkout())
    loaded = set(ended.stderr.split())
    assert "replication.cli.parser" in loaded
    assert loaded & unused == set()


def test_a_character_that_the_locale_lacks_is_written_as_an_escape() -> None:
    command = [sys.executable, "-m", "replication", "tail", "--help"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, env=environment, capture_output=True, check=False, cwd=_checkout())
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert rb"\u2026" in ended.stdout


def _checkout() -> str:
    return os.path.dirname(os.path.dirname(replication.__file__))  # noqa: PTH120
