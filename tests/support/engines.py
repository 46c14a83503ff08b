"""Engines with the stand-in forward pass for tests of scheduling, roles and messages."""

from collections.abc import Mapping

from held_grammars import HeldStore
from state_machine.standin import NUM_LAYERS, VOCAB_SIZE, StandInExecutor
from state_machine.standin_store import STAND_IN_STORE

from pdkv.build_core import build_core
from pdkv.config import HandoffConfig
from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.registry import make_connector
from pdkv.engine.core import EngineCore
from pdkv.engine.drafts import Proposer
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import EngineCard, EngineToRouter, KVGroup, KVLayout, Submit

EOS = 3


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
    hit_tokens: int = 0,
    proposer: Proposer | None = None,
    grammars: HeldStore | None = None,
) -> EngineCore:
    """An engine with router "r".

    Args:
        options: those of its connector; None: it has none. With mode=store it is the stand-in's own store.
        max_model_len: None: all that the pool holds.
        proposer: steps have room for what it proposes.
    """
    handoff = handoff or HandoffConfig(connector="memory")
    limits = limits or SchedulerLimits(8, 64, kv_load_timeout_s=handoff.kv_load_timeout_s)
    if proposer is not None:
        limits = limits._replace(num_draft_tokens=proposer.num_tokens)
    num_layers = len(groups[0].layers) if groups else NUM_LAYERS
    layout = KVLayout(num_layers, 1, 1, block_size, "int64", 8, groups=groups)
    made = None
    if options is not None:
        config = ConnectorConfig(
            engine=name, epoch=f"{name}.0", layout=layout, num_blocks=num_blocks, options=options, kv_checksum="off"
        )
        name_of = STAND_IN_STORE if options.get("mode") == "store" else connector
        made = make_connector(name_of, config, lambda: None)
    worker = made.make_worker_side(0) if made else None
    card = EngineCard(
        engine=name,
        epoch=f"{name}.0",
        role="any",
        pid=0,
        connector="memory",
        kind=made.kind if made else "pull",
        content_addressed=False,
        orders=made.orders() if made else [],
        model="stand-in",
        layout=layout,
        hash_block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len or num_blocks * block_size,
        max_num_seqs=limits.max_num_seqs,
        rank_blobs=[worker.handshake()] if worker else [],
    )
    executor = StandInExecutor(num_blocks, layout, worker, proposer=proposer, grammars=grammars)
    core = build_core(
        card=card,
        executor=executor,
        connector=made.make_scheduler_side() if made else None,
        block_table=made.make_block_table() if made else LocalBlockTable(num_blocks),
        handoff=handoff,
        limits=limits,
        eos_token_ids=[EOS],
        vocab_size=VOCAB_SIZE,
        shutdown=executor.shutdown,
        hit_tokens=hit_tokens,
        grammars=grammars,
    )
    executor.pool.blocks = core.scheduler.kv.pool
    core.router_joined("r", "1")
    core.take_messages(0.0)
    return core


def submit(
    prompt: list[int], *, request_id: str = "a", attempt: int = 0, max_tokens: int = 4, **fields: object
) -> Submit:
    """A greedy Submit."""
    return Submit(
        request_id=request_id,
        transfer_id=f"t-{request_id}",
        attempt=attempt,
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


def run(core: EngineCore, now: float = 1.0, *, max_steps: int = 200) -> list[EngineToRouter]:
    """Step until nothing is to be done; returns the messages to the router."""
    messages: list[EngineToRouter] = []
    for _ in range(max_steps):
        has_work = core.has_work
        if has_work:
            core.step(now)
            core.scheduler.kv.pool.check_integrity()
        for _, sent in core.take_messages(now):  # of what a notification brought, too
            messages += sent
        if not has_work:
            break
    return messages


def of_type(messages: list[EngineToRouter], kind: type) -> list[EngineToRouter]:
    """The messages of one type."""
    return [message for message in messages if isinstance(message, kind)]


def output_of(messages: list[EngineToRouter], request_id: str) -> list[int]:
    """All output tokens of a request."""
    from pdkv.wire.messages import Tokens

    tokens = [m for m in messages if isinstance(m, Tokens) and m.request_id == request_id]
    return [token_id for message in tokens for token_id in message.token_ids]


def at_rest(core: EngineCore) -> bool:
    """Whether every block is free or cached and nothing is pending."""
    counts = core.scheduler.kv.pool.counts()
    return counts.free + counts.cached == counts.total and core.external.is_idle and not core.requests
