"""How many sockets and files a process may have open, and how many connections may wait to be accepted."""

import resource

LISTEN_BACKLOG = 4096
"""Connections that wait to be accepted, as far as the kernel allows it (net.core.somaxconn)."""


def raise_open_files_limit() -> int:
    """Make the soft limit on open files the hard one, for this process and those that it starts; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
