"""Assembles an engine from its parts: pool, cache, connector's scheduler side, roles, scheduler, executor."""

from collections.abc import Callable, Sequence
from itertools import chain

from pdkv.config import HandoffConfig, Preemption
from pdkv.connectors.base import SchedulerConnector
from pdkv.connectors.block_table import BlockTable
from pdkv.decode.role import DecodeRole
from pdkv.engine.core import EngineCore
from pdkv.engine.drafting import Drafting
from pdkv.engine.grammar_wait import GrammarWait
from pdkv.engine.kv.block_pool import BlockPool
from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.outbox import Outbox
from pdkv.engine.outside.external import ExternalKV
from pdkv.engine.outside.swap import SwapRule
from pdkv.engine.scheduler import Scheduler, SchedulerLimits
from pdkv.engine.stopping import StopRules
from pdkv.engine.worker.executor import Executor
from pdkv.grammar.matching.host import GrammarHost
from pdkv.prefill.leases import LeaseTable
from pdkv.prefill.role import PrefillRole
from pdkv.sampling.logits_processors import NO_PROCESSORS, ProcessorSet
from pdkv.wire.kv import EngineCard
from pdkv.wire.step_watch import StepWatch

LOCAL_PREFILL_TOKENS = 64
"""Missing prompt tokens below which decode prefills by itself (with decode first)."""


def build_core(
    *,
    card: EngineCard,
    executor: Executor,
    connector: SchedulerConnector | None,
    block_table: BlockTable,
    handoff: HandoffConfig,
    limits: SchedulerLimits,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    shutdown: Callable[[], None],
    hit_tokens: int = 0,
    local_prefill_tokens: int = LOCAL_PREFILL_TOKENS,
    grammars: GrammarHost | None = None,
    processors: ProcessorSet = NO_PROCESSORS,
    drafting: Drafting | None = None,
    preemption: Preemption = "swap",
    prefix_caching: bool = True,
) -> EngineCore:
    """An engine around an executor whose KV pool has card.num_blocks blocks, enough for card.max_model_len tokens.

    Args:
        connector: the scheduler side; None for an engine without peers and stores.
        block_table: written by the block pool; from the connector if there is one.
        shutdown: called once, when the core shuts down.
        hit_tokens: the connector's hits end at multiples of this many tokens; 0: it finds nothing by content.
        processors: logits processors that requests may name.
        grammars: prepares the grammars of requests; None: requests that have one are refused. The caller owns it.
        drafting: decides how many guesses a step verifies; None: all.
        preemption: what happens to the KV of preempted requests.
        prefix_caching: whether the pool's content can be found again.
    """
    layout = card.layout
    pool = BlockPool(card.num_blocks, block_table, keys_per_block=layout.block_size // card.hash_block_size)
    kv = KVCacheManager(
        pool,
        block_size=layout.block_size,
        hash_block_size=card.hash_block_size,
        windows=layout.windows,
        max_step_tokens=limits.max_num_batched_tokens,
        hit_tokens=hit_tokens,
        caches=prefix_caching,
    )
    longest_blocks = kv.num_at_once(card.max_model_len)
    assert longest_blocks <= card.num_blocks, "a request of the longest length must fit alone"
    watch = StepWatch()
    swap = SwapRule(preemption, watch.times.predict_s, limits.max_num_batched_tokens)
    external = ExternalKV(connector, pool, swap, block_size=layout.block_size, num_groups=layout.num_groups)
    outbox = Outbox()

    def num_promised_blocks() -> int:
        """Blocks of prompts in progress that will become leases."""
        loading = (load.request for load in external.loads.values())
        return sum(kv.num_kept(r.num_tokens) for r in chain(scheduler.running, loading) if r.kv == "handoff")

    most_leased = int(card.num_blocks * handoff.max_leased_fraction)
    if card.kind == "push" and card.holds_two:  # where decode has blocks for a prompt already, it must find room here
        most_leased = min(most_leased, card.num_blocks - longest_blocks)
    prefill = PrefillRole(
        engine=card.engine,
        epoch=card.epoch,
        leases=LeaseTable(pool),
        external=external,
        send=outbox,
        max_leased_blocks=max(most_leased, 1),
        lease_timeout_s=handoff.lease_timeout_s,
        num_promised_blocks=num_promised_blocks,
    )
    decode = DecodeRole(
        pool=pool,
        external=external,
        send=outbox,
        policy=handoff.kv_load_failure_policy,
        local_prefill_tokens=local_prefill_tokens,
        longest_blocks=longest_blocks,
    )

    stop_rules = StopRules(
        eos_token_ids=eos_token_ids, max_model_len=card.max_model_len, vocab_size=vocab_size, processors=processors
    )
    scheduler = Scheduler(kv, external, prefill, decode, limits, stop_rules, drafting)
    return EngineCore(
        card=card,
        scheduler=scheduler,
        executor=executor,
        prefill=prefill,
        decode=decode,
        outbox=outbox,
        stop_rules=stop_rules,
        grammars=GrammarWait(grammars),
        watch=watch,
        shutdown=shutdown,
    )
