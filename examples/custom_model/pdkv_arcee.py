"""Arcee (AFM-4.5B) for pdkv: Llama with an MLP of its own, down(relu(up(x)) ** 2).

docs/writing-a-model.md goes through this file. The family says what its config.json may hold, and is read by routers,
too, which have no torch: what computes is named, and imported where weights are loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdkv.models.family import Family

if TYPE_CHECKING:
    import torch

    from pdkv.models.linear import Linear
    from pdkv.models.loader import Loader
    from pdkv.models.passes import RowPass


class Arcee(Family):
    """ArceeForCausalLM."""

    model_type = "arcee"
    activation = "relu2"  # any other `hidden_act` is refused
    attention_bias = attention_output_bias = mlp_bias = None  # the fields of these names say it
    mlp = "pdkv_arcee:load_mlp"


class SquaredReluMlp:
    """An Mlp of pdkv.models.decoder: x (n, hidden) -> (n, hidden), row by row."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self._up = up
        self._down = down

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._down(self._squared(x, before))

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        """What the layer calls: `before` is its norm, and `residual` may be overwritten."""
        return self._down.add(self._squared(x, before), residual)

    def _squared(self, x: torch.Tensor, before: RowPass | None) -> torch.Tensor:
        return self._up(x, before).relu_().square_()


def load_mlp(load: Loader, layer: int, prefix: str) -> SquaredReluMlp:
    """One layer's MLP, with this rank's part of the neurons; `prefix` begins its tensors' names."""
    size, bias = load.config.intermediate_size, load.config.mlp_bias
    mine = load.parallel.shard.part(size, "MLP neurons")
    up = load.fused("", [(prefix + "up_proj", size, mine)], bias=bias, is_fused=False)
    return SquaredReluMlp(up, load.by_columns(prefix + "down_proj", size, mine, bias=bias))
