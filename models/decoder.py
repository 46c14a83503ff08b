"""The decoder of every known family over paged KV: one flattened sequence of many requests per call."""

from collections.abc import Callable

import torch

from pdkv.models.config import ModelConfig
from pdkv.models.heads import Heads, Rotation
from pdkv.models.linear import Linear
from pdkv.models.parallel_layers import Embedding
from pdkv.models.passes import RMSNorm, silu_mul

Attend = Callable[[int, torch.Tensor, Heads | None], torch.Tensor]
"""(layer, qkv (n, heads + 2 * kv_heads, head_size), heads) -> (rows, heads * head_size).

Lets queries and keys go through `heads`, in place (None: they already have), writes K and V to the cache and attends.
`rows` is n, and in the last layer the rows that the step needs.
"""


class DecoderLayer:
    """Attention and MLP of one layer, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        *,
        input_norm: RMSNorm,
        qkv: Linear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        output: Linear,
        mlp_norm: RMSNorm,
        gate_up: Linear,
        down: Linear,
    ) -> None:
        self.input_norm = input_norm
        self.qkv = qkv
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.output = output
        self.mlp_norm = mlp_norm
        self.gate_up = gate_up
        self.down = down


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
        rotation: Rotation,
    ) -> None:
        """`num_heads` and `num_kv_heads` are this rank's; the layers themselves exchange data with other ranks."""
        self.config = config
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.dtype = embedding.dtype
        self.device = embedding.device
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._lm_head = lm_head
        self._rotation = rotation

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
        rotation = self._rotation.at(positions)
        qkv_shape = (len(positions), self.num_heads + 2 * self.num_kv_heads, self.config.head_size)
        x = self._embedding(token_ids)
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(x, layer.input_norm).view(qkv_shape)
            attended = attend(i, qkv, rotation.of(layer.q_norm, layer.k_norm))
            if i == last and rows is not None:
                x = x.index_select(0, rows)
                if not len(x):  # a chunk in mid-prompt: its KV is written, and nothing else is wanted
                    return x
            x = layer.output.add(attended, x)
            x = layer.down.add(layer.gate_up(x, layer.mlp_norm), x, silu_mul)
        return self._norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (m, vocab) of hidden states (m, hidden)."""
        return self._lm_head(hidden).float()

    def step_bytes(self, num_tokens: int, num_logits: int) -> int:
        """Estimated memory of steps' temporaries: a layer's activations, doubled because steps of other sizes leave
        gaps between them, and float32 logits.
        """
        config = self.config
        qkv = (self.num_heads + 2 * self.num_kv_heads) * config.head_size
        layer = 3 * config.hidden_size + qkv + 2 * config.intermediate_size
        return 2 * num_tokens * layer * self.dtype.itemsize + num_logits * config.vocab_size * 2 * 4
