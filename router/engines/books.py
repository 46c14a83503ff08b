"""Tokens of work that one router has given to engines, counted exactly from each generation's start to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.router.request import GenerateRequest

EXPECTED_OUTPUT = 256
"""Output tokens assumed for a request that allows more: few requests use up their limit."""

CONTEXT_WEIGHT = 0.05
"""What a token of KV costs the steps of an aggregated engine while its request lasts, in prompt tokens to compute.

Each step reads it, and computes none of it. Counted as whole tokens, the KV of running requests outweighs every hit in
a cache (benchmarks/policies.py --aggregated).
"""


@dataclass(slots=True)
class Books:
    """The work of one incarnation of an engine; the next incarnation starts with new books."""

    requests: int = 0  # KV tokens that it has, or will get
    prefill_tokens: int = 0  # prompt tokens that it has to compute
    kv_tokens: int = 0  # KV tokens that its requests hold, or will hold
    # when the latest of these prompts was run, or the first of them came
    worked_since: float = field(default=0.0, compare=False)
    noticed: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)  # called at each change


class Entry(NamedTuple):
    """A generation's part in the books of one engine."""

    books: Books
    prefill_tokens: int
    kv_tokens: int

    def enter(self) -> None:
        """Add the generation."""
        books = self.books
        books.requests += 1
        books.prefill_tokens += self.prefill_tokens
        books.kv_tokens += self.kv_tokens
        books.noticed()

    def strike(self) -> None:
        """Remove the generation."""
        books = self.books
        books.requests -= 1
        books.prefill_tokens -= self.prefill_tokens
        books.kv_tokens -= self.kv_tokens
        books.noticed()
        assert books.requests >= 0, "a generation was removed from books that did not contain it"
        assert books.requests or not (books.prefill_tokens or books.kv_tokens), "tokens without a request"


def expected_output(max_tokens: int | None) -> int:
    """Output tokens that a request is expected to produce; at least one."""
    return EXPECTED_OUTPUT if max_tokens is None else max(min(max_tokens, EXPECTED_OUTPUT), 1)


def kv_tokens(request: GenerateRequest) -> int:
    """Tokens of KV that a request is expected to need in the end; choices after the first share the prompt's."""
    prompt = len(request.prompt_token_ids) if request.choice == 0 else HASH_BLOCK_SIZE
    return prompt + expected_output(request.params.max_tokens)
