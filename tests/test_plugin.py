"""twistd finds the plugin. That depends on the packaging, so these tests run twistd itself."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins
from twisted.python.reflect import ModuleNotFound

from replication import service

CHECKOUT = Path(__file__).parent.parent


def twistd(*arguments: str, folder: Path) -> str:
    """Return what ``twistd`` prints, run in ``folder`` with the checkout on its path."""
    script = "import sys; from twisted.scripts.twistd import run; sys.argv[0] = 'twistd'; run()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_twistd_lists_us_once_from_anywhere(tmp_path: Path) -> None:
    """From the checkout's root too, where our folder ``twisted`` must not hide the real one."""
    for folder in (tmp_path, CHECKOUT):
        assert len(re.findall(r"^ +replication ", twistd("--help", folder=folder), re.MULTILINE)) == 1


def test_twistd_explains_both_roles(tmp_path: Path) -> None:
    output = twistd("replication", "--help", folder=tmp_path)
    assert re.search(r"^ +master +\S", output, re.MULTILINE)
    assert re.search(r"^ +worker +\S", output, re.MULTILINE)
    assert "Usage: twistd [-n] replication master" in twistd("replication", "master", "--help", folder=tmp_path)


def test_the_plugin_names_our_service() -> None:
    (maker,) = [each for each in getPlugins(IServiceMaker) if each.tapname == "replication"]
    assert maker.options is service.Options
    assert maker.makeService is service.makeService


def test_the_service_is_imported_without_garbage_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it from then on, also if the import fails."""
    (maker,) = [each for each in getPlugins(IServiceMaker) if each.tapname == "replication"]
    (tmp_path / "notes_gc.py").write_text("import gc\nOptions = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(maker, "module", "notes_gc")
    gc.unfreeze()
    assert maker.options is False
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    monkeypatch.setattr(maker, "module", "is_no_module")
    with pytest.raises(ModuleNotFound):
        maker.options  # noqa: B018 (it raises)
    assert gc.isenabled()


START = """
import sys
from replication import service
from twisted.internet import reactor
options = service.Options()
options.parseOptions(["master", "--stream=orders"])
service.make_daemon(reactor, options)
print(*sys.modules)
"""


def test_a_master_imports_only_what_it_needs(tmp_path: Path) -> None:
    """What it does not need takes a part of each start.  (Twisted's reactor imports OpenSSL if that is installed.)"""
    found = subprocess.run(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        check=True,
        capture_output=True,
        text=True,
    )
    loaded = set(found.stdout.split())
    assert {"replication.storage.sqlite.store", "replication.web.site"} <= loaded
    unused = {"follower", "rooms", "segments", "storage.postgres", "web.client", "web.live", "writer.rooms"}
    others = {"argcomplete", "hiredis", "opentelemetry", "prometheus_client", "psycopg", "rich", "twisted.web.server"}
    assert loaded & {*others, *(f"replication.{each}" for each in unused)} == set()


def test_twisted_plugins_has_no_init_file() -> None:
    """An ``__init__.py`` there would hide either this plugin or all others."""
    assert not list((CHECKOUT / "twisted").rglob("__init__.py"))
