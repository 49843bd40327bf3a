"""What happens in rooms: events, history that was fetched later, receipts, typing."""

# ruff: noqa: S608 - nothing in this SQL comes from anywhere else

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from replication.streams.registry import SourceTable, StreamDefinition
from replication.streams.typed import Flag, History, Row, TypedStream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replication.streams.registry import Dialect


class Event(Row, frozen=True):
    """An event that was persisted, or that is no outlier any longer; one that was rejected relates to nothing."""

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
    """A key of a room's current state, and the event that it is now; None: the key was removed."""

    room_id: str
    type: str
    state_key: str
    event_id: str | None


class AllState(Row, frozen=True):
    """All state of a room is another one (since 1.96)."""

    room_id: str


class _TaggedRow(Row, frozen=True):
    """A row of a stream with several kinds of them: ``[kind, fields]``."""

    data: Any

    def named(self) -> Mapping[str, object]:
        """Return the kind, as ``kind``, and the fields."""
        return {"kind": self.__struct_config__.tag, **self.data.named()}


class EventRow(_TaggedRow, frozen=True, tag="ev"):
    """``["ev", [event_id, …]]``."""

    data: Event


class StateRow(_TaggedRow, frozen=True, tag="state"):
    """``["state", [room_id, …]]``: after the ``ev`` of the same token, which is the lowest that changed the state."""

    data: State


class AllStateRow(_TaggedRow, frozen=True, tag="state-all"):
    """``["state-all", [room_id]]``."""

    data: AllState


class BackfillRow(Row, frozen=True):
    """An event of a room's past."""

    event_id: str
    room_id: str
    type: str
    state_key: str | None
    redacts: str | None
    relates_to: str | None


class ReceiptRow(Row, frozen=True):
    """How far a user has read; ``data`` has its time, ``ts``."""

    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    data: dict[str, Any]


class TypingRow(Row, frozen=True):
    """All who are typing in a room now."""

    room_id: str
    user_ids: list[str]


# A redaction deletes what its event relates to from event_relations, while followers have been told it; the event
# itself has it until its content is pruned, a week later.
_RELATIONS: Final = "('m.annotation', 'm.reference', 'm.replace', 'io.element.thread')"
_RELATES_TO: Final[Mapping[Dialect, str]] = {
    "sqlite": f"""
        CASE WHEN json_valid(kept.json)
            AND json_extract(kept.json, '$.content."m.relates_to".rel_type') IN {_RELATIONS}
            AND json_type(kept.json, '$.content."m.relates_to".event_id') = 'text'
        THEN json_extract(kept.json, '$.content."m.relates_to".event_id') END
    """,
    # A zero character, which JSON may have, is an error to PostgreSQL if it is anywhere in what it looks into.
    "postgresql": f"""
        CASE WHEN strpos(kept.json, '\\u0000') > 0 THEN NULL
        WHEN kept.json::json #>> '{{content,m.relates_to,rel_type}}' IN {_RELATIONS}
            AND json_typeof(kept.json::json #> '{{content,m.relates_to,event_id}}') = 'string'
        THEN kept.json::json #>> '{{content,m.relates_to,event_id}}' END
    """,
}


def _tables_of_events(more: tuple[str, ...], kind: str | None) -> list[SourceTable]:
    """Return where events are: under the ID that they were given first, and the one that they got as an outlier's end.

    ``more`` are the fields after those that every row of an event has; ``{event}`` in them is the row of ``events``.
    """
    joins = " ".join(
        f"LEFT JOIN {table} ON {table}.event_id = source.event_id"
        for table in ("state_events", "redactions", "event_relations", "room_memberships", "rejections")
    )
    tables = []
    for dialect, relation in _RELATES_TO.items():
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
                instance_column="instance_name",
                kind=kind,
                dialect=dialect,
            ),
            SourceTable(
                table="ex_outlier_stream",
                id_column="event_stream_ordering",
                row=("event_id", "event.room_id", "event.type", *given, *(each.format(event="event") for each in more)),
                joins=f"JOIN events AS event ON event.event_id = source.event_id {joins}",
                instance_column="instance_name",
                kind=kind,
                dialect=dialect,
            ),
        ]
    return tables


def _events(*more: str) -> TypedStream[EventRow | StateRow | AllStateRow]:
    """Return the stream whose ``ev`` rows have ``more`` fields after those that they have had since 1.23."""
    fields = ("room_memberships.membership", "rejections.reason IS NOT NULL", *more)
    state = SourceTable(
        table="current_state_delta_stream", row=State.names(), instance_column="instance_name", kind="state"
    )
    definition = StreamDefinition(
        "events",
        row=("kind", "data"),
        tables=[*_tables_of_events(fields, "ev"), state],
        sequence="events_stream_seq",
    )
    return TypedStream(definition, EventRow | StateRow | AllStateRow)


EVENTS: Final = _events()
EVENTS_SINCE_1_64: Final = _events("{event}.outlier")

BACKFILL: Final[TypedStream[BackfillRow]] = TypedStream(
    StreamDefinition(
        "backfill",
        row=BackfillRow.names(),
        tables=_tables_of_events((), None),
        negative=True,
        sequence="events_backfill_stream_seq",
    ),
    BackfillRow,
)

RECEIPTS: Final[TypedStream[ReceiptRow]] = TypedStream(
    StreamDefinition(
        "receipts",
        row=ReceiptRow.names(),
        tables=[SourceTable(table="receipts_linearized", row=ReceiptRow.names(), instance_column="instance_name")],
        json_fields=["data"],
        key=("room_id", "receipt_type", "user_id"),
        sequence="receipts_sequence",
    ),
    ReceiptRow,
    History.NEWEST,
)

TYPING: Final[TypedStream[TypingRow]] = TypedStream(
    StreamDefinition("typing", row=TypingRow.names(), key=("room_id",), in_memory=True), TypingRow, History.NONE
)
