"""KV layouts to measure with, by name or by numbers."""

import re
from collections.abc import Mapping

from pdkv.connector_kit.rig.world import Shape
from pdkv.errors import ConfigError

_DTYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

LAYOUTS: Mapping[str, str] = {"tiny": "4x4x32", "small": "8x4x64", "mid": "16x8x64"}
"""layers x KV heads x head size of the models with 5, 40 and 197 million parameters that benchmarks use."""

_FORM = re.compile(r"(\d+)x(\d+)x(\d+)(?::(\w+))?")


def parse_layout(text: str, *, tp: int = 1, block_size: int = 16, num_blocks: int = 0) -> Shape:
    """A name of LAYOUTS or LAYERSxHEADSxHEAD_SIZE[:DTYPE], bfloat16 by default; heads are those of all ranks.

    Raises:
        ConfigError: neither of the two, or heads that cannot be divided among the ranks.
    """
    match = _FORM.fullmatch(LAYOUTS.get(text, text))
    dtype = (match[4] or "bfloat16") if match else ""
    if match is None or dtype not in _DTYPES or not all(int(match[i]) for i in (1, 2, 3)):
        raise ConfigError(
            f"layout {text!r} is neither one of {', '.join(LAYOUTS)} nor LAYERSxHEADSxHEAD_SIZE[:DTYPE] with DTYPE "
            f"one of {', '.join(_DTYPES)}"
        )
    layers, heads, head_size = (int(match[i]) for i in (1, 2, 3))
    if heads % tp and tp % heads:
        raise ConfigError(f"{heads} KV heads cannot be divided among {tp} tensor parallel ranks")
    if head_size * _DTYPES[dtype] % 4:
        raise ConfigError(f"a head of {head_size} {dtype} is not a multiple of 4 bytes")
    return Shape(
        tp=tp, block_size=block_size, num_blocks=num_blocks, num_layers=layers, head_size=head_size, num_heads=heads,
        dtype=dtype, dtype_bytes=_DTYPES[dtype],
    )  # fmt: skip
