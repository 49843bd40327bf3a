"""HTTP: the API of a process, and the two clients of it, one on Twisted and one blocking."""
