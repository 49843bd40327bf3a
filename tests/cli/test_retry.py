"""The help of ``replication retry``; tests/cli/test_skipping.py has the rest."""

from __future__ import annotations

from replication.cli import retry


def test_it_takes_a_stream_a_writer_and_a_token() -> None:
    found = retry.make_parser().parse_args(["orders", "master", "3"])
    assert (found.stream, found.writer, found.token, found.database) == ("orders", "master", "3", None)
