"""Writers that are not where ``[writers.NAME]`` places them: the connection there sends positions of others only.

A relay at that address is no mistake: it sends positions of several writers, and that of NAME is among them.  A
connection that sends no position proves nothing: the writer there may write no followed stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
from twisted.logger import Logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.follower.links import FollowedLinks
    from replication.net.links import IWriterLink
    from replication.wire.grammar import InstanceName


LONGEST_PAUSE: Final = 60.0  # seconds between two looks, if no connection changes


@attrs.define(eq=False, repr=False, kw_only=True)
class AbsentWriters:
    """Finds writers that are not at the endpoint in ``[writers.NAME]``.

    Args:
        expected: the names of the writers at each endpoint.
        links: what has been received.
        lifetime: of this process.
        all_streams: whether all streams are followed; else a writer may write none of them, which is only logged.
        patience: seconds in which a writer that has sent SERVER sends its positions.

    """

    log = Logger()
    _expected: Mapping[str, Sequence[InstanceName]]
    _links: FollowedLinks
    _lifetime: Lifetime
    _all_streams: bool
    _patience: float
    _had_time: dict[IWriterLink, int] = attrs.field(init=False, factory=dict)  # the number of that connection
    _logged: set[InstanceName] = attrs.field(init=False, factory=set)

    async def watch(self) -> None:
        """Log each writer that is absent, once; return when all have sent a position.

        A writer may never send one.  So each pause is twice the one before, up to LONGEST_PAUSE, until a connection
        changes.
        """
        before: dict[IWriterLink, int] = {}
        pause = self._patience
        while not self._lifetime.ended and self._missing():
            await self._lifetime.sleep(pause)
            connected = {link: link.connections for link in self._links if link.greeted}
            pause = min(2 * pause, LONGEST_PAUSE) if connected == before else self._patience
            self._had_time, before = dict(connected.items() & before.items()), connected
            for name, text in self._find().items():
                if name not in self._logged:
                    self._logged.add(name)
                    self.log.warn("{text}", text=text)

    def faults(self) -> list[str]:
        """Return a sentence for each writer whose facts do not arrive; none while not all streams are followed."""
        return [*self._find().values()] if self._all_streams else []

    def _missing(self) -> list[tuple[str, InstanceName]]:
        """Return each writer, with its endpoint, that has sent no position over any connection since the start."""
        known = self._links.endpoints
        return [(endpoint, name) for endpoint, names in self._expected.items() for name in names if name not in known]

    def _find(self) -> dict[InstanceName, str]:
        links = {link.endpoint: link for link in self._links}
        found = {}
        for endpoint, name in self._missing():
            link = links[endpoint]
            sent = sorted(self._links.writers_of(link))
            if sent and link.greeted and self._had_time.get(link) == link.connections:
                found[name] = (
                    f"the connection of [writers.{name}] to {endpoint} has sent positions of {', '.join(sent)}, "
                    f"and none of {name}: give the address of {name}, or of a relay that follows it"
                )
        return found
