"""Streams: facts, IDs, positions, gaps.  No I/O, no clock."""
