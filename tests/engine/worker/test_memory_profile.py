"""What the profile of a GPU's memory counts, on a ledger that stands in for a device: none is at hand in most runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdkv.engine.worker import memory_profile
from pdkv.engine.worker.attention import select
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.engine.worker.kv_cache import make_layout
from pdkv.engine.worker.memory_profile import profiled_bytes
from pdkv.engine.worker.step_buffers import Padding
from pdkv.errors import ConfigError
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Attend, Decoder
from pdkv.models.loader import load_decoder

torch.set_num_threads(1)

TOTAL, OTHERS, WEIGHTS, PER_TOKEN, UNUSED = 100_000, 7_000, 20_000, 300, 2_500


class Ledger:
    """A device of TOTAL bytes: OTHERS are other processes', WEIGHTS this one's, UNUSED lie in torch's cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Decoder) -> None:
        self.peak = 90_000  # of loading, before the profile
        self.tokens: list[int] = []
        self.most_logits = 0
        forward, logits = model.forward, model.logits

        def counted_forward(
            token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor | None
        ) -> torch.Tensor:
            self.tokens.append(len(token_ids))
            self.peak = max(self.peak, WEIGHTS + len(token_ids) * PER_TOKEN)
            return forward(token_ids, positions, attend, rows)

        def counted_logits(hidden: torch.Tensor) -> torch.Tensor:
            self.most_logits = max(self.most_logits, len(hidden))
            return logits(hidden)

        monkeypatch.setattr(model, "forward", counted_forward)
        monkeypatch.setattr(model, "logits", counted_logits)
        for name, answer in {
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", WEIGHTS),
            "max_memory_allocated": lambda device: self.peak,
            "memory_allocated": lambda device: WEIGHTS,
            "memory_reserved": lambda device: self.peak + UNUSED,
            "mem_get_info": lambda device: (TOTAL - OTHERS - self.peak - UNUSED, TOTAL),
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)


@pytest.fixture
def model(tiny_model_dir: Path) -> Decoder:
    config = load_model_config(tiny_model_dir)
    return load_decoder(tiny_model_dir, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=256)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "on_device", lambda _: True)


def profile(
    model: Decoder,
    utilization: float,
    num_tokens: int,
    max_num_seqs: int = 8,
    captures: bool = False,
    guess: Callable[[], None] | None = None,
) -> int:
    return profiled_bytes(
        model,
        make_layout(model.config, block_size=16, dtype="float32"),
        utilization=utilization,
        max_num_tokens=num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=40,
        decode_sizes=(1, max_num_seqs),
        prompt_sizes=[Padding(16, 1, 1, 2)],
        captures=captures,
        timeout_s=30.0,
        guess=guess,
    )


@pytest.mark.parametrize("num_tokens", [70, 100])
def test_the_pool_gets_what_the_largest_step_leaves(
    num_tokens: int, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the share that the engine may use: less weights and the temporaries at their peak."""
    ledger = Ledger(monkeypatch, model)
    assert profile(model, 0.9, num_tokens) == 90_000 - WEIGHTS - num_tokens * PER_TOKEN
    assert max(ledger.tokens) == num_tokens
    assert ledger.most_logits == 8


@pytest.mark.parametrize(("pads_prompts", "largest", "num_graphs"), [(True, 16, 3), (False, 8, 2)])
def test_graphs_get_what_their_largest_step_takes_and_the_driver_for_each(
    pads_prompts: bool, largest: int, num_graphs: int, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(monkeypatch, model)
    monkeypatch.setattr(memory_profile, "_GRAPH_BYTES", 1000)
    monkeypatch.setattr(CudaAttention, "pads_prompts", pads_prompts)
    without = profile(model, 0.9, 70)
    assert without - profile(model, 0.9, 70, captures=True) == 2 * largest * PER_TOKEN + num_graphs * 1000


def test_what_a_proposer_computes_beside_a_step_counts(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(monkeypatch, model)

    def guess() -> None:
        ledger.peak = WEIGHTS + 4_000

    assert profile(model, 0.9, 70) - profile(model, 0.9, 70, guess=guess) == 4_000


def test_where_nothing_is_left_it_says_so(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(monkeypatch, model)
    with pytest.raises(ConfigError, match=r"0\.45 leaves no memory"):
        profile(model, 0.45, 100)


def test_what_others_have_taken_is_not_promised(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(monkeypatch, model)
    with pytest.raises(ConfigError, match=r"0\.95 asks for .* and other processes leave"):
        profile(model, 0.95, 1)
