"""Forty prompts over HTTP against any topology: the expected tokens, and books that add up."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deployments import Running, launches
from oracle import Expected
from prompt_set import NUM_PROMPTS, forty_prompts
from serving_checks import Books, complete_all, read_books, serve_directory, settled_books

NUM_OUTPUT = 56

CHUNKED = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64", "--long-prefill-token-threshold", "48")
SMALL_POOL_BLOCKS = 44  # the longest prompt and its output take 41
AMPLE_POOL_BLOCKS = 800
MAX_PASSES = 8
SMALL_POOL_TOKENS = str(SMALL_POOL_BLOCKS * 16)

SMALL_PREFILL_POOL = ("--prefill-kv-cache-memory", "{small}", "--prefill-max-model-len", SMALL_POOL_TOKENS)
SMALL_DECODE_POOL = ("--decode-kv-cache-memory", "{small}", "--decode-max-model-len", SMALL_POOL_TOKENS)
"""Room for the longest prompt and its output and little more; all forty need ten times as much."""

PREEMPTING = (
    *SMALL_PREFILL_POOL, *SMALL_DECODE_POOL, "--long-prefill-token-threshold", "48", "--max-leased-fraction", "4"
)  # fmt: skip
"""Chunks of prompts that meet, and no cap on prompts in the making: each finds room when it begins, and not all do when
they go on.
"""

TOPOLOGIES = {
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "2P4D": ("--prefill", "2", "--decode", "4"),
    "2P1D": ("--prefill", "2", "--decode", "1"),  # what both prefills have done meets in one pool
}
AGGREGATED = ("--prefill", "0", "--decode", "2")


@dataclass(frozen=True)
class Workload:
    """A served model, requests to it, and what must come back."""

    path: Path
    expected: Sequence[Expected]
    fields: Sequence[dict[str, Any]] = ({"temperature": 0},)  # of request i: fields[i % len(fields)]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The requests."""
        return [
            {"prompt": e.prompt, "max_tokens": len(e.output), "ignore_eos": True, **self.fields[i % len(self.fields)]}
            for i, e in enumerate(self.expected)
        ]

    @property
    def block_bytes(self) -> int:
        """Of a KV block of 16 tokens in float32."""
        config = json.loads((self.path / "config.json").read_text())
        if "kv_lora_rank" in config:
            row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            row = 2 * config["num_key_value_heads"] * size
        return int(16 * config["num_hidden_layers"] * row * 4)

    @property
    def num_prompt_tokens(self) -> int:
        """Over all requests."""
        return sum(len(e.prompt) for e in self.expected)


def greedy_workload(model_dir: Path, directory: Path, num: int = NUM_PROMPTS) -> Workload:
    """The forty prompts for a model, or `num` of them; it is made ready to be served in `directory`."""
    return Workload(serve_directory(model_dir, directory), forty_prompts(model_dir, NUM_OUTPUT)[:num])


@contextmanager
def deployed(workload: Workload, *flags: str) -> Iterator[Running]:
    """A `pd launch` of the workload's model; "{small}" in a flag becomes the size of a small KV pool."""
    small, ample = (n * workload.block_bytes for n in (SMALL_POOL_BLOCKS, AMPLE_POOL_BLOCKS))
    with launches(workload.path) as launch:
        yield launch("--kv-cache-memory", str(ample), *(flag.format(small=small) for flag in flags))


def run_all(deployment: Running, workload: Workload) -> Books:
    """All requests at once: the right tokens, each prompt counted once on either side. Returns what it cost.

    Where the router moved requests off an engine that was starved, their prompts may have been computed twice.
    """
    before, told = read_books(deployment), len(deployment.log)
    replies = complete_all(deployment, workload.bodies)
    check_replies(replies, workload.expected)
    num_tokens = workload.num_prompt_tokens
    books = (
        settled_books(deployment, lambda now: all((now - before).total(r) >= num_tokens for r in now.roles)) - before
    )
    again = books.num_moved * max(len(e.prompt) + len(e.output) for e in workload.expected)
    surpluses = {role: books.total(role) - num_tokens for role in books.roles}
    assert all(0 <= surplus <= again for surplus in surpluses.values()), (surpluses, books, deployment.log)
    failed = re.search(r"KV load from \S+ to (?!prefill)", deployment.log[told:])  # of a hand-off; a loan may be late
    assert failed is None, deployment.log
    computed = sum(books.sources(role)[s] for role in ("prefill", "any") for s in ("computed", "recomputed"))
    num_cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
    if not books.num_moved:  # a moved request's may be its whole prompt
        whole = [i for i, e in enumerate(workload.expected) if num_cached[i] >= len(e.prompt)]
        assert not whole, (whole, num_cached, books, deployment.log[told:])
    cached = sum(num_cached)
    assert 0 <= cached - (num_tokens - computed) <= again, books
    return books


def check_replies(replies: Sequence[dict[str, Any]], expected: Sequence[Expected]) -> None:
    """Tokens and usage of single-choice replies."""
    wrong = [
        (i, len(e.prompt), reply["choices"][0]["token_ids"], e.output)
        for i, (e, reply) in enumerate(zip(expected, replies, strict=True))
        if reply["choices"][0]["token_ids"] != e.output
    ]
    assert not wrong, f"{len(wrong)} of {len(replies)} (number, prompt length, got, expected): {wrong}"
    for e, reply in zip(expected, replies, strict=True):
        usage = reply["usage"]
        num_prompt, num_output = len(e.prompt), len(e.output)
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_output)
        assert usage["total_tokens"] == num_prompt + num_output
        assert usage["prompt_tokens_details"]["cached_tokens"] <= num_prompt


def check_decode_computed_nothing(books: Books) -> None:
    """What must hold of every run over a prefill and a decode side."""
    assert books.sources("decode")["computed"] == 0, books
    assert books.sources("decode")["remote"] > 0, books


def check_undisturbed(books: Books) -> None:
    """Nothing was preempted, nothing computed again, and no load failed (a cache may lose what it promised)."""
    for role in ("prefill", "decode", "any"):
        assert books.of("preemptions", role) == 0, books
        assert books.sources(role)["recomputed"] == 0, books
        assert books.of("kv_load_failures", role) <= (books.num_late_loans if role != "decode" else 0), books


def run_twice(deployment: Running, workload: Workload) -> list[Books]:
    """Two undisturbed passes, in which decode computes nothing: corruption would hit the second one's reads."""
    passes = [run_all(deployment, workload) for _ in range(2)]
    for books in passes:
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    return passes


def run_until_preempted(deployment: Running, workload: Workload, *roles: str) -> int:
    """Passes, two or more, until engines of these roles, of both by default, were short of blocks; decode may be short
    of nothing else. Returns their number.
    """

    def take_pass() -> Books:
        books = run_all(deployment, workload)
        check_decode_computed_nothing(books)
        return books

    return until_preempted(take_pass, *(roles or ("prefill", "decode")), least=2)


def until_preempted(take_pass: Callable[[], Books], *roles: str, least: int = 1) -> int:
    """Passes, so many or more, until engines of all these roles were short of blocks. Returns their number.

    How many requests meet on an engine is a matter of the machine's speed, so no single pass has to preempt.
    """
    passes: list[Books] = []
    for _ in range(MAX_PASSES):
        passes.append(take_pass())
        if len(passes) >= least and all(sum(books.of("preemptions", role) for books in passes) for role in roles):
            return len(passes)
    pytest.fail(f"one side was never short of blocks: {passes}")
