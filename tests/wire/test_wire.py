"""What the lower layers may import."""

from __future__ import annotations

import subprocess
import sys

FLOORS = ["wire.commands", "wire.lines", "streams.definitions", "session.connection", "session.send_buffer"]
FOREIGN = {"asyncio", "logging", "pyspark", "sqlite3", "twisted", "zope"}


def test_wire_streams_and_session_import_without_twisted() -> None:
    """A Spark executor that encodes lines must not load Twisted."""
    imports = "; ".join(f"import replication.{floor}" for floor in FLOORS)
    look = f"{imports}; import sys; print(*{FOREIGN} & {{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert loaded.stdout == "\n"
