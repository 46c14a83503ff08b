"""A p2p engine in a process of its own (nursery.py), for p2p/test_processes.py; the first that it says is its card.

Commands: ["become", epoch, tp, block size] for another card, ["meet", cards],
["want", transfer, blocks, tokens, start], ["give", transfer, blocks, tokens, ticket],
["fill", blocks, tokens, seed], ["check", blocks, tokens, seed, start], ["outcome", kind, transfer].
Each but "give" is answered: a test may stop the process by what that sends, before it could answer.
"""

import base64
import json
from collections.abc import Callable
from typing import Any, TextIO

import msgspec
import torch
from nursery import run_nursery
from push_rig import PushEngine, full_kv, make_layout, view

from pdkv.connectors.base import TransferKey
from pdkv.connectors.p2p.connector import P2PConnector
from pdkv.wire.kv import EngineCard

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
        case "give", (name, blocks, num_tokens, ticket):
            request = view(name, kv="handoff", num_tokens=num_tokens, ticket=base64.b64decode(ticket))
            engine.give(request, blocks, num_tokens)
        case "fill", (blocks, num_tokens, seed):
            engine.fill(blocks, full_kv(num_tokens, engine.layout, seed))
        case "check", (blocks, num_tokens, seed, start):
            engine.check(blocks, full_kv(num_tokens, engine.layout, seed), start)
        case "outcome", (kind, name):
            return engine.outcome(kind, TransferKey(name, 1))
        case _:
            raise ValueError(f"no such command: {command} {arguments}")
    return None


def live(arguments: list[Any], lines: TextIO, say: Callable[[Any], None]) -> None:
    """Obey until the lines end."""
    name, num_blocks, options, *shape = arguments
    process = Process(name, num_blocks, options)
    say(process.become(*shape))
    for line in lines:
        command, *words = json.loads(line)
        if command == "become":
            say(process.become(*words))
        else:
            assert process.engine is not None
            answer = act(process.engine, command, *words)
            if command != "give":
                say(answer)
    process.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_nursery(live)
