"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import sqlite3
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> dict[str, str | int | float]:
    """Return what has a say in the figures; ``load`` is what others did here in the last minute."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 2),
        "twisted": version("twisted"),
        "sqlite": sqlite3.sqlite_version,
    }


def _cpu() -> str:
    """Return the processor's name; only Linux has a place for it that is read without asking around."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
