"""Twisted on TCP: the LineReceiver skin over a session, and the link that a follower keeps to a writer."""
