"""What transformers says about a model directory: greedy tokens and logprobs in float32."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

CLOSE = 1e-4
"""Prompts whose two best logits come closer than this anywhere prove nothing and are drawn again."""


@cache
def load(model_dir: Path) -> Any:
    """The transformers model, in float32, with attention that has soft caps."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def greedy(model_dir: Path, prompt: list[int], num_output: int) -> tuple[list[int], float]:
    """Greedy continuation and the smallest gap between the two best logits on the way."""
    model, tokens, gap = load(model_dir), list(prompt), float("inf")
    cache_state, fresh = None, torch.tensor([prompt])
    for _ in range(num_output):
        out = model(fresh, past_key_values=cache_state, use_cache=True)
        best = out.logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        cache_state, fresh = out.past_key_values, torch.tensor([tokens[-1:]])
    return tokens[len(prompt) :], gap


@torch.inference_mode()
def logprobs(model_dir: Path, tokens: list[int]) -> torch.Tensor:
    """(len(tokens), vocab) natural-log probabilities of the token behind each position."""
    result: torch.Tensor = load(model_dir)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return result


def draw_prompts(
    model_dir: Path, lengths: list[int], num_output: int, *, seed: int = 0
) -> dict[int, tuple[list[int], list[int]]]:
    """By index of `lengths`: a random prompt of that length and its greedy continuation, near ties drawn again."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = load(model_dir).config.vocab_size
    drawn: dict[int, tuple[list[int], list[int]]] = {}
    for index, length in enumerate(lengths):
        while index not in drawn:
            prompt = torch.randint(2, vocab_size, (length,), generator=generator).tolist()
            output, gap = greedy(model_dir, prompt, num_output)
            if gap > CLOSE:
                drawn[index] = (prompt, output)
    return drawn
