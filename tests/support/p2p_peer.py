"""A p2p engine in a process of its own, for p2p/test_processes.py: does what it is told, line by line, as JSON.

Arguments: name, epoch, tp, block size, number of blocks, options as JSON. The first line that it prints is its card.
Commands: ["become", epoch, tp, block size] for another card, ["meet", cards],
["want", transfer, blocks, tokens, start], ["give", transfer, blocks, tokens, ticket, last],
["fill", blocks, tokens, seed], ["check", blocks, tokens, seed, start], ["outcome", kind, transfer].
Each is answered by JSON.
"""

import base64
import json
import sys
from typing import Any

import msgspec
import torch
from push_rig import PushEngine, full_kv, make_layout, view

from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.wire.messages import EngineCard

WIDE = {"num_layers": 4, "head_size": 64}


class Process:
    """The one engine of this process, which may become another one."""

    def __init__(self, name: str, num_blocks: int, options: dict[str, str]) -> None:
        self._name = name
        self._num_blocks = num_blocks
        self._options = options
        self.engine: PushEngine | None = None

    def become(self, epoch: str, tp: int, block_size: int) -> str:
        """Be a new incarnation; returns its card."""
        self.close()
        self.engine = PushEngine(
            P2PConnector, self._name, epoch=epoch, tp=tp, layout=make_layout(tp, block_size, **WIDE),
            num_blocks=self._num_blocks, **self._options,
        )  # fmt: skip
        return base64.b64encode(msgspec.msgpack.encode(self.engine.card)).decode()

    def close(self) -> None:
        """Stop the engine."""
        if self.engine is not None:
            self.engine.close()


def act(engine: PushEngine, command: str, *arguments: Any) -> Any:
    """Carry out one command."""
    match command, arguments:
        case "meet", (cards,):
            engine.meet(*(msgspec.msgpack.decode(base64.b64decode(card), type=EngineCard) for card in cards))
        case "want", (name, blocks, num_tokens, start):
            ticket = engine.want(view(name, kv="await_peer", num_tokens=num_tokens), blocks, start)
            return base64.b64encode(ticket or b"").decode()
        case "give", (name, blocks, num_tokens, ticket, last):
            request = view(name, kv="handoff", num_tokens=num_tokens, ticket=base64.b64decode(ticket))
            engine.give(request, blocks, num_tokens, last=last)
        case "fill", (blocks, num_tokens, seed):
            engine.fill(blocks, full_kv(num_tokens, engine.layout, seed))
        case "check", (blocks, num_tokens, seed, start):
            engine.check(blocks, full_kv(num_tokens, engine.layout, seed), start)
        case "outcome", (kind, name):
            return engine.outcome(kind, (name, 1))
        case _:
            raise ValueError(f"no such command: {command} {arguments}")
    return None


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    name, epoch, tp, block_size, num_blocks, options = sys.argv[1:]
    process = Process(name, int(num_blocks), json.loads(options))
    print(process.become(epoch, int(tp), int(block_size)), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "become":
            answer = process.become(*arguments)
        else:
            assert process.engine is not None
            answer = act(process.engine, command, *arguments)
        print(json.dumps(answer), flush=True)
    process.close()


if __name__ == "__main__":
    main()
