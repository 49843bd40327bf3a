"""Streams of a Synapse that one process writes at a time, and whose tables name no writer, such as ``account_data``.

After a move to another process, a page of the new writer has the facts of the previous one, too.  Those up to the
position of the previous writer were applied under its name (docs/protocol/redis.md, Former writers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from replication.wire.grammar import InstanceName, Token

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from replication.follower.stream import StreamFollower
    from replication.streams.cursor import Apply
    from replication.streams.facts import Fact
    from replication.streams.interfaces import Page


def begin_of(writer: InstanceName, positions: Mapping[InstanceName, Token], upto: Token) -> Token:
    """Return the largest position of another writer that is at most ``upto``; 0 if there is none."""
    return max((each for other, each in positions.items() if other != writer and each <= upto), default=Token(0))


def not_applied(follower: StreamFollower, writer: InstanceName, step: Apply, facts: Sequence[Fact]) -> Sequence[Fact]:
    """Return those of the ``facts`` of a step that were not applied under the name of another writer.

    The audit need not compare the left-out facts for this writer: ``checked`` is raised past them.
    """
    applied = max((each for other, each in follower.all_positions().items() if other != writer), default=Token(0))
    follower.checked[writer] = max(follower.checked.get(writer, Token(0)), min(applied, step.upto))
    return facts if not facts or facts[0].token > applied else [each for each in facts if each.token > applied]


def own_part(page: Page, writer: InstanceName, positions: Mapping[InstanceName, Token], upto: Token) -> Page:
    """Return a page, for a follower of a relay, without the facts up to the position of another writer."""
    begin = begin_of(writer, positions, upto)
    return replace(page, facts=[each for each in page.facts if each.token > begin])
