"""An engine without a model on a host: a program that obeys lines of JSON; and its owner's side.

Over any connector between two engines: what a token's KV must be is a function of the request's seed.
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from hosts.machine import Host
from pdkv.connectors.base import TransferKey
from pdkv.wire.kv import EngineCard, KVHandoff

WAIT_S = 60.0


class HostedEngine:
    """The owner's side of an engine that runs on a host."""

    def __init__(
        self,
        host: Host,
        name: str,
        connector: str,
        options: Mapping[str, str],
        *,
        tp: int = 1,
        num_blocks: int = 256,
        layout: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Begin to start it. `layout`: what differs from push_rig.make_layout."""
        self._spec = {"name": name, "tp": tp, "num_blocks": num_blocks, "layout": dict(layout or {})}
        spec = {**self._spec, "connector": connector, "options": dict(options)}
        self._process = subprocess.Popen(
            host.command(sys.executable, "-P", __file__, json.dumps(spec)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **(environment or {})},
        )  # fmt: skip

    def become(self, connector: str, options: Mapping[str, str]) -> None:
        """End the engine; there is another one in the same process, which spares its start."""
        card = self("become", {**self._spec, "connector": connector, "options": dict(options)})
        self.card = msgspec.msgpack.decode(base64.b64decode(card), type=EngineCard)

    @cached_property
    def card(self) -> EngineCard:
        """Its card, when it has started."""
        return msgspec.msgpack.decode(base64.b64decode(self._answer()), type=EngineCard)

    def __call__(self, command: str, *arguments: Any) -> Any:
        """Carry a command out there; returns its answer."""
        assert self._process.stdin is not None
        assert self.card
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        return self._answer()

    def meet(self, peer: "HostedEngine") -> None:
        """It is the only peer."""
        self("meet", _text(peer.card))

    def close(self) -> None:
        """End it. Idempotent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=WAIT_S)
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        return json.loads(line)


def begin(source: HostedEngine, sink: HostedEngine, name: str, blocks: Sequence[int], num_tokens: int) -> None:
    """Let KV of a request begin to pass from the source's blocks into those of the same numbers of the sink's."""
    if source.card.kind == "push":
        source("give", name, blocks, num_tokens, sink("want", name, blocks, num_tokens))
    else:
        sink("load", source("hand_off", name, blocks, num_tokens), blocks)


def outcomes(source: HostedEngine, sink: HostedEngine, name: str) -> tuple[str, str]:
    """How it ended, for the sink and for the source (a pull's has nothing to say).

    A sink whose source has given up is told, as the router would.
    """
    sent = source("outcome", "sending", name) if source.card.kind == "push" else ""
    if sent:
        sink("cancel", name)
    received: str = sink("outcome", "receiving", name)
    return received, sent or received


def _text(value: object) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


def _make(spec: dict[str, Any]) -> Any:
    from push_rig import PullEngine, PushEngine, make_layout

    from pdkv.connectors.registry import plan_connector

    plan = plan_connector(spec["connector"], spec["options"])
    kind = PushEngine if plan.kind == "push" else PullEngine
    layout = make_layout(spec["tp"], **spec["layout"])
    return kind(plan, spec["name"], tp=spec["tp"], layout=layout, num_blocks=spec["num_blocks"])


def _act(engine: Any, command: str, *arguments: Any) -> Any:
    from push_rig import full_kv, view

    match command, arguments:
        case "meet", (card,):
            engine.meet(msgspec.msgpack.decode(base64.b64decode(card), type=EngineCard))
        case "fill", (blocks, num_tokens, seed):
            engine.fill(blocks, full_kv(num_tokens, engine.layout, seed))
        case "check", (blocks, num_tokens, seed):
            engine.check(blocks, full_kv(num_tokens, engine.layout, seed))
        case "want", (name, blocks, num_tokens):
            ticket = engine.want(view(name, kv="await_peer", num_tokens=num_tokens), blocks)
            return base64.b64encode(ticket or b"").decode()
        case "give", (name, blocks, num_tokens, ticket):
            request = view(name, kv="handoff", num_tokens=num_tokens, ticket=base64.b64decode(ticket))
            engine.give(request, blocks, num_tokens)
        case "hand_off", (name, blocks, num_tokens):
            return _text(engine.hand_off(name, blocks, num_tokens))
        case "load", (handoff, blocks):
            engine.load(msgspec.msgpack.decode(base64.b64decode(handoff), type=KVHandoff), blocks)
        case "cancel", (name,):
            engine.cancel(TransferKey(name, 1), "receive")
        case "outcome", (kind, name):
            return engine.outcome(kind, TransferKey(name, 1), WAIT_S).code
        case "sum", ():
            return [float(pool.double().sum()) for pool in engine.pools]
        case "held", ():
            return [len(os.listdir("/proc/self/fd")), threading.active_count()]
        case _:
            raise ValueError(f"no such command: {command} {arguments}")
    return None


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    engine = _make(json.loads(sys.argv[1]))
    print(json.dumps(_text(engine.card)), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "become":
            engine.close()
            engine = _make(arguments[0])
            answer = _text(engine.card)
        else:
            answer = _act(engine, command, *arguments)
        print(json.dumps(answer), flush=True)
    engine.close()


if __name__ == "__main__":
    _main()
