"""`fp8`: E4M3 floats (OCP 8-bit floating point specification), scaled by head."""

from typing import ClassVar

import torch

from pdkv.kv_store.codecs.scaled import ScaledCodec


class Fp8Codec(ScaledCodec):
    """A scale for each layer and head of K, and of V, over all tokens of the value."""

    name: ClassVar[str] = "fp8"
    number: ClassVar[int] = 1
    largest: ClassVar[float] = 448.0
    shared: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((0, 3, 4), (0, 3, 4))

    def to_codes(self, ratios: torch.Tensor) -> torch.Tensor:
        return ratios.to(torch.float8_e4m3fn)

    def from_codes(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).float()
