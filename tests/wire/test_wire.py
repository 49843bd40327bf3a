"""What the lower floors may load."""

from __future__ import annotations

import subprocess
import sys

FLOORS = ["wire.commands", "wire.lines", "streams.registry", "session.connection", "session.outbox"]
FOREIGN = {"asyncio", "logging", "pyspark", "sqlite3", "twisted", "zope"}


def test_wire_streams_and_session_import_without_twisted() -> None:
    """A Spark executor that spells lines must not load a reactor."""
    imports = "; ".join(f"import replication.{floor}" for floor in FLOORS)
    look = f"{imports}; import sys; print(*{FOREIGN} & {{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert loaded.stdout == "\n"
