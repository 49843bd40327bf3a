"""Twisted HTTP: facts in and out, where things stand, metrics; and the client that fetches what was missed."""
