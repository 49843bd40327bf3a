"""The tables of the live page, as HTML.  Everything that a stream, a peer or a row has is escaped."""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import attrs

from replication.errors import escape
from replication.web.live import words
from replication.web.live.curves import rate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence

    from replication.net.access import Rights
    from replication.streams.interfaces import PeerStatus, StreamStatus, WriterStatus
    from replication.web.live.curves import Curves

MAX_ROWS: Final = 100  # of one table
ROWS_A_TURN: Final = 4  # that are rendered in one turn of the reactor: 2 ms, if all curves are drawn


def text(value: object) -> str:
    """Return a value as the text of an element or of an attribute in double quotes."""
    return html.escape(escape(str(value)))


@attrs.frozen
class Table:
    """A table.  A head that begins with # has numbers below it.

    The cells of ``rows`` are HTML, and each row has a key.  ``empty`` is the sentence that is shown without rows, and
    ``more`` is HTML after the table.
    """

    caption: str
    heads: Sequence[str]
    rows: Mapping[Hashable, Sequence[str]] = attrs.field(eq=lambda rows: [*rows.items()])  # their order counts
    empty: str
    more: str = ""

    @property
    def html(self) -> str:
        """The whole table, as HTML."""
        if not self.rows:
            return f"<h2>{self.caption}</h2><p>{self.empty}</p>{self.more}"
        titles = "".join(f'<th scope="col"{_kind(each)}>{each.lstrip("#")}</th>' for each in self.heads)
        body = "".join(
            f"<tr>{''.join(f'<td{_kind(head)}>{cell}</td>' for head, cell in zip(self.heads, row, strict=True))}</tr>"
            for row in self.rows.values()
        )
        return (
            f'<h2>{self.caption}</h2><div class="wide" tabindex="0" role="region" aria-label="{self.caption}"><table>'
            f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>{self.more}"
        )

    def changes(self, before: Table) -> list[tuple[int, int, str]] | None:
        """Return the number of the row and of the cell, and the HTML, of each cell that has changed.

        None if anything else differs, such as the order of the rows.
        """
        if [*self.rows] != [*before.rows] or attrs.evolve(before, rows=self.rows) != self:
            return None
        return [
            (row, cell, new)
            for row, (news, olds) in enumerate(zip(self.rows.values(), before.rows.values(), strict=True))
            for cell, (new, old) in enumerate(zip(news, olds, strict=True))
            if new != old
        ]


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """Return the HTML of a table whose rows need no keys."""
    return Table(caption, heads, dict(enumerate(rows)), empty).html


async def streams_table(
    statuses: Sequence[StreamStatus], curves: Curves, find: str, breathe: Callable[[], Awaitable[None]]
) -> Table:
    """Return the table of streams and writers: those that need attention first, then by name.

    ``breathe`` is called after each few rows: the reactor does other work then.
    """
    found = [
        (stream, writer)
        for stream in statuses
        for writer in stream.writers
        if find in stream.definition.name or find in writer.instance
    ]
    found.sort(key=lambda each: (words.urgency(each[1].state, each[1].lag), each[0].definition.name, each[1].instance))
    rest = len(found) - MAX_ROWS
    more = f"<p>{rest:,} more rows: search by a part of a name.</p>" if rest > 0 else ""
    rows: dict[Hashable, Sequence[str]] = {}
    for stream, writer in found[:MAX_ROWS]:
        if rows and len(rows) % ROWS_A_TURN == 0:
            await breathe()
        rows[stream.definition.name, writer.instance] = _stream_row(stream, writer, curves)
    return Table(words.STREAMS, words.STREAM_HEADS, rows, words.NO_WRITER, more)


