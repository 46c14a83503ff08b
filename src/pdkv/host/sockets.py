"""Limits of open sockets and files, and of connections that wait to be accepted."""

import resource

LISTEN_BACKLOG = 4096
"""Connections that wait to be accepted, as far as the kernel allows it (net.core.somaxconn)."""


def raise_open_files_limit() -> int:
    """Raise the soft limit on open files to the hard one, for this process and its children; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
