"""An MLP of experts: each token goes through the few that a router chooses for it, and through the shared ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from pdkv.errors import ModelError
from pdkv.kernels.linear import PackedExperts
from pdkv.models.decoder import GatedMlp, Mlp
from pdkv.models.expert_config import Experts
from pdkv.models.linear import CompiledLinear, Linear, PlainLinear, linear_kind, make_linear
from pdkv.models.loader import Loader
from pdkv.models.parallel_layers import RowParallelLinear
from pdkv.models.passes import RowPass


class Router:
    """Chooses each token's experts."""

    def __init__(self, scores: Linear, bias: torch.Tensor | None, config: Experts) -> None:
        """`scores`: (n, hidden) -> (n, experts), in float32; `bias` (experts,), float32."""
        self._scores = scores
        self._bias = bias
        self._config = config

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For rows x (n, hidden): (n, chosen) int64 experts, (n, chosen) float32 weights."""
        config, logits = self._config, self._scores(x.float())
        if config.scoring == "softmax" and config.normalised and self._bias is None and config.groups == 1:
            best, experts = logits.topk(config.chosen, dim=-1)
            weights = best.softmax(-1)  # of all, divided by the sum of the chosen
        else:
            scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
            wanted = scores if self._bias is None else scores + self._bias
            if config.groups > 1:
                wanted = self._of_best_groups(wanted)
            experts = wanted.topk(config.chosen, dim=-1).indices
            weights = scores.gather(1, experts)
            if config.normalised:
                weights /= weights.sum(-1, keepdim=True).add_(1e-20)
        return experts, weights if config.scale == 1.0 else weights.mul_(config.scale)

    def _of_best_groups(self, wanted: torch.Tensor) -> torch.Tensor:
        config = self._config
        groups = wanted.view(len(wanted), config.groups, -1)
        best = groups.topk(config.group_best, dim=-1).values.sum(-1).topk(config.chosen_groups, dim=-1).indices
        dropped = torch.ones(groups.shape[:2], dtype=torch.bool, device=wanted.device).scatter_(1, best, False)
        return groups.masked_fill(dropped.unsqueeze(-1), -torch.inf).view_as(wanted)


class Routed(Protocol):
    """The experts that a router chooses among."""

    def add(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + the weighted sum of each row's experts, (n, hidden).

        Args:
            x: (n, hidden).
            experts, weights: as of `Router`.
            residual: (n, hidden), which may be overwritten; None: nothing is added to.
        """


class TorchExperts:
    """Any MLPs, one after the other, by the rows that chose them."""

    def __init__(self, mlps: Sequence[GatedMlp]) -> None:
        self._mlps = mlps

    def add(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for i, mlp in enumerate(self._mlps):
            rows, which = (experts == i).nonzero(as_tuple=True)
            if len(rows):
                out.index_add_(0, rows, mlp(x[rows]).float() * weights[rows, which, None])
        return out.to(x.dtype) if residual is None else residual.add_(out)


class CompiledExperts:
    """The products of all experts by compiled kernels, in one call."""

    def __init__(self, gate_up: Sequence[CompiledLinear], down: Sequence[CompiledLinear]) -> None:
        self._packed = PackedExperts(*([layer.weight for layer in layers] for layers in (gate_up, down)))

    def add(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self._packed.add(x, experts, weights, residual, torch.get_num_threads())


class TritonExperts:
    """The products of all experts by Triton's kernels, without a look at what was chosen."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """`gate_up` (experts, 2 * size, hidden), `down` (experts, hidden, size)."""
        self._gate_up = gate_up
        self._down = down

    def add(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        from pdkv.kernels.experts_triton import Order, add_weighted_triton, grouped_linear_triton
        from pdkv.kernels.passes_triton import gated_triton  # Triton, which a CPU need not have

        order = Order.of(experts, len(self._gate_up))
        gates = gated_triton(grouped_linear_triton(x, self._gate_up, order, gathers=True))
        products = grouped_linear_triton(gates, self._down, order, gathers=False)
        return add_weighted_triton(products, order.places, weights, residual)


class ExpertMlp:
    """Routed and shared experts."""

    def __init__(self, router: Router, routed: Routed, shared: GatedMlp | None) -> None:
        self._router = router
        self._routed = routed
        self._shared = shared

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        x = x if before is None else before(x)
        return self._routed.add(x, *self._router(x), None if self._shared is None else self._shared(x))

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        x = x.clone() if before is None else before(x)  # `residual` may be x, and is overwritten before x is read last
        experts, weights = self._router(x)
        if self._shared is not None:
            residual = self._shared.add(x, residual)
        return self._routed.add(x, experts, weights, residual)


def load_experts(load: Loader, layer: int, prefix: str) -> Mlp:
    """The MLP of a layer, of experts where the configuration says so; each rank has a part of every expert's neurons.

    Raises:
        ModelError: as `load_decoder`, and for a router with NaN or infinity.
    """
    config, shard = load.config.experts, load.parallel.shard
    if config is None or layer not in config.layers:
        return load.gated_mlp(layer, prefix)
    if load.device.type == "cuda":  # whose grouped products read dense weights
        load = replace(load, kept=None)
    parts = [load.gate_up_down(f"{prefix}experts.{i}.", config.size) for i in range(config.num)]
    shared = None
    if config.shared_size:
        shared = GatedMlp(*load.gate_up_down(f"{prefix}shared_experts.", config.shared_size))
    made = ExpertMlp(_load_router(load, prefix + "gate", config), _routed(parts), shared)
    return made if shard.size == 1 else RowParallelLinear(made, load.parallel)


def _routed(parts: Sequence[tuple[Linear, Linear]]) -> Routed:
    gate_up, down = zip(*parts, strict=True)
    if all(isinstance(layer, CompiledLinear) for pair in parts for layer in pair):
        return CompiledExperts(gate_up, down)
    weights = [[layer.weight for layer in each if isinstance(layer, PlainLinear)] for each in (gate_up, down)]
    if len(weights[0]) == len(weights[1]) == len(parts) and weights[0][0].is_cuda:
        return TritonExperts(torch.stack(weights[0]), torch.stack(weights[1]))
    return TorchExperts([GatedMlp(*part) for part in parts])


def _load_router(load: Loader, name: str, config: Experts) -> Router:
    weight = load.tensor(name + ".weight", (config.num, load.config.hidden_size)).float()
    bias_name = name + ".e_score_correction_bias"
    bias = (
        load.source.get(bias_name, (config.num,)).to(load.device, torch.float32, copy=True) if config.has_bias else None
    )
    for what, tensor in ((name + ".weight", weight), (bias_name, bias)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise ModelError(f"tensor {what!r} has NaN or infinity: no expert could be chosen by it")
    kind = linear_kind(torch.float32, load.device, "auto" if load.kind == "compiled" else "torch")
    return Router(make_linear(weight.contiguous(), None, kind), bias, config)
