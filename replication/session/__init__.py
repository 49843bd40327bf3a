"""One end of a connection: directions, keep-alive, the send buffer, lines; messages of Redis.  No I/O, no clock."""
