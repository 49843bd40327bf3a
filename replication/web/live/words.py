"""The words that the live page and ``replication status --watch`` both show, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from replication.streams.interfaces import WriterStatus

# A head that begins with # has numbers below it.
STREAM_HEADS: Final = (
    *("stream", "writer", "state", "#position", "#lag", "#IDs/s", "10 min"),
    *("#open", "oldest open", "#found late", "#left out"),
)
CURVE: Final = STREAM_HEADS.index("10 min")
CONNECTION_HEADS: Final = ("name", "address", "since", "#lines out", "#bytes out", "#queued bytes", "last command")
STREAMS: Final = "Streams"
CONNECTIONS: Final = "Connections"
ATTENTION: Final = "Needs attention"
READY: Final = "ready"
NO_WRITER: Final = "No stream has a writer yet."
NO_CONNECTION: Final = "No process is connected here."
URGENT: Final = ("stopped", "not connected", "catching up", "opening", "waiting for others")  # their order
BRIEF: Final = 1_000  # IDs; a worker of a Synapse catches up for a moment at each fact of several rows
TRIED_AGAIN: Final = "It is tried again by itself."


def urgency(state: str, lag: int) -> int:
    """Return the place of a state among others: 0 comes first.  A short catch-up moves no row."""
    short = state == "catching up" and lag <= BRIEF
    return URGENT.index(state) if state in URGENT and not short else len(URGENT)


def not_ready(why: str) -> str:
    """Return the state of a process that cannot do its work."""
    return f"not ready: {why}"


def mend(fact: str) -> str:
    """Return the cure if a function cannot take a fact."""
    return (
        f"The function cannot take {fact}. Mend what it uses: it is called again by itself. "
        "Or mend its code, and start the worker again."
    )


def leave_out(how: str) -> str:
    """Return the other cure, which leaves the fact out."""
    return f"If the fact itself is wrong: {how}"


def shared_name(name: str) -> str:
    """Return the sentence about two processes of one name."""
    return f"two processes have the instance name {name!r}: give each its own"


def state_of(writer: WriterStatus, speed: float | None) -> str:
    """Return the state of a writer; of a catch-up also from where, how far, and when it is done.

    ``speed`` is in IDs a second.
    """
    state = writer.state
    if state == "catching up" and writer.source:
        state += f" from {writer.source}"
    if writer.state == "catching up" and writer.lag > BRIEF and speed:
        state += f": {100 * writer.position / max(writer.published, 1):.0f} %, {duration(writer.lag / speed)} left"
    return state


def stream_cells(
    writer: WriterStatus, open_count: int, oldest: tuple[int, float] | None, speed: float | None
) -> list[str]:
    """Return the cells below STREAM_HEADS; the stream and the curve are empty.

    ``oldest`` is the smallest open ID and its age in seconds.  ``speed`` is in IDs a second; None: not known yet.
    """
    return [
        "",
        writer.instance,
        state_of(writer, speed),
        f"{writer.position:,}",
        f"{writer.lag:,}",
        "-" if speed is None else f"{speed:,.1f}",
        "",
        f"{open_count:,}",
        "-" if oldest is None else f"{oldest[0]:,} for {duration(oldest[1])}",
        f"{writer.lost_and_found:,}",
        f"{writer.skipped:,}",
    ]


def duration(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds < 120:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3600:.0f} h"  # noqa: PLR2004
