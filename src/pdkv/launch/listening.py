"""The socket on which a launch listens, which its router inherits."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from pdkv.errors import ConfigError, StartupError
from pdkv.host.sockets import LISTEN_BACKLOG
from pdkv.launch.config import LaunchConfig


def listen_for(options: LaunchConfig) -> contextlib.AbstractContextManager[socket.socket]:
    """The listening socket of a launch. Raises ConfigError."""
    return listen(options.host, options.port) if options.uds is None else listen_at(options.uds)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket, which the router inherits.

    Raises:
        ConfigError: the address is unknown, in use or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:  # socket.gaierror is one
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


@contextlib.contextmanager
def listen_at(path: Path) -> Iterator[socket.socket]:
    """A listening unix socket at `path`, which is removed in the end; one left by a killed launch is replaced.

    Raises:
        ConfigError: the path belongs to something else, or the socket cannot be made.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            if path.is_socket():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                    other.setblocking(False)
                    if other.connect_ex(str(path)) == errno.ECONNREFUSED:
                        path.unlink()
            listener.bind(str(path))
            own = path.lstat()
            listener.listen(LISTEN_BACKLOG)
        except OSError as error:  # "AF_UNIX path too long" has no number
            raise ConfigError(f"cannot listen on {path} (--uds): {error.strerror or error}") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):  # while this launch drains, another one may listen there
                if (now := path.lstat()).st_mtime_ns == own.st_mtime_ns and os.path.samestat(now, own):
                    path.unlink()


def listen_for_fronts(path: Path) -> socket.socket:
    """The socket at which a dispatcher and its successors meet their fronts: for this user alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener
