"""The errors that applications catch, drawn as a tree.

::

    ReplicationError
    ├── ProtocolError             never raised itself
    │   ├── LocalProtocolError    this process was about to send what it may not send
    │   └── RemoteProtocolError   the peer sent what it may not send: kind
    ├── StreamError               a stream, a fact or an ID is not what the caller expects
    │   ├── UnknownStreamError    no such stream: stream, lasting
    │   ├── NotAWriterError       this instance does not write that stream: stream, instance
    │   ├── RowError              a row is not JSON, or not as its stream declares it: stream, fact
    │   ├── SequenceRegressedError  a sequence repeated an ID: ids, used_upto
    │   ├── StoppingError         the process is stopping: instance
    │   └── PositionTimeoutError  a position was not reached in time: stream, writer, token, position, timeout
    ├── StoreError                a database cannot do what was asked: temporary
    │   ├── ValueRefusedError     a table cannot hold a value
    │   ├── RowRefusedError       a constraint or a trigger refuses a row
    │   ├── SchemaError           the tables are not this package's, or of another version: version
    │   ├── PositionMovedError    another process moved a position: stream, writer, expected, stored
    │   └── CommitsLostError      the database has lost commits of this process, or its name was taken over
    ├── RoomError                 an event cannot be part of its room's graph
    │   └── UnknownRoomError      no such room, event or state group: room_id, event_id
    ├── CatchUpError              missed facts could not be fetched from a source: behind
    │   └── FactsGoneError        the source has deleted them: stream, writer, upto, since
    └── ConfigError               a configuration, option or endpoint that cannot work

A message names what is wrong and, where there is one, the cure.  The attributes after a colon hold the same as values;
one is None where it does not apply.  No text of a peer is ever used as a format string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DISTRIBUTION: Final = "twisted-replication"


def install_command(extra: str) -> str:
    """Return the command that installs an extra of ``setup.cfg``, as every message names it."""
    return f"pip install '{DISTRIBUTION}[{extra}]' (from a checkout: pip install '.[{extra}]')"


TLS_CURE: Final = f"TLS needs pyopenssl and service-identity: {install_command('tls')}"


class ReplicationError(Exception):
    """Any error that this package raises on purpose; ``details`` become its attributes."""

    def __init__(self, message: str = "", **details: object) -> None:
        super().__init__(message)
        vars(self).update(details)


class ProtocolError(ReplicationError):
    """The rules of the wire were broken; one of the two classes below is raised."""


class LocalProtocolError(ProtocolError):
    """This process was about to break the rules of the wire (docs/protocol/wire.md)."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules of the wire (docs/protocol/wire.md A7).

    ``kind`` is the kind of the fault, a label in metrics.
    """

    kind: str = "bad line"


class StreamError(ReplicationError):
    """A stream, a fact or an ID is not what the caller expects."""


class UnknownStreamError(StreamError):
    """No stream of that name is declared, written or copied here.

    ``stream`` is the name.  If it is ``lasting``, this process will not have the stream before its next start.
    """

    stream: str | None = None
    lasting: bool = False


class NotAWriterError(StreamError):
    """This instance does not write that stream.

    ``stream`` is the stream's name, None if the instance writes no stream.  ``instance`` is this instance's name.
    """

    stream: str | None = None
    instance: str | None = None


class RowError(StreamError):
    """A row cannot be encoded as JSON, or does not have the fields that its stream declares.

    ``stream`` is the stream's name.  ``fact`` is the index of the wrong fact among the facts of one append, from 0.
    """

    stream: str | None = None
    fact: int | None = None


class SequenceRegressedError(StreamError):
    """A sequence returned an ID that was used before.

    ``ids`` are the IDs that it returned.  Every ID up to ``used_upto`` was used before.
    """

    ids: Sequence[int] = ()
    used_upto: int | None = None


class StoppingError(StreamError):
    """The process is stopping and begins nothing new: try again when it has restarted.

    ``instance`` is its instance name.
    """

    instance: str | None = None


class PositionTimeoutError(StreamError):
    """``wait_for`` ended before the position was reached.

    ``stream``, ``writer`` and ``token`` are those of the call.  ``position`` is the applied position at its end; None
    if no POSITION of the writer was received.  ``timeout`` is in seconds.
    """

    stream: str | None = None
    writer: str | None = None
    token: int | None = None
    position: int | None = None
    timeout: float | None = None


class StoreError(ReplicationError):
    """A database cannot do what was asked.

    ``temporary`` if the same may work later, without another configuration: it is locked, full, or does not answer any
    more.
    """

    temporary: bool = False


class ValueRefusedError(StoreError):
    """A table cannot hold a value; the same value is refused each time."""


class RowRefusedError(StoreError):
    """A constraint or a trigger of the application's table refuses a row.

    It may accept the row later, once other rows have changed.  ``__cause__`` is the driver's error.
    """


class SchemaError(StoreError):
    """The tables in the database are not this package's, or another version of this package made them.

    ``version`` is that of the tables, None if they are not this package's.
    """

    version: int | None = None


class PositionMovedError(StoreError):
    """A stored position is not the one that a transaction expected: another process uses this database.

    The position is that of ``writer`` in ``stream``.  ``expected`` is the expected token, ``stored`` the stored one.
    """

    stream: str | None = None
    writer: str | None = None
    expected: int | None = None
    stored: int | None = None


class CommitsLostError(StoreError):
    """The database has lost commits of this process, as after a restore or a failover: restart the process.

    Or another process has taken over its name (PostgreSQL).  Until the restart, it writes and publishes nothing
    (docs/guarantees.md, A restored master).
    """


class RoomError(ReplicationError):
    """An event cannot be part of its room's graph (docs/protocol/rooms.md)."""


