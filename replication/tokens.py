"""Tokens of streams that several writers write: read, spelt, and asked about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replication.errors import StreamError
from replication.storage.instances import number_instances
from replication.streams.positions import MultiWriterToken

if TYPE_CHECKING:
    from replication.streams.seams import IStreamStore
    from replication.wire.grammar import InstanceName


class Tokens:
    """The texts of tokens: ``5``, or ``m5~1.7~2.9`` where some writers are ahead, by their numbers in the database."""

    def __init__(self, store: IStreamStore) -> None:
        self._store = store
        self._numbers: dict[InstanceName, int] = {}  # as far as they are known here; a name keeps its number

    async def read(self, text: str) -> MultiWriterToken:
        """Return the token; StreamError if it is none, or has the number of nobody."""
        try:
            return self._parse(text)
        except StreamError:
            if "." not in text:
                raise
        self._numbers = await number_instances(self._store)
        return self._parse(text)

    async def spell(self, token: MultiWriterToken) -> str:
        """Return the text, with a number for each writer that is ahead."""
        if not token.ahead.keys() <= self._numbers.keys():
            self._numbers = await number_instances(self._store, token.ahead.keys())
        return token.spell(self._numbers)

    def _parse(self, text: str) -> MultiWriterToken:
        return MultiWriterToken.parse(text, {number: name for name, number in self._numbers.items()})
