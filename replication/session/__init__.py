"""One conversation, seen from one end: who may say what and when, what waits, and facts as lines.  No I/O, no clock."""
