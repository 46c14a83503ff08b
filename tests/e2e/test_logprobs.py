"""Over a prefill and a decode engine logprobs of prompt and output agree with transformers within 1e-3 (F3), and each
prompt is counted once on either side, by source, whatever its length; `usage` counts it once (F5).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deployments import Running
from equality import NUM_OUTPUT, PREEMPTING, TOPOLOGIES, Workload, deployed, until_preempted
from oracle import Expected, Oracle, oracle
from prompt_set import forty_prompts
from serving_checks import Books, complete_all, read_books, serve_directory, settled_books

TOLERANCE = 1e-3
NUM_TOP = 4
BLOCK = 16
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 600]
VOCAB_SIZE = 258  # exactly the tokenizer's, so that each token has a text of its own


@pytest.fixture(scope="module")
def model_dir(hf_model: Callable[..., Path]) -> Path:
    return hf_model("llama", initializer_range=0.2, vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Oracle:
    return oracle(model_dir)


@pytest.fixture(scope="module")
def workload(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = serve_directory(model_dir, tmp_path_factory.mktemp("logprobs"))
    return Workload(path, forty_prompts(model_dir, NUM_OUTPUT))


@pytest.fixture(scope="module")
def pair(workload: Workload) -> Iterator[Running]:
    with deployed(workload, *TOPOLOGIES["1P1D"]) as deployment:
        yield deployment


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(2, VOCAB_SIZE), k=length)


def check_near(values: Any, expected: torch.Tensor) -> None:
    told = torch.tensor(values, dtype=torch.float64).reshape(expected.shape)
    torch.testing.assert_close(told, expected.double(), rtol=0, atol=TOLERANCE)


def check_legacy(shown: dict[str, Any], token_ids: Sequence[int], logprobs: torch.Tensor, num_top: int) -> None:
    """The `logprobs` of a completion: `token_ids` drawn at the rows of `logprobs`."""
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["text_offset"]) == len(token_ids)
    rows, drawn = logprobs[: len(token_ids)], torch.tensor(token_ids)[:, None]
    best = rows.topk(num_top)
    check_near(shown["token_logprobs"], rows.gather(1, drawn)[:, 0])
    values = [sorted(top.values(), reverse=True) for top in shown["top_logprobs"]]
    check_near([row[:num_top] for row in values], best.values)
    is_beside = (best.indices != drawn).all(1)
    assert [len(row) - num_top for row in values] == is_beside.tolist()
    check_near([row[-1] for row in values if len(row) > num_top], rows.gather(1, drawn)[is_beside, 0])


def check_prompt_logprobs(
    shown: Sequence[dict[str, Any] | None], prompt: Sequence[int], logprobs: torch.Tensor
) -> None:
    """vLLM's `prompt_logprobs`: entry i is of prompt[i], at row i - 1 of `logprobs`."""
    assert len(shown) == len(prompt)
    assert shown[0] is None
    told, ranked = list[tuple[int, int, float]](), list[list[float]]()
    for row, (token_id, entry) in enumerate(zip(prompt[1:], shown[1:], strict=True)):
        assert entry is not None
        assert str(token_id) in entry
        assert len(entry) in (NUM_TOP, NUM_TOP + 1)
        told += [(row, int(token), value["logprob"]) for token, value in entry.items()]
        by_rank = {value["rank"]: value["logprob"] for value in entry.values()}
        ranked.append([by_rank[rank] for rank in range(1, NUM_TOP + 1)])
    at, token_ids, values = ([entry[i] for entry in told] for i in range(3))
    check_near(values, logprobs[at, token_ids])
    check_near(ranked, logprobs[: len(ranked)].topk(NUM_TOP).values)


def check_reply(reply: dict[str, Any], expected: Expected, model: Oracle) -> None:
    """Tokens, logprobs and prompt logprobs of one greedy reply."""
    [choice] = reply["choices"]
    prompt, output = expected
    assert choice["token_ids"] == output
    logprobs = model.logprobs(prompt + output)
    check_legacy(choice["logprobs"], output, logprobs[len(prompt) - 1 :], NUM_TOP)
    check_prompt_logprobs(choice["prompt_logprobs"], prompt, logprobs)


