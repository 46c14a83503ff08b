"""One real engine in this process, with the test as its loop: scheduler, block pool and connector, step by step."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from pdkv.assemble.core import build_core
from pdkv.assemble.engine import build_engine
from pdkv.base.clock import MONOTONIC, Clock
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.base import ConnectorConfig, WorkerConnector
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.plan import NO_PLAN
from pdkv.connectors.registry import build_connector, plan_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.proposers.base import TokenProposer
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.worker.executor import Executor
from pdkv.sampling.params import SamplingParams
from pdkv.testing.clock import REAL_LIMIT_S, VirtualClock
from pdkv.testing.standin import NUM_LAYERS, VOCAB_SIZE, StandInExecutor
from pdkv.wire.kv import ChecksumMode, EngineCard, KVGroup, KVLayout
from pdkv.wire.messages import (
    Allocated,
    Continue,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    KVReady,
    KVTicket,
    Peers,
    Release,
    RouterToEngine,
    Submit,
    Tokens,
)

EOS = 3
"""The token that ends a text of `make_core`'s engines."""

M = TypeVar("M", bound=EngineToRouter)


def make_core(
    *,
    name: str = "e0",
    num_blocks: int = 16,
    block_size: int = 4,
    limits: SchedulerLimits | None = None,
    options: Mapping[str, str] | None = None,
    handoff: HandoffConfig | None = None,
    connector: str = "memory",
    max_model_len: int | None = None,
    groups: tuple[KVGroup, ...] = (),
    layout: KVLayout | None = None,
    kv_checksum: ChecksumMode = "off",
    executor: Callable[[WorkerConnector | None, Any], Executor] | None = None,
    hit_tokens: int = 0,
    proposer: TokenProposer | None = None,
    grammars: Any = None,
    notify: Callable[[], None] = lambda: None,
) -> EngineCore:
    """An engine with router "r" and a StandInExecutor as its forward pass.

    Args:
        options: those of its connector; None: it has none.
        max_model_len: in tokens; None: all that the pool holds.
        layout: in place of the stand-in's, for another executor.
        executor: makes it, and registers the pool, given the connector's worker side and its pool; None: a
            StandInExecutor.
        proposer: guesses tokens; steps have room for its guesses.
        grammars: in place of a GrammarHost.
        notify: called by the connector's threads when there is news.
    """
    handoff = handoff or HandoffConfig(connector="memory")
    limits = limits or SchedulerLimits(8, 64, kv_load_timeout_s=handoff.kv_load_timeout_s)
    if proposer is not None:
        limits = limits._replace(num_draft_tokens=proposer.num_tokens)
    num_layers = len(groups[0].layers) if groups else NUM_LAYERS
    layout = layout or KVLayout(num_layers, 1, 1, block_size, "int64", 8, groups=groups)
    made, plan, table = None, NO_PLAN, LocalBlockTable(num_blocks)
    if options is not None:
        plan = plan_connector(connector, options)
        config = ConnectorConfig(
            engine=name, epoch=f"{name}.0", layout=layout, num_blocks=num_blocks, plan=plan,
            kv_checksum=kv_checksum, block_table=table,
        )  # fmt: skip
        made = build_connector(config, notify)
    scheduler, worker = (made.scheduler(), made.worker()) if made else (None, None)
    if executor is None:
        runs: Executor = StandInExecutor(num_blocks, layout, worker, proposer=proposer, grammars=grammars)
    else:
        runs = executor(worker, made and made.kv_cache())
    card = EngineCard(
        engine=name, epoch=f"{name}.0", role="any", pid=0, connector=connector, kind=plan.kind if made else "pull",
        content_addressed=False, orders=list(plan.orders) if made else [], model="stand-in", layout=layout,
        hash_block_size=layout.block_size, num_blocks=num_blocks,
        max_model_len=max_model_len or num_blocks * layout.block_size, max_num_seqs=limits.max_num_seqs,
        rank_blobs=[worker.handshake()] if worker else [],
    )  # fmt: skip

    def shutdown() -> None:
        for part in (runs, scheduler, made):
            if part is not None:
                part.shutdown()

    core = build_core(
        card=card,
        executor=runs,
        connector=scheduler,
        block_table=made.block_table if made and made.block_table else table,
        handoff=handoff,
        limits=limits,
        eos_token_ids=[EOS],
        vocab_size=VOCAB_SIZE,
        shutdown=shutdown,
        hit_tokens=hit_tokens,
        grammars=grammars,
    )
    if isinstance(runs, StandInExecutor):
        runs.pool.blocks = core.scheduler.kv.pool
    core.router_joined("r", "1")
    core.take_messages(0.0)
    return core


