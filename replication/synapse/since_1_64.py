"""The streams of Synapse 1.64 to 1.66; ``replication.synapse`` has those of 1.47 to 1.60.

Rows of events have the field ``outlier``, which workers of these releases require, and there is no stream ``groups``.
A worker reads either form; a master needs ``definitions = ["replication.synapse.since_1_64"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from replication import synapse
from replication.synapse.rooms import EVENTS_SINCE_1_64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.streams.typed_rows import TypedStream

_INSTEAD: Final = {synapse.EVENTS.name: EVENTS_SINCE_1_64}

STREAMS: Final[Sequence[TypedStream[Any]]] = tuple(
    _INSTEAD.get(each.name, each) for each in synapse.STREAMS if each is not synapse.GROUPS
)
