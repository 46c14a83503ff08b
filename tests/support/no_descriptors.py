"""A process that can open nothing more."""

import contextlib
import resource
from collections.abc import Iterator

_STANDARD_STREAMS = 3


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """What opens a file or a socket meanwhile gets EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_STANDARD_STREAMS, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
