"""An MLP of experts keeps its contract where nothing comes before it."""

import torch

from pdkv.models.decoder import GatedMlp
from pdkv.models.expert_config import Experts
from pdkv.models.experts import ExpertMlp, Router, TorchExperts
from pdkv.models.linear import PlainLinear
from pdkv.models.passes import RowPass


class InPlace(GatedMlp):
    """Adds to the residual itself, as layers on a GPU do."""

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return residual.add_(self(x, before))


def linear(rows: int, columns: int) -> PlainLinear:
    return PlainLinear(torch.randn(rows, columns))


CONFIG = Experts(
    layers=(0,), num=4, chosen=2, size=6, shared_size=6, scoring="softmax", has_bias=False, normalised=True, scale=1.0,
    groups=1, chosen_groups=1, group_best=1,
)  # fmt: skip


def test_weights_of_the_chosen_are_their_parts_of_all() -> None:
    torch.manual_seed(0)
    config = CONFIG._replace(num=64, chosen=8, scale=2.5)
    scores, x = linear(64, 16), torch.randn(200, 16)
    experts, weights = Router(scores, None, config)(x)
    best, chosen = scores(x).double().softmax(-1).topk(8, dim=-1)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, (2.5 * best / best.sum(-1, keepdim=True)).float())


def test_the_residual_may_be_the_input() -> None:
    torch.manual_seed(0)
    routed = TorchExperts([GatedMlp(linear(12, 8), linear(8, 6)) for _ in range(4)])
    mlp = ExpertMlp(Router(linear(4, 8), None, CONFIG), routed, InPlace(linear(12, 8), linear(8, 6)))
    x = torch.randn(5, 8)
    expected = x + mlp(x.clone())
    torch.testing.assert_close(mlp.add(x, x), expected)
