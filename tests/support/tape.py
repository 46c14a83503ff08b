"""What a CUDA graph is on a device, on a CPU: operators and kernels with the very tensors and numbers of their capture.

So whatever a captured function takes from Python at a later step, and not from memory, is missed here as it is there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pdkv.engine.worker.graphs import Replay

READS_BY_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class _Tape(TorchDispatchMode):
    """Notes operators while it is the current mode, and kernels while it is `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_BY_HOST:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        outs = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]

        def again() -> None:
            results = func(*args, **(kwargs or {}))
            results = results if isinstance(results, tuple | list) else [results]
            for kept, result in zip(outs, [x for x in results if isinstance(x, torch.Tensor)], strict=True):
                if kept.data_ptr() != result.data_ptr():  # neither a view nor in place
                    kept.copy_(result)

        self.entries.append(again)
        return out


class TapeRecorder:
    """A `Recorder`; `num_replays` counts what was replayed."""

    def __init__(self) -> None:
        self.num_replays = 0
        self.sizes: list[int] = []  # operators and kernels of each capture

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        tape = _Tape()
        with _kernels_noted(tape), tape:
            run()
        self.sizes.append(len(tape.entries))

        def replay() -> None:
            self.num_replays += 1
            for entry in tape.entries:
                entry()

        return replay


@contextmanager
def _kernels_noted(tape: _Tape) -> Iterator[None]:
    from triton.runtime.interpreter import GridExecutor  # not for those who collect

    launch = GridExecutor.__call__

    def note(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        tape.entries.append(lambda: launch(executor, *args, **kwargs))
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", note)
        yield
