"""One module per claim of speed: each measures a ratio within one run on this machine."""
