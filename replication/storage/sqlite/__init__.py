"""The SQLite store: one process writes a file."""
