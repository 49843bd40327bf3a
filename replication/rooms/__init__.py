"""The graph of events behind the streams ``events`` and ``backfill``: its rules, without I/O (``protocol``, H)."""
