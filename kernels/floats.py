"""Conversions of KV's number formats to float32 and back in numpy, which has no bfloat16; the same as in vectors.h."""

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_BFLOAT16_MAX = np.float32(3.3895314e38)
_FLOAT16_MAX = np.float32(65504.0)


def as_floats(data: Bytes, dtype: str) -> Floats:
    """Flat bytes of a dtype ("float32", "bfloat16" or "float16") as float32."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(dtype).astype(np.float32)


def store_floats(numbers: Floats, dtype: str, out: Bytes) -> None:
    """Write finite numbers as a dtype, rounded to nearest, ties to even; too large numbers become the largest one.

    Args:
        out: flat; written.
    """
    if dtype == "bfloat16":
        bits = numbers.clip(-_BFLOAT16_MAX, _BFLOAT16_MAX).reshape(-1).view(np.uint32)
        out.view(np.uint16)[:] = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    elif dtype == "float16":
        out.view(np.float16)[:] = numbers.reshape(-1).clip(-_FLOAT16_MAX, _FLOAT16_MAX)
    else:
        out.view(np.float32)[:] = numbers.reshape(-1)
