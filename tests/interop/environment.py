"""Python environments with a Synapse; each stays in pytest's cache. uv makes them, in less time than pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_environment(folder: Path, interpreter: str, requirements: Path, *, upgrade: bool = False) -> Path:
    """Install requirements into an environment, and return its Python; it is kept until the requirements change.

    ``upgrade``: install releases that were published meanwhile.
    """
    python, made_for = folder / "bin/python", folder / "made-for.txt"
    uv = sys.executable, "-m", "uv"
    install = (*uv, "pip", "install", "--quiet", "--python", str(python), "-r", str(requirements))
    if not made_for.exists() or made_for.read_text() != requirements.read_text():
        _run(*uv, "venv", "--quiet", "--clear", "--python", interpreter, str(folder))
        _run(*install)
        shutil.copyfile(requirements, made_for)
    elif upgrade:
        _run(*install, "--upgrade")
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-3000:]}")
