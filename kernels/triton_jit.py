"""`triton.jit` with a signature: Triton has no type information of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import triton

LAUNCH_OPTIONS = {"enable_fp_fusion": True}  # multiply-add as one instruction; Triton 3.9 warns where nothing is said


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Compile the decorated kernel at its first launch; it is not specialized on values of the named arguments."""

    def decorate(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(do_not_specialize))

    return decorate
