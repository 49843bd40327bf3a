"""TCP and Redis with Twisted: a LineReceiver around a session, a follower's links to writers, and the timers' clock."""
