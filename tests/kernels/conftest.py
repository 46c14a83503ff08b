import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: the GPU, or the CPU through Triton's interpreter or the references."""
    torch.set_num_threads(1)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cuda" if torch.cuda.is_available() and not interpreted else "cpu")
