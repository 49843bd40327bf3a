"""What a stream is: facts, IDs, positions, gaps.  No I/O, no clock."""
