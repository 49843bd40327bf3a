"""How things are spelt on the wire: no state, no time, no I/O (``protocol``, sections A1 to A5)."""
