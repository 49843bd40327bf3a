"""The streams of a Synapse 1.64 to 1.66, as ``replication.synapse`` has those of 1.47 to 1.60.

An event also says whether it is an outlier, which workers of those releases insist on, and there are no groups any
more.  A worker of ours reads either form; a master is told ``definitions = ["replication.synapse.since_1_64"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication import synapse
from replication.synapse.rooms import EVENTS_SINCE_1_64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.typed import TypedStream

_INSTEAD: Final = {synapse.EVENTS.name: EVENTS_SINCE_1_64}

STREAMS: Final[Sequence[TypedStream[Any]]] = tuple(
    _INSTEAD.get(each.name, each) for each in synapse.STREAMS if each is not synapse.GROUPS
)
