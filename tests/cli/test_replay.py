"""Tests of ``replication replay``: options, what it says, how it ends; without Spark."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
pytest.importorskip("adbc_driver_sqlite", reason="pip install '.[spark]' in the checkout")

from replication.cli import main as cli
from replication.cli import replay
from replication.errors import ConfigError
from replication.replay.folders import LocalFolder
from replication.replay.segments import read_manifest
from tests.replay.histories import MASTER, OTHER, fact, lines_of, live_lines, write_database

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
def test_it_says_what_it_added_and_that_a_rerun_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "30", "--master", "none"]
    assert run(*asked) == 0
    said = capsys.readouterr()
    assert said.out.startswith("out: 100 rows in 8 new segments, ")
    assert said.err == ""
    assert history(tmp_path / "out") == live_lines(FACTS[::2])
    assert run(*asked) == 0
    assert capsys.readouterr().out == "out: up to date\n"


def test_what_to_take_can_be_said(database: str, tmp_path: Path) -> None:
    write_database(tmp_path / "m.db", {MASTER: FACTS}, stream="caches")
    asked = ["--database", database, "--out", str(tmp_path / "out"), "--master", "none"]
    assert run(*asked, "--stream", "orders", "--instance", OTHER, "--from", "10", "--upto", "20") == 0
    assert history(tmp_path / "out", OTHER) == live_lines(FACTS[9:19:2], OTHER)
    assert history(tmp_path / "out") == history(tmp_path / "out", stream="caches") == b""
    names = [each.suffixes for each in (tmp_path / "out/orders/worker2").iterdir()]
    assert names == [[".rdata", ".zst"]]


@pytest.mark.usefixtures("database")
@pytest.mark.parametrize(("compression", "suffix"), [("none", ".rdata"), ("gzip", ".gz"), ("zstd", ".zst")])
def test_segments_are_compressed_as_is_said(tmp_path: Path, compression: str, suffix: str) -> None:
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--master", "none", "--compression", compression]
    assert run(*asked) == 0
    assert {each.suffix for each in (tmp_path / "out/orders/master").iterdir()} == {suffix}
    assert run("--verify", "out") == 0


@pytest.mark.usefixtures("database")
def test_verify_counts_what_is_whole_and_names_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    said = capsys.readouterr()
    *faults, cure = said.err.splitlines()
    assert [
        f"{each.name}: {what}" in line
        for each, what, line in zip((first, second), ("No such file", "damaged"), faults, strict=True)
    ] == [True, True]
    assert cure.startswith("out: what is damaged or missing stays so, however often you replay into it: bring its file")
    assert said.out == ""


@pytest.mark.usefixtures("database")
def test_verify_of_a_folder_without_segments_fails_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--verify", "nothing") == 1
    assert "nothing has no manifest.json" in capsys.readouterr().err


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
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


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
def test_what_cannot_work_is_one_line_and_status_1(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--out", "out", "--master", "none", *arguments) == 1
    said = capsys.readouterr().err
    assert text in said
    assert said.count("\n") == 1


def test_a_masters_configuration_says_the_database_and_how_streams_are_mapped(tmp_path: Path, database: str) -> None:
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


@pytest.mark.usefixtures("database")
def test_spark_that_cannot_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_session(master: str | None) -> None:
        raise ConfigError(f"Spark needs Java, not {master}")

    monkeypatch.setattr(replay, "open_session", no_session)
    assert run("--database", "sqlite:///m.db", "--out", "out") == 1
    assert capsys.readouterr().err == "replication replay: Spark needs Java, not None\n"


@pytest.mark.usefixtures("database")
def test_a_terminal_is_shown_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr(replay, "LOOK_EVERY", 0.001)
    asked = ["--database", "sqlite:///m.db", "--out", "out", "--segment-rows", "10", "--master", "none"]
    assert run(*asked) == 0
    said = capsys.readouterr()
    assert "rows/s" in said.err
    assert said.out.startswith("out: 100 rows in 20 new segments")
