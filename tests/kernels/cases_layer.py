"""What a layer launches on a device; run by test_triton.py, in a process of its own."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_hf_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from tests.engine.worker.step_driver import StepDriver

PROJECTED = Counter({"_heads_kernel": 1, "_paged_attention_kernel": 1, "_combine_kernel": 1})
ROW = PROJECTED + Counter({"_linear_row_kernel": 4})
ROWS = PROJECTED + Counter({"linear": 2, "_rms_norm_kernel": 2, "_gated_kernel": 1})


class _Launches(TorchDispatchMode):
    """The names of kernels, and of operators that are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [each.alias_info for each in func._schema.returns]
        name = func._schema.name.removeprefix("aten::")
        if "empty" not in name and all(alias is None or alias.is_write for alias in aliases):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def launches(directory: Path, num_requests: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Those of a decode step."""
    options: dict[str, Any] = {"check_finite": False, "decode_sizes": (num_requests,)}
    driver = StepDriver(directory, num_blocks=40, max_num_seqs=4, **options)
    keys = [driver.add(str(i), [3, 4, 5 + i]) for i in range(num_requests)]
    driver.step(dict.fromkeys(keys, 3))
    noted, launch = _Launches(), GridExecutor.__call__

    def note(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        noted.names[executor.fn.__name__] += 1
        with _disable_current_modes():
            launch(executor, *args, **kwargs)

    with monkeypatch.context() as patch, noted:
        patch.setattr(GridExecutor, "__call__", note)
        driver.step(dict.fromkeys(keys, 1))
    return noted.names


@pytest.mark.usefixtures("in_triton", "as_on_a_gpu")
@pytest.mark.parametrize(("family", "num_posts"), [("qwen3", 0), pytest.param("gemma2", 2, marks=pytest.mark.slow)])
def test_a_layer_launches_few_kernels(
    family: str, num_posts: int, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven for a row, ten for several; each norm of what is added to the residual stream is one more."""
    if device.type == "cuda":
        pytest.skip("launches are counted in the interpreter")
    models = [make_hf_model(tmp_path / str(n), family, "float32", num_hidden_layers=n) for n in (2, 3)]
    added = Counter({"linear" if num_posts else "addmm_": 2})
    for num_requests, expected in ((1, ROW), (3, ROWS + added)):
        less, found = (launches(model, num_requests, monkeypatch) for model in models)
        assert found - less == expected + Counter(num_posts * ["_rms_norm_kernel"])
