"""An engine that answers routers at a TCP port with the cluster key, and follows a script instead of computing."""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

from scripted_engine import ScriptedEngine, make_card
from wire_rig import KEY

from pdkv.wire.cluster_key import ClusterKey
from pdkv.wire.engine_server import EngineServer, RouterJoined, RouterLeft

_ports = itertools.count(7000, 2)
ADDRESS = "127.{}.{}.{}".format(*(1 << 22 | os.getpid()).to_bytes(3))
"""Of this process's tests alone."""


def free_endpoint() -> str:
    return f"tcp://{ADDRESS}:{next(_ports)}"


@contextlib.contextmanager
def standing(name: str, endpoint: str = "", key: ClusterKey = KEY, **card: Any) -> Iterator[str]:
    """The endpoint of such an engine, which does both roles unless said; each step takes a millisecond."""
    endpoint = endpoint or free_endpoint()
    server = EngineServer(endpoint, make_card(name, **{"role": "any", **card}), key=key)
    over, (wake, tell) = threading.Event(), os.pipe()

    def serve() -> None:
        engine, router = ScriptedEngine(name, "pull"), ""
        while not over.is_set():
            server.poll(0.001 if engine.tasks else None, wake)
            for router, message in server.receive():  # noqa: B007 (the last one is the one)
                if isinstance(message, RouterJoined | RouterLeft):
                    engine = ScriptedEngine(name, "pull")
                else:
                    engine.receive(message)
            for task in engine.runnable():
                engine.step(task)
            said, engine.outbox = engine.outbox, []
            server.send(router, said)
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