class UnknownRoomError(RoomError):
    """That room, event or state group is not stored here.

    ``room_id`` is the room, and ``event_id`` the event, if one was requested.
    """

    room_id: str | None = None
    event_id: str | None = None


class CatchUpError(ReplicationError):
    """Missed facts could not be fetched from a source (docs/protocol/following.md E5).

    ``behind``: that ends by itself. A database answered that does not have them yet, such as a standby; or the
    connection on which they were announced was lost.
    """

    behind: bool = False


class FactsGoneError(CatchUpError):
    """Missed facts were deleted, because the stream has a retention (docs/operations.md, Retention).

    Facts of ``writer`` in ``stream`` up to ``upto`` are gone from this source; all later ones are there.  ``upto`` is
    None if this source never has the missed facts: segments without that writer, or a source older than a restore.
    ``since`` is the token of all writers with which to go on without them; None for a page of one writer.
    """

    stream: str | None = None
    writer: str | None = None
    upto: int | None = None
    since: str | None = None


class ConfigError(ReplicationError):
    """A configuration key, option or endpoint that cannot work."""


def is_temporary(error: Exception | None) -> bool:
    """Return whether what failed with ``error`` may work later, without another configuration."""
    return isinstance(error, StoreError) and error.temporary


def escape(text: str, *, keep: str = "") -> str:
    """Return ``text`` with each character that is not printable as ``repr`` writes it, except those in ``keep``.

    These are the characters that a terminal would obey or hide: control characters, line feeds, and those that change
    the direction of a text.
    """
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text])


def decorator_error(rule: str, example: str, function: object) -> ConfigError:
    """Return the error of a decorator without its parentheses: ``rule`` is about its argument, ``example`` its use."""
    return ConfigError(f"{rule}: write {example} above {getattr(function, '__name__', repr(function))}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the name in ``known`` that is most like ``name``, else an empty text."""
    from difflib import get_close_matches  # noqa: PLC0415 (only errors need it)

    return "".join(f"; did you mean {each}?" for each in get_close_matches(name, list(known), 1))
