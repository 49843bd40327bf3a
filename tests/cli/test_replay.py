"""Tests of ``replication replay``: options, output and exit status; without Spark."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.cli import main as cli
from replication.cli import replay
from replication.errors import ConfigError
from replication.segments.folders import LocalFolder
from replication.segments.manifest import read_manifest
from replication.segments.run import Task
from replication.spark import job
from replication.streams.definitions import StreamDefinition
from tests.segments.histories import MASTER, OTHER, fact, lines_of, live_lines, write_database

if TYPE_CHECKING:
    from pathlib import Path

FACTS = [fact(token, ["row", token]) for token in range(2, 102)]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write_database(tmp_path / "m.db", {MASTER: FACTS[::2], OTHER: FACTS[1::2]})


def run(*arguments: str) -> int:
    return cli.main(["replay", *arguments])


def history(folder: Path, writer: str = MASTER, stream: str = "orders") -> bytes:
    manifest = read_manifest(LocalFolder(folder))
    assert manifest is not None
    chain = [each for each in manifest.segments if (each.stream, each.instance) == (stream, writer)]
    return b"".join(lines_of(LocalFolder(folder), each) for each in chain)


@pytest.mark.usefixtures("database")
def test_a_run_prints_what_it_added_and_a_rerun_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "30", "--master", "none"]
    assert run(*asked) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("out: 100 rows in 8 new segments, ")
    assert printed.err == "replication replay: 4 ranges to write, of orders\n"
    assert history(tmp_path / "out") == live_lines(FACTS[::2])
    assert run(*asked) == 0
    assert capsys.readouterr() == ("out: up to date\n", "")


def test_facts_that_no_line_can_hold_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were left out without a word: a folder that seems whole lacked them."""
    monkeypatch.chdir(tmp_path)
    long = [fact(token, "x" * 2_000) for token in (5, 6, 60)]
    facts = [each for each in FACTS if each.token not in {5, 6, 60}] + long
    database = write_database(tmp_path / "m.db", {MASTER: sorted(facts, key=lambda each: each.token)})
    (tmp_path / "m.toml").write_text(f'database = "{database}"\nline_limit = 1024\n')
    asked = ["--config", "m.toml", "--out", "out", "--segment-rows", "30", "--master", "none"]
    assert run(*asked) == 0
    warning = (
        "warning: stream 'orders': facts of 'master' that are left out, because a row is longer than line_limit: 3, "
    )
    assert f"replication replay: {warning}the first is 5; a worker fetches them from" in capsys.readouterr().err
    manifest = read_manifest(LocalFolder(tmp_path / "out"))
    assert manifest is not None
    counted = [(each.left_out, each.left_out_from) for each in manifest.segments if each.left_out]
    assert counted == [(2, 5), (1, 60)]
    (tmp_path / "m.toml").write_text(f'database = "{database}"\nline_limit = 4096\n')
    assert run(*asked[:3], "whole", *asked[4:]) == 0
    assert "left out" not in capsys.readouterr().err
    assert '"left_out' not in (tmp_path / "whole/manifest.json").read_text()


def test_streams_instances_and_ids_can_be_limited(database: str, tmp_path: Path) -> None:
    write_database(tmp_path / "m.db", {MASTER: FACTS}, stream="caches")
    asked = ["--database", database, "--out", str(tmp_path / "out"), "--master", "none"]
    assert run(*asked, "--stream", "orders", "--instance", OTHER, "--from", "10", "--upto", "20") == 0
    assert history(tmp_path / "out", OTHER) == live_lines(FACTS[9:19:2], OTHER)
    assert history(tmp_path / "out") == history(tmp_path / "out", stream="caches") == b""
    names = [each.suffixes for each in (tmp_path / "out/orders/worker2").iterdir()]
    assert names == [[".rdata", ".zst"]]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(("compression", "suffix"), [("none", ".rdata"), ("gzip", ".gz"), ("zstd", ".zst")])
def test_compression_chooses_the_suffix(tmp_path: Path, compression: str, suffix: str) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--master", "none", "--compression", compression]
    assert run(*asked) == 0
    assert {each.suffix for each in (tmp_path / "out/orders/master").iterdir()} == {suffix}
    assert run("--verify", "out") == 0


