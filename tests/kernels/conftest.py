"""Where kernels run in these tests."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from interpreted_floats import compute_as_gpus_do

    compute_as_gpus_do()


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU through Triton's interpreter or the references."""
    torch.set_num_threads(1)
    return torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """What kernels compute in."""
    if request.param == torch.float16 and device.type == "cpu":
        pytest.skip("the interpreter takes bfloat16 the same way")
    return request.param
