"""Sets the number of threads for a CPU step: all of them only if a layer is work enough to be shared."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdkv.models.config import DTYPE_BYTES, ModelConfig

_SHARED_FLOPS = 1_000_000_000
"""Multiply-adds of one layer's products above which a second thread gains more than waking it costs."""

_SHARED_BYTES = 8 << 20
"""Bytes of one layer's weights worth reading with several threads even for a single token, since no cache holds
them.
"""


class StepThreads:
    """Sets torch's threads for each step. Depends only on the step's size, so equal steps run equally."""

    def __init__(self, config: ModelConfig, dtype: str, num_threads: int, num_ranks: int = 1) -> None:
        """`num_threads` at most, on a rank with one of `num_ranks` parts."""
        heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_size
        num_weights = config.hidden_size * (heads + 3 * config.mlp_neurons) // num_ranks
        self._num_threads = num_threads
        self._least_tokens = -(-_SHARED_FLOPS // (2 * num_weights))
        if num_weights * DTYPE_BYTES[dtype] >= _SHARED_BYTES:
            self._least_tokens = 0

    def count(self, num_tokens: int) -> int:
        """Threads for a step of that many tokens."""
        return self._num_threads if num_tokens >= self._least_tokens else 1

    @contextmanager
    def used_for(self, num_tokens: int) -> Iterator[None]:
        """Use that many threads inside. Behind it there are as many as before: others compute in the process, too."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.count(num_tokens))
        try:
            yield
        finally:
            torch.set_num_threads(before)
