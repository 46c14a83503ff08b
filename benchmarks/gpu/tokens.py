"""Greedy tokens in float32 on the GPU: those of the CPU, wherever the choice is not a matter of rounding, and those of
steps in turn without graphs; and logprobs in bfloat16: as near to float32 as those of transformers on the same device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.against_transformers import errors
from benchmarks.report import Claim
from pdkv import LLM, SamplingParams
from pdkv.config import DEFAULT_MODEL
from pdkv.offline.llm import RequestOutput

MARGIN = 1e-4
"""Between the two best logprobs: where they are closer, either token is right."""

NUM_TOKENS = 48
_TEXT = "In a serving system the first token waits for the prompt, and every further one for its turn in the batch. "


def run(device: str, scale: str) -> Iterator[Claim]:
    """The shares of prompts whose tokens differ where they must not; how far logprobs in bfloat16 lie from float32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    prompts = [(_TEXT * 12)[: 17 * (i + 1)] for i in range(4 if scale == "tiny" else 32)]
    expected, found = (generate(where, prompts) for where in ("cpu", device))
    yield compare("float32", device, expected, found)
    in_turn = generate(device, prompts, enforce_eager=True, max_steps_ahead=0)
    wrong = sum(
        one.outputs[0].token_ids != other.outputs[0].token_ids for one, other in zip(found, in_turn, strict=True)
    )
    name = "float32, steps ahead and graphs against eager ones in turn: prompts with another token"
    yield Claim(name, wrong / len(prompts), 0.0, "lower", {"prompts": len(prompts), "differ": wrong})
    token_ids = [result.prompt_token_ids for result in expected]
    found_errors = errors(device, DEFAULT_MODEL, token_ids, NUM_TOKENS)  # rounding moves single logprobs of either far
    figures = {f"{name} {what}": float(value) for name, each in found_errors.items()
               for what, value in (("mean", each.mean()), ("largest", each.max()))}  # fmt: skip
    ratio = figures["pdkv mean"] / figures["transformers mean"]
    yield Claim("bfloat16: mean error against float32 / that of transformers", ratio, 1.2, "lower", figures)


def compare(what: str, device: str, expected: list[RequestOutput], found: list[RequestOutput]) -> Claim:
    """The share of prompts whose tokens differ where it is not a matter of rounding."""
    places = [_first_difference(one, other) for one, other in zip(expected, found, strict=True)]
    wrong = sum(place is not None and place > MARGIN for place in places)
    figures = {"prompts": len(places), "differ": sum(p is not None for p in places), "differ above the margin": wrong}
    return Claim(
        f"{what}, {device} against cpu: prompts with another token", wrong / len(places), 0.0, "lower", figures
    )


def generate(device: str, prompts: Sequence[str | list[int]], **options: Any) -> list[RequestOutput]:
    """Greedy tokens in float32."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    with LLM(device=device, dtype="float32", kv_cache_memory=64 << 20, **options) as llm:
        return list(llm.generate(prompts, params, use_tqdm=False))


def _first_difference(one: RequestOutput, other: RequestOutput) -> float | None:
    """How far the two best tokens of `one` lie apart where `other` goes its own way; None: it never does."""
    first, second = one.outputs[0], other.outputs[0]
    for i, (token, another) in enumerate(zip(first.token_ids, second.token_ids, strict=True)):
        if token != another:
            assert first.logprobs is not None
            best, next_best = first.logprobs[i].values()
            return best.logprob - next_best.logprob
    return None
