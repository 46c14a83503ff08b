"""A bucket of one's own: moto's server, one process in Python. Its speed is not that of a real one."""

import contextlib
import importlib.util
import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping

from benchmarks.servers import free_port, running

_CREDENTIALS: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def is_installed() -> bool:
    """Whether there are both sides."""
    return all(importlib.util.find_spec(name) is not None for name in ("moto", "flask", "obstore"))


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a bucket for `open_store`. Meanwhile the environment has its credentials."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    before = {name: os.environ.get(name) for name in _CREDENTIALS}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, endpoint, health="/moto-api/data.json"):
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/pdkv", method="PUT"), timeout=10.0).close()
        os.environ.update(_CREDENTIALS)
        try:
            yield f"s3://pdkv/values?endpoint={endpoint}&region=us-east-1"
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
