"""What every segments folder guarantees, local or behind a URL."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from replication.errors import ConfigError, StoreError
from replication.segments import folders
from replication.segments.folders import Folder, LocalFolder, RemoteFolder, open_folder, read_index, write_index

if TYPE_CHECKING:
    from collections.abc import Callable


def remote(path: Path) -> Folder:
    fs = pytest.importorskip("pyarrow.fs", reason="pip install '.[spark]' in the checkout")
    return RemoteFolder(f"file://{path}", fs.LocalFileSystem())


@pytest.fixture(params=[LocalFolder, remote])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    make: Callable[[Path], Folder] = request.param
    return make(tmp_path / "out")


def write(folder: Folder, name: str, data: bytes) -> None:
    with folder.create(name) as sink:
        sink.write(data)


def read(folder: Folder, name: str) -> bytes:
    with folder.open(name) as source:
        return source.read()


def test_a_file_appears_once_it_is_complete(folder: Folder, tmp_path: Path) -> None:
    with folder.create("a/b/c.txt") as sink:
        sink.write(b"one")
        assert folder.size("a/b/c.txt") is None
    assert (folder.size("a/b/c.txt"), read(folder, "a/b/c.txt")) == (3, b"one")
    assert (tmp_path / "out/a/b/c.txt").read_bytes() == b"one"


@pytest.mark.parametrize("name", ["manifest.json", "orders/master/1.rdata"])
def test_a_pipe_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """To open one would wait for a program that writes into it, for ever."""
    folder = LocalFolder(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    other_end = os.open(tmp_path / name, os.O_RDWR)  # with it, the wait is over, and the test fails at once
    with pytest.raises(OSError, match="it is no file"):
        folder.open(name)
    os.close(other_end)


def test_an_index_is_read_up_to_the_limit(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_INDEX", 5)
    write_index(folder, "fits", b"12345")
    write(folder, "long", b"123456")
    assert read_index(folder, "fits") == b"12345"
    with pytest.raises(OSError, match="it has more than 5 bytes") as caught:
        read_index(folder, "long")
    assert caught.value.errno == errno.EFBIG
    with pytest.raises(StoreError, match="long would have more than 5 bytes"):
        write_index(folder, "long", b"123456")


def test_a_failed_write_leaves_the_old_file(folder: Folder) -> None:
    write(folder, "a/b", b"old")
    with pytest.raises(ZeroDivisionError), folder.create("a/b") as sink:
        sink.write(b"new")
        raise ZeroDivisionError
    assert folder.names() == ["a/b"]
    assert read(folder, "a/b") == b"old"


def test_names_lists_all_files_sorted(folder: Folder) -> None:
    assert folder.names() == []
    for name in ("b", "a/2", "a/1", "a/c/d"):
        write(folder, name, b"")
    assert folder.names() == ["a/1", "a/2", "a/c/d", "b"]
    assert folder.names("a/c") == ["a/c/d"]
    assert folder.names("nothing") == []


def test_a_move_replaces_the_file_of_the_new_name(folder: Folder) -> None:
    write(folder, "a", b"new")
    write(folder, "x/y", b"old")
    folder.move("a", "x/y")
    folder.move("x/y", "z/v/w")
    assert folder.names() == ["z/v/w"]
    assert read(folder, "z/v/w") == b"new"


def test_removing_a_missing_file_is_harmless(folder: Folder) -> None:
    for name in ("a/1", "a/b/2", "c"):
        write(folder, name, b"")
    folder.remove("a")
    assert folder.names() == ["c"]
    folder.remove("c")
    folder.remove("c")
    assert folder.names() == []


def test_a_subfolder_is_removed_while_a_task_of_a_killed_run_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors write for a while after their driver was killed; the next run ended with `Directory not empty`."""
    folder, remove = LocalFolder(tmp_path), shutil.rmtree
    write(folder, ".replay/task/1", b"x")
    raced = [OSError(errno.ENOTEMPTY, "Directory not empty"), FileNotFoundError(errno.ENOENT, "No such file")]

    def race(path: Path) -> None:
        if raced:
            raise raced.pop()
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", race)
    folder.remove(".replay")
    assert folder.names() == []
    write(folder, ".replay/task/1", b"x")
    raced += [OSError(errno.EACCES, "Permission denied")]
    with pytest.raises(StoreError, match="Permission denied"):
        folder.remove(".replay")
    raced += [OSError(errno.ENOTEMPTY, "Directory not empty")] * (folders.REMOVALS + 1)
    with pytest.raises(StoreError, match="Directory not empty"):
        folder.remove(".replay")


