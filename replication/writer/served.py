"""What the HTTP API shows of a process that writes: pages, statuses, metrics (docs/http.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from msgspec.structs import replace

from replication.streams.facts import count_rows
from replication.streams.interfaces import Page, PeerStatus, Sample, StreamStatus, WriterStatus
from replication.streams.merged_page import read_page_since
from replication.wire import grammar
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from replication.deferreds import Lifetime
    from replication.presence.last_seen import LastSeen
    from replication.presence.tracker import PresenceTracker
    from replication.storage.tables.instances import TokenCodec
    from replication.streams.history import History
    from replication.streams.merged_page import MergedPage
    from replication.streams.retention import SegmentChain
    from replication.web.skips import ISkips
    from replication.web.synapse_requests import SynapseRequests
    from replication.wire.commands import UserIp
    from replication.writer.external_writers import ExternalWriters
    from replication.writer.known_followers import KnownFollowers
    from replication.writer.positions import Positions
    from replication.writer.reservation import OpenTransactions
    from replication.writer.retention import Retentions
    from replication.writer.stream import StreamWriter
    from replication.writer.subscribers import Subscribers


@attrs.define(eq=False, repr=False, kw_only=True)
class WrittenStreams:
    """The streams that this process writes, for ``web.site``.

    Args:
        stream: returns the writer of a stream by name; UnknownStreamError if there is none.

    """

    role = "master"
    server_name: str
    instance_name: InstanceName
    synapse_requests: SynapseRequests
    _streams: Mapping[StreamName, StreamWriter]
    _stream: Callable[[str], StreamWriter]
    _positions: Positions
    _transactions: OpenTransactions
    _external: ExternalWriters
    _subscribers: Subscribers
    _presence: PresenceTracker
    _last_seen: LastSeen
    _tokens: TokenCodec
    _retention: Retentions
    _lifetime: Lifetime
    followers: KnownFollowers
    skips: ISkips | None = attrs.field(init=False, default=None)  # no function is called here
    _catch_up_rows: int = attrs.field(init=False, default=0)

    # ---- facts

    def stores(self, stream: str) -> bool:  # noqa: ARG002
        """Whether the facts of ``stream`` are here; they are."""
        return True

    async def page(self, stream: str, writer: str | None, *, after: int, upto: int | None, limit: int) -> Page:
        """Return facts of one writer, at most up to its published position; ``writer`` None is this instance."""
        await self._transactions.ready()
        found = self._stream(stream)
        name = found.definition.name
        source = self.instance_name if writer is None else grammar.instance_name(writer)
        if source == self.instance_name:
            reached = found.published
        elif found.shared:  # the newest row of a running writer may be above an open ID
            stored = (await self._transactions.store.stored_positions()).get(name, {}).get(source, Token(0))
            reached = max(stored, self._positions.former.of(name).get(source, Token(0)))
        else:
            reached = (await self._transactions.store.positions(name)).get(source, Token(0))
        end = reached if upto is None else Token(min(upto, reached))
        if after >= end:
            return Page([], end, limited=False)
        if source == self.instance_name:
            page = await found.publisher.page(found.outgoing, after=Token(after), upto=end, limit=limit)
        else:
            page = await self._transactions.store.facts(name, source, after=Token(after), upto=end, limit=limit)
        self._catch_up_rows += count_rows(page.facts)
        return page

    def has_former(self, stream: str, writer: str) -> bool:
        """Whether a former writer of ``stream`` has this name, and its facts are here."""
        return writer in self._positions.former.of(StreamName(stream))

    async def shown_page(self, stream: str, writer: str, *, after: int, upto: int, limit: int) -> Page:
        """Return what ``page`` returns."""
        return await self.page(stream, writer, after=after, upto=upto, limit=limit)

    async def history(self, stream: str, writer: str) -> History:
        """Return the epochs of one writer of a stream that is written here."""
        await self._transactions.ready()
        name = self._stream(stream).definition.name
        return await self._transactions.store.history(name, grammar.instance_name(writer))

    async def since(self, stream: str, token: str, limit: int) -> tuple[MergedPage, str]:
        """Return about ``limit`` rows of all writers after ``token``, and the token that follows them."""
        await self._transactions.ready()
        found = self._stream(stream)
        upto = await self._positions.complete(found)
        after = await self._tokens.read(token)
        name = found.definition.name
        return await read_page_since(self._tokens.encode, self._complete_page, name, after, upto, limit=limit)

    async def _complete_page(self, stream: str, writer: str, *, after: int, upto: int, limit: int) -> Page:
        """Return ``page``, up to ``upto`` if it is not limited: the stored position of a former writer may be lower."""
        page = await self.page(stream, writer, after=after, upto=upto, limit=limit)
        return page if page.limited else replace(page, upto=Token(upto))

    async def append_texts(self, stream: str, facts: Iterable[Sequence[object]], key: str | None) -> Sequence[Token]:
        """Append facts, each a list of decoded rows; see ``StreamWriter.append``."""
        return await self._stream(stream).append(facts, key)

    async def check(self) -> None:
        """Return if the store answers and can be written, else StoreError."""
        if self._transactions.trouble is not None:
            raise self._transactions.trouble
        await self._transactions.ready()
        await self._transactions.store.check()

    # ---- users

    def users_syncing(self) -> Mapping[str, Mapping[str, int]]:
        """Return, by instance ID, each user that syncs there, and the time of the last sync in ms."""
        return self._presence.syncing.processes()

    async def places_of(self, user_id: str) -> Sequence[UserIp]:
        """Return where a user was seen, the latest first."""
        await self._transactions.ready()
        return await self._last_seen.of(user_id)

    # ---- statuses and metrics

    def stream_statuses(self, only: str | None = None) -> list[StreamStatus]:
        """Return the status of every stream, or of the stream named ``only``, if there is one."""
        named = self._streams.values() if only is None else [self._streams.get(StreamName(only))]
        writers = [each for each in named if each]
        oldest: dict[StreamName, tuple[Token, float]] = {}
        for stream, first, age in self._transactions.oldest_first():
            oldest.setdefault(stream.definition.name, (first, age))
        return [self._status(writer, oldest.get(writer.definition.name)) for writer in writers]

    def unreachable_writers(self) -> Sequence[str]:
        """Return nothing: a master follows no writer."""
        return ()

    def absent_writers(self) -> Sequence[str]:
        """Return nothing: a master follows no writer."""
        return ()

    def failed_tasks(self) -> Sequence[str]:
        """Return the names of tasks that have ended with an error."""
        return self._lifetime.failed_tasks

    async def segments(self) -> list[SegmentChain]:
        """Return what the folder has that a retention waits for, if there is one."""
        return [chain for each in self._retention.needs for chain in await each.segments()]

    def peer_statuses(self) -> list[PeerStatus]:
        """Return the status of every subscriber's connection."""
        return self._subscribers.statuses()

    def samples(self) -> Iterable[Sample]:
        """Yield the metrics of this process."""
        yield from self._subscribers.samples()
        yield from self._presence.samples()
        yield Sample("catch_up_rows_total", self._catch_up_rows)
        for status in self.stream_statuses():
            of = {"stream": status.definition.name}
            yield Sample("open_ids", status.open_count, of)
            age = status.oldest_open[1] if status.oldest_open else 0.0
            yield Sample("oldest_open_seconds", age, of)
            refused = self._streams[status.definition.name].outgoing.refused
            yield Sample("facts_refused_total", refused, of)
            if status.kept is not None:
                yield Sample("kept_bytes", status.kept.bytes, of)
            ours = status.writers[0]
            where = {**of, "writer": ours.instance}
            yield Sample("position", ours.published, where)
            retention = self._retention.get(status.definition.name)
            if retention is not None:
                yield Sample("gone", ours.gone, where)
                yield Sample("kept_rows", retention.kept.rows, where)
            yield Sample("lag", ours.lag, where)

    def _status(self, writer: StreamWriter, oldest: tuple[Token, float] | None) -> StreamStatus:
        name, ids = writer.definition.name, writer.publisher.ids
        notes = [each for each in self._transactions.store.warnings if each.startswith(f"stream {name!r}: ")]
        count = ids.pending.open_count
        state = self._external.states.get(name)
        if state is not None and state.last_value > ids.settled and state.waits > 0:
            count = max(count, state.last_value - ids.settled)
            if oldest is None or oldest[1] < state.waits:
                oldest = (Token(ids.settled + 1), state.waits)
            if state.blockers:
                notes.append(f"stream {name!r}: {count} IDs from {oldest[0]} on wait for {', '.join(state.blockers)}")
        error = self._error(writer)
        word = "stopped" if error else "writing" if ids.horizon_known else "opening"
        if word == "writing" and not writer.outgoing.may_write:
            word = "elsewhere"
        retention = self._retention.get(name)
        gone = Token(0) if retention is None else retention.gone
        if retention is not None and retention.held:
            notes.append(retention.held)
        ours = WriterStatus(self.instance_name, ids.settled, writer.published, word, error, gone=gone)
        # Not ``of_former``: above the stored position there is no epoch, by which a reader knows that it was raised.
        former, found = self._positions.former.of(name), self._positions.of_writers(writer)
        known = {*former, *self._positions.former.to_take_over(name)}  # also one whose name is not taken over yet
        found |= {instance: position for instance, position in former.items() if instance not in found}
        others = [
            WriterStatus(instance, position, position, state="former" if instance in former else "elsewhere")
            for instance, position in found.items()
            if instance != self.instance_name and (instance in known or writer.definition.written_by(instance))
        ]
        log = writer.outgoing.memory_log
        return StreamStatus(
            writer.definition,
            [ours, *others],
            open_count=count,
            oldest_open=oldest,
            kept=None if log is None else log.status(),
            notes=notes,
        )

    def _error(self, writer: StreamWriter) -> str | None:
        """Return why a stream is not published, and the cure; None if it is."""
        definition = writer.definition
        error = writer.publisher.trouble.error or self._external.error_of(definition.name)
        if error is None:
            return None
        cure = "the stream is published again once that is mended"
        if definition.in_tables:
            cure += "; after a change of its mapping, restart this process"
        return f"{error}; {cure}"
