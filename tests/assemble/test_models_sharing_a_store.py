"""Models of the same configuration and other weights over one KV store: each answers as itself, and hits its own KV."""

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from oracle import Expected, oracle
from other_weights import CHANGES, Change, copy_with

from pdkv.testing.engine import InProcessEngine, of_type, output_of, submit
from pdkv.wire.messages import Finished

NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN = 4, 80, 8


@contextmanager
def engine(model: Path, store: Path, epoch: str) -> Iterator[InProcessEngine]:
    """An aggregated engine over a store of files."""
    options = {"url": f"file://{store}", "lookup_timeout_s": "60"}
    with closing(InProcessEngine.of_model(model, "store", options, epoch=epoch, kv_cache_memory=8 << 20)) as running:
        yield running


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path]) -> Path:
    """Large enough that a few pages of its file are a small part of it."""
    return hf_model(
        "llama", hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, initializer_range=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_models_kv_is_never_taken(model: Path, tmp_path: Path, change: Change) -> None:
    """F27. Attack 1: 12 of 12 prompts were wrong."""
    other = copy_with(model, tmp_path / "other", change)
    draw = random.Random(0)
    store = tmp_path / "kv"

    def make_prompt() -> list[int]:
        return [draw.randrange(2, 384) for _ in range(PROMPT_LEN)]

    workload = [oracle(model).expect(make_prompt, OUTPUT_LEN) for _ in range(NUM_PROMPTS)]
    others = [(e.prompt, oracle(other).generate(e.prompt, OUTPUT_LEN)) for e in workload]
    expected_of_other = [Expected(prompt, output) for prompt, output in others if output is not None]
    assert expected_of_other
    assert all(a.output != b for a, (_, b) in zip(workload, others, strict=True)), "the weights make no difference"
    hits = []
    for turn, (path, expected) in enumerate([(model, workload), (other, expected_of_other), (model, workload)]):
        with engine(path, store, f"epoch-{turn}") as running:
            answers = [
                running.ask(submit(e.prompt, request_id=f"{i}", max_tokens=OUTPUT_LEN)) for i, e in enumerate(expected)
            ]
        assert [output_of(answer, str(i)) for i, answer in enumerate(answers)] == [e.output for e in expected]
        hits.append([of_type(answer, Finished)[0].sources.store for answer in answers])
    assert hits[0] == [0] * NUM_PROMPTS
    assert hits[1] == [0] * len(expected_of_other)
    assert all(hit > 0 for hit in hits[2]), "the first engine's KV is found by its own model"
