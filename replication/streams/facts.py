"""A fact: one token with all its rows, never a part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from replication.wire import grammar

if TYPE_CHECKING:
    from replication.wire.grammar import Token


class Fact(NamedTuple):
    """What one writer did under one stream ID.

    ``texts`` are the rows as JSON text, as they were spelt when the fact was written and as they travel; ``rows``
    decodes them, each time that it is asked.  A fact may have no rows.
    """

    token: Token
    texts: tuple[str, ...]

    @property
    def rows(self) -> list[Any]:
        """The rows, decoded."""
        return [grammar.read_json(text) for text in self.texts]
