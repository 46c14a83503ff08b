"""What the profile of a GPU's memory counts, on a ledger that stands in for a device: none is at hand in most runs."""

from pathlib import Path

import pytest
import torch

from pdkv.engine.memory_profile import profiled_bytes
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
        self.num_logits = 0
        forward, logits = model.forward, model.logits

        def counted_forward(
            token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor | None
        ) -> torch.Tensor:
            self.tokens.append(len(token_ids))
            self.peak = max(self.peak, WEIGHTS + len(token_ids) * PER_TOKEN)
            return forward(token_ids, positions, attend, rows)

        def counted_logits(hidden: torch.Tensor) -> torch.Tensor:
            self.num_logits += len(hidden)
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


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_the_pool_gets_what_the_largest_step_leaves(
    num_tokens: int, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the share that the engine may use: less weights and the temporaries at their peak."""
    ledger = Ledger(monkeypatch, model)
    assert profiled_bytes(model, 0.9, num_tokens, 8) == 90_000 - WEIGHTS - num_tokens * PER_TOKEN
    assert ledger.tokens == [num_tokens]
    assert ledger.num_logits == min(8, num_tokens)


def test_where_nothing_is_left_it_says_so(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(monkeypatch, model)
    with pytest.raises(ConfigError, match=r"0\.5 leaves no memory"):
        profiled_bytes(model, 0.5, 100, 8)


def test_what_others_have_taken_is_not_promised(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    Ledger(monkeypatch, model)
    with pytest.raises(ConfigError, match=r"0\.95 asks for .* and other processes leave"):
        profiled_bytes(model, 0.95, 1, 8)
