"""Every error that this package raises on purpose.

::

    ReplicationError
    ├── ProtocolError             never raised bare
    │   ├── LocalProtocolError    we were about to say something that we may not say
    │   └── RemoteProtocolError   the peer said something that it may not say
    ├── StreamError               a stream, a fact or an ID is not what the caller thinks
    │   ├── UnknownStreamError
    │   ├── NotAWriterError
    │   ├── RowError              a row cannot be spelt as JSON, or does not have the declared fields
    │   ├── SequenceRegressedError
    │   ├── StoppingError         the process is stopping; another one, or it itself, will soon be there
    │   └── PositionTimeoutError  wait_for() ran out of time
    ├── StoreError                a database cannot do what was asked
    │   ├── ValueRefusedError     a table cannot hold a value as it is
    │   ├── SchemaError           its tables are not ours, or are newer than this code
    │   └── PositionMovedError    somebody else moved the position that we were about to move
    ├── RoomError                 events that cannot be part of their room's graph
    │   └── UnknownRoomError      no such room, event or state group
    ├── CatchUpError              missed facts could not be fetched from a source
    └── ConfigError               a configuration, option or endpoint that cannot work

Messages name the culprit and, where there is one, the cure.  Nothing that a peer sent is ever used as a format string.
"""

from __future__ import annotations

from typing import Final

TLS_CURE: Final = "TLS needs pyopenssl and service-identity: pip install '.[tls]' from a checkout"


class ReplicationError(Exception):
    """Anything that this package raises on purpose."""


class ProtocolError(ReplicationError):
    """The rules of the wire were broken; raise one of the two below."""


class LocalProtocolError(ProtocolError):
    """We were about to break the rules of the wire: a bug on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules of the wire; ``kind`` is a short label for metrics."""

    def __init__(self, message: str, kind: str = "bad line") -> None:
        """Keep what to tell the peer, and the label under which to count it."""
        super().__init__(message)
        self.kind = kind


class StreamError(ReplicationError):
    """A stream, a fact or an ID is not what the caller thinks."""


class UnknownStreamError(StreamError):
    """No stream of that name is declared here."""


class NotAWriterError(StreamError):
    """This instance may not write to that stream."""


class RowError(StreamError):
    """A row cannot be spelt as JSON, or does not have the fields that its stream declares.

    ``fact`` is the culprit's index among the facts of one append, where that is known.
    """

    fact: int | None = None


class SequenceRegressedError(StreamError):
    """A sequence handed out an ID that was used before."""


class StoppingError(StreamError):
    """This process is stopping and begins nothing new: ask again once it is back."""


class PositionTimeoutError(StreamError):
    """A position was not reached in time; the message says which, how far it got, and how the link is."""


class StoreError(ReplicationError):
    """A database cannot do what was asked of it."""


class ValueRefusedError(StoreError):
    """A table cannot hold a value as it is, or may not: to try again with the same is of no use."""


class SchemaError(StoreError):
    """The tables in the database are not ours, or were made by a newer version of this package."""


class PositionMovedError(StoreError):
    """The stored position is not the one that we were about to move on from: another process uses this database."""


class RoomError(ReplicationError):
    """An event cannot be part of its room's graph; the message names it and says why."""


class UnknownRoomError(RoomError):
    """No room, event or state group of that name is stored here."""


class CatchUpError(ReplicationError):
    """Missed facts could not be fetched from a source."""


class ConfigError(ReplicationError):
    """A configuration key, option or endpoint that cannot work."""
