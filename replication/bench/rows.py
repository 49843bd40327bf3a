"""The rows that scenarios write and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.wire.grammar import InstanceName, StreamName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STREAM: Final = StreamName("events")
WRITER: Final = InstanceName("master")


def short_row(number: int) -> list[object]:
    """Return a row like those of a Synapse's caches stream: most rows there are."""
    return ["get_user_by_id", [f"@u{number % 100_000:05}:example.com"], 1700000000000 + number]


def long_row(number: int) -> list[object]:
    """Return a row like those of a Synapse's events stream."""
    event = f"$2s{number:09}xmJk7QmW9rVbT4yHc0LpZe6NfUaGdSiXo1BkR4w"
    return ["ev", [event, "!hTqYwLbVzDnRkPcMaE:example.com", "m.room.message", None, None, None, None, False]]


SHAPES: Final[Mapping[str, Callable[[int], list[object]]]] = {"84-byte lines": short_row, "167-byte lines": long_row}
