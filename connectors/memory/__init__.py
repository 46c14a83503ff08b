"""Hand-off within one process: the reference for tests and for offline use."""
