"""``python -m replication``: the same as ``replication``."""

from __future__ import annotations

import sys

from replication.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
