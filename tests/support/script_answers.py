"""What transformers makes of the embedded model's prompts: the answers that scripts of vLLM's shapes are to get."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from oracle import Choice, greedy, oracle

from pdkv.config import DEFAULT_MODEL

MODEL = str(DEFAULT_MODEL)
CODES = "Codes: fox=4821, hat=0937, pin=5550. "
QUESTIONS = [f"{CODES}{word}=" for word in ("fox", "hat", "pin")]
"""Prompts that the model answers with four digits, and then ends."""


@cache
def tokenizer() -> Any:
    """Transformers' own."""
    import transformers

    return transformers.AutoTokenizer.from_pretrained(MODEL)


def ids_of(prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt."""
    return list(tokenizer().encode(prompt)) if isinstance(prompt, str) else list(prompt)


def chat_ids(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Those of a conversation's prompt."""
    text = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer().encode(text, add_special_tokens=False))


def greedy_ids(prompt: str | Sequence[int], count: int) -> list[int]:
    """At most so many tokens behind a prompt, up to the end of sequence."""
    end = tokenizer().eos_token_id

    def until_end(logits: torch.Tensor, tokens: Sequence[int], num_prompt: int) -> Choice:
        return Choice(end, True) if end in tokens[num_prompt:] else greedy(logits, tokens, num_prompt)

    found = oracle(DEFAULT_MODEL).generate(ids_of(prompt), count, until_end)
    assert found is not None, f"a near tie behind {prompt!r}"
    return found[: found.index(end) + 1] if end in found else found


def greedy_text(prompt: str | Sequence[int], count: int) -> str:
    """Their text."""
    return str(tokenizer().decode(greedy_ids(prompt, count), skip_special_tokens=True))


def logprob_rows(token_ids: Sequence[int]) -> torch.Tensor:
    """(len(token_ids), vocab) of what comes behind each token."""
    return oracle(DEFAULT_MODEL).logprobs(list(token_ids))


def beams(prompt: str, width: int, count: int) -> list[list[int]]:
    """The best continuations of so many tokens, the best one first."""
    ids = torch.tensor([ids_of(prompt)])
    found = oracle(DEFAULT_MODEL).model.generate(
        ids, num_beams=width, num_return_sequences=width, max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return [row[ids.shape[1] :].tolist() for row in found]
