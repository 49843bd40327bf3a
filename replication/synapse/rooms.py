"""Streams about rooms: events, backfilled events, receipts, typing."""

# ruff: noqa: S608 - this SQL is made of constants

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from replication.streams.definitions import SourceTable, StreamDefinition
from replication.streams.typed_rows import Flag, History, Row, TypedStream, typed_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.definitions import Dialect


class Event(Row, frozen=True):
    """An event that was persisted or de-outliered; for a rejected one ``redacts`` and ``relates_to`` are None."""

    FLAGS: ClassVar[tuple[str, ...]] = ("rejected", "outlier")

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    redacts: str | None
    relates_to: str | None
    membership: str | None = None  # since 1.23
    rejected: Flag = False
    outlier: Flag = False  # since 1.64


class State(Row, frozen=True):
    """A changed key of a room's current state, and its event; None if the key was removed."""

    room_id: str
    type: str
    state_key: str
    event_id: str | None


class AllState(Row, frozen=True):
    """All state of a room has changed (since Synapse 1.96)."""

    room_id: str


class _TaggedRow(Row, frozen=True):
    """A row of a stream with several kinds of rows: ``[kind, fields]``."""

    data: Any

    def named(self) -> Mapping[str, object]:
        """Return the kind, as ``kind``, and the fields."""
        return {"kind": self.__struct_config__.tag, **self.data.named()}


class EventRow(_TaggedRow, frozen=True, tag="ev"):
    """``["ev", [event_id, …]]``."""

    data: Event


class StateRow(_TaggedRow, frozen=True, tag="state"):
    """``["state", [room_id, …]]``: comes after the ``ev`` row of the first event of the change, with its token."""

    data: State


class AllStateRow(_TaggedRow, frozen=True, tag="state-all"):
    """``["state-all", [room_id]]``."""

    data: AllState


class BackfillRow(Row, frozen=True):
    """A backfilled event."""

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    redacts: str | None
    relates_to: str | None


class ReceiptRow(Row, frozen=True):
    """The event up to which a user has read; ``data`` has the time, ``ts``."""

    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    data: dict[str, Any]


class TypingRow(Row, frozen=True):
    """All users who are typing in a room now."""

    room_id: str
    user_ids: list[str]


# Synapse 1.47 to 1.66 stores relations of these types; a newer one stores those of any type, among them m.thread.
_RELATIONS: Final = "IN ('m.annotation', 'm.reference', 'm.replace', 'io.element.thread')"
_ANY_RELATION: Final = "IS NOT NULL"


# An escaped backslash becomes its code, so that each remaining \u is an escape.  Then half a pair becomes "?".
_HIGH: Final = r"\\ud[89ab][0-9a-f][0-9a-f]"
_LOW: Final = r"\\ud[c-f][0-9a-f][0-9a-f]"
_PARSED: Final = rf"""
    regexp_replace(replace(kept.json, '\\', '\u005c'), '{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW}', '\\u003f', 'gi')::json
"""


def _relations(types: str) -> Mapping[Dialect, str]:
    """Return SQL for the relation in an event's JSON, if its type meets the condition ``types``.

    A redaction deletes the relation from event_relations after followers have received it.  The event's JSON has it
    until Synapse prunes the content a week later.
    """
    return {
        "sqlite": f"""
            CASE WHEN json_valid(kept.json)
                AND json_type(kept.json, '$.content."m.relates_to".rel_type') = 'text'
                AND json_extract(kept.json, '$.content."m.relates_to".rel_type') {types}
                AND json_type(kept.json, '$.content."m.relates_to".event_id') = 'text'
            THEN json_extract(kept.json, '$.content."m.relates_to".event_id') END
        """,
        # JSON may have a zero character, or half a surrogate pair; PostgreSQL then refuses to parse the text.
        "postgresql": f"""
            CASE WHEN strpos(kept.json, '\\u0000') > 0 THEN NULL
            WHEN json_typeof({_PARSED} #> '{{content,m.relates_to,rel_type}}') = 'string'
                AND {_PARSED} #>> '{{content,m.relates_to,rel_type}}' {types}
                AND json_typeof({_PARSED} #> '{{content,m.relates_to,event_id}}') = 'string'
            THEN {_PARSED} #>> '{{content,m.relates_to,event_id}}' END
        """,
    }


