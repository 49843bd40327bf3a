"""Everything that needs PySpark: the replay job and the ``replication`` data source."""
