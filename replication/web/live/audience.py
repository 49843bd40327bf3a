"""The viewers who are shown the same: what has changed is encoded once, and all of them are sent the same bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import msgspec
from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from replication.web.live.tables import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.net.access import Rights
    from replication.web.request import ApiRequest

    Part = str | Table  # of a page: HTML, or a table whose cells are sent alone

BYTES_PER_SECOND: Final = 4_096  # of events, for one viewer


class Shown(msgspec.Struct, frozen=True):
    """What decides what a viewer is shown: its rights, and what it searches for.

    ``find`` is a part of the names of streams and writers.  ``stream`` is the one whose latest facts it follows, with
    the text ``has``; or empty.
    """

    rights: Rights
    find: str
    stream: str
    has: str


@implementer(IPushProducer)
@attrs.define(eq=False)
class Viewer:
    """One open page.

    ``number`` is that of the last news it was sent.  ``due`` is when it may be sent a whole page again.
    """

    request: ApiRequest
    number: int = -1
    due: float = 0.0
    paused: bool = False

    def pauseProducing(self) -> None:
        """Send nothing more: the viewer does not read."""
        self.paused = True

    def resumeProducing(self) -> None:
        """Send on."""
        self.paused = False

    def stopProducing(self) -> None:
        """Do nothing: ``notifyFinish`` follows."""


@attrs.define(eq=False, repr=False)
class Audience:
    """The viewers of one ``Shown``, the parts of their page, and what has changed in them.

    ``due`` is when the viewers may be sent further news.
    """

    shown: Shown
    viewers: dict[Viewer, None] = attrs.field(init=False, factory=dict)  # a set, in the order of arrival
    due: float = attrs.field(init=False, default=0.0)
    _number: int = attrs.field(init=False, default=0)
    _parts: dict[str, Part] = attrs.field(init=False, factory=dict)
    _news: bytes = attrs.field(init=False, default=b"")
    _whole: bytes | None = attrs.field(init=False, default=None)  # of all parts; None until a viewer needs it

    def update(self, parts: Mapping[str, Part], now: float) -> None:
        """Take the parts as they are now, and encode what has changed."""
        events, cells = [], {}
        for name, part in parts.items():
            before = self._parts.get(name, "")
            changes = part.changes(before) if isinstance(part, Table) and isinstance(before, Table) else None
            if part != before and changes is None:
                events.append(_event(name, html_of(part)))
            elif changes:
                cells[name] = changes
            self._parts[name] = part
        if cells:
            events.append(_event("cells", cells))
        if events:
            first, self._number = not self._number, self._number + 1
            self._news, self._whole = b"".join(events), None
            self.due = (
                now if first else now + len(self._news) / BYTES_PER_SECOND
            )  # facts soon move on a page just opened

    def waiting(self, now: float) -> list[Viewer]:
        """Return the viewers that lack something, and may be sent it: those that do not read are sent nothing."""
        return [
            each
            for each in self.viewers
            if each.number != self._number and not each.paused and (each.number == self._number - 1 or now >= each.due)
        ]

    def send(self, viewer: Viewer, now: float) -> None:
        """Send to a viewer what it lacks: the news, or the whole page if it has missed some; nothing if it is gone.

        A viewer whose rights have changed is closed: its browser connects again, and is shown what it may see now.
        """
        if viewer not in self.viewers or viewer.paused:
            return
        viewer.request.update_rights()
        if viewer.request.rights != self.shown.rights:
            cast("Any", viewer.request.channel).transport.abortConnection()
            return
        if viewer.number == self._number - 1:
            data = self._news
        else:
            if self._whole is None:
                self._whole = b"".join(_event(name, html_of(part)) for name, part in self._parts.items())
            data = self._whole
            viewer.due = now + len(data) / BYTES_PER_SECOND
        viewer.number = self._number
        viewer.request.write(data)  # type: ignore[no-untyped-call]


def html_of(part: Part) -> str:
    """Return a part as HTML."""
    return part.html if isinstance(part, Table) else part


def _event(name: str, value: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
