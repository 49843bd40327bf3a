"""The facts that a viewer searches for, as HTML: one by its ID, or the latest of a stream."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from replication.errors import ReplicationError
from replication.web.live.tables import table, text
from replication.wire import grammar

if TYPE_CHECKING:
    from replication.net.access import Rights
    from replication.web.site import IServed

LATEST: Final = 20  # IDs of one writer
SEARCHED: Final = 1_000  # IDs of one writer, if the rows must have a text
_MOST: Final = 100  # rows
_LONGEST: Final = 500  # characters of one value
_DECODED: Final = 20_000  # characters of a row; a longer one is not decoded, as that takes long


async def facts_section(served: IServed, rights: Rights, stream: str, token: int | None, has: str = "") -> str:
    """Return the fact with this ID of each writer, or the latest facts; or a sentence with the reason for none.

    With ``has``, the rows that have this text.
    """
    if why := rights.missing("read", [stream]):
        return f"<p>{text(why)}</p>"
    found = served.stream_statuses(stream)
    if not found:
        return f"<p>No stream {text(repr(stream))} here.</p>"
    (status,) = found
    heads = ("writer", "#ID", *(text(each) for each in status.definition.row or ("row",)))
    reach = SEARCHED if has else LATEST
    forms = {has, grammar.encode_json(has)[1:-1]}  # a row may have its characters, or their escapes
    columns = len(status.definition.row or ())
    matching: list[tuple[int, str, str]] = []
    failures = []
    for writer in status.writers:
        after, upto = (max(0, writer.position - reach), writer.position) if token is None else (token - 1, token)
        if after >= max(writer.position, writer.published):
            continue
        try:
            page = await served.shown_page(stream, writer.instance, after=after, upto=upto, limit=max(_MOST, reach))
        except ReplicationError as error:
            failures.append(f"<p>{text(writer.instance)}: {text(error)}</p>")
            continue
        matching += islice(
            (
                (fact.token, writer.instance, row)
                for fact in reversed(page.facts)
                for row in fact.texts
                if any(form in row for form in forms)
            ),
            _MOST,
        )
    matching.sort(key=lambda each: -each[0])  # the rows of a fact stay in their order
    rows = [[text(writer), f"{each:,}", *_cells(row, columns)] for each, writer, row in matching[:_MOST]]
    caption = f"Latest facts of {text(stream)}" if token is None else f"Fact {token:,} of {text(stream)}"
    what = f"a row with {text(repr(has))}" if has else "a fact"
    nothing = f"No writer has {what} among its last {reach} IDs." if token is None else "There is no such fact here."
    shown = "" if failures and len(failures) == len(status.writers) else table(caption, heads, rows, nothing)
    return shown + "".join(failures)


def _cells(row_text: str, columns: int) -> list[str]:
    """Return the cells of a row: its fields, or the whole row if it is long or has not ``columns`` fields."""
    row = row_text if len(row_text) > _DECODED else grammar.read_json(row_text)
    fields = row if columns and isinstance(row, list) and len(row) == columns else [row, *[""] * (columns - 1)]
    return [text(_shorten(each)) for each in fields]


def _shorten(value: object) -> str:
    shown = value if isinstance(value, str) else grammar.encode_again(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}… ({len(shown):,} characters)"
