"""An engine that answers routers at a TCP port with the cluster key, and computes nothing; and a resting dispatcher."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from wire_rig import KEY, make_card

from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import EngineServer

_ports = itertools.count(7000, 2)
ADDRESS = "127.{}.{}.{}".format(*(1 << 22 | os.getpid()).to_bytes(3))
"""Of this process's tests alone."""


def free_endpoint() -> str:
    return f"tcp://{ADDRESS}:{next(_ports)}"


@contextlib.contextmanager
def standing(name: str, endpoint: str = "", key: ClusterKey = KEY, epoch: str = "e0", **card: Any) -> Iterator[str]:
    """The endpoint of such an engine."""
    endpoint = endpoint or free_endpoint()
    server = EngineServer(endpoint, msgspec.structs.replace(make_card(name, epoch), **card), key=key)
    over, (wake, tell) = threading.Event(), os.pipe()

    def serve() -> None:
        while not over.is_set():
            server.poll(None, wake)
            server.receive()
            server.acknowledge()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoint
    finally:
        over.set()
        os.write(tell, b"x")
        thread.join()
        server.close()
        os.close(wake)
        os.close(tell)