@pytest.mark.parametrize("more", [[], ["--upto", "9"]])
def test_rows_of_a_writer_without_a_position_are_named(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writers = [("master", 1), *[(f"w{number}\x1b", number) for number in range(2, 9)]]
    with closing(sqlite3.connect(tmp_path / "m.db")) as connection, connection:
        connection.execute("CREATE TABLE visits (id INTEGER PRIMARY KEY, writer TEXT)")
        connection.executemany("INSERT INTO visits (writer, id) VALUES (?, ?)", writers)
    database = write_database(tmp_path / "m.db", {}, stream=StreamDefinition("visits"), positions={MASTER: 9})
    (tmp_path / "m.toml").write_text(
        f"""database = "{database}"\n[[streams]]\nname = "visits"\ntable = "visits"\nid_column = "id"\n"""
        f"""instance_column = "writer"\nrow = ["id"]\n"""
    )
    assert run("--config", f"{tmp_path}/m.toml", "--out", f"{tmp_path}/out", "--master", "none", *more) == 0
    warning, *_ = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        "replication replay: warning: stream 'visits': rows are left out, of writers that are not"
    )
    assert warning.count(" 1 of 'w") == 5
    assert ", and 2 more writers; add them to writers in the file of --config, or give these rows a name" in warning
    assert "\x1b" not in warning


@pytest.mark.usefixtures("database")
def test_verify_counts_whole_segments_and_names_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "30", "--master", "none"]
    run(*asked)
    capsys.readouterr()
    assert run("--verify", "out") == 0
    assert capsys.readouterr().out == "out: 8 segments with 100 rows are whole\n"
    first, second, *_ = sorted((tmp_path / "out/orders/master").iterdir())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-3])
    assert run(*asked) == 0
    assert capsys.readouterr().out == "out: up to date\n"
    assert run("--verify", "out") == 1
    printed = capsys.readouterr()
    *faults, cure = printed.err.splitlines()
    assert [
        f"{each.name}: {what}" in line
        for each, what, line in zip((first, second), ("No such file", "damaged"), faults, strict=True)
    ] == [True, True]
    assert cure.startswith("out: a replay does not repair damaged or missing segments: restore the files")
    assert printed.out == ""


@pytest.mark.usefixtures("database")
def test_verify_without_zstandard_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "30", "--master", "none")
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert run("--verify", "out") == 1
    printed = capsys.readouterr().err
    assert printed.startswith(
        "replication replay: compression zstd needs zstandard: pip install 'twisted-replication[zstd]'"
    )
    assert printed.count("\n") == 1


