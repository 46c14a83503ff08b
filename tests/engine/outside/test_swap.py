"""KV of preempted requests: read from a store, or computed again, as the policy and what both took say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from deployments import link_text_model

from pdkv import LLM, SamplingParams
from pdkv.config import Preemption
from pdkv.engine.outside.swap import TRY_AGAIN_AFTER, SwapRule

PROMPTS = [[3 + (i + j * j) % 50 for j in range(100 + i)] for i in range(6)]
KEY = ("a", 0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)


def rule(policy: Preemption) -> SwapRule:
    """Steps take a millisecond per token."""
    return SwapRule(policy, lambda num_tokens: num_tokens * 1e-3, step_tokens=100)


def test_what_was_not_measured_is_tried_and_then_the_cheaper_way_is_taken() -> None:
    auto = rule("auto")
    assert auto.prefers_load(KEY, 250)
    auto.loaded(100, 0.05)
    assert auto.prefers_load(KEY, 250)
    for _ in range(20):
        auto.loaded(100, 0.5)
    assert not auto.prefers_load(KEY, 250)


def test_reading_is_tried_again_now_and_then() -> None:
    auto = rule("auto")
    auto.loaded(100, 10.0)
    choices = [auto.prefers_load((f"{i}", 0), 250) for i in range(3 * (TRY_AGAIN_AFTER + 1)) for _ in range(100)]
    assert choices == ([False] * 100 * TRY_AGAIN_AFTER + [True] * 100) * 3


def test_the_other_policies_ask_no_clock() -> None:
    for measured in (None, 10.0):
        swap, recompute = rule("swap"), rule("recompute")
        if measured:
            swap.loaded(1, measured)
            recompute.loaded(1, 1e-9)
        assert swap.looks
        assert swap.prefers_load(KEY, 1)
        assert not recompute.looks
        assert not recompute.prefers_load(KEY, 1)


class Run(NamedTuple):
    """What came of four requests that begin together."""

    tokens: list[Sequence[int]]
    block_bytes: int
    num_preemptions: int
    recomputed: int  # prompt tokens
    num_loads: int


def run(policy: Preemption, model: Path, kv_cache_memory: int, name: str) -> Run:
    """`name`: of the store, which nobody else has."""
    options: dict[str, Any] = {"threads": 1, "device": "cpu", "max_model_len": 256, "in_turn_below_s": 0.0}
    options |= {"connector": "store", "connector_config": {"url": f"memory://{name}", "min_hit_tokens": "0"}}
    with LLM(model, preemption=policy, kv_cache_memory=kv_cache_memory, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        core = llm._engine.core
        counters = core.counters
        return Run(
            [output.outputs[0].token_ids for output in outputs],
            core.card.layout.block_bytes,
            core.scheduler.num_preemptions,
            counters.recomputed,
            sum(stats.loads for stats in core.scheduler.external.worker_stats.values()),
        )


@pytest.mark.parametrize("policy", ["recompute", "swap", "auto"])
def test_preempted_requests_say_the_same_whatever_becomes_of_their_kv(
    tiny_model_dir: Path, tmp_path: Path, policy: Preemption
) -> None:
    model = link_text_model(tiny_model_dir, tmp_path)
    roomy = run(policy, model, 16 << 20, f"{policy}-roomy")
    assert not roomy.num_preemptions
    tight = run(policy, model, 32 * roomy.block_bytes, f"{policy}-tight")
    assert tight.num_preemptions
    assert tight.tokens == roomy.tokens
    if policy == "recompute":
        assert not tight.num_loads
    if policy == "swap":  # auto may find that computing takes less time here
        assert tight.num_loads
        assert tight.recomputed < 64 * tight.num_preemptions, "values of 64 tokens were there"
