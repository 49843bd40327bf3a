"""Where missed facts can be read beside HTTP: databases, and folders of segments."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace
from twisted.internet.defer import Deferred
from twisted.logger import Logger

from replication.errors import StoreError
from replication.follower.ended_transactions import EndedTransactions, read_transactions
from replication.follower.local_users import check_server_name
from replication.net.endpoints import is_redis
from replication.storage import open_store, path_of
from replication.storage.threads import SerialThread
from replication.streams.definitions import StreamDefinition
from replication.streams.interfaces import IStreamStore, Page
from replication.urls import Url
from replication.wire.grammar import InstanceName, StreamName, Token

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from twisted.internet.interfaces import IDelayedCall

    from replication.segments.manifest import Manifest
    from replication.streams.definitions import Dialect
    from replication.streams.history import History
    from replication.streams.interfaces import ISqlExecutor

MOST_IDS: Final = 1_000_000  # of a page from tables of an application; more after a page without facts
FEW_IDS: Final = 100  # a range of at most so many IDs is read without a look at the stored positions
FIRST_IDS: Final = 20_000  # of the first statement that searches writers
SHORT: Final = 1.0  # seconds of such a statement, after which the next one may read more IDs
FIRST: Final = Token(1)  # the position of a Synapse that has written nothing
MAX_TOKEN: Final = Token(2**63 - 1)
IDLE: Final = 2.0  # seconds after the last request until an SQLite file is closed


class DatabaseCatchUp:
    """Reads missed facts from a database: the writer's own, or a copy of another worker.

    ``url`` is ``sqlite:///…`` or ``postgresql://…``; the database is only read.  ``definitions`` are of streams in
    tables of an application.  If there are any, the database may be that of another program, such as a Synapse.  Then
    its local users must be of ``server_name``, unless that is None.

    An SQLite file is closed while nothing is read: a backup may be restored into its place.  An open file would hide
    the new one, or its lock would keep the master from starting.
    """

    name = "the database"
    log = Logger()

    def __init__(
        self,
        url: str | Url,
        reactor: Any,
        definitions: Iterable[StreamDefinition] = (),
        server_name: str | None = None,
    ) -> None:
        dialect: Dialect = "postgresql" if path_of(url) is None else "sqlite"
        self._mapped = {each.name: each for each in definitions if each.maps(dialect) or each.sources(dialect)}
        # Of these streams another program stores the positions, or none.
        self.foreign = {name: each for name, each in self._mapped.items() if each.position_name is not None}
        self._naming_writers = {
            name
            for name, each in self.foreign.items()
            if each.stored_name is not None and all(table.instance_column for table in each.all_sources(dialect))
        }
        self._new_store = partial(open_store, url, reactor, read_only=True, foreign=bool(self._mapped))
        self._store: IStreamStore = self._new_store()
        self._declared: set[StreamName] = set()
        self._most: dict[tuple[StreamName, InstanceName], int] = {}  # IDs of the next page, after one without facts
        self._ended: dict[StreamName, EndedTransactions] = {}  # of streams without stored positions
        self._server_name = server_name if self.foreign else None
        self._opened = False
        self._rests = dialect == "sqlite" and not self.foreign
        self._reactor = reactor
        self._requests = 0  # that are not answered yet
        self._rest: IDelayedCall | None = None

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts up to the position of the writer in this database, which may be below ``upto``.

        For tables of an application, this is the stored position.  Without a history, as in the database of another
        program, there is no stored position, and ``upto`` counts.  StoreError: the database cannot be read, or
        lacks the stream.
        """
        with self._used():
            return await self._facts(stream, writer, after=after, upto=upto, limit=limit)

    async def _facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        await self._declare(stream)
        if stream in self._mapped:
            most = self._most.pop((stream, writer), MOST_IDS)  # after a failure, MOST_IDS again
            end, began = min(upto, Token(after + most)), self._reactor.seconds()
            if stream not in self.foreign and await self._store.history(stream, writer):
                stored = (await self._store.stored_positions()).get(stream, {})
                end = min(end, Token(abs(stored.get(writer, 0))))
                if end <= after:
                    return Page([], after, limited=True)
            page = await self._store.facts(stream, writer, after=after, upto=end, limit=limit)
            if not page.facts and end - after == most and self._reactor.seconds() - began < SHORT:
                self._most[stream, writer] = 2 * most  # rows may be very far apart, as IDs that are made from the time
            if stream in self.foreign and end > FIRST and (not page.facts or end - after > FEW_IDS):
                await self.stored_positions()
            return page if page.upto == upto else replace(page, limited=True)
        if upto - after > limit:
            page = await self._store.facts(stream, writer, after=after, upto=upto, limit=limit)
            if page.limited:  # a full page needs no position
                return page
        reached = (await self._store.positions(stream)).get(writer, Token(0))
        if reached <= after:
            return Page([], after, limited=True)
        return await self._store.facts(stream, writer, after=after, upto=min(upto, reached), limit=limit)

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs of a writer; empty if this database has none."""
        with self._used():
            await self._open()
            return await self._store.history(stream, writer)

    # ---- the source of an audit

    def audits(self, stream: StreamName) -> bool:
        """Whether another program stores the positions of a stream, or none."""
        return stream in self.foreign

    def stores_positions(self, stream: StreamName) -> bool:
        """Whether ``stored_positions`` have those of a stream."""
        return self.foreign[stream].stored_name is not None

    def state(self, _stream: StreamName, _writer: InstanceName, _position: Token) -> object:
        """Return None: nothing in the database changes with the facts that it has."""
        return None

    def settled(self, stream: StreamName, _writer: InstanceName) -> Token:
        """Return the largest token: the audit itself knows when a range need not be compared again.

        Without stored positions, return the token up to which no ID was open when ``newest`` was read.
        """
        return self._ended[stream].upto if stream in self._ended else MAX_TOKEN

    async def stored_positions(self) -> Mapping[StreamName, Mapping[InstanceName, Token]]:
        """Return the positions that the other program has stored, of each stream in ``foreign`` that has any.

        StoreError if no position is stored: a restore may be running.  It fills ``stream_positions`` after most other
        tables, so these may still lack rows.
        """
        await self._open()
        stored = await self._store.stored_positions()
        names = {name: StreamName(each.stored_name) for name, each in self.foreign.items() if each.stored_name}
        if names and not stored:
            raise StoreError(
                f"table 'stream_positions' of {self.name} is empty, so its other tables may lack rows: is a backup "
                "being restored? This process tries again until a position is stored"
            )
        return {name: stored[of] for name, of in names.items() if of in stored}

    async def newest(self, stream: StreamName) -> Mapping[InstanceName, Token]:
        """Return each writer's largest token in the tables of a stream; below it, IDs may be open."""
        await self._declare(stream)
        newest = await self._store.positions(stream)
        last, ended = max(newest.values(), default=Token(0)), self._ended.get(stream, EndedTransactions())
        if not self.stores_positions(stream) and ended.needs_look(last):
            transactions = await self._store.read(read_transactions)
            if transactions is not None:
                ended.look(last, *transactions)
                self._ended[stream] = ended
        return newest

    async def last_row(self, stream: StreamName) -> Token:
        """Return the largest token in the tables of a stream, of all writers; 0 if there is none."""
        await self._declare(stream)
        return await self._store.last_row(stream)

    def keeps_rows(self, stream: StreamName) -> bool:
        """Whether the rows of a stream in ``foreign`` stay; one whose rows are replaced, or deleted, has a ``key``."""
        return not self.foreign[stream].key

    async def is_primary(self) -> bool:
        """Whether the database is no standby, which may lack what was published."""
        await self._open()
        return not await self._store.read(is_standby)

    async def present(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token) -> set[Token]:
        """Return the tokens of ``writer`` with ``after < token <= upto`` in the tables of a stream in ``foreign``."""
        await self._declare(stream)
        return await self._store.present(stream, writer, after=after, upto=upto)

    # ---- the source of former writers

    def names_writers(self, stream: StreamName) -> bool:
        """Whether the positions of a stream in ``foreign`` are stored, and each row has the name of its writer."""
        return stream in self._naming_writers

    def names_no_writer(self, stream: StreamName) -> bool:
        """Whether the positions of a stream in ``foreign`` are stored, and its rows have no name of a writer."""
        return stream in self.foreign and self.stores_positions(stream) and stream not in self._naming_writers

    async def writers(self, stream: StreamName, *, after: Token, upto: Token) -> dict[InstanceName, Token]:
        """Return the writers with rows in a range of a stream in ``foreign``, each with its largest token there.

        The first statement reads FIRST_IDS at most; the next ones read more, while each takes less than a second.
        """
        found: dict[InstanceName, Token] = {}
        count = FIRST_IDS
        while after < upto:
            await self._declare(stream)
            end, began = Token(min(upto, after + count)), self._reactor.seconds()
            found.update(await self._store.writers(stream, after=after, upto=end))
            took = self._reactor.seconds() - began
            count = min(MOST_IDS, 2 * count) if took < SHORT else max(FIRST_IDS, count // 2)
            after = end
        return found

    def note_former(self, stream: StreamName, writers: Collection[InstanceName]) -> None:
        """Note that these writers of a stream in ``foreign`` have ended, so a standby has all of their facts."""
        self._store.note_former(stream, writers)

    async def close(self) -> None:
        """Close the database."""
        self._rests = False
        self._wake()
        await self._store.close()

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Keep the database open for one request, and for some time after it."""
        self._wake()
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1
            if self._rests and self._opened and not self._requests:
                self._rest = self._reactor.callLater(IDLE, self._close_for_now)

    def _wake(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None

    def _close_for_now(self) -> None:
        """Close the file; the next request opens the one that is there then."""
        self._rest = None
        store, self._store, self._opened = self._store, self._new_store(), False
        self._declared.clear()
        closing = Deferred.fromCoroutine(store.close())
        closing.addErrback(lambda failure: self.log.failure("closing {name}", failure, name=self.name))

    async def _declare(self, stream: StreamName) -> None:
        await self._open()
        if stream not in self._declared:
            await self._store.declare(self._mapped.get(stream) or StreamDefinition(stream))
            self._declared.add(stream)

    async def _open(self) -> None:
        if not self._opened:
            await self._store.open()
            if self._server_name is not None:
                await check_server_name(self._store, self._server_name)
            self._opened = True


class SegmentCatchUp:
    """Reads missed facts from a folder of segments, on a thread of its own.

    ``url`` is a path, or the URL of a folder in an object store.
    """

    def __init__(self, url: str | Url, reactor: Any) -> None:
        from replication.segments.archive import Archive  # noqa: PLC0415 (few workers have a folder of segments)
        from replication.segments.folders import open_folder  # noqa: PLC0415 (likewise)

        self._folder = open_folder(url)
        self._archive = Archive(self._folder)
        self._thread = SerialThread(reactor, f"replication {Url(url)}")

    async def facts(self, stream: StreamName, writer: InstanceName, *, after: Token, upto: Token, limit: int) -> Page:
        """Return facts up to the end of the segments; CatchUpError names a segment that is damaged or missing."""
        return await self._thread.run(self._archive.page, stream, writer, after=after, upto=upto, limit=limit)

    async def history(self, stream: StreamName, writer: InstanceName) -> History:
        """Return the epochs of the facts in the segments; empty if the folder has none, as one of version 0.1."""
        return await self._thread.run(self._archive.history, stream, writer)

    async def manifest(self) -> Manifest:
        """Return the manifest of the folder, an empty one if it has none; CatchUpError if it cannot be read."""
        from replication.segments.manifest import Manifest, read_manifest  # noqa: PLC0415 (as above)

        return await self._thread.run(read_manifest, self._folder) or Manifest()

    async def close(self) -> None:
        """Close the files and end the thread."""
        await self._thread.run(self._archive.close)
        await self._thread.stop()


def is_standby(database: ISqlExecutor) -> bool:
    """Whether a database is a standby."""
    return database.dialect == "postgresql" and bool(database.execute("SELECT 1 WHERE pg_is_in_recovery()"))


def all_definitions(
    writes: Iterable[StreamDefinition | str], definitions: Iterable[StreamDefinition]
) -> list[StreamDefinition]:
    """Return ``definitions``, and the definitions of the streams that this process writes."""
    written = [each for each in writes if isinstance(each, StreamDefinition)]
    return [*{str(each.name): each for each in [*written, *definitions]}.values()]


def described_streams(
    endpoints: Sequence[str], definitions: Sequence[StreamDefinition]
) -> dict[StreamName, StreamDefinition]:
    """Return the definitions of streams that other programs write, by name: behind Redis, those of a Synapse."""
    if any(map(is_redis, endpoints)):
        from replication.synapse import since_1_159  # noqa: PLC0415 (few workers follow a Synapse)

        definitions = [*(each.definition for each in since_1_159.STREAMS), *definitions]
    return {StreamName(each.name): each for each in definitions}
