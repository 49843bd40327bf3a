"""twistd finds the plugin. That depends on the packaging, so these tests run twistd itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins

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


def test_twisted_plugins_has_no_init_file() -> None:
    """An ``__init__.py`` there would hide either this plugin or all others."""
    assert not list((CHECKOUT / "twisted").rglob("__init__.py"))
