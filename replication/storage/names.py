"""Names of tables and sequences, as SQL has them."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

NAME_LENGTH: Final = 63  # bytes; PostgreSQL cuts longer names without an error


def relation_name(stream: str, end: str = "") -> str:
    """Return the name of a stream's table or, with an ``end``, of its sequence.

    A name over 63 bytes is cut, and ends in a checksum of the stream's name.
    """
    name = f"stream_{stream}{end}"
    if len(name) <= NAME_LENGTH:
        return name
    mark = f"~{sha256(stream.encode()).hexdigest()[:12]}{end}"  # no stream has a ~ in its name
    return name[: NAME_LENGTH - len(mark)] + mark


def quoted(name: str) -> str:
    """Return a name in the quotes of SQL."""
    return f'"{name}"'