def test_a_missing_file_has_no_size_and_cannot_be_opened(folder: Folder) -> None:
    assert folder.size("a") is folder.stamp("a") is None
    with pytest.raises(FileNotFoundError):
        folder.open("a")


def test_a_replaced_file_has_another_stamp(folder: Folder) -> None:
    write(folder, "a", b"one")
    before = folder.stamp("a")
    assert folder.stamp("a") == before
    write(folder, "a", b"other")
    assert folder.stamp("a") != before


def test_an_open_file_that_is_written_into_has_another_stamp(folder: Folder, tmp_path: Path) -> None:
    write(folder, "a", b"one")
    [path] = [each for each in tmp_path.rglob("a") if each.is_file()]
    with folder.open("a") as source:
        before = folder.stamp_of(source, "a")
        assert before == folder.stamp("a")
        path.write_bytes(b"other")
        assert folder.stamp_of(source, "a") != before


def test_an_error_names_the_path(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(StoreError, match="out/a"), folder.create("a/b"):
        pass
    with pytest.raises(StoreError, match="out/"):
        folder.move("x", "a/b")


def test_an_error_of_a_local_folder_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("not a folder")
    with pytest.raises(StoreError, match=rf"^{tmp_path}/a/b: Not a directory$"):
        LocalFolder(tmp_path).remove("a/b")


def test_an_error_of_an_object_store_names_the_url_and_the_file() -> None:
    fs = pytest.importorskip("pyarrow.fs", reason="pip install '.[spark]' in the checkout")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "no answer")

    away = RemoteFolder("s3://bucket/out", SimpleNamespace(get_file_info=fail, create_dir=fail))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: away.size("a"), "a"),
        (lambda: away.stamp("b"), "b"),
        (lambda: away.names("c"), "c"),
        (lambda: away.move("d", "e"), "e"),
        (lambda: away.remove("f"), "f"),
    ]
    for call, name in calls:
        with pytest.raises(StoreError, match=f"^s3://bucket/out/{name}: no answer$"):
            call()
    for kind in (fs.FileType.File, fs.FileType.Directory):
        found = SimpleNamespace(type=kind, path="out/g")
        full = SimpleNamespace(get_file_info=lambda _, found=found: found, delete_file=fail, delete_dir=fail)
        with pytest.raises(StoreError, match=r"^s3://bucket/out/g: no answer$"):
            RemoteFolder("s3://bucket/out", full).remove("g")


def test_a_locked_local_folder_refuses_a_second_lock(tmp_path: Path) -> None:
    with LocalFolder(tmp_path).locked():
        with pytest.raises(StoreError, match="another run writes here"), LocalFolder(tmp_path).locked():
            pass
        assert list(tmp_path.iterdir()) == []
    with LocalFolder(tmp_path).locked():
        pass


def test_an_object_store_has_no_lock(tmp_path: Path) -> None:
    with remote(tmp_path).locked(), remote(tmp_path).locked():
        pass


