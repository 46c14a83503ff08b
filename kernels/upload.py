"""Copies small arrays to a device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A numpy array as a tensor on `device`, queued on the current stream: a copy from unpinned memory would wait,
    without a deadline, for all work queued there.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
