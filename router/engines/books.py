"""What one router has given the engines to do, in tokens: kept exactly, from a generation's start to its end."""

from dataclasses import dataclass
from typing import NamedTuple

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.router.request import GenerateRequest

EXPECTED_OUTPUT = 256
"""Output tokens that a request is taken to come to where it allows more: few use up what they may."""

CONTEXT_WEIGHT = 0.05
"""What a token of KV costs the steps of an aggregated engine while its request lasts, in prompt tokens to compute.

Each step reads it, and computes none of it. Counted as whole tokens, the KV of running requests outweighs every hit in
a cache (benchmarks/policies.py --aggregated).
"""


@dataclass(slots=True)
class Books:
    """Of one incarnation of an engine: the next one begins with new ones."""

    requests: int = 0  # that it has, or will get
    prefill_tokens: int = 0  # of prompts that it has to compute
    kv_tokens: int = 0  # that its requests hold, or will hold


class Entry(NamedTuple):
    """A generation's part in the books of one engine."""

    books: Books
    prefill_tokens: int
    kv_tokens: int

    def enter(self) -> None:
        """It is under way there."""
        books = self.books
        books.requests += 1
        books.prefill_tokens += self.prefill_tokens
        books.kv_tokens += self.kv_tokens

    def strike(self) -> None:
        """It is not any more."""
        books = self.books
        books.requests -= 1
        books.prefill_tokens -= self.prefill_tokens
        books.kv_tokens -= self.kv_tokens
        assert books.requests >= 0, "a generation was struck from books that it was not in"
        assert books.requests or not (books.prefill_tokens or books.kv_tokens), "tokens without a request"


def expected_output(max_tokens: int | None) -> int:
    """Output tokens that a request is taken to come to; at least one."""
    return EXPECTED_OUTPUT if max_tokens is None else max(min(max_tokens, EXPECTED_OUTPUT), 1)


def kv_tokens(request: GenerateRequest) -> int:
    """KV that a request is taken to need in the end, in tokens; choices after the first share the prompt's."""
    prompt = len(request.prompt_token_ids) if request.choice == 0 else HASH_BLOCK_SIZE
    return prompt + expected_output(request.params.max_tokens)
