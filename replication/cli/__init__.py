"""`replication COMMAND`: a file per command, each a thin skin over the rest of the package."""
