"""The wire format: lines, commands and rows.  No state, no clock, no I/O."""
