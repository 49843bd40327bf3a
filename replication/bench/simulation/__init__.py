"""Masters and workers in one thread, on a simulated network, disk and clock (docs/simulation.md)."""
