"""A folder of segments as a source of missed facts: pages out of files whose sums have been checked.

Everything here blocks; ``replication.sources`` keeps it off the reactor's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import CatchUpError
from replication.replay.segments import MANIFEST, OpenSegment, Segment, read_manifest
from replication.streams.seams import Page
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.replay.folders import IFolder
    from replication.streams.facts import Fact
    from replication.wire.grammar import InstanceName, StreamName


class Archive:
    """What a folder can tell.  It may grow meanwhile: the manifest is read again when it has changed.

    A segment that is damaged or missing raises CatchUpError each time that it is asked for, without being read again
    before it has changed; the segments around it can be had.
    """

    def __init__(self, folder: IFolder) -> None:
        self._folder = folder
        self._stamp: object = None
        self._chains: dict[tuple[StreamName, InstanceName], list[Segment]] = {}
        self._readings: dict[tuple[StreamName, InstanceName], _Reading] = {}
        self._known: dict[str, tuple[object, str | None]] = {}  # segments looked at, as they were, and what is wrong

    def page(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page as ICatchUp does, at most to the end of a segment.

        Where nothing is known beyond ``after``, which the next fact may be because no line can hold it, the page
        reaches no further than that.  CatchUpError names a segment that cannot be used, or a chain that is not there.
        """
        if after >= upto:
            return Page((), upto, limited=False)
        segment = self._find(stream, writer, after)
        if segment is None:
            return Page((), after, limited=True)
        reading = self._readings.get((stream, writer))
        if reading is None or reading.segment != segment or reading.given > after:
            self._forget(stream, writer)
            reading = self._readings[stream, writer] = _Reading(segment, self._open(segment))
        try:
            page = reading.page(after, upto, limit)
        except CatchUpError as error:
            self._note(segment, str(error))
            self._forget(stream, writer)
            raise
        if page.upto >= segment.upto:
            self._forget(stream, writer)
        return page

    def close(self) -> None:
        """Close all files."""
        for key in list(self._readings):
            self._forget(*key)

    def _find(self, stream: StreamName, writer: InstanceName, after: Token) -> Segment | None:
        """Return the segment with what follows ``after``, None if the chain has ended before."""
        self._refresh()
        chain = self._chains.get((stream, writer))
        if chain is None:
            raise CatchUpError(f"{self._folder.url} has no segments of stream {stream!r} by {writer!r}")
        if after < chain[0].after:
            raise CatchUpError(f"{self._folder.url}: the segments of {stream} by {writer} begin after {chain[0].after}")
        return next((each for each in chain if after < each.upto), None)

    def _refresh(self) -> None:
        stamp = self._folder.stamp(MANIFEST)
        if stamp is not None and stamp == self._stamp:
            return
        manifest = read_manifest(self._folder)
        if manifest is None:
            raise CatchUpError(f"{self._folder.url} has no {MANIFEST}: has `replication replay` finished there?")
        if faults := manifest.faults():
            raise CatchUpError(f"{self._folder.url}/{MANIFEST}: {faults[0]}")
        self._stamp, self._chains = stamp, manifest.chains()

    def _open(self, segment: Segment) -> OpenSegment:
        stamp, fault = self._known.get(segment.name, (None, None))
        if stamp is None or stamp != self._folder.stamp(segment.name):
            try:
                opened = OpenSegment(self._folder, segment)
            except CatchUpError as error:
                self._note(segment, str(error))
                raise
            self._note(segment, None)
            return opened
        if fault is not None:
            raise CatchUpError(fault)
        return OpenSegment(self._folder, segment, checked=True)

    def _note(self, segment: Segment, fault: str | None) -> None:
        self._known[segment.name] = self._folder.stamp(segment.name), fault

    def _forget(self, stream: StreamName, writer: InstanceName) -> None:
        reading = self._readings.pop((stream, writer), None)
        if reading is not None:
            reading.close()


class _Reading:
    """A segment that is read from its beginning on: ``given`` is how far."""

    def __init__(self, segment: Segment, opened: OpenSegment) -> None:
        self.segment = segment
        self.given = segment.after
        self._opened = opened
        self._more: Iterator[list[Fact]] = opened.facts()
        self._read: list[Fact] = []
        self._next = 0  # the first of them that was not given

    def page(self, after: Token, upto: Token, limit: int) -> Page:
        """Return what follows ``after``, which is not before ``given``."""
        facts: list[Fact] = []
        rows = 0
        reached = min(upto, self.segment.upto)
        while (fact := self._peek()) is not None and fact.token <= reached:
            if fact.token > after:
                if not fact.texts:  # to be fetched elsewhere; what lies before it is all here
                    reached = Token(fact.token - 1)
                    break
                rows += len(fact.texts)
                if facts and rows > limit:
                    reached = facts[-1].token
                    break
                facts.append(fact)
            self._next += 1
        self.given = facts[-1].token if facts else max(self.given, after)
        return Page(facts, reached, limited=reached < upto)

    def _peek(self) -> Fact | None:
        while self._next == len(self._read):
            some = next(self._more, None)
            if some is None:
                return None
            self._read, self._next = some, 0
        return self._read[self._next]

    def close(self) -> None:
        """Close the file."""
        self._opened.close()
