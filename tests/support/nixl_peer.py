"""A process that has a NIXL agent and one registered region, for tests of real peers.

Arguments: agent name, bytes, and the number that fills the region. It prints its metadata and its region as JSON.
Then it obeys lines on stdin: "hear" prints the messages so far, "say PEER TEXT" sends one, "know NAME METADATA"
connects, "bytes A B" prints data[A:B], "end" ends it.
"""

import base64
import json
import queue
import sys
import threading

import msgspec
import numpy as np
import numpy.typing as npt

from pdkv.connectors.nixl.agent import Memory, Message, NixlAgent


def answer(value: object) -> None:
    """One line of JSON."""
    print(json.dumps(value), flush=True)


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


class Peer:
    """What an agent may be told."""

    def __init__(self, name: str, size: int, fill: int) -> None:
        self.listening = Listening(name, size, fill)
        self.agent, self.data = self.listening.agent, self.listening.data
        metadata = base64.b64encode(self.agent.metadata()).decode()
        answer({"metadata": metadata, "region": msgspec.to_builtins(self.listening.region)})

    def hear(self) -> None:
        """Wait for one message at least."""
        messages = [self.listening.messages.get(timeout=10)]
        while not self.listening.messages.empty():
            messages.append(self.listening.messages.get())
        answer([[message.peer, message.data.decode("latin-1")] for message in messages])

    def obey(self, line: str) -> None:
        """Carry one command out and answer it."""
        match line.split():
            case ["hear"]:
                self.hear()
            case ["say", peer, text]:
                self.agent.send(peer, text.encode())
                answer("said")
            case ["know", name, metadata]:
                self.agent.connect(name, base64.b64decode(metadata))
                answer("known")
            case ["bytes", start, stop]:
                answer(self.data[int(start) : int(stop)].tolist())


def main() -> None:
    """Serve until "end"."""
    peer = Peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        if line.strip() == "end":
            break
        peer.obey(line)
    peer.listening.close()


if __name__ == "__main__":
    main()
