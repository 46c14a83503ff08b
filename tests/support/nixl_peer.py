"""A process that has a NIXL agent and one registered region, for tests of real peers.

It is forked (nursery.py), and says its metadata and its region first. Then it obeys: ["hear"] answers with the messages
so far, one at least, ["say", peer, text] sends one, ["know", name, metadata] connects.
"""

import base64
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, TextIO

import msgspec
import numpy as np
import numpy.typing as npt
from nursery import run_nursery

from pdkv.connectors.nixl.agent import Memory, Message, NixlAgent


class Listening:
    """An agent with one region, and a thread that receives: only so does it make progress."""

    def __init__(self, name: str, size: int, fill: int) -> None:
        self.agent = NixlAgent(name)
        self.data: npt.NDArray[np.uint8] = np.full(size, fill, dtype=np.uint8)
        self.region = self.agent.register(Memory(self.data.ctypes.data, size))
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        while not self._ending.wait(0.001):
            for message in self.agent.receive():
                self.messages.put(message)

    def close(self) -> None:
        """End it. Idempotent."""
        self._ending.set()
        self._listener.join()
        self.agent.close()


def live(arguments: list[Any], lines: TextIO, say: Callable[[Any], None]) -> None:
    """An agent (name, bytes, the number that fills them) that obeys until the lines end."""
    listening = Listening(*arguments)
    agent = listening.agent
    say([base64.b64encode(agent.metadata()).decode(), msgspec.to_builtins(listening.region)])
    for line in lines:
        match json.loads(line):
            case ["hear"]:
                messages = [listening.messages.get(timeout=60)]
                while not listening.messages.empty():
                    messages.append(listening.messages.get())
                say([[message.peer, message.data.decode("latin-1")] for message in messages])
            case ["say", peer, text]:
                agent.send(peer, text.encode())
                say(None)
            case ["know", name, metadata]:
                agent.add_peer(name, base64.b64decode(metadata))
                say(None)
    listening.close()


if __name__ == "__main__":
    run_nursery(live)
