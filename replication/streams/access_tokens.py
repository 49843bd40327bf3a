"""Access tokens in facts: a Synapse puts them into its caches stream (docs/protocol/streams.md C4).

A reader of such a fact can act as that user until the token is invalid.  So tokens are hidden where facts leave
this process: in copies, functions, relays, segments and output.  A hidden row has null for its keys, which
invalidates all entries of that cache: no cache keeps a stale entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replication.errors import RemoteProtocolError
from replication.streams.definitions import CACHES
from replication.streams.facts import Fact
from replication.wire import grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replication.wire.grammar import StreamName

CACHE: Final = "get_user_by_access_token"  # its keys are access tokens
MAY_HAVE: Final = rf"{CACHE}|\\"  # a pattern of rows that may be of the cache: JSON may write its name with escapes


def hide_access_tokens(stream: StreamName, facts: Sequence[Fact]) -> Sequence[Fact]:
    """Return ``facts`` without the access tokens in rows of the caches stream."""
    if stream != CACHES:
        return facts
    return [
        Fact(token, tuple(map(hide_in_row, texts))) if any(map(_may_have, texts)) else Fact(token, texts)
        for token, texts in facts
    ]


def _may_have(text: str) -> bool:
    """Return whether a row matches MAY_HAVE, in less time."""
    return CACHE in text or "\\" in text


def hide_in_row(text: str) -> str:
    """Return one row of the caches stream, as JSON text, with null for keys that are access tokens."""
    if not _may_have(text):
        return text
    try:
        row = grammar.read_json(text)
    except RemoteProtocolError:
        return grammar.encode_row([CACHE, None, None])  # what else it may contain is unknown
    if not isinstance(row, list) or row[:1] != [CACHE]:
        return text
    return grammar.encode_again([CACHE, None, *row[2:]])