def test_content_is_synced_before_the_rename_and_names_are_synced_by_flush(
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


def test_a_path_or_file_url_opens_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_folder("out").url == str(tmp_path / "out")
    assert open_folder(f"file://{tmp_path}/out").url == str(tmp_path / "out")
    assert open_folder(f"file://{tmp_path}/from://here").url == str(tmp_path / "from:" / "here")


def test_a_secret_with_a_slash_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
        open_folder("s3://key:hid/den@bucket/out")
    assert "hid" not in str(caught.value)


def test_a_token_before_the_host_is_in_no_message() -> None:
    assert RemoteFolder("s3://token@bucket/a:b@c", SimpleNamespace()).url == "s3://…@bucket/a:b@c"


def test_an_option_of_a_url_is_in_no_error() -> None:
    def fail(*_: object) -> None:
        raise OSError("403 Forbidden")

    folder = RemoteFolder("abfs://files@account/out?sig=hidden", SimpleNamespace(get_file_info=fail))
    with pytest.raises(StoreError) as caught:
        folder.size("manifest.json")
    assert str(caught.value).startswith("abfs://files@account/out?…/manifest.json: ")
    assert folder.address.endswith("?sig=hidden")


def test_an_unknown_scheme_is_refused_and_the_known_ones_are_listed() -> None:
    known = "s3://, s3a://, gs://, abfs://, hdfs://…"
    with pytest.raises(ConfigError, match=f"^'ftp://here/out' is not a folder: give a path, or {known}$"):
        open_folder("ftp://here/out")


def test_a_secret_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match=r"^s3://…@bucket/out\?…: .*AWS_SECRET_ACCESS_KEY") as caught:
        open_folder("s3://key:hidden@bucket/out?region=x")
    assert "hidden" not in str(caught.value)


def test_a_colon_in_a_path_is_not_a_secret() -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    assert open_folder("abfs://container@account.dfs.core.windows.net/a:b@c/d").url.endswith("/a:b@c/d")


def test_a_port_is_not_a_secret() -> None:
    """There is no Hadoop here."""
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    with pytest.raises(ConfigError, match=r"^hdfs://here:9000/out: .*a folder that all machines mount"):
        open_folder("hdfs://here:9000/out")


def test_a_slash_at_the_end_of_a_url_is_not_part_of_it(tmp_path: Path) -> None:
    fs = pytest.importorskip("pyarrow.fs", reason="pip install '.[spark]' in the checkout")
    folder = RemoteFolder(f"file://{tmp_path}/out//", fs.LocalFileSystem())
    write(folder, "a", b"one")
    assert (folder.url, folder.names()) == (f"file://{tmp_path}/out", ["a"])


def test_the_container_of_an_azure_url_is_not_a_secret() -> None:
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    assert open_folder("abfs://container@account.dfs.core.windows.net/out").url.startswith("abfs://container@account")


def test_a_url_that_pyarrow_cannot_open_is_an_error_with_the_reason() -> None:
    """There is no Hadoop here."""
    pytest.importorskip("pyarrow", reason="pip install '.[spark]' in the checkout")
    with pytest.raises(ConfigError, match=r"^hdfs://here/out: .*a folder that all machines mount"):
        open_folder("hdfs://here/out")


def test_a_reason_of_pyarrow_is_its_first_line_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = pytest.importorskip("pyarrow.fs", reason="pip install '.[spark]' in the checkout")
    asked: list[str] = []

    class Refusing:
        @staticmethod
        def from_uri(url: str) -> None:
            asked.append(url)
            raise ValueError(f"no bucket in {url}\nand more\nand more")

    monkeypatch.setattr(fs, "FileSystem", Refusing)
    with pytest.raises(ConfigError) as caught:
        open_folder("s3a://bucket/out?secret_key=hidden")
    assert asked == ["s3://bucket/out?secret_key=hidden"]
    why, cure = str(caught.value).split("; ")
    assert why.startswith("s3a://bucket/out?…: no bucket in s3")
    assert "hidden" not in why
    assert "more" not in why
    assert cure == "or give a folder that all machines mount"


def test_a_url_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(ConfigError, match=r"\.\[segments\]"):
        open_folder("s3://bucket/out")
