"""Makes the follower of a stream: what it stores, which function it calls, and whether its facts are compared."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs

from replication.follower.doubts import Doubts
from replication.follower.history import FollowedHistories
from replication.follower.known_tokens import AppliedTokens, CopiedTokens, ReceivedTokens
from replication.follower.links import is_open
from replication.follower.merge import MergingFollower
from replication.follower.stream import FollowMode, StreamFollower, begin_without_gap
from replication.streams.definitions import CACHES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping

    from replication.deferreds import Lifetime
    from replication.follower.cache_invalidation import CacheInvalidation
    from replication.follower.links import FollowedLinks
    from replication.follower.missed_facts import MissedFacts
    from replication.follower.registration import StreamFunctions
    from replication.follower.relay import Relay
    from replication.follower.relayed_audit import RelayedAudit
    from replication.streams.definitions import StreamDefinition
    from replication.streams.interfaces import IStreamStore
    from replication.wire.grammar import InstanceName, StreamName, Token


@attrs.define(eq=False, repr=False, kw_only=True)
class FollowerFactory:
    """Makes the followers of one process.

    Args:
        instance_name: of this process; positions are stored under it.
        store: holds positions and copies.
        lifetime: of this process.
        functions: of the application.
        missed: fetches the facts that this process has missed.
        invalidation: of the cached functions.
        links: to the writers.
        written: contains the names of the streams that this process writes.
        described: the definitions of streams that other programs write, by name.
        audits: whether facts are compared with a foreign database among the sources.
        accept_new_history: that of ``FollowedHistories``.
        access_tokens: that of ``StreamFollower``.
        relay: publishes what is followed; None if nothing is relayed.

    A worker sets at its start whether it ``copies`` streams without a function.
    """

    _instance_name: InstanceName
    _store: IStreamStore
    _lifetime: Lifetime
    _functions: StreamFunctions
    _missed: MissedFacts
    _invalidation: CacheInvalidation
    _links: FollowedLinks
    _written: Container[str]
    _described: Mapping[StreamName, StreamDefinition]
    _audits: bool
    _accept_new_history: bool
    _access_tokens: bool
    _relay: Relay | None
    copies: bool = attrs.field(init=False, default=False)

    def make(
        self,
        name: StreamName,
        *,
        moved: Callable[[StreamName, InstanceName, Token], object],
        relayed_audit: RelayedAudit | None,
    ) -> StreamFollower:
        """Return the follower of a stream.

        ``moved`` is called with each position that it applies.  ``relayed_audit`` may compare its facts; None if it
        cannot.
        """
        mode, definition = self._mode(name), self._described.get(name)
        stores_position = mode is not FollowMode.POSITION_ONLY
        needs_facts = stores_position or name == CACHES or self._relay is not None
        database = self._missed.sources.foreign_database() if needs_facts else None
        in_database = database is not None and database.audits(name)
        relayed = relayed_audit if needs_facts else None
        may_arrive_late = definition is not None and (definition.known_by_token or definition.position_name is not None)
        compares_histories = stores_position or (name == CACHES and self._invalidation.is_needed())
        histories = self._histories(name, mode) if compares_histories else None
        kind: Callable[..., StreamFollower] = StreamFollower
        one_writer = database is not None and database.names_no_writer(name)
        if name in self._functions.linear and not one_writer:  # its facts ascend anyway
            kind = partial(MergingFollower, all_positions_received=self._links.all_positions_received)
        return kind(
            name=name,
            mode=mode,
            instance_name=self._instance_name,
            store=self._store,
            lifetime=self._lifetime,
            fetch=partial(self._missed.fetch, histories=histories, stores_position=stores_position),
            moved=moved,
            function=self._functions.apply.get(name),
            undo=self._functions.undo.get(name),
            on_failed=self._functions.on_failed.get(name),
            histories=histories,
            known=self._known_tokens(name, mode) if may_arrive_late or relayed is not None else None,
            known_by_token=definition is not None and definition.known_by_token,
            one_writer=one_writer,
            audited=in_database and self._audits,
            fetches_whole=in_database and self._links.over_redis() and definition is not None and definition.has_kinds,
            confirm_audit=None if relayed is None else relayed.confirm,
            is_open=is_open,
            first=self._invalidation.before_step if name == CACHES else None,
            begin=self._invalidation.begin if name == CACHES else begin_without_gap,
            in_memory=definition is not None and definition.in_memory,
            access_tokens=self._access_tokens,
            relay=self._relay,
        )

    def _mode(self, name: StreamName) -> FollowMode:
        if name in self._functions.apply:
            return FollowMode.APPLIED
        # The table of a stream that is written here has its facts.
        return FollowMode.COPIED if self.copies and name not in self._written else FollowMode.POSITION_ONLY

    def _known_tokens(self, name: StreamName, mode: FollowMode) -> CopiedTokens:
        if mode is FollowMode.APPLIED:
            return AppliedTokens(name, self._store, self._instance_name)
        return (CopiedTokens if mode is FollowMode.COPIED else ReceivedTokens)(name, self._store)

    def _histories(self, name: StreamName, mode: FollowMode) -> FollowedHistories:
        return FollowedHistories(
            stream=name,
            store=None if mode is FollowMode.POSITION_ONLY else self._store,
            follower="" if mode is FollowMode.COPIED else self._instance_name,
            lifetime=self._lifetime,
            fetch=self._missed.history,
            accept_new=self._accept_new_history or mode is FollowMode.POSITION_ONLY,
            changed=None if self._relay is None else self._relay.restarted,
            # A restarted writer may have lost facts; cached values may depend on them.
            begun_again=self._invalidation.clear if name == CACHES else None,
            doubts=Doubts(
                stream=name,
                copies=self._store if mode is FollowMode.COPIED else None,
                clock=self._lifetime.clock,
                count=self._missed.count,
                undone=name in self._functions.undo,
            ),
        )
