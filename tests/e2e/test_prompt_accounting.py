"""Each choice's prompt is counted once on either side, by source, whatever its length; `usage` counts it once (F5)."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployments import Running, launches
from serving_checks import Books, complete_all, read_books, settled_books

BLOCK = 16
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 600]


@pytest.fixture(scope="module")
def pair(served_model: Path) -> Iterator[Running]:
    with launches(served_model) as launch:
        yield launch("--prefill", "1", "--decode", "1")


def run(deployment: Running, num_counted: int, **body: Any) -> tuple[dict[str, Any], Books]:
    """One request, and what it added to the books once both sides have counted `num_counted` prompt tokens."""
    before = read_books(deployment)
    [reply] = complete_all(deployment, [{"max_tokens": 4, "ignore_eos": True, **body}])

    def counted(books: Books) -> bool:
        return min((books - before).total(role) for role in ("prefill", "decode")) >= num_counted

    books = settled_books(deployment, counted) - before
    assert books.total("prefill") == books.total("decode") == num_counted, books
    assert books.sources("decode")["computed"] == 0, books
    assert books.sources("prefill")["recomputed"] == books.sources("decode")["recomputed"] == 0, books
    return reply, books


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_computed_once_and_travels_once(pair: Running, length: int) -> None:
    prompt = random.Random(length).choices(range(2, 258), k=length)
    full_blocks = (length - 1) // BLOCK * BLOCK  # a hit leaves one token to compute
    reply, first = run(pair, length, prompt=prompt)
    assert first.sources("prefill")["computed"] == length
    assert first.sources("decode")["remote"] == length
    assert reply["usage"]["prompt_tokens"] == length
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reply, again = run(pair, length, prompt=prompt)
    assert again.sources("prefill")["local_hit"] == full_blocks
    assert again.sources("prefill")["computed"] == length - full_blocks
    assert again.sources("decode")["local_hit"] == length // BLOCK * BLOCK  # the token behind it came along
    assert again.sources("decode")["remote"] == length % BLOCK
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == full_blocks


def test_every_choice_counts_on_the_engines_and_the_prompt_once_in_usage(pair: Running) -> None:
    prompt = random.Random("choices").choices(range(2, 258), k=50)
    reply, books = run(pair, 3 * 50, prompt=prompt, n=3, seed=1)
    assert len(reply["choices"]) == 3
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (50, 12, 62)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # by the first choice
    assert books.sources("prefill")["local_hit"] == 2 * 48


def test_usage_sums_over_the_prompts_of_one_request(pair: Running) -> None:
    prompts = [random.Random(i).choices(range(2, 258), k=length) for i, length in enumerate((7, 40))]
    reply, _ = run(pair, 47, prompt=prompts)
    assert reply["usage"]["prompt_tokens"] == 47
    assert reply["usage"]["completion_tokens"] == 8


def test_a_request_that_ends_with_its_first_token_is_never_handed_off(pair: Running) -> None:
    before = read_books(pair)
    [reply] = complete_all(pair, [{"prompt": [5] * 20, "max_tokens": 1}])
    books = settled_books(pair, lambda now: (now - before).total("prefill") >= 20) - before
    assert books.total("prefill") == 20
    assert books.total("decode") == 0
    assert reply["usage"]["prompt_tokens"] == 20
