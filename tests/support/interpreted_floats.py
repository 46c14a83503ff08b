"""Triton's interpreter with the floats of a GPU.

Its own bfloat16 and FP8 are wrong: products are of the bits, rounding is towards zero or loses its carry, and what is
too large for FP8 becomes another number (Triton 3.6 to 3.9). Here torch converts: to the nearest, ties to even, and
FP8 e4m3fn saturates as the instruction of GPUs does (PTX, cvt.rn.satfinite). Products are taken in float32.

And without half of its work: it prepares the language anew for each call of a function, and guards each sum of integers
against overflow.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_DTYPES = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}  # which numpy keeps as bits


def compute_as_gpus_do() -> None:
    """From here on, in this process."""
    builder = interpreter.InterpreterBuilder
    cast, fp_to_fp, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def convert(self: Any, source: Any, target: Any, otherwise: Any) -> Any:
        ours = source.dtype.scalar in _DTYPES or target.scalar in _DTYPES
        return _convert(source, target.scalar) if ours else otherwise()

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        return convert(self, source, target, lambda: cast(self, source, target))

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return convert(self, source, target, lambda: fp_to_fp(self, source, target, rounding))

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (_convert(each, tl.float32) if each.dtype.scalar in _DTYPES else each for each in (a, b))
        return dot(self, a, b, *rest)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot


def save_work() -> None:
    """From here on, in this process, which only interprets."""
    np_dtype, known = interpreter._get_np_dtype, {}

    def known_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    interpreter._get_np_dtype = known_np_dtype
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _convert(source: Any, target: Any) -> Any:
    tensor = torch.from_numpy(np.ascontiguousarray(source.data))
    if source.dtype.scalar in _DTYPES:
        tensor = tensor.view(_DTYPES[source.dtype.scalar])
    if target == tl.float8e4nv:
        tensor = tensor.float().clamp(-448.0, 448.0)
    if target in _DTYPES:
        bits = {2: torch.uint16, 1: torch.uint8}[_DTYPES[target].itemsize]
        converted = tensor.float().to(_DTYPES[target]).view(bits).numpy()
    else:
        converted = tensor.float().numpy().astype(interpreter._get_np_dtype(target))
    return interpreter.TensorHandle(converted.reshape(source.data.shape), target)
