"""A process that has a NIXL agent and one registered region, for tests of real peers.

Arguments: agent name, bytes, and the number that fills the region. It prints its metadata and its region as JSON.
Then it obeys lines on stdin: "hear" prints the messages so far, "say PEER TEXT" sends one, "know NAME METADATA"
connects, "bytes A B" prints data[A:B], "churn" writes all the time, "end" ends it.
"""

import base64
import json
import sys
import threading
import time

import msgspec
import numpy as np

from pdkv.connectors.nixl_agent import Memory, NixlAgent


def answer(value: object) -> None:
    """One line of JSON."""
    print(json.dumps(value), flush=True)


class Peer:
    """The agent and what it may be told."""

    def __init__(self, name: str, size: int, fill: int) -> None:
        self.agent = NixlAgent(name)
        self.data = np.full(size, fill, dtype=np.uint8)
        region = self.agent.register(Memory(self.data.ctypes.data, size))
        metadata = base64.b64encode(self.agent.metadata()).decode()
        answer({"metadata": metadata, "region": msgspec.to_builtins(region)})

    def hear(self) -> None:
        """Wait for at least one message."""
        deadline = time.monotonic() + 10
        messages = self.agent.receive()
        while not messages and time.monotonic() < deadline:
            threading.Event().wait(0.001)
            messages = self.agent.receive()
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
    peer.agent.close()


if __name__ == "__main__":
    main()