def submit(prompt: list[int], *, request_id: str = "a", attempt: int = 0, max_tokens: int = 4, **fields: Any) -> Submit:
    """A greedy Submit."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    values = {"transfer_id": f"t-{request_id}", "prompt_token_ids": prompt, "params": params, **fields}
    return Submit(request_id=request_id, attempt=attempt, **values)


def run(core: EngineCore, now: float = 1.0, *, max_steps: int = 200) -> list[EngineToRouter]:
    """Step until there is nothing to do; returns the messages to the router."""
    messages: list[EngineToRouter] = []
    for _ in range(max_steps):
        has_work = core.has_work
        if has_work:
            core.step(now)
            core.scheduler.kv.pool.check_integrity()
        for _, sent in core.take_messages(now):  # including those of a notification
            messages += sent
        if not has_work:
            break
    return messages


def of_type(messages: Sequence[EngineToRouter], kind: type[M]) -> list[M]:
    """The messages of one type."""
    return [message for message in messages if isinstance(message, kind)]


def output_of(messages: Sequence[EngineToRouter], request_id: str) -> list[int]:
    """All output tokens of a request."""
    tokens = [message for message in of_type(messages, Tokens) if message.request_id == request_id]
    return [token_id for message in tokens for token_id in message.token_ids]


def at_rest(core: EngineCore) -> bool:
    """Whether every block is free or cached and nothing is pending."""
    counts = core.scheduler.kv.pool.counts()
    return counts.free + counts.cached == counts.total and core.external.is_idle and not core.requests


class InProcessEngine:
    """A real engine and its loop: it steps while there is work, and otherwise waits for news or its next deadline.

    Args:
        build: makes the core, given the function that its connector's threads call for news.
        clock: the core's clock. With a VirtualClock, deadlines only pass when the test moves it.
    """

    def __init__(self, build: Callable[[Callable[[], None]], EngineCore], clock: Clock = MONOTONIC) -> None:
        self.clock = clock
        self.sent: list[EngineToRouter] = []  # all of its messages
        self.beside: InProcessEngine | None = None  # runs whenever this one does
        self._news = threading.Event()
        self._is_woken = False
        self.core = build(self._notify)
        self.core.router_joined("r", "1")

    @classmethod
    def of_model(
        cls,
        model: Path,
        connector: str = "",
        options: Mapping[str, str] | None = None,
        *,
        name: str = "e",
        epoch: str = "1",
        clock: Clock = MONOTONIC,
        **fields: Any,
    ) -> Self:
        """Make an engine from a model's directory, on one CPU thread; without a connector if none is named.

        Args:
            options: the connector's options.
            fields: fields of EngineConfig.
        """
        values = {"device": "cpu", "kv_cache_memory": 16 << 20, "threads": 1, "max_num_seqs": 8, **fields}
        handoff = HandoffConfig(connector=connector, connector_config=dict(options or {})) if connector else None
        config = EngineConfig(model=model, **values)
        return cls(lambda notify: build_engine(config, handoff, name=name, epoch=epoch, notify=notify), clock)

    @classmethod
    def of_stand_in(cls, clock: Clock = MONOTONIC, **fields: Any) -> Self:
        """Make an engine around `make_core(**fields)`."""
        return cls(lambda notify: make_core(notify=notify, **fields), clock)

    def tell(self, *messages: RouterToEngine) -> list[EngineToRouter]:
        """Handle the messages of one frame, and `run`."""
        for message in messages:
            self.core.handle("r", message, self.clock.now())
        return self.run()

    def run(self) -> list[EngineToRouter]:
        """Step until there is nothing to do without news; returns its messages."""
        num_before, is_busy = len(self.sent), True
        while is_busy:
            if self._is_woken:
                self._is_woken = False
                self.core.wake()
            now, due = self.clock.now(), self.core.next_deadline()
            is_busy = self.core.has_work or (due is not None and due <= now)
            if is_busy:
                self.core.step(now)
                self.core.scheduler.kv.pool.check_integrity()
            for _, messages in self.core.take_messages(now):
                self.sent += messages
        return self.sent[num_before:]

    def run_until(self, is_met: Callable[[], bool]) -> list[EngineToRouter]:
        """Run, and wait for news, until the condition holds; returns this engine's messages.

        Raises:
            TimeoutError: it does not hold within REAL_LIMIT_S of the machine's time.
        """
        num_before, bound = len(self.sent), MONOTONIC.now() + REAL_LIMIT_S
        while True:
            self._news.clear()
            self.run()
            if self.beside is not None:
                self.beside.run()
                self.run()
            if is_met():
                return self.sent[num_before:]
            if MONOTONIC.now() >= bound:
                raise TimeoutError(f"engine {self.core.card.engine} does not get there: {self.core.requests}")
            self._wait(bound)

    def tell_until(self, kind: type[EngineToRouter], *messages: RouterToEngine) -> list[EngineToRouter]:
        """Handle the messages of one frame, and `run_until` it has sent a message of this type; returns all of its
        messages.
        """
        num_before = len(self.sent)
        self.tell(*messages)
        self.run_until(lambda: bool(of_type(self.sent[num_before:], kind)))
        return self.sent[num_before:]

    def rest(self) -> list[EngineToRouter]:
        """`run_until` no request is left, every block is free or cached, and everything is saved."""
        return self.run_until(lambda: at_rest(self.core) and not self.core.external.has_news)

    def ask(self, request: Submit) -> list[EngineToRouter]:
        """Answer a request; returns the messages until it is at rest."""
        num_before = len(self.sent)
        self.tell(request)
        self.rest()
        return self.sent[num_before:]

    def generate(self, prompts: Sequence[list[int]], *, max_tokens: int = 4) -> list[list[int]]:
        """Greedy outputs of prompts that run together; returns when it is at rest. AssertionError: one failed."""
        num_before = len(self.sent)
        ids = [f"{num_before}-{index}" for index in range(len(prompts))]
        self.tell(*(submit(p, request_id=i, max_tokens=max_tokens) for i, p in zip(ids, prompts, strict=True)))
        self.rest()
        sent = self.sent[num_before:]
        assert not of_type(sent, Failed)
        return [output_of(sent, request_id) for request_id in ids]

    def meet(self, other: "InProcessEngine") -> None:
        """Connect two engines: each runs while a test waits for the other."""
        for engine, peer in ((self, other), (other, self)):
            engine.beside = peer
            engine._news = self._news
            engine.core.handle("r", Peers([self.core.card, other.core.card]), engine.clock.now())
        self.run()
        other.run()

    def close(self) -> None:
        """Shut the engine down. Idempotent."""
        self.core.shutdown()

    def _notify(self) -> None:
        self._is_woken = True
        self._news.set()

    def _wait(self, bound: float) -> None:
        """Wait for news of either engine, or the next deadline that passes by itself."""
        engines = [self] if self.beside is None else [self, self.beside]
        deadlines = [e.core.next_deadline() for e in engines if not isinstance(e.clock, VirtualClock)]
        MONOTONIC.wait(self._news, min([bound, *(deadline for deadline in deadlines if deadline is not None)]))


class SideBySide:
    """A prefill and a decode engine that hand requests over, with the test as their router."""

    def __init__(self, prefill: InProcessEngine, decode: InProcessEngine) -> None:
        self.prefill, self.decode = prefill, decode
        prefill.meet(decode)

    @classmethod
    @contextmanager
    def of_model(
        cls, model: Path, connector: str, options: Mapping[str, str] | None = None, **fields: Any
    ) -> Iterator[Self]:
        """Make two engines with `InProcessEngine.of_model`, which are closed at the end."""
        made: list[InProcessEngine] = []
        try:
            for role in ("prefill", "decode"):
                name = f"{role}-{model.name}-{connector}"
                made.append(InProcessEngine.of_model(model, connector, options, name=name, **fields))
            yield cls(*made)
        finally:
            for engine in made:
                engine.close()

    def hand_over(self, request: Submit, *, late_ticket: bool = False) -> list[EngineToRouter]:
        """Prefill a prompt and decode after it; returns decode's messages, when both are at rest.

        If the connector pushes, decode allocates its blocks first. `late_ticket`: prefill is told of them only after
        its end.
        """
        prefill, decode, key = self.prefill, self.decode, (request.request_id, request.attempt)
        handed = replace(request, kv="handoff", until="first_token")
        num_before = len(decode.sent)
        asked = replace(request, kv="await_peer")
        if prefill.core.card.kind == "push":
            (allocated,) = of_type(decode.tell_until(Allocated, asked), Allocated)
            assert allocated.ticket is not None
            if not late_ticket:
                handed = replace(handed, ticket=allocated.ticket)
            sent = prefill.tell_until(HandedOff, handed)
            if late_ticket:
                prefill.tell(KVTicket(*key, allocated.ticket))
            decode.tell(Continue(*key, output_of(sent, request.request_id)))
        else:
            sent = prefill.tell_until(HandedOff, handed)
            (message,) = of_type(sent, HandedOff)
            output = output_of(sent, request.request_id)
            decode.tell(replace(asked, output_token_ids=output, handoff=message.handoff))
            if prefill.core.card.kind == "store":
                ready = of_type(sent, KVReady) or of_type(prefill.tell_until(KVReady), KVReady)
                assert ready[0].ok
                decode.tell(ready[0])
        decode.run_until(lambda: bool(of_type(decode.sent[num_before:], Finished)))
        prefill.tell(Release(request.transfer_id, request.attempt))
        prefill.rest()
        decode.rest()
        return decode.sent[num_before:]
