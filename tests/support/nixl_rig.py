"""What tests of NIXL share: whether it is installed, and peers in processes of their own."""

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nixl_peer import Listening
from traffic import stop_process

from pdkv.connectors.nixl.agent import Memory, NixlAgent
from pdkv.connectors.nixl.doorbell import DoorbellAddress

HAS_NIXL = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
needs_nixl = pytest.mark.skipif(not HAS_NIXL, reason="the package nixl-cu12 (or nixl-cu13) is not installed")

PIECE = 4096
"""Bytes of one piece of what an agent copies."""

WAIT_S = 60.0

NO_DOORBELL = DoorbellAddress(0, 0, -1, 0)
"""Nobody has this one."""

_SCRIPT = Path(__file__).with_name("nixl_peer.py")


class Peer:
    """A process of nixl_peer.py."""

    def __init__(self, name: str, size: int = 1 << 20, fill: int = 7) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(_SCRIPT), name, str(size), str(fill)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        said = self._answer()
        self.metadata = base64.b64decode(said["metadata"])
        self.region = msgspec.convert(said["region"], Memory)

    def ask(self, *words: object) -> Any:
        """Give a command and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def know(self, agent: NixlAgent) -> None:
        """Let it connect to an agent."""
        assert self.ask("know", agent.name, base64.b64encode(agent.metadata()).decode()) == "known"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal. After SIGSTOP all of its threads have stopped."""
        if number == signal.SIGSTOP:
            stop_process(self.process.pid)
        else:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End it as nothing can prevent. Idempotent."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            if not pipe.closed:
                pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


def own_agent() -> Listening:
    """An agent of this process with one region."""
    return Listening("own", 1 << 20, 0)
