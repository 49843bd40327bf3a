"""A process that has imported ``twistd replication``, and forks for each start of it: a tenth of the CPU time.

The new process runs what the script ``twistd`` or ``replication`` runs, and ends as that does.  ``forked.py`` starts
this server.  Its standard input is the socket on which requests come.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPTS = {"twistd": ("twisted.scripts.twistd", "run"), "replication": ("replication.cli.main", "main")}
# What most processes of the tests import.  They import the rest themselves, such as the reactor.
PRELOADED = """
    hiredis prometheus_client psycopg replication.cli.append replication.cli.doctor replication.cli.main
    replication.cli.status replication.cli.tail replication.follower.worker replication.net.redis replication.service
    replication.storage.mapping_checks replication.storage.postgres.store replication.storage.sqlite.store
    replication.synapse replication.synapse.since_1_159 replication.writer.rooms rich.live rich.table
    twisted.application.twist twisted.cred.strcred twisted.internet.epollreactor twisted.plugins.replication_plugin
    twisted.scripts.twistd twisted.trial.itrial twisted.words.iwords
"""


def main(requests: socket.socket) -> None:
    """Fork for each request, and return in the new process only."""
    gc.freeze()  # the pages that the processes share stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the process that ``become`` leaves behind
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 17, 3)
        if not request:
            os._exit(0)  # the tests have ended
        if not os.fork():
            requests.close()
            become(json.loads(request), *descriptors)
            return
        for each in descriptors:
            os.close(each)


def become(request: dict[str, Any], output: int, errors: int, status: int) -> None:
    """Return in a process as requested; write its ID to ``status`` and, once it has ended, its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        os.write(status, f"{pid}\n".encode())
        os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
        os._exit(0)
    for number, each in enumerate([os.open(os.devnull, os.O_RDONLY), output, errors]):
        os.dup2(each, number)
    os.closerange(3, max(output, errors, status) + 1)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv[:] = request["command"]


if __name__ == "__main__":
    sys.path[0] = str(Path(sys.executable).parent)  # as in the script
    for each in PRELOADED.split():
        with suppress(ImportError):  # of an extra
            importlib.import_module(each)
    main(socket.socket(fileno=0))
    module, function = SCRIPTS[sys.argv[0]]
    sys.exit(getattr(importlib.import_module(module), function)())
