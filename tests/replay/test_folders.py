"""What every folder of segments promises, for one of this machine and for one behind a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError, StoreError
from replication.replay.folders import IFolder, LocalFolder, RemoteFolder, open_folder

if TYPE_CHECKING:
    from collections.abc import Callable


def remote(path: Path) -> IFolder:
    fs = pytest.importorskip("pyarrow.fs", reason="pip install '.[spark]' in the checkout")
    return RemoteFolder(f"file://{path}", fs.LocalFileSystem())


@pytest.fixture(params=[LocalFolder, remote])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> IFolder:
    make: Callable[[Path], IFolder] = request.param
    return make(tmp_path / "out")


def write(folder: IFolder, name: str, data: bytes) -> None:
    with folder.create(name) as sink:
        sink.write(data)


def read(folder: IFolder, name: str) -> bytes:
    with folder.open(name) as source:
        return source.read()


def test_a_file_is_there_once_it_has_been_written_to_its_end(folder: IFolder, tmp_path: Path) -> None:
    with folder.create("a/b/c.txt") as sink:
        sink.write(b"one")
        assert folder.size("a/b/c.txt") is None
    assert (folder.size("a/b/c.txt"), read(folder, "a/b/c.txt")) == (3, b"one")
    assert (tmp_path / "out/a/b/c.txt").read_bytes() == b"one"


def test_a_file_that_fails_is_not_there_and_leaves_what_was_there(folder: IFolder) -> None:
    write(folder, "a/b", b"old")
    with pytest.raises(ZeroDivisionError), folder.create("a/b") as sink:
        sink.write(b"new")
        raise ZeroDivisionError
    assert folder.names() == ["a/b"]
    assert read(folder, "a/b") == b"old"


def test_names_are_those_of_all_files_in_order(folder: IFolder) -> None:
    assert folder.names() == []
    for name in ("b", "a/2", "a/1", "a/c/d"):
        write(folder, name, b"")
    assert folder.names() == ["a/1", "a/2", "a/c/d", "b"]
    assert folder.names("a/c") == ["a/c/d"]
    assert folder.names("nothing") == []


def test_a_file_is_moved_over_another(folder: IFolder) -> None:
    write(folder, "a", b"new")
    write(folder, "x/y", b"old")
    folder.move("a", "x/y")
    folder.move("x/y", "z/w")
    assert folder.names() == ["z/w"]
    assert read(folder, "z/w") == b"new"


def test_files_and_folders_are_removed_and_what_is_not_there_is_no_matter(folder: IFolder) -> None:
    for name in ("a/1", "a/b/2", "c"):
        write(folder, name, b"")
    folder.remove("a")
    assert folder.names() == ["c"]
    folder.remove("c")
    folder.remove("c")
    assert folder.names() == []


def test_what_is_not_there_has_no_size_and_cannot_be_opened(folder: IFolder) -> None:
    assert folder.size("a") is folder.stamp("a") is None
    with pytest.raises(FileNotFoundError):
        folder.open("a")


def test_a_file_that_was_replaced_has_another_stamp(folder: IFolder) -> None:
    write(folder, "a", b"one")
    before = folder.stamp("a")
    assert folder.stamp("a") == before
    write(folder, "a", b"other")
    assert folder.stamp("a") != before


def test_a_folder_that_refuses_is_named(folder: IFolder, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(StoreError, match="out/a"), folder.create("a/b"):
        pass
    with pytest.raises(StoreError, match="out/"):
        folder.move("x", "a/b")


def test_nobody_else_writes_into_a_local_folder_meanwhile(tmp_path: Path) -> None:
    with LocalFolder(tmp_path).alone():
        with pytest.raises(StoreError, match="another run writes here"), LocalFolder(tmp_path).alone():
            pass
        assert list(tmp_path.iterdir()) == []
    with LocalFolder(tmp_path).alone():
        pass


def test_an_object_store_has_nothing_to_lock(tmp_path: Path) -> None:
    with remote(tmp_path).alone(), remote(tmp_path).alone():
        pass


def test_content_is_durable_before_it_has_its_name_and_the_name_when_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(file: int) -> None:
        done.append("sync")
        fsync(file)

    def noted_replace(self: Path, target: Any) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    folder = LocalFolder(tmp_path)
    write(folder, "a/b/c", b"one")
    assert done == ["sync", "rename"]
    folder.flush(["a/b/c", "a/b/d"])
    assert done == ["sync", "rename", "sync", "sync", "sync"]  # the folders that have c, b and a
    folder.flush([])


def test_a_path_or_a_file_url_is_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_folder("out").url == str(tmp_path / "out")
    assert open_folder(f"file://{tmp_path}/out").url == str(tmp_path / "out")


def test_a_url_that_nobody_knows_is_refused_with_those_that_can_be() -> None:
    with pytest.raises(ConfigError, match=r"^'ftp://here/out' is no folder: .*s3://"):
        open_folder("ftp://here/out")


def test_a_secret_in_a_url_is_refused_and_not_said_again() -> None:
    with pytest.raises(ConfigError, match=r"^s3://…@bucket/out\?region=x: .*AWS_SECRET_ACCESS_KEY") as caught:
        open_folder("s3://key:hidden@bucket/out?region=x")
    assert "hidden" not in str(caught.value)


def test_a_container_of_an_account_is_no_secret() -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    assert open_folder("abfs://container@account.dfs.core.windows.net/out").url.startswith("abfs://container@account")


def test_a_url_that_cannot_be_reached_says_why() -> None:
    """There is no Hadoop here."""
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    with pytest.raises(ConfigError, match=r"^hdfs://here/out: .*a folder that all machines share"):
        open_folder("hdfs://here/out")


def test_a_url_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(ConfigError, match=r"\.\[spark\]"):
        open_folder("s3://bucket/out")
