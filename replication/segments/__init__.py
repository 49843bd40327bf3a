"""Segments: files with the RDATA lines of streams, the manifest that lists them, and the replay that writes them.

Nothing here needs Spark.  Reading (``manifest``, ``files``, ``folders``, ``archive``, ``verify``) needs no extra.
"""
