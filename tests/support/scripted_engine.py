"""An engine without a model: it follows the message protocol, one small action at a time, and counts its leases."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdkv.connectors.base import TransferKey
from pdkv.router.request import GenerateRequest
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import ConnectorKind, EngineCard, KVHandoff, KVLayout, Order
from pdkv.wire.messages import (
    Abort,
    Allocated,
    Continue,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Loaded,
    Release,
    RouterToEngine,
    Submit,
    Tokens,
)
from pdkv.wire.reports import SourceCounts

STOP = 7
"""The token that ends a generation."""

ORDERS_OF: dict[ConnectorKind, list[Order]] = {
    "pull": ["prefill_first", "decode_first"],
    "store": ["prefill_first", "decode_first"],
    "push": ["decode_first", "needs_peer_first", "concurrent"],
}

Draw = Callable[[int], int]
"""A number in [0, n): what chance, or a test, wants to happen."""


def token_at(prompt: Sequence[int], position: int) -> int:
    """The model: a function of the prompt and the output position."""
    digest = hashlib.blake2b(repr((list(prompt), position)).encode(), digest_size=2).digest()
    return int.from_bytes(digest) % 50


def expected_output(request: GenerateRequest) -> list[int]:
    """All tokens of a generation."""
    assert request.params.max_tokens is not None
    tokens: list[int] = []
    while len(tokens) < request.params.max_tokens:
        tokens.append(token_at(request.prompt_token_ids, len(tokens)))
        if tokens[-1] == STOP:
            break
    return tokens


def make_card(name: str, role: str, kind: ConnectorKind = "pull", **changes: Any) -> EngineCard:
    """A card of an engine that gets along with all others of the same `changes`."""
    values: dict[str, Any] = {
        "epoch": "e0",
        "pid": 1,
        "connector": kind,
        "content_addressed": False,
        "orders": ORDERS_OF[kind],
        "model": "m",
        "layout": KVLayout(num_layers=1, num_kv_heads=1, head_size=8, block_size=16, dtype="float32", dtype_bytes=4),
        "hash_block_size": 16,
        "num_blocks": 100,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "reads_parts": True,
    }
    return EngineCard(engine=name, role=role, kind=kind, **(values | changes))


def make_request(num_prompt: int = 20, max_tokens: int = 5, **changes: Any) -> GenerateRequest:
    """A request; its prompt and so its output depend on `num_prompt`."""
    return GenerateRequest(
        prompt_token_ids=list(range(num_prompt)),
        params=SamplingParams(max_tokens=max_tokens, seed=1),
        **({"timeout_s": 60.0} | changes),
    )


@dataclass
class Task:
    """A Submit in progress."""

    submit: Submit
    output: list[int]
    stage: str = "new"  # new, loading, running, sending
    ticket: bytes | None = None
    handoff: KVHandoff | None = None
    kv_ready: bool | None = None
    local: bool = False  # computes the prompt by itself


@dataclass
class ScriptedEngine:
    """Messages go into `receive`; `step` does one action of one task; what it says is in `outbox`."""

    name: str
    kind: ConnectorKind = "pull"
    draw: Draw = lambda n: 0  # 0 is the dull choice everywhere
    tasks: dict[tuple[str, int], Task] = field(default_factory=dict)
    leases: set[TransferKey] = field(default_factory=set)
    outbox: list[EngineToRouter] = field(default_factory=list)
    received: list[RouterToEngine] = field(default_factory=list)
    max_tokens_per_step: int = 1
    loans: dict[tuple[str, int], TransferKey | None] = field(default_factory=dict)  # their leases, while they last

    def receive(self, message: RouterToEngine) -> None:
        self.received.append(message)
        match message:
            case Submit(until="cached"):
                self._lend(message)
            case KVTicket() if (message.request_id, message.attempt) in self.loans:
                is_kept = self.loans[message.request_id, message.attempt] is not None and self.draw(6) != 5
                self.outbox.append(
                    KVReady(message.request_id, message.attempt, ok=is_kept, code="" if is_kept else "x")
                )
            case Submit():
                key = (message.request_id, message.attempt)
                assert key not in self.tasks
                assert message.timeout_s > 0
                self.tasks[key] = Task(message, list(message.output_token_ids), local=message.kv == "local")
                self.tasks[key].ticket, self.tasks[key].handoff = message.ticket, message.handoff
            case Abort():
                task = self.tasks.get((message.request_id, message.attempt))
                if task is not None and task.stage != "sending":
                    del self.tasks[message.request_id, message.attempt]
            case Release():
                self.leases.discard(TransferKey(message.transfer_id, message.attempt, message.lent))
                self.loans = {key: lease if lease in self.leases else None for key, lease in self.loans.items()}
                for key, task in [] if message.lent else list(self.tasks.items()):
                    if task.stage == "sending" and task.submit.transfer_id == message.transfer_id:
                        del self.tasks[key]
            case KVTicket() | KVHandoff() | KVReady() | Continue():
                task = self.tasks.get((message.request_id, message.attempt))
                if task is not None:
                    self._tell(task, message)
            case _:
                pass

    def _lend(self, submit: Submit) -> None:
        """It has the prompt's beginning, or not any more, or does not get to say so in time."""
        key, lease = (submit.request_id, submit.attempt), TransferKey(submit.transfer_id, submit.attempt, lent=True)
        assert key not in self.loans
        self.loans[key] = None
        match self.draw(4):
            case 3:
                self.outbox.append(Failed(*key, "kv_not_found", "chance", retryable=False))
            case 2:
                pass
            case _:
                self.leases.add(lease)
                self.loans[key] = lease
                num_tokens = len(submit.prompt_token_ids) - 1
                handoff = KVHandoff(*key, submit.transfer_id, self.name, "e0", num_tokens, b"", lent=True)
                self.outbox.append(HandedOff(*key, SourceCounts(local_hit=num_tokens), handoff))

    def _tell(self, task: Task, message: KVTicket | KVHandoff | KVReady | Continue) -> None:
        match message:
            case KVTicket():
                task.ticket = message.ticket
            case KVHandoff():
                task.handoff = message
            case KVReady():
                task.kv_ready = message.ok
            case Continue():
                task.output = task.output or list(message.token_ids)

    def runnable(self) -> list[tuple[str, int]]:
        """Tasks that can do something now."""
        return [key for key, task in self.tasks.items() if self._can_step(task)]

    def step(self, key: tuple[str, int]) -> None:
        task = self.tasks[key]
        if self.draw(40) == 39:
            del self.tasks[key]
            self.leases.discard(TransferKey(task.submit.transfer_id, task.submit.attempt))
            self.outbox.append(Failed(*key, "internal_error", "chance", retryable=bool(self.draw(2))))
        elif task.submit.kv == "handoff":
            self._step_prefill(key, task)
        elif task.stage == "new":
            self._allocate(key, task)
        elif task.stage == "loading":
            self._finish_load(key, task)
        else:
            self._generate(key, task)

    def _can_step(self, task: Task) -> bool:
        if task.stage == "sending":
            return task.ticket is not None
        if task.stage == "loading":
            known = task.kv_ready is not None if self.kind == "push" else task.handoff is not None
            return known and (bool(task.output) or not task.kv_ready or self.draw(2) == 1)
        if task.submit.kv == "handoff":
            return True
        return task.stage == "new" or task.local or bool(task.output)

    def _step_prefill(self, key: tuple[str, int], task: Task) -> None:
        submit = task.submit
        lease = TransferKey(submit.transfer_id, submit.attempt)
        if submit.handoff is not None and task.stage == "new":
            task.stage = "borrowing"
            if self.kind == "push":
                self.outbox.append(Allocated(*key, 0, submit.handoff.num_tokens, b"wanted"))
            return
        if task.stage == "borrowing":
            task.stage = "running"
            self.outbox.append(Loaded(*key, ok=self.draw(4) != 3))
            return
        if task.stage == "sending":  # the lease lives until its Release: another ticket sends it again
            task.ticket = None
            self.outbox.append(KVReady(*key, ok=self.draw(8) != 7))
            return
        sources = SourceCounts(computed=len(submit.prompt_token_ids))
        if self._emit(key, task, 1, sources):
            return
        handoff = KVHandoff(*key, submit.transfer_id, self.name, "e0", len(submit.prompt_token_ids), b"")
        self.leases.add(lease)
        self.outbox.append(HandedOff(*key, sources, handoff))
        task.stage = "sending"
        if self.kind != "push":
            del self.tasks[key]

    def _allocate(self, key: tuple[str, int], task: Task) -> None:
        submit, task.stage = task.submit, "running"
        if task.local:
            return
        num_prompt = len(submit.prompt_token_ids)
        if submit.conditional and self.draw(3) == 1:  # it declines
            task.local = True
            self.outbox.append(Allocated(*key, 0, 0))
        elif self.draw(6) == 5:  # the whole prompt is a local hit
            self.outbox.append(Allocated(*key, num_prompt, num_prompt))
        else:
            task.stage = "loading"
            self.outbox.append(Allocated(*key, 0, num_prompt, b"ticket" if self.kind == "push" else None))

    def _finish_load(self, key: tuple[str, int], task: Task) -> None:
        ok = task.kv_ready is not False and self.draw(6) != 5
        task.stage, task.local = "running", task.local or not ok
        self.outbox.append(Loaded(*key, ok=ok))
        lease = task.submit.attempt if task.handoff is None else task.handoff.attempt
        self.outbox.append(Release(task.submit.transfer_id, lease))

    def _generate(self, key: tuple[str, int], task: Task) -> None:
        num_prompt = len(task.submit.prompt_token_ids)
        sources = SourceCounts(computed=num_prompt) if task.local else SourceCounts(remote=num_prompt)
        self._emit(key, task, 1 + self.draw(self.max_tokens_per_step), sources)

    def _emit(self, key: tuple[str, int], task: Task, num: int, sources: SourceCounts) -> bool:
        """Say the next tokens. True: the request is finished."""
        params, position, new = task.submit.params, len(task.output), []
        assert params.max_tokens is not None
        while len(new) < num and len(task.output) < params.max_tokens and STOP not in task.output:
            new.append(token_at(task.submit.prompt_token_ids, len(task.output)))
            task.output.append(new[-1])
        self.outbox.append(Tokens(*key, position, new))
        if task.output[-1] == STOP or len(task.output) >= params.max_tokens:
            stop = STOP if task.output[-1] == STOP else None
            self.outbox.append(Finished(*key, "length" if stop is None else "stop", sources, stop))
            del self.tasks[key]
            return True
        return False
