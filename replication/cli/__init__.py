"""`replication COMMAND`: one module per command, each of which calls the rest of the package."""