def _tables_of_events(more: tuple[str, ...], kind: str | None, types: str = _RELATIONS) -> list[SourceTable]:
    """Return the tables of events: ``events``, and ``ex_outlier_stream`` for events that were de-outliered.

    ``more`` are the SQL expressions of the fields after the common ones; ``{event}`` stands for the row of ``events``.
    Without ``kind`` they are the tables of ``backfill``, which has their negative IDs.  ``types`` is that of
    ``_relations``.
    """
    joins = " ".join(
        f"LEFT JOIN {table} ON {table}.event_id = source.event_id"
        for table in ("state_events", "redactions", "event_relations", "room_memberships", "rejections")
    )
    tables = []
    for dialect, relation in _relations(types).items():
        relates_to = f"""
            coalesce(event_relations.relates_to_id, CASE WHEN rejections.reason IS NULL
                AND EXISTS (SELECT 1 FROM redactions AS undoing WHERE undoing.redacts = source.event_id)
                THEN (SELECT {relation} FROM event_json AS kept WHERE kept.event_id = source.event_id) END)
        """
        given = ("state_events.state_key", "redactions.redacts", relates_to)
        tables += [
            SourceTable(
                table="events",
                id_column="stream_ordering",
                row=("event_id", "room_id", "type", *given, *(each.format(event="source") for each in more)),
                joins=joins,
                where=None if kind is None else "source.stream_ordering > 0",
                instance_column="instance_name",
                kind=kind,
                dialect=dialect,
            ),
            SourceTable(
                table="ex_outlier_stream",
                id_column="event_stream_ordering",
                row=("event_id", "event.room_id", "event.type", *given, *(each.format(event="event") for each in more)),
                joins=f"JOIN events AS event ON event.event_id = source.event_id {joins}",
                where=None if kind is None else "source.event_stream_ordering > 0",
                instance_column="instance_name",
                kind=kind,
                dialect=dialect,
            ),
        ]
    return tables


def _events(*more: str, types: str = _RELATIONS) -> TypedStream[EventRow | StateRow | AllStateRow]:
    """Return the stream ``events``; ``more`` are the fields of ``ev`` rows after those of Synapse 1.23."""
    fields = ("room_memberships.membership", "rejections.reason IS NOT NULL", *more)
    state = SourceTable(
        table="current_state_delta_stream", row=State.names(), instance_column="instance_name", kind="state"
    )
    definition = StreamDefinition(
        "events",
        row=("kind", "data"),
        tables=[*_tables_of_events(fields, "ev", types), state],
        sequence="events_stream_seq",
    )
    return TypedStream(definition, EventRow | StateRow | AllStateRow)


EVENTS: Final = _events()
EVENTS_SINCE_1_64: Final = _events("{event}.outlier")
EVENTS_SINCE_1_159: Final = _events("{event}.outlier", types=_ANY_RELATION)


def _backfill(types: str) -> TypedStream[BackfillRow]:
    """Return the stream ``backfill``; ``types`` is a condition for the types of relations."""
    tables = _tables_of_events((), None, types)
    return typed_stream("backfill", BackfillRow, tables=tables, negative=True, sequence="events_backfill_stream_seq")


BACKFILL: Final = _backfill(_RELATIONS)
BACKFILL_SINCE_1_159: Final = _backfill(_ANY_RELATION)

RECEIPTS: Final = typed_stream(
    "receipts",
    ReceiptRow,
    History.NEWEST,
    tables=[SourceTable(table="receipts_linearized", row=ReceiptRow.names(), instance_column="instance_name")],
    json_fields=["data"],
    key=("room_id", "receipt_type", "user_id"),
    sequence="receipts_sequence",
)

TYPING: Final = typed_stream("typing", TypingRow, History.NONE, key=("room_id",), in_memory=True)
