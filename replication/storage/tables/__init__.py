"""Tables beside those of streams and positions, for both databases: one module for each, or for a few together."""
