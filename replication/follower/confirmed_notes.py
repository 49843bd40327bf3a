"""Notes about streams that two looks in a row have found: what only one has found may end by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from replication.wire.grammar import StreamName

LONGEST_PAUSE: Final = 60.0  # seconds between two looks, while there is a note or a process does not answer


@attrs.define(eq=False, repr=False)
class ConfirmedNotes:
    """The notes of each stream.

    Args:
        log: logs a note once it is confirmed.
        confirmed_after: seconds between the two looks.

    """

    _log: Callable[[str], object]
    _confirmed_after: float
    _notes: Mapping[StreamName, list[str]] = attrs.field(init=False, factory=dict)
    _found: Mapping[StreamName, list[str]] = attrs.field(init=False, factory=dict)  # by the last look

    def of(self, stream: StreamName) -> Sequence[str]:
        """Return the notes of a stream."""
        return self._notes.get(stream, ())

    def begin(self) -> None:
        """Begin with a first look again; the notes stay until then."""
        self._found = self._notes

    def look(self, found: Mapping[StreamName, list[str]]) -> float | None:
        """Note what this look has found, if the one before has, too; the others end.

        Return after how many seconds to look again; None if nothing was found.
        """
        notes = {name: [note for note in each if note in self._found.get(name, ())] for name, each in found.items()}
        for note in [note for name, each in notes.items() for note in each if note not in self.of(name)]:
            self._log(note)
        self._notes, self._found = notes, found
        if not any(found.values()):
            return None
        return LONGEST_PAUSE if any(notes.values()) else self._confirmed_after
