"""The decoder of every family over paged KV: one flattened sequence of many requests per call.

A layer is an `Attention` and an `Mlp`; families choose them, the norms around them and how they rotate (loader.py).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from pdkv.models.config import ModelConfig
from pdkv.models.heads import Heads, Rotation, StepRotation
from pdkv.models.latent_heads import LatentHeads
from pdkv.models.linear import Linear, PlainLinear
from pdkv.models.parallel_layers import Embedding, WideNorms
from pdkv.models.passes import RMSNorm, RowPass, silu_mul

Attend = Callable[[int, torch.Tensor, Heads | LatentHeads | None], torch.Tensor]
"""(layer, qkv (n, heads + 2 * kv_heads, head_size), heads) -> (rows, heads * head_size).
Over latent rows, each of which is one KV head: (layer, (n, heads + 1, row), heads) -> (rows, heads * value).

Lets queries and keys go through `heads`, in place (None: they already have), writes K and V to the cache and attends.
`rows` is n, and in the last layer the rows that the step needs.
"""


class Step(NamedTuple):
    """What the layers share in one forward pass."""

    positions: torch.Tensor  # (n,) int64
    rotations: Sequence[StepRotation]  # of the model's rotations, each for these positions
    attend: Attend


class Attention(Protocol):
    """Attention of one layer, without what is added to the residual stream."""

    output: Linear
    """Projects what the call returns to (rows, hidden)."""

    def __call__(self, layer: int, x: torch.Tensor, before: RowPass | None, step: Step) -> torch.Tensor:
        """Attention of before(x), x (n, hidden), with `step.attend` of that layer; (rows, output's inputs)."""


class Mlp(Linear, Protocol):
    """What follows attention: x (n, hidden) -> (n, hidden), for each row alone. In `add`, `residual` may be `x`."""


class GroupedQueryAttention:
    """Attention whose queries, keys and values are projected together."""

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        head_size: int,
        *,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        rotation: int = 0,
        wide_norms: WideNorms | None = None,
    ) -> None:
        """`q_norm`, `k_norm`: of each head; `rotation`: the index in `Step.rotations`."""
        self.output = output
        self._qkv = qkv
        self._head_size = head_size
        self._norms = q_norm, k_norm
        self._rotation = rotation
        self._wide_norms = wide_norms

    def __call__(self, layer: int, x: torch.Tensor, before: RowPass | None, step: Step) -> torch.Tensor:
        qkv = self._qkv(x, before)
        if self._wide_norms is not None:
            self._wide_norms.apply(qkv)
        qkv = qkv.view(x.shape[0], -1, self._head_size)
        return step.attend(layer, qkv, step.rotations[self._rotation].of(*self._norms))


class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, act: RowPass = silu_mul) -> None:
        self._gate_up = gate_up
        self._down = down
        self._act = act

    def __call__(self, x: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        return self._down(*self._gated(x, before))

    def add(self, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None = None) -> torch.Tensor:
        x, act = self._gated(x, before)
        return self._down.add(x, residual, act)

    def _gated(self, x: torch.Tensor, before: RowPass | None) -> tuple[torch.Tensor, RowPass | None]:
        """What `down` multiplies, and what is to be done to it first: nothing behind a kernel that has done it."""
        gated = self._gate_up.gated(x, before, self._act) if isinstance(self._gate_up, PlainLinear) else None
        return (self._gate_up(x, before), self._act) if gated is None else (gated, None)


Post = Callable[[torch.Tensor], torch.Tensor]
"""What a layer does to what a part adds (n, hidden) before it is added: a norm, or a factor."""


class DecoderLayer:
    """Attention and MLP of one layer, each added to the residual stream."""

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp,
        *,
        attention_norm: RowPass | None,
        mlp_norm: RowPass | None,
        attention_post: Post | None = None,
        mlp_post: Post | None = None,
    ) -> None:
        """Norms are of a part's inputs, `_post` of what it adds."""
        self._attention = attention
        self._mlp = mlp
        self._attention_norm = attention_norm
        self._mlp_norm = mlp_norm
        self._attention_post = attention_post
        self._mlp_post = mlp_post

    def __call__(self, layer: int, x: torch.Tensor, step: Step, rows: torch.Tensor | None) -> torch.Tensor:
        """x (n, hidden), which may be overwritten -> (n or len(rows), hidden)."""
        attended = self._attention(layer, x, self._attention_norm, step)
        if rows is not None:
            x = x.index_select(0, rows)
            if not len(x):  # a chunk in mid-prompt: its KV is written, and nothing else is wanted
                return x
        x = _added(self._attention.output, attended, x, None, self._attention_post)
        return _added(self._mlp, x, x, self._mlp_norm, self._mlp_post)


def _added(
    part: Linear, x: torch.Tensor, residual: torch.Tensor, before: RowPass | None, post: Post | None
) -> torch.Tensor:
    if post is None:
        return part.add(x, residual, before)
    if isinstance(post, RMSNorm):
        return post.add(part(x, before), residual)
    return residual.add_(post(part(x, before)))


class Decoder:
    """A model on one device; holds weights and no state."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_heads: int,
        num_kv_heads: int,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: RMSNorm,
        lm_head: Linear,
        rotations: Sequence[Rotation],
    ) -> None:
        """`num_heads` and `num_kv_heads` are this rank's; the layers themselves exchange data with other ranks.

        `rotations`: those that the layers' attentions name by index.
        """
        self.config = config
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head
        self._rotations = rotations

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the layers.

        Args:
            token_ids: (n,) int64.
            positions: (n,) int64, each token's position in its request.
            rows: (m,) int64, the rows of which the hidden state is needed; None: all. The last layer computes only
                these.

        Returns:
            (m, hidden), normalised, as `logits` expects it.
        """
        step = Step(positions, [rotation.at(positions) for rotation in self._rotations], attend)
        x = self._embedding(token_ids)
        if self.config.embedding_scale != 1.0:
            x.mul_(torch.tensor(self.config.embedding_scale, dtype=self.dtype).item())  # rounded as its products are
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            x = layer(i, x, step, rows if i == last else None)
            if not len(x):
                return x
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (m, vocab) of hidden states (m, hidden)."""
        logits, config = self._lm_head(hidden).float(), self.config
        if config.logits_divisor != 1.0:
            logits /= config.logits_divisor
        if config.logits_softcap:
            logits = logits.div_(config.logits_softcap).tanh_().mul_(config.logits_softcap)
        return logits

    def step_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Estimated memory of steps' temporaries: a layer's activations, doubled because steps of other sizes leave
        gaps between them, and float32 logits.
        """
        config = self.config
        qkv = (self.num_heads + 2 * self.num_kv_heads) * config.head_size
        layer = 3 * config.hidden_size + qkv + 2 * config.mlp_neurons
        if config.experts is not None:  # whose results lie side by side
            layer += config.experts.chosen * config.hidden_size
        return 2 * num_tokens * layer * self.dtype.itemsize + num_logits * config.vocab_size * 2 * 4