def with_logprobs(workload: Workload) -> Workload:
    return replace(workload, fields=[{"temperature": 0, "logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP}])


def test_logprobs_of_prompts_and_outputs(pair: Running, workload: Workload, model: Oracle) -> None:
    again = replace(workload, expected=workload.expected[-8:])  # cached; computed again, as its logprobs are asked for
    for asked in (workload, again):
        replies = complete_all(pair, with_logprobs(asked).bodies)
        for reply, expected in zip(replies, asked.expected, strict=True):
            check_reply(reply, expected, model)


def test_logprobs_under_preemption_and_in_chunks(workload: Workload, model: Oracle) -> None:
    with deployed(workload, *TOPOLOGIES["1P1D"], *PREEMPTING) as deployment:

        def take_pass() -> Books:
            before = read_books(deployment)
            replies = complete_all(deployment, with_logprobs(workload).bodies)
            for reply, expected in zip(replies, workload.expected, strict=True):
                check_reply(reply, expected, model)
            num_tokens = workload.num_prompt_tokens
            books = settled_books(deployment, lambda now: all((now - before).total(r) >= num_tokens for r in now.roles))
            assert books.sources("decode")["computed"] == 0
            return books - before

        until_preempted(take_pass, "prefill", "decode")


def test_logprobs_are_the_models_own_whatever_is_drawn(pair: Running, model: Oracle) -> None:
    prompt = random_prompt(1, 37)
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 2, "seed": 3}
    [reply] = complete_all(
        pair, [{**body, "temperature": 0.6, "top_k": 9, "repetition_penalty": 1.3, "logit_bias": {"40": 4.0}}]
    )
    [choice] = reply["choices"]
    logprobs = model.logprobs(prompt + choice["token_ids"])
    check_legacy(choice["logprobs"], choice["token_ids"], logprobs[len(prompt) - 1 :], 2)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_shows_the_prompts_logprobs_first(pair: Running, model: Oracle, max_tokens: int) -> None:
    prompt = random_prompt(2, 33)
    before = read_books(pair)
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "logprobs": 3}
    [reply] = complete_all(pair, [{**body, "echo": True}])
    settled_books(pair, lambda now: (now - before).total("prefill") >= len(prompt))
    shown = reply["choices"][0]["logprobs"]
    assert shown["token_logprobs"][0] is None
    assert shown["top_logprobs"][0] is None
    behind = {name: values[1:] for name, values in shown.items()}
    tokens = prompt + reply["choices"][0]["token_ids"]
    assert len(tokens) == len(prompt) + max_tokens
    check_legacy(behind, tokens[1:], model.logprobs(tokens), 3)


def run_one(deployment: Running, num_counted: int, **body: Any) -> tuple[dict[str, Any], Books]:
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
    reply, first = run_one(pair, length, prompt=prompt)
    assert first.sources("prefill")["computed"] == length
    assert first.sources("decode")["remote"] == length
    assert reply["usage"]["prompt_tokens"] == length
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reply, again = run_one(pair, length, prompt=prompt)
    assert again.sources("prefill")["local_hit"] == full_blocks
    assert again.sources("prefill")["computed"] == length - full_blocks
    assert again.sources("decode")["local_hit"] == length // BLOCK * BLOCK  # the token behind it came along
    assert again.sources("decode")["remote"] == length % BLOCK
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == full_blocks


def test_every_choice_counts_on_the_engines_and_the_prompt_once_in_usage(pair: Running) -> None:
    prompt = random.Random("choices").choices(range(2, 258), k=50)
    reply, books = run_one(pair, 3 * 50, prompt=prompt, n=3, seed=1)
    assert len(reply["choices"]) == 3
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (50, 12, 62)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0  # by the first choice
    assert books.sources("prefill")["local_hit"] == 2 * 48


def test_a_request_that_ends_with_its_first_token_is_never_handed_off(pair: Running) -> None:
    before = read_books(pair)
    [reply] = complete_all(pair, [{"prompt": [5] * 20, "max_tokens": 1}])
    books = settled_books(pair, lambda now: (now - before).total("prefill") >= 20) - before
    assert books.total("prefill") == 20
    assert books.total("decode") == 0
    assert reply["usage"]["prompt_tokens"] == 20
