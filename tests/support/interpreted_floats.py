"""Triton's interpreter with the floats of a GPU.

Its own bfloat16 and FP8 are wrong: products are of the bits, rounding is towards zero or loses its carry, and what is
too large for FP8 becomes another number (Triton 3.6 to 3.9). Here torch converts: to the nearest, ties to even, and
FP8 e4m3fn saturates as the instruction of GPUs does (PTX, cvt.rn.satfinite). Products are taken in float32.

And without most of its work: it prepares the language anew for each call of a function, guards each sum of integers
against overflow, describes each tensor's type anew, and broadcasts what has one shape already.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
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
    interpreter.TensorHandle.__post_init__ = lambda self: None
    broadcast, describe = TritonSemantic.broadcast_impl_value, tl.block_type.__init__
    types: dict[Any, dict[str, Any]] = {}
    shapes = functools.cache(lambda *shape: (tl.constexpr(math.prod(shape)), tl.tuple([*map(tl.constexpr, shape)])))
    scalar = tl.constexpr(1), tl.tuple([])

    def broadcast_unequal(self: Any, a: Any, b: Any) -> Any:
        return (a, b) if a.type.is_block() and a.shape is b.shape else broadcast(self, a, b)

    def described(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *shape
        if key not in types:
            describe(self, element, shape)
            types[key] = vars(self) | {"in_tensors": shapes(*self.shape)}
        vars(self).update(types[key], element_ty=element)

    def make(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.in_tensors if type.is_block() else scalar

    TritonSemantic.broadcast_impl_value, tl.block_type.__init__, tl.tensor.__init__ = broadcast_unequal, described, make


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