@pytest.mark.usefixtures("database")
def test_verify_of_a_folder_without_a_manifest_fails_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--verify", "nothing") == 1
    assert "nothing has no manifest.json" in capsys.readouterr().err


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(("master", "extra"), [("none", "segments"), ("local[1]", "spark")])
def test_without_its_extra_replay_names_the_command_that_installs_it(
    master: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("NEEDED", "NEEDED_HERE"):
        monkeypatch.setattr(job, needed, ("zstandard", "no_such_module"))
    assert run("--database", "sqlite:///m.db", "--out", "out", "--master", master) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(
        f"replication replay: replay needs no_such_module: pip install 'twisted-replication[{extra}]'"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--out DIR"),
        (["--out", "out"], "--database URL"),
        (["--out", "out", "--database", "sqlite:///m.db", "--compression", "lz4"], "invalid choice: 'lz4'"),
        (["--out", "out", "--database", "sqlite:///m.db", "--segment-rows", "many"], "--segment-rows"),
        (["--out", "out", "--database", "sqlite:///m.db", "--from", "x"], "--from"),
        (["else"], "else"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert printed.count("\n") == 1


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--database", "sqlite:///no.db"], "there is no such file"),
        (["--database", "mysql://here"], "postgresql://"),
        (["--database", "sqlite:///m.db", "--stream", "odrers"], "it has orders"),
        (["--config", "no.toml"], "cannot read the configuration no.toml"),
    ],
)
def test_a_failure_is_one_line_and_status_1(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "out", "--master", "none", *arguments) == 1
    printed = capsys.readouterr().err
    assert text in printed
    assert printed.count("\n") == 1


def test_config_gives_the_database_and_the_mapped_streams(tmp_path: Path, database: str) -> None:
    with sqlite3.connect(tmp_path / "m.db") as opened:
        opened.execute("CREATE TABLE shop (n INTEGER, writer TEXT, id TEXT, total REAL, note TEXT)")
        opened.execute("CREATE INDEX shop_n ON shop (n)")
        rows = [(-2, None, "a", 1.0, None), (-3, "worker2", "é", 1e-7, '"'), (-3, "worker2", "c", 1e16, "\x7f")]
        opened.executemany("INSERT INTO shop VALUES (?, ?, ?, ?, ?)", [*rows, (-4, "master", "d", 2.5, "x")])
        for writer, place in (("master", -4), ("worker2", -3)):
            opened.execute("INSERT INTO stream_positions VALUES ('shop', ?, ?)", (writer, place))
    opened.close()
    (tmp_path / "master.toml").write_text(
        'database = "sqlite:///m.db"\n[[streams]]\nname = "shop"\ntable = "shop"\nid_column = "n"\nnegative = true\n'
        'instance_column = "writer"\nrow = ["id", "total", "note"]\nwhere = "id <> \'d\'"\n'
    )
    assert run("--config", "master.toml", "--out", "out", "--master", "none") == 0
    assert history(tmp_path / "out") == live_lines(FACTS[::2])
    assert history(tmp_path / "out", "master", "shop") == live_lines([fact(2, ["a", 1.0, None])], "master", "shop")
    want = [fact(3, ["é", 1e-7, '"'], ["c", 1e16, "\x7f"])]
    assert history(tmp_path / "out", "worker2", "shop") == live_lines(want, "worker2", "shop")


def test_a_worker_s_config_gives_the_streams_and_needs_the_database_of_the_writers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = write_database(tmp_path / "writer.db", {MASTER: FACTS})
    path = tmp_path / "worker.toml"
    path.write_text('connect = ["tcp:127.0.0.1:1"]\n[[streams]]\nname = "orders"\nrow = ["kind", "number"]\n')
    command = ["--config", str(path), "--out", str(tmp_path / "out"), "--master", "none"]
    assert run(*command) == 1
    assert f"{path} is a worker's: give --database URL, the database of the writers" in capsys.readouterr().err
    assert run(*command, "--database", url) == 0
    assert history(tmp_path / "out") == live_lines(FACTS)


@pytest.mark.usefixtures("database")
def test_spark_that_cannot_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_session(master: str | None, _: object) -> None:
        raise ConfigError(f"Spark needs Java, not {master}")

    monkeypatch.setattr(replay, "open_session", no_session)
    monkeypatch.setattr(replay, "check_installed", lambda **_: None)  # the extra ``segments`` has no Spark
    assert run("--database", "sqlite:///m.db", "--out", "out") == 1
    assert capsys.readouterr().err.splitlines()[1:] == ["replication replay: Spark needs Java, not None"]


@pytest.mark.usefixtures("database")
def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(replay, "POLL_INTERVAL", 0.001)
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "10", "--master", "none"]
    assert run(*asked) == 0
    printed = capsys.readouterr()
    assert "rows/s" in printed.err
    assert printed.out.startswith("out: 100 rows in 20 new segments")


@pytest.mark.usefixtures("database")
def test_a_pipe_gets_a_line_for_every_ten_ranges(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "POLL_INTERVAL", 0.001)
    do = Task.do

    def slowly(task: Task) -> bytes:
        time.sleep(0.05)
        return do(task)

    monkeypatch.setattr(Task, "do", slowly)
    assert run("--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "4", "--master", "none") == 0
    planned, *lines = capsys.readouterr().err.splitlines()
    assert planned == "replication replay: 25 ranges to write, of orders"
    assert [re.sub(r"\d+ rows/s", "… rows/s", line) for line in lines] == [
        "replication replay: 10 of 25 ranges, 40 rows in 20 segments, … rows/s",
        "replication replay: 20 of 25 ranges, 80 rows in 40 segments, … rows/s",
    ]


@pytest.mark.usefixtures("database")
def test_an_interrupt_is_one_line_and_a_rerun_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "30", "--master", "none"]
    done: list[Task] = []
    do = Task.do

    def interrupted(task: Task) -> bytes:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(task)
        return do(task)

    with monkeypatch.context() as patch:
        patch.setattr(Task, "do", interrupted)
        assert run(*asked) == 130
    _, line = capsys.readouterr().err.splitlines()
    assert line == ("replication replay: interrupted; finished ranges are kept: run the same command again to continue")
    assert run(*asked) == 0
    assert capsys.readouterr().err == "replication replay: 2 ranges to write, of orders\n"
    assert history(tmp_path / "out") == live_lines(FACTS[::2])
