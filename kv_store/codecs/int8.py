"""`int8`: K is scaled by channel and V by token, according to where their outliers lie (KIVI, arXiv:2402.02750)."""

from typing import ClassVar

import torch

from pdkv.kv_store.codecs.scaled import ScaledCodec


class Int8Codec(ScaledCodec):
    """Scales of K for each layer, head and channel, over all tokens of a value; of V for each layer, head and token."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 2
    largest: ClassVar[float] = 127.0
    shared: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 3), (4,))

    def to_codes(self, ratios: torch.Tensor) -> torch.Tensor:
        return ratios.round_().to(torch.int8)

    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.int8).float()
