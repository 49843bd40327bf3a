"""The processor time of starts: of daemons until their first socket is open, and of two short commands.

``twistd`` with an application that does nothing shows Twisted's part of a daemon's start.  The starts take turns.  The
first start of each is not measured: it stores compiled modules, if Python may store them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from replication.bench.processes import BenchError
from replication.bench.series import Series

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from replication.bench.series import BenchOptions

TWISTD: Final = ("-c", "from twisted.scripts.twistd import run; run()", "--nodaemon", "--pidfile=")
LOCAL: Final = ("--listen=tcp:0:interface=127.0.0.1", "--http=tcp:0:interface=127.0.0.1")
SERVED: Final = b"is served"  # in the first line after a socket was opened
NOTHING: Final = """
from twisted.application.service import Application
from twisted.internet import reactor
application = Application("nothing")
reactor.callWhenRunning(print, "nothing is served")
"""
VARIANTS: Final[Mapping[str, Sequence[str]]] = {
    "twistd, an application that does nothing": (*TWISTD, "--python=nothing.tac"),
    "twistd replication master": (*TWISTD, "replication", "master", "--stream=orders", *LOCAL),
    "twistd replication worker": (*TWISTD, "replication", "worker", "--connect=tcp:127.0.0.1:1", LOCAL[1]),
    "replication": ("-m", "replication"),
    "replication append, no daemon": (
        "-m",
        "replication",
        "append",
        "--http=http://127.0.0.1:1",
        "--retry=0",
        "s",
        "[]",
    ),
}


def measure(options: BenchOptions) -> Iterator[Series]:
    """Measure each start in every round."""
    with TemporaryDirectory(prefix="replication-bench-") as folder:
        Path(folder, "nothing.tac").write_text(NOTHING, encoding="utf-8")
        rounds = [{name: _start(name, folder) for name in VARIANTS} for _ in range(options.rounds + 1)]
    for name in VARIANTS:
        yield Series(name, "CPU of a start", "s", [each[name] for each in rounds[1:]])


def _start(name: str, folder: str) -> float:
    """Return the seconds of processor time until a daemon serves, or a command ends."""
    command = [sys.executable, *VARIANTS[name]]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:  # noqa: S603 (constant commands)
        assert process.stdout is not None  # noqa: S101 (it is a pipe)
        served = any(SERVED in line for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)  # not ``process.kill``, which may wait for it
        _, _, used = os.wait4(process.pid, 0)
    if served != (TWISTD[0] in command):
        raise BenchError(f"{name!r} did not run")
    return used.ru_utime + used.ru_stime
