"""The `pd` command."""

EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""