def troubles_list(
    statuses: Sequence[StreamStatus],
    peers: Sequence[PeerStatus],
    unreachable: Sequence[str],
    absent: Sequence[str],
    rights: Rights,
) -> str:
    """Return what stands still, why, and the cure, with buttons that leave a fact out; empty if all is well.

    ``unreachable`` are the writers without a connection, ``absent`` sentences about those that are elsewhere.
    """
    items = []
    for stream in statuses:
        name = stream.definition.name
        for writer in stream.writers:
            if writer.error:
                plain, why = f"{text(name)} of {text(writer.instance)}", text(writer.error)
                bold = f"<b>{text(name)}</b> of {text(writer.instance)}"
                what = why.replace(plain, bold, 1) if plain in why else f"{bold}: {why}"
                items.append(f"{what}<p>{_cure(name, writer, rights)}</p>")
        items += [text(note) for note in stream.notes]
    items += [f"no connection to the writer at {text(each)}: it is tried again" for each in unreachable]
    items += [text(each) for each in absent]
    shared = sorted({each.name for each in peers if each.shares_name})
    items += [text(words.shared_name(each)) for each in shared]
    if not items:
        return ""
    shown = "".join(f"<li>{each}</li>" for each in items[:MAX_ROWS])
    return f'<section class="trouble"><h2>{words.ATTENTION}</h2><ul>{shown}</ul></section>'


def connections_table(peers: Sequence[PeerStatus]) -> Table:
    """Return the table of connections, those with the longest queues first."""
    ordered = sorted(peers, key=lambda each: (-each.queued_bytes, each.name, each.address))
    rows: dict[Hashable, Sequence[str]] = {
        (each.name, each.address, number): [
            text(each.name or "-"),
            text(each.address),
            show_time(each.since),
            f"{each.lines_out:,}",
            f"{each.bytes_out:,}",
            f"{each.queued_bytes:,}",
            text(each.last_command or "-"),
        ]
        for number, each in enumerate(ordered[:MAX_ROWS])
    }
    more = f"<p>{len(peers) - MAX_ROWS:,} more connections.</p>" if len(peers) > MAX_ROWS else ""
    return Table(words.CONNECTIONS, words.CONNECTION_HEADS, rows, words.NO_CONNECTION, more)


def _stream_row(stream: StreamStatus, writer: WriterStatus, curves: Curves) -> list[str]:
    name, pair = stream.definition.name, (stream.definition.name, writer.instance)
    cells = words.stream_cells(writer, stream.open_count, stream.oldest_open, rate(curves.of(pair)))
    cells[words.CURVE] = curves.drawn(pair)
    cells[:3] = [  # the others are numbers
        f'<a href="?stream={_query(name)}">{text(name)}</a>',
        text(writer.instance),
        f'<span class="{text(writer.state.replace(" ", "-"))}">{text(cells[2])}</span>',
    ]
    return cells


def _cure(stream: str, writer: WriterStatus, rights: Rights) -> str:
    if writer.failed is None:
        return words.TRIED_AGAIN
    link = f'<a href="?stream={_query(stream)}&amp;id={writer.failed}">fact {writer.failed:,}</a>'
    mend = words.mend(link)
    if not rights.admin:
        return mend
    leave = _button("skip", stream, writer.instance, writer.failed, "leave it out")
    return f"{mend} {words.leave_out(leave)}"


def _button(decision: str, stream: str, writer: str, token: int, label: str) -> str:
    what = f'data-decision="{decision}" data-stream="{text(stream)}" data-writer="{text(writer)}"'
    named = text(f"{decision}-{stream}-{writer}-{token}")
    return f'<button type="button" id="{named}" {what} data-token="{token}">{label}: fact {token:,}</button>'


def _kind(head: str) -> str:
    return ' class="number"' if head.startswith("#") else ""


def _query(name: str) -> str:
    return html.escape(quote(name, safe=""))


def show_time(seconds: float) -> str:
    """Return a time in seconds since 1970, in UTC, as HTML."""
    return datetime.fromtimestamp(seconds, UTC).strftime("<time>%Y-%m-%d %H:%M:%SZ</time>")
