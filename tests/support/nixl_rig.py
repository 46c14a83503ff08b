"""What tests of NIXL share: whether it is installed, and peers in processes of their own."""

import base64
import importlib.util
import signal

import msgspec
import nixl_peer
import pytest
from nixl_peer import Listening
from nursery import Forked

from pdkv.connectors.nixl.agent import Memory, NixlAgent
from pdkv.connectors.nixl.doorbell import DoorbellAddress

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 (or nixl-cu13) is not installed")

PIECE = 4096
"""Bytes of one piece of what an agent copies."""

WAIT_S = 60.0

NO_DOORBELL = DoorbellAddress(0, 0, -1, 0)
"""Nobody has this one."""


class Peer(Forked):
    """A process of nixl_peer.py."""

    def __init__(self, name: str, size: int = 1 << 20, fill: int = 7) -> None:
        super().__init__(nixl_peer.__file__, [name, size, fill])
        self.name = name
        metadata, region = self.said
        self.metadata = base64.b64decode(metadata)
        self.region = msgspec.convert(region, Memory)

    def know(self, agent: NixlAgent) -> None:
        """Let it connect to an agent."""
        self.ask("know", agent.name, base64.b64encode(agent.metadata()).decode())

    def kill(self) -> None:
        """End it as nothing can prevent."""
        self.signal(signal.SIGKILL)
        self.close()


def own_agent() -> Listening:
    """An agent of this process with one region."""
    return Listening("own", 1 << 20, 0)
