"""What transformers says about a model directory, in float32: the tokens and logprobs that every topology must give.

Prompts whose outcome hangs on the last digits of a float (near ties, draws at a boundary) are drawn again.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

TIE = 1e-4
"""Two best logits closer than this prove nothing."""


class Choice(NamedTuple):
    """One token of an oracle's output."""

    token_id: int
    is_clear: bool  # False: a last digit could have made it another one


class Chooser(Protocol):
    """Chooses the next token from logits (vocab,) float32 behind `tokens`, of which `num_prompt` are the prompt."""

    def __call__(self, logits: torch.Tensor, tokens: Sequence[int], num_prompt: int) -> Choice: ...


class Expected(NamedTuple):
    """A prompt and what transformers makes of it."""

    prompt: list[int]
    output: list[int]


def greedy(logits: torch.Tensor, tokens: Sequence[int], num_prompt: int) -> Choice:
    """The likeliest token."""
    best = logits.topk(2)
    return Choice(int(best.indices[0]), float(best.values[0] - best.values[1]) > TIE)


class Oracle:
    """A transformers model with eager attention."""

    def __init__(self, model_dir: Path) -> None:
        import transformers

        torch.set_num_threads(1)  # threads that spin cost the engines under test their cores
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.requires_grad_(False)
        self.vocab_size: int = self.model.config.vocab_size

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_output: int, choose: Chooser = greedy) -> list[int] | None:
        """The continuation by `num_output` tokens; None where one of them was not clear."""
        tokens, state = list(prompt), None
        for _ in range(num_output):
            fresh = tokens if state is None else tokens[-1:]
            out = self.model(torch.tensor([fresh]), past_key_values=state, use_cache=True, logits_to_keep=1)
            state = out.past_key_values
            token_id, is_clear = choose(out.logits[0, -1], tokens, len(prompt))
            if not is_clear:
                return None
            tokens.append(token_id)
        return tokens[len(prompt) :]

    @torch.inference_mode()
    def generate_all(
        self, prompts: Sequence[Sequence[int]], num_output: int, choosers: Sequence[Chooser]
    ) -> list[list[int] | None]:
        """`generate` for one prompt of each chooser, all of them in one batch."""
        rows, longest = [list(prompt) for prompt in prompts], max(map(len, prompts))
        fresh = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        positions, state = (mask.cumsum(-1) - 1).clamp(min=0), None
        are_clear = [True] * len(rows)
        for _ in range(num_output):
            out = self.model(
                fresh,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=state,
                use_cache=True,
                logits_to_keep=1,
            )
            state = out.past_key_values
            for i, (row, choose) in enumerate(zip(rows, choosers, strict=True)):
                token_id, is_clear = choose(out.logits[i, -1], row, len(prompts[i]))
                are_clear[i] &= is_clear
                row.append(token_id)
            fresh = torch.tensor([row[-1:] for row in rows])
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
        return [row[-num_output:] if clear else None for row, clear in zip(rows, are_clear, strict=True)]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """(len(tokens), vocab) natural-log probabilities of the token behind each position."""
        result: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)
        return result

    def expect(
        self, make_prompt: Callable[[], list[int]], num_output: int, choose: Chooser = greedy, *, attempts: int = 50
    ) -> Expected:
        """The first prompt of `make_prompt` whose output is clear."""
        for _ in range(attempts):
            prompt = make_prompt()
            output = self.generate(prompt, num_output, choose)
            if output is not None:
                return Expected(prompt, output)
        raise AssertionError(f"no clear output in {attempts} prompts")


@cache
def oracle(model_dir: Path) -> Oracle:
    """The oracle of a directory, loaded once."""
    return Oracle(model_dir)


def check_departures(
    model_dir: Path, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], *, most: float = 0.2
) -> None:
    """Check greedy outputs in bfloat16 by the rule of divergence: each token is float32's best one behind the tokens
    before it, or its logit is less below than twice what bfloat16 changes in transformers' logits of these tokens.

    `most`: the share of the tokens that may be others.
    """
    import transformers

    exact = oracle(model_dir).model
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="eager"
    )
    changed, gaps = 0.0, []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = exact(tokens).logits[0]
            changed = max(changed, float((rounded(tokens).logits[0].float() - logits).abs().max()))
        rows = logits[len(prompt) - 1 : -1]
        gaps.append(rows.amax(-1) - rows.gather(1, torch.tensor(output)[:, None])[:, 0])
    gap = torch.cat(gaps)
    departed = float((gap > 0).float().mean())
    assert float(gap.max()) < 2 * changed, (gap.max(), changed)
    assert departed < most, (departed, gap.max(), changed)
