"""HTTP: the API of a process, its live page, and the two clients of the API, one on Twisted and one blocking."""
