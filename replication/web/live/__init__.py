"""The live page of a daemon, for a browser (docs/how-to/watch.md).  It is imported when a page is first requested."""
