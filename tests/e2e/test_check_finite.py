"""--check-finite over HTTP: a prompt with the token whose embedding is NaN fails, and its neighbours do not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from deployments import Running, launches, write_tokenizer
from oracle import oracle
from poisoned_model import POISON, poison
from serving_checks import settled_books


@pytest.fixture
def deployment(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Running]:
    model = poison(tiny_model_dir, tmp_path / "served", float("nan"))
    write_tokenizer(model)
    with launches(model) as launch:
        yield launch("--prefill", "1", "--decode", "1")


def test_only_the_prompt_that_overflows_fails(deployment: Running, tiny_model_dir: Path) -> None:
    clean = list(range(5, 45))
    expected = oracle(tiny_model_dir).generate(clean, 8)
    assert expected is not None
    prompts = [clean, [*clean[:20], POISON, 7]] * 3
    fields = {"max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    def complete(prompt: list[int]) -> httpx.Response:
        return deployment.complete(prompt, **fields)

    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(complete, prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        if prompt == clean:
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["token_ids"] == expected
        else:
            assert reply.status_code == 500, reply.text
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "non_finite_logits")
            assert "--check-finite" in error["message"]
    books = settled_books(deployment, lambda books: books.of("non_finite_requests", "prefill") >= 3)
    assert sum(books.of("non_finite_requests", role) for role in books.roles) == 3
    assert complete(clean[:30]).status_code == 200
