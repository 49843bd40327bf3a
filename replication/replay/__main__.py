"""``python -m replication.replay``, and what spark-submit runs: the same as ``replication replay``."""

from __future__ import annotations

import sys

from replication.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["replay", *sys.argv[1:]]))
