"""Facts that a function of the application cannot take, and what was decided about each.

docs/operations.md (Facts that a function cannot take) has the rules.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from replication.errors import escape
from replication.streams.facts import Fact  # noqa: TC001 (Sphinx reads the annotations)
from replication.wire.grammar import InstanceName, StreamName, Token  # noqa: TC001 (likewise)

COPIED: Final = (
    "stream {stream!r} is copied here, and a copy is complete: others read it. Correct what its error names, and the "
    "copy goes on"
)
MAX_REASON: Final = 10_000  # characters of an error that are kept and shown


class FailedFactAction(Enum):
    """What a function of ``@worker.on_failed_fact`` returns."""

    SKIP = "skip"  # leave the fact out, and go on with the next one
    STOP = "stop"  # keep the stream stopped, and call both functions again later


class FailedFact(msgspec.Struct, frozen=True):
    """A fact that a function could not take: it was given to the function alone, and the function raised.

    ``attempts`` is how often in a row that happened since the process started; ``error`` is the last exception.
    """

    stream: StreamName
    writer: InstanceName
    fact: Fact
    error: Exception
    attempts: int

    @property
    def reason(self) -> str:
        """The exception in one line."""
        return describe_error(self.error)


class SkipState(Enum):
    """What has become of a fact that was skipped."""

    SKIP_REQUESTED = "skip requested"  # while the worker was stopped; its next start skips the fact
    SKIPPED = "skipped"
    RETRY_REQUESTED = "retry requested"  # likewise
    APPLIED = "applied"  # by a retry
    DROPPED = "dropped"  # its skip was requested, and taken back; or no fact had this ID when all facts were applied


LEFT_OUT: Final = (SkipState.SKIPPED, SkipState.RETRY_REQUESTED)  # the states of facts that are left out now


class SkippedFact(msgspec.Struct, frozen=True):
    """What a follower's database keeps of a fact that was left out.

    Attributes:
        stream: its name.
        writer: the instance that wrote the fact.
        fact: its token and its rows; without rows while the skip is only requested.
        state: what has become of it.
        error: why the function could not take it; empty if that is not known.
        decided_by: ``command``, or ``function`` for one of ``@worker.on_failed_fact``.
        changed_at: when ``state`` began, in seconds since 1970; the store sets it.
    """

    stream: StreamName
    writer: InstanceName
    fact: Fact
    state: SkipState
    error: str = ""
    decided_by: str = "command"
    changed_at: float = 0.0

    @property
    def key(self) -> tuple[InstanceName, Token]:
        """Which fact of the stream it is."""
        return self.writer, self.fact.token


def describe_error(error: BaseException) -> str:
    """Return the first MAX_REASON characters of an exception, escaped: one line that every database can hold."""
    try:
        text = str(error)
    except Exception as failed:  # noqa: BLE001 (the class is the application's)
        text = f"its text cannot be made: {type(failed).__name__}"
    text = f"{type(error).__name__}: {text}"
    return escape(text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]} …")
