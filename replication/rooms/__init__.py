"""Room graphs: events, state groups, extremities and state resolution, without I/O (docs/protocol/rooms.md)."""
