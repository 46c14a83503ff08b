"""Models of the same configuration and other weights over one KV store: each answers as itself, and hits its own KV."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import at_rest, submit
from oracle import Expected, oracle
from other_weights import CHANGES, Change, copy_with

from pdkv.build_engine import build_engine
from pdkv.config import EngineConfig, HandoffConfig
from pdkv.engine.core import EngineCore
from pdkv.wire.messages import Finished, SourceCounts, Tokens

BOUND_S = 60.0
NUM_PROMPTS, PROMPT_LEN, OUTPUT_LEN = 4, 80, 8


class Answer(NamedTuple):
    """One request's output, and where its prompt came from."""

    token_ids: list[int]
    sources: SourceCounts


class Engine:
    """An aggregated engine in this process, over a store of files."""

    def __init__(self, model: Path, store: Path, epoch: str) -> None:
        self._woken = threading.Event()
        config = EngineConfig(model=model, device="cpu", kv_cache_memory=8 << 20, threads=1, max_num_seqs=8)
        options = {"url": f"file://{store}", "lookup_timeout_s": str(BOUND_S)}
        handoff = HandoffConfig(connector="store", connector_config=options)
        self.core: EngineCore = build_engine(config, handoff, name="e", epoch=epoch, notify=self._woken.set)
        self.core.router_joined("r", "1")

    def ask(self, prompt: list[int], request_id: str) -> Answer:
        """Greedy; returns when it is answered and everything is saved."""
        self.core.handle("r", submit(prompt, request_id=request_id, max_tokens=OUTPUT_LEN), time.monotonic())
        token_ids: list[int] = []
        finished: Finished | None = None
        bound = time.monotonic() + BOUND_S
        while finished is None or not at_rest(self.core):
            for message in self._step(bound):
                if isinstance(message, Tokens):
                    token_ids += message.token_ids
                elif isinstance(message, Finished):
                    finished = message
        return Answer(token_ids, finished.sources)

    def _step(self, bound: float) -> list[object]:
        now = time.monotonic()
        assert now < bound, "no answer, or it is not saved"
        due = self.core.next_deadline()
        due = math.inf if due is None else due
        if self._woken.is_set():
            self._woken.clear()
            self.core.wake()  # which may be all that was waited for
        elif self.core.has_work or due <= now:
            self.core.step(now)
        else:
            self._woken.wait(min(due, bound) - now)
        return [message for _, messages in self.core.take_messages(time.monotonic()) for message in messages]


@contextmanager
def engine(model: Path, store: Path, epoch: str) -> Iterator[Engine]:
    running = Engine(model, store, epoch)
    try:
        yield running
    finally:
        running.core.shutdown()


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
            answers = [running.ask(e.prompt, f"{turn}-{i}") for i, e in enumerate(expected)]
        assert [answer.token_ids for answer in answers] == [e.output for e in expected]
        hits.append([answer.sources.store for answer in answers])
    assert hits[0] == [0] * NUM_PROMPTS
    assert hits[1] == [0] * len(expected_of_other)
    assert all(hit > 0 for hit in hits[2]), "the first engine's KV is found by its own model"
