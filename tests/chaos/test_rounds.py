"""What a round counts."""

from __future__ import annotations

from tests.chaos.rounds import ERROR

LOG = """2026-11-26 06:01:02 replication.writer: [critical] Unhandled error in Deferred:
\t
\tTraceback (most recent call last):
\t  File "/a/errors.py", line 7, in f
\t    raise StoreError("no")
\treplication.errors.StoreError: database 'a': it is away
2026-11-26 06:01:03 replication.writer: [info] the wire is served
Traceback (most recent call last):
  File "b.py", line 1, in <module>
ZeroDivisionError: division by zero
"""


def test_each_traceback_in_a_log_counts_by_its_error() -> None:
    assert ERROR.findall(LOG) == [
        "replication.errors.StoreError: database 'a': it is away",
        "ZeroDivisionError: division by zero",
    ]
