"""The recorded bytes of Synapse 1.47 and its worker, in tests/data."""

from __future__ import annotations

import gzip
from pathlib import Path

from replication.session.connection import Role

DATA = Path(__file__).parent.parent / "data"
RECORDINGS = [
    ("synapse-sqlite/recording.txt", Role.MASTER),
    ("synapse-sqlite/worker.txt", Role.WORKER),
    ("synapse-postgres/recording.txt", Role.MASTER),
    ("synapse-postgres/worker.txt", Role.WORKER),
    ("synapse-postgres/worker1.txt", Role.WORKER),
]


def read_recording(name: str) -> bytes:
    """Return the recorded bytes; a worker's lines stand with the number of lines that it had received."""
    data = gzip.decompress((DATA / f"{name}.gz").read_bytes())
    if "worker" in name:
        data = b"".join(line.split(b" ", 1)[1] for line in data.splitlines(keepends=True))
    return data
