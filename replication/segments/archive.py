"""A segments folder as a catch-up source: pages of facts from files whose checksums are right.

All calls block; ``replication.follower.catch_up`` makes them on a thread of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, takewhile
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from replication.errors import CatchUpError, FactsGoneError
from replication.segments.files import SegmentReader, UnreadableError
from replication.segments.histories import HISTORIES, is_of_tables, stored_histories
from replication.segments.manifest import MANIFEST, Manifest, Segment, read_manifest
from replication.streams.interfaces import Page
from replication.wire.grammar import Token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replication.segments.folders import Folder
    from replication.segments.histories import Histories
    from replication.streams.facts import Fact
    from replication.streams.history import History
    from replication.wire.grammar import InstanceName, StreamName

_token_of: Final = itemgetter(0)  # of a fact
_texts_of: Final = itemgetter(1)


class Archive:
    """Reads pages from a folder.  The manifest is read again when it has changed.

    A damaged or missing segment raises CatchUpError at each request; a damaged file is read again only after it has
    changed.  A file that the disk or the store did not give is read again at the next request.  The other segments
    remain readable.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._stamp: object = None
        self._manifest = Manifest()
        self._chains: dict[tuple[StreamName, InstanceName], list[Segment]] = {}
        self._cursors: dict[tuple[StreamName, InstanceName], _SegmentCursor] = {}
        self._checked: dict[Segment, tuple[object, str | None]] = {}  # checked files: stamp and fault
        self._given: dict[tuple[StreamName, InstanceName], tuple[object, History]] = {}  # histories and their manifests
        self._histories: tuple[object, Histories] = None, {}  # with the stamps of manifest and file

    def page(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return a page as ``ICatchUp.facts`` does; it ends with the segment at the latest.

        A page is of the ``history`` that was returned last: if the folder has another one now, it raises CatchUpError.
        The page is empty and ends at ``after`` if no segment reaches further, or if the next fact has a row that no
        line can hold.  CatchUpError names the segment that cannot be used, or the chain that does not exist.
        """
        if after >= upto:
            return Page((), upto, limited=False)
        segment = self._find(stream, writer, after)
        stamp, history = self._given.get((stream, writer), (self._stamp, ()))
        if stamp != self._stamp and self.history(stream, writer) != history:
            raise CatchUpError(f"{self._folder.url} has other histories now: its segments are read at the next request")
        if segment is None:
            return Page((), after, limited=True)
        cursor = self._cursors.get((stream, writer))
        if cursor is None or cursor.segment != segment or cursor.reached > after:
            self._close(stream, writer)
            stamp = self._folder.stamp(segment.name)  # before its content: a file that replaces it has another one
            cursor = self._cursors[stream, writer] = _SegmentCursor(segment, self._open(segment, stamp), stamp)
        try:
            page = cursor.page(after, upto, limit)
            cursor.reader.check_unchanged()
        except CatchUpError as error:
            self._close(stream, writer)
            self._remember_fault(segment, cursor.stamp, error)
            raise
        if page.upto >= segment.upto:
            self._close(stream, writer)
        return replace(page, replaced_upto=self._replaced_upto(segment)) if segment.compacted else page

    def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs of a writer's facts in the segments; empty if the folder has none, or only names of tables.

        StoreError: they cannot be read, or are missing although the manifest has ``histories``.
        CatchUpError: the manifest cannot be read.
        """
        self._refresh()
        stamp = self._folder.stamp(HISTORIES)
        if stamp is None or (self._stamp, stamp) != self._histories[0]:
            self._histories = (self._stamp, stamp), stored_histories(self._folder, self._manifest)
        found = self._histories[1].get((stream, writer), ())
        history: History = () if is_of_tables(found) else found
        self._given[stream, writer] = self._stamp, history
        return history

    def close(self) -> None:
        """Close all files."""
        for key in list(self._cursors):
            self._close(*key)

    def _find(self, stream: StreamName, writer: InstanceName, after: Token) -> Segment | None:
        """Return the segment with the facts after ``after``, None if the chain ends before."""
        self._refresh()
        chain = self._chains.get((stream, writer))
        if chain is None:
            raise FactsGoneError(f"{self._folder.url} has no segments of stream {stream!r} by {writer!r}")
        if after < chain[0].after:
            raise FactsGoneError(
                f"{self._folder.url}: the segments of {stream} by {writer} begin after {chain[0].after}",
                stream=stream,
                writer=writer,
                upto=chain[0].after,
            )
        return next((each for each in chain if after < each.upto), None)

    def _replaced_upto(self, segment: Segment) -> Token:
        """Return the largest ID that may have a fact which replaces one of a compacted segment.

        An older entry lacks the end of its range: then all compacted segments that directly follow may be of it.
        """
        if segment.compacted_upto:
            return segment.compacted_upto
        chain = self._chains[segment.stream, segment.instance]
        following = takewhile(attrgetter("compacted"), chain[chain.index(segment) :])
        return [each.upto for each in following][-1]

    def _refresh(self) -> None:
        stamp = self._folder.stamp(MANIFEST)
        if stamp is not None and stamp == self._stamp:
            return
        manifest = read_manifest(self._folder)
        if manifest is None:
            raise CatchUpError(f"{self._folder.url} has no {MANIFEST}: has `replication replay` finished there?")
        if faults := manifest.faults():
            raise CatchUpError(f"{self._folder.url}/{MANIFEST}: {faults[0]}")
        self._stamp, self._manifest, self._chains = stamp, manifest, manifest.chains()
        self._checked = {each: self._checked[each] for each in manifest.segments if each in self._checked}

    def _open(self, segment: Segment, stamp: object) -> SegmentReader:
        """Open a segment; its checksum is compared again only if the file has changed, and so has its ``stamp``."""
        checked, fault = self._checked.get(segment, (None, None))
        if checked is None or checked != stamp:
            try:
                reader = SegmentReader(self._folder, segment)
            except CatchUpError as error:
                self._remember_fault(segment, stamp, error)
                raise
            self._checked[segment] = stamp, None
            return reader
        if fault is not None:
            raise CatchUpError(fault)
        return SegmentReader(self._folder, segment, checked=checked)

    def _remember_fault(self, segment: Segment, stamp: object, error: CatchUpError) -> None:
        if not isinstance(error, UnreadableError):
            self._checked[segment] = stamp, str(error)

    def _close(self, stream: StreamName, writer: InstanceName) -> None:
        cursor = self._cursors.pop((stream, writer), None)
        if cursor is not None:
            cursor.reader.close()


class _SegmentCursor:
    """Reads one segment from its beginning; ``reached`` is the end of the last page."""

    def __init__(self, segment: Segment, reader: SegmentReader, stamp: object) -> None:
        self.segment = segment
        self.reader = reader
        self.stamp = stamp  # of the file when it was opened
        self.reached = segment.after
        self._lists: Iterator[list[Fact]] = reader.facts()
        self._facts: list[Fact] = []
        self._next = 0  # the index in _facts of the first fact that was not returned

    def page(self, after: Token, upto: Token, limit: int) -> Page:
        """Return the facts after ``after``, which is not below ``reached``."""
        facts: list[Fact] = []
        end, room, more, lacking = min(upto, self.segment.upto), limit, True, Token(0)
        while more and self._read_on():
            first = bisect_right(self._facts, after, self._next, key=_token_of)
            last = bisect_right(self._facts, end, first, key=_token_of)
            rows = [*map(len, map(_texts_of, self._facts[first:last]))]
            taken = last - first
            if 0 in rows:  # the rows of this fact must come from another source; the page ends before it
                taken = rows.index(0)
                lacking = self._facts[first + taken].token
                end = Token(lacking - 1)
            if sum(rows[:taken]) > room:
                fitting = max(bisect_right([*accumulate(rows[:taken])], room), 0 if facts else 1)
                if fitting < taken:
                    taken = fitting
                    end = self._facts[first + taken - 1].token if taken else facts[-1].token
            facts += self._facts[first : first + taken]
            room -= sum(rows[:taken])
            self._next = first + taken
            more = self._next == len(self._facts)
        self.reached = end
        return Page(facts, end, limited=end < upto, lacking=lacking if end == after else Token(0))

    def _read_on(self) -> bool:
        """Read the next facts if all were returned; returns whether there are any."""
        while self._next == len(self._facts):
            facts = next(self._lists, None)
            if facts is None:
                return False
            self._facts, self._next = facts, 0
        return True
